"""What all metrics ask of their inputs."""

from typing import Any

import numpy as np


def numbers(name: str, values: Any) -> np.ndarray:
    """One finite number per document, (documents,) float64.

    Raises:
        ValueError: there are none, one of them is not finite, or they are not one per document.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} has shape {array.shape}; it must be one number per document, of at least one.")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name} holds {int((~np.isfinite(array)).sum())} numbers of {len(array)} that are not finite."
        )
    return array


def labels(predictions: Any, references: Any) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes, integers or strings, (documents,) each.

    Raises:
        ValueError: there are none, the lengths differ, or one is of integers and the other of strings.
    """
    predicted, true = np.asarray(predictions), np.asarray(references)
    same_length(predicted, true)
    kinds = {"string" if array.dtype.kind in "UO" else "number" for array in (predicted, true)}
    if len(kinds) > 1:
        raise ValueError(f"predictions are of {predicted.dtype} and references of {true.dtype}; both must be the same.")
    return predicted, true


def same_length(predictions: Any, references: Any) -> None:
    """Check that there is one prediction for each reference, and at least one.

    Raises:
        ValueError: it is not so.
    """
    if len(predictions) != len(references):
        raise ValueError(f"There are {len(predictions)} predictions for {len(references)} references.")
    if not len(predictions):
        raise ValueError("predictions and references are empty.")
