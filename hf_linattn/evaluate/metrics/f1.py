"""Macro F1: the harmonic mean of precision and recall of each class, averaged over classes."""

from typing import Any

import datasets
import evaluate
from sklearn.metrics import f1_score

from .inputs import labels

HIGHER_IS_BETTER = True


def function(predictions: Any, references: Any) -> float:
    """Macro F1 over the classes that occur in either; classes are integers or strings."""
    predicted, true = labels(predictions, references)
    return float(f1_score(true, predicted, average="macro", zero_division=0.0))


class F1(evaluate.Metric):
    """The same for `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: classes as integers or strings, one per document.",
            features=[
                datasets.Features({name: datasets.Value(kind) for name in ("predictions", "references")})
                for kind in ("string", "int64")
            ],
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"f1": function(predictions, references)}
