"""nDCG: discounted gain of the first candidates of each query's ranking, over that of the best ranking.

Järvelin and Kekäläinen 2002, "Cumulated gain-based evaluation of IR techniques": the candidate at rank r
counts its relevance divided by log2(r + 1). Candidates with the same score share their places evenly.
"""

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import ndcg_score

from .inputs import numbers, same_length

HIGHER_IS_BETTER = True


def per_document(predictions: Any, references: Any, k: int | None = 10) -> np.ndarray:
    """nDCG of each query's first `k` candidates, all with None, (queries,); 0 for a query without a relevant one.

    Raises:
        ValueError: a query has not as many scores as relevances, or fewer than two candidates.
    """
    same_length(predictions, references)
    values = []
    for index, (scores, relevances) in enumerate(zip(predictions, references, strict=True)):
        score = numbers(f"predictions[{index}]", scores)
        relevance = numbers(f"references[{index}]", relevances)
        if len(score) != len(relevance) or len(score) < 2:
            raise ValueError(
                f"Query {index} has {len(score)} scores for {len(relevance)} relevances; it must be as many, of at "
                "least two candidates."
            )
        values.append(ndcg_score(relevance[None], score[None], k=k))
    return np.array(values)


def function(predictions: Any, references: Any, k: int | None = 10) -> float:
    """Mean over queries of the nDCG of each query's first `k` candidates."""
    return float(per_document(predictions, references, k).mean())


class Ndcg(evaluate.Metric):
    """The same for `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: a list of scores per query, one per candidate; references: their "
            "relevances; k: how many candidates count, 10 unless given.",
            features=datasets.Features(
                {name: datasets.Sequence(datasets.Value("float64")) for name in ("predictions", "references")}
            ),
        )

    def _compute(self, predictions: Any, references: Any, k: int | None = 10) -> dict[str, float]:
        return {"ndcg": function(predictions, references, k)}
