"""Confidence intervals of metrics: the percentile bootstrap over documents and seeds.

A resample draws as many documents as there are, with replacement, and as many seeds as there are; the metric
of a resample is the mean over its seeds of the metric on its documents. Documents are the same for all seeds
of a resample, since the models of all seeds read the same documents. The interval is what lies between the
quantiles of the resampled metrics (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13).

Drawing documents and seeds apart from each other is the pigeonhole bootstrap (Owen 2007, "The pigeonhole
bootstrap", Annals of Applied Statistics 1): no exact one exists for such crossed data, and this one is a little
wide where there are many seeds. Of few seeds it knows little: with S of them it sees (S - 1) / S of the variance
between seeds on average, with one seed nothing of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..modeling.validation import check_integer
from .metrics import MetricFunction

#: What a metric reads, one sequence for each of its arguments, all with one entry per document.
Arrays: TypeAlias = Sequence[Any]

# Numbers in memory at a time while documents are drawn.
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A metric, or a difference, and its confidence interval.

    `low` and `high` are None where nothing can be said: of one document, or where the metric is not defined.
    """

    value: float
    low: float | None
    high: float | None


def bootstrap_interval(
    function: MetricFunction | Callable[..., float],
    outcomes_by_seed: Sequence[Arrays],
    *,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """The mean of a metric over seeds, and its percentile bootstrap interval over documents and seeds.

    Args:
        function: the metric; of a mean over documents (`MetricFunction.per_document`) all resamples are computed
            at once.
        outcomes_by_seed: per seed the arguments of `function`, e.g. (predictions, references); the same documents
            in the same order in all of them.
        resamples: how many times documents and seeds are drawn. Those where the metric is not defined (NaN), such as
            the area under the ROC curve of one class, are left out.
        seed: seed of the draws; the same seed draws the same documents.
        level: share of resamples inside the interval.

    Raises:
        ValueError: an argument is not allowed, or the seeds have different numbers of documents.
    """
    _check(resamples, level)
    model = _Resampled(function, outcomes_by_seed)
    draws = _draws(model.documents, (model.seeds,), resamples, seed)
    resampled = np.concatenate([model.resampled(documents, seeds) for documents, (seeds,) in draws])
    return _interval(model.value, resampled, model.documents, level)


def bootstrap_difference(
    function: MetricFunction | Callable[..., float],
    outcomes_by_seed: Sequence[Arrays],
    other_by_seed: Sequence[Arrays],
    *,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """`bootstrap_interval` of the metric of one model minus that of another on the same documents.

    Both are computed on the same documents in each resample, so that what makes documents easy or hard for both
    drops out. With as many seeds on both sides seeds are pairs and are drawn as such, which is right whether or not
    one has to do with the other; else they are drawn apart.

    Raises:
        ValueError: as `bootstrap_interval`, or the models have different numbers of documents.
    """
    _check(resamples, level)
    first, other = _Resampled(function, outcomes_by_seed), _Resampled(function, other_by_seed)
    if first.documents != other.documents:
        raise ValueError(f"The models have {first.documents} and {other.documents} documents; they must be the same.")
    counts = (first.seeds,) if first.seeds == other.seeds else (first.seeds, other.seeds)
    differences = [
        first.resampled(documents, seeds[0]) - other.resampled(documents, seeds[-1])
        for documents, seeds in _draws(first.documents, counts, resamples, seed)
    ]
    return _interval(first.value - other.value, np.concatenate(differences), first.documents, level)


class _Resampled:
    """The outcomes of one model for all its seeds, and the metric of any draw of them."""

    def __init__(self, function: MetricFunction | Callable[..., float], outcomes_by_seed: Sequence[Arrays]) -> None:
        if not outcomes_by_seed:
            raise ValueError("outcomes_by_seed is empty; it must hold the outcomes of at least one seed.")
        per_document = function.per_document if isinstance(function, MetricFunction) else None
        self.function = function
        self.seeds = len(outcomes_by_seed)
        # (seeds, documents) where the metric is a mean over documents
        self.values: np.ndarray | None = None
        self.arrays: list[list[np.ndarray]] = []
        if per_document is not None:
            rows = [np.asarray(per_document(*outcomes)) for outcomes in outcomes_by_seed]
            lengths = {len(row) for row in rows}
        else:
            self.arrays = [[np.asarray(array) for array in outcomes] for outcomes in outcomes_by_seed]
            lengths = {len(array) for outcomes in self.arrays for array in outcomes}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"outcomes_by_seed has {', '.join(map(str, sorted(lengths)))} documents; it must be the same number, "
                "of at least 1, for all seeds and arguments."
            )
        self.documents = lengths.pop()
        if per_document is not None:
            self.values = np.stack(rows)

    @property
    def value(self) -> float:
        everything = np.arange(self.documents)[None], np.arange(self.seeds)[None]
        return float(self.resampled(*everything)[0])

    def resampled(self, documents: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """The metric of each draw, (draws,): `documents` (draws, documents) and `seeds` (draws, seeds) are indices."""
        if self.values is not None:
            # one seed after the other: (draws, documents) at a time
            return np.mean(
                [self.values[drawn[:, None], documents].mean(-1) for drawn in seeds.T],
                axis=0,
            )
        results = []
        for chosen, drawn in zip(documents, seeds, strict=True):
            # a seed that was drawn twice counts twice, and is computed once
            distinct, counts = np.unique(drawn, return_counts=True)
            metrics = [self.function(*(array[chosen] for array in self.arrays[index])) for index in distinct]
            results.append(np.average(metrics, weights=counts))
        return np.array(results)


def _draws(
    documents: int, seeds: tuple[int, ...], resamples: int, seed: int
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Indices of documents (draws, documents), and of each model's seeds (draws, seeds), some draws at a time."""
    # apart, so that models of any number of seeds see the same documents
    of_documents, of_seeds = np.random.default_rng((seed, 0)), np.random.default_rng((seed, 1))
    step = max(_CHUNK // documents, 1)
    for begin in range(0, resamples, step):
        draws = min(step, resamples - begin)
        yield (
            of_documents.integers(documents, size=(draws, documents)),
            [of_seeds.integers(count, size=(draws, count)) for count in seeds],
        )


def _interval(value: float, resampled: np.ndarray, documents: int, level: float) -> Interval:
    resampled = resampled[~np.isnan(resampled)]
    if documents == 1 or np.isnan(value) or not len(resampled):
        return Interval(value, None, None)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def _check(resamples: int, level: float) -> None:
    check_integer("bootstrap", "resamples", resamples, 1)
    if not 0 < level < 1:
        raise ValueError(f"level={level!r} must be between 0 and 1.")
