"""Accuracy: share of the documents whose class is predicted."""

from typing import Any

import datasets
import evaluate
import numpy as np

from .inputs import labels

HIGHER_IS_BETTER = True


def per_document(predictions: Any, references: Any) -> np.ndarray:
    """1 where the class is predicted and 0 elsewhere, (documents,)."""
    predicted, true = labels(predictions, references)
    return (predicted == true).astype(np.float64)


def function(predictions: Any, references: Any) -> float:
    """Share of predicted classes that are the true ones; classes are integers or strings."""
    return float(per_document(predictions, references).mean())


class Accuracy(evaluate.Metric):
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
        return {"accuracy": function(predictions, references)}
