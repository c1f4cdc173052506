"""Metrics: one file each, which `evaluate` loads from here without a network, and which also works on plain arrays."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evaluate
import numpy as np

from ...modeling.validation import check_choice

#: Names of the metrics; each is a file of this folder.
METRICS = ("accuracy", "f1", "mean", "ndcg", "perplexity", "roc_auc", "spearman")


@dataclass(frozen=True, kw_only=True)
class MetricFunction:
    """A metric on arrays, fast enough to be called thousands of times.

    Attributes:
        name: one of `METRICS`.
        function: predictions and references -> the metric.
        per_document: predictions and references -> one number per document, whose mean the metric is; None for
            a metric that is no such mean.
        higher_is_better: whether a higher value is the better one. Of `mean`, which can be of anything, only its
            caller knows.
    """

    name: str
    function: Callable[..., float]
    per_document: Callable[..., np.ndarray] | None
    higher_is_better: bool

    def __call__(self, *arrays: Any) -> float:
        return self.function(*arrays)


def load_metric(name: str) -> evaluate.EvaluationModule:
    """A metric as `evaluate` has them: `load_metric("accuracy").compute(predictions=..., references=...)`.

    Nothing is downloaded. The examples are kept in memory: two processes do not get into each other's way.

    Raises:
        ValueError: there is no such metric; the message lists those that there are.
    """
    check_choice("metrics", "metric", name, METRICS)
    return evaluate.load(str(Path(__file__).with_name(f"{name}.py")), keep_in_memory=True)


def metric_function(name: str) -> MetricFunction:
    """The same metric on arrays.

    Raises:
        ValueError: there is no such metric; the message lists those that there are.
    """
    check_choice("metrics", "metric", name, METRICS)
    module = importlib.import_module(f".{name}", __name__)
    return MetricFunction(
        name=name,
        function=module.function,
        per_document=getattr(module, "per_document", None),
        higher_is_better=module.HIGHER_IS_BETTER,
    )
