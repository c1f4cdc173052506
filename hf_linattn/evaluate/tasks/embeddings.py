"""Document embeddings: how near they stay to those of extended softmax."""

from dataclasses import dataclass, field

import numpy as np

from ...modeling.validation import check_choice
from ..metrics import metric_function
from ..runner import POOLINGS, Runner
from .base import DocumentTask, Metric, Outcomes, TaskOptions, metric


@dataclass(kw_only=True)
class EmbeddingOptions(TaskOptions):
    """Options of tasks that read one embedding per document."""

    pooling: str = field(
        default="mean",
        metadata={"help": "probe, pairs, embeddings: how states become one embedding.", "choices": POOLINGS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(type(self).__name__, "pooling", self.pooling, POOLINGS)


class Embeddings(DocumentTask):
    """Cosine of each document's embedding to that of extended softmax, and rank correlation of its neighbors.

    The rank correlation is Spearman's, of one document's cosines to all the others, and then the mean over documents.
    The mean of these cosines themselves tells how crowded the embeddings are: a threshold of similarity moves with it.
    """

    name = "embeddings"
    reads_embeddings = True
    used = ("pooling",)
    config: EmbeddingOptions

    def metrics(self) -> list[Metric]:
        return [
            metric("mean", ("cosine",), called="cosine to extended softmax", higher_is_better=True),
            metric("mean", ("rank_correlation",), called="rank correlation", higher_is_better=True),
            metric("mean", ("crowding",), called="mean cosine to the other documents", higher_is_better=False),
        ]

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        pooling = self.config.pooling
        ours = normalized(runner.embed(self.at_length(length, runner.limit), pooling))
        theirs = normalized(reference.embed(self.at_length(length, reference.limit), pooling))
        return {
            "cosine": (ours * theirs).sum(1).tolist(),
            "rank_correlation": neighbor_correlation(ours, theirs).tolist(),
            # without the document itself, whose cosine is 1
            "crowding": ((ours @ ours.sum(0) - 1) / (len(ours) - 1)).tolist(),
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


def normalized(embeddings: np.ndarray) -> np.ndarray:
    """Rows of length one: (documents, dim)."""
    return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
