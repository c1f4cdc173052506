"""Mean of one number per document, whatever it is: a cosine, a loss, 1 for an exact answer."""

from typing import Any

import datasets
import evaluate
import numpy as np

from .inputs import numbers

HIGHER_IS_BETTER = True


def per_document(predictions: Any, references: Any = None) -> np.ndarray:
    """The numbers themselves, (documents,); `references` is not used."""
    return numbers("predictions", predictions)


def function(predictions: Any, references: Any = None) -> float:
    """Mean of the numbers; `references` is not used."""
    return float(per_document(predictions).mean())


class Mean(evaluate.Metric):
    """The same for `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: one number per document.",
            features=datasets.Features({"predictions": datasets.Value("float64")}),
        )

    def _compute(self, predictions: Any) -> dict[str, float]:
        return {"mean": function(predictions)}
