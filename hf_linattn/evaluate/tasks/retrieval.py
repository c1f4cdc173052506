"""Finding the document that belongs to another one by its embedding."""

import numpy as np

from ..metrics import metric_function
from ..runner import Runner
from .base import Metric, Outcomes, metric
from .embeddings import normalized
from .pairs import Pairs

_CUTOFF = 10


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


def ranking_quality(similarity: np.ndarray, query: int, relevant: set[int]) -> float:
    """nDCG at 10 of all texts but the query itself, ranked by their similarity to it, (texts,)."""
    candidates = [index for index in range(len(similarity)) if index != query]
    scores = [similarity[candidates].tolist()]
    relevances = [[float(index in relevant) for index in candidates]]
    return metric_function("ndcg").function(scores, relevances, k=_CUTOFF)
