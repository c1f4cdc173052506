"""Spearman's rank correlation; equal values share the mean of their ranks."""

import math
from typing import Any

import datasets
import evaluate
from scipy.stats import spearmanr

from .inputs import numbers, same_length

HIGHER_IS_BETTER = True


def function(predictions: Any, references: Any) -> float:
    """Rank correlation of two lists of numbers, -1 to 1; NaN where all numbers of one list are equal."""
    same_length(predictions, references)
    first, second = numbers("predictions", predictions), numbers("references", references)
    if (first == first[0]).all() or (second == second[0]).all():
        return math.nan
    return float(spearmanr(first, second).statistic)


class Spearman(evaluate.Metric):
    """The same for `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: numbers, one each per document or pair.",
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"spearman": function(predictions, references)}
