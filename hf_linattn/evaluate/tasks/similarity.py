"""Document embeddings: how near they stay to the base model's, and how well they find what belongs together."""

from typing import Any

import numpy as np

from ..metrics import metric_function
from ..runner import Runner
from .base import DocumentTask, Metric, Outcomes, metric
from .probing import Pairs, normalized

_CUTOFF = 10


class Embeddings(DocumentTask):
    """Cosine of each document's embedding to that of extended softmax, and rank correlation of its neighbors.

    The rank correlation is Spearman's, of one document's cosines to all the others, and then the mean over documents.
    """

    name = "embeddings"

    def metrics(self) -> list[Metric]:
        return [
            metric("mean", ("cosine",), called="cosine to extended softmax", higher_is_better=True),
            metric("mean", ("rank_correlation",), called="rank correlation", higher_is_better=True),
        ]

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        pooling = self.config.pooling
        ours = normalized(runner.embed(self.at_length(length, runner.limit), pooling))
        theirs = normalized(reference.embed(self.at_length(length, reference.limit), pooling))
        return {
            "cosine": (ours * theirs).sum(1).tolist(),
            "rank_correlation": neighbor_correlation(ours, theirs).tolist(),
        }

    def settings(self) -> dict[str, Any]:
        return {"pooling": self.config.pooling}


class Retrieval(Pairs):
    """nDCG at 10 of finding the second text of a pair by the embedding of the first, among all texts of the pairs."""

    name = "retrieval"

    def metrics(self) -> list[Metric]:
        return [metric("mean", ("ndcg",), called=f"nDCG@{_CUTOFF}", higher_is_better=True)]

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        embeddings = normalized(runner.embed(self.at_length(length, runner.limit), self.config.pooling))
        relevant: dict[int, set[int]] = {}
        for a, b, truth in self._pairs:
            if truth:
                relevant.setdefault(a, set()).add(b)
        return {
            "ndcg": [ranking_quality(embeddings @ embeddings[a], a, second) for a, second in sorted(relevant.items())]
        }


def neighbor_correlation(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Spearman's correlation, document by document, of the cosines to all others: two (documents, dim) -> (documents,).

    Raises:
        ValueError: fewer than three documents have no order of neighbors.
    """
    if len(ours) < 3:
        raise ValueError(f"{len(ours)} documents: a rank correlation needs at least 3.")
    spearman = metric_function("spearman")
    result = []
    for index in range(len(ours)):
        others = np.arange(len(ours)) != index
        result.append(spearman(*((x @ x[index])[others] for x in (ours, theirs))))
    return np.array(result)


def ranking_quality(similarity: np.ndarray, query: int, relevant: set[int]) -> float:
    """nDCG at 10 of all texts but the query itself, ranked by their similarity to it, (texts,)."""
    candidates = [index for index in range(len(similarity)) if index != query]
    scores = [similarity[candidates].tolist()]
    relevances = [[float(index in relevant) for index in candidates]]
    return metric_function("ndcg").function(scores, relevances, k=_CUTOFF)
