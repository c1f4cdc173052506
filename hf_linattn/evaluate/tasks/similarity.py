"""Document embeddings: how near they stay to the base model's, and how well they find what belongs together."""

from typing import Any

import numpy as np
from scipy.stats import rankdata

from ..runner import Runner
from .base import DocumentTask, Metric, Outcomes, metric
from .probing import Pairs, normalized

_CUTOFF = 10


class Embeddings(DocumentTask):
    """Cosine of each document's embedding to that of extended softmax, and rank correlation of its neighbours.

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
            "rank_correlation": neighbour_correlation(ours, theirs).tolist(),
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
        return {"ndcg": [ndcg(embeddings @ embeddings[a], a, found) for a, found in sorted(relevant.items())]}


def neighbour_correlation(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Spearman's correlation, document by document, of the cosines to all others: two (documents, dim) -> (documents,).

    Raises:
        ValueError: fewer than three documents have no order of neighbours.
    """
    if len(ours) < 3:
        raise ValueError(f"{len(ours)} documents: a rank correlation needs at least 3.")
    result = []
    for index in range(len(ours)):
        others = np.arange(len(ours)) != index
        ranks = [rankdata((x @ x[index])[others]) for x in (ours, theirs)]
        result.append(np.corrcoef(ranks)[0, 1])
    return np.array(result)


def ndcg(similarity: np.ndarray, query: int, relevant: set[int]) -> float:
    """Normalised discounted cumulative gain at 10 (Jarvelin and Kekalainen 2002) of all texts but the query itself."""
    order = [int(i) for i in np.argsort(-similarity, kind="stable") if i != query][:_CUTOFF]
    gain = sum(1 / np.log2(rank + 2) for rank, index in enumerate(order) if index in relevant)
    best = sum(1 / np.log2(rank + 2) for rank in range(min(len(relevant), _CUTOFF)))
    return float(gain / best)
