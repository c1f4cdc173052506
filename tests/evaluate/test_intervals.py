"""Bootstrap intervals: coverage on simulated data, the fast form against the plain one, and what is degenerate."""

import math
from typing import Any

import numpy as np
import pytest

from hf_linattn.evaluate import intervals
from hf_linattn.evaluate.intervals import Interval, bootstrap_difference, bootstrap_interval
from hf_linattn.evaluate.metrics import metric_function

MEAN = metric_function("mean")
PERPLEXITY = metric_function("perplexity")


def _numbers(seeds: int, documents: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(seeds, documents))


def _by_seed(values: np.ndarray) -> list[tuple[np.ndarray]]:
    return [(row,) for row in values]


def test_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = _numbers(1, 400)
    found = bootstrap_interval(MEAN, _by_seed(values), resamples=4000)
    error = values.std() / math.sqrt(400)
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    narrow = bootstrap_interval(MEAN, _by_seed(values), resamples=4000, level=0.5)
    assert narrow.low == pytest.approx(values.mean() - 0.674 * error, abs=0.15 * error)


def test_coverage_over_documents() -> None:
    inside = 0
    for trial in range(300):
        found = bootstrap_interval(MEAN, _by_seed(_numbers(1, 60, trial)), resamples=200, seed=trial)
        inside += found.low <= 0.0 <= found.high
    # 285 expected; three standard deviations of the count are 11
    assert 267 <= inside <= 296


def test_coverage_over_seeds_and_documents() -> None:
    inside, without_seeds, trials = 0, 0, 300
    generator = np.random.default_rng(0)
    for trial in range(trials):
        # documents are hard or easy for all seeds, and seeds are good or bad on all documents
        values = generator.normal(size=(8, 1)) + generator.normal(size=(1, 60)) + generator.normal(size=(8, 60))
        found = bootstrap_interval(MEAN, _by_seed(values), resamples=200, seed=trial)
        inside += found.low <= 0.0 <= found.high
        alone = bootstrap_interval(MEAN, _by_seed(values.mean(0, keepdims=True)), resamples=200, seed=trial)
        without_seeds += alone.low <= 0.0 <= alone.high
    # eight seeds show 7/8 of their variance, in an interval of the normal distribution: about 91 per cent
    assert 0.86 * trials <= inside <= 0.97 * trials
    assert without_seeds < 0.7 * trials


@pytest.mark.parametrize("seeds", [1, 3])
def test_all_at_once_equals_one_after_the_other(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, others = _by_seed(_numbers(seeds, 20)), _by_seed(_numbers(2, 20, seed=1))
    expected = bootstrap_interval(MEAN.function, outcomes, resamples=50)
    paired = bootstrap_difference(MEAN.function, outcomes, others, resamples=50)
    # a few draws at a time, the last of them fewer
    monkeypatch.setattr(intervals, "_CHUNK", 7 * 20)
    found = bootstrap_interval(MEAN, outcomes, resamples=50)
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))
    assert found == bootstrap_interval(MEAN, outcomes, resamples=50)
    found = bootstrap_difference(MEAN, outcomes, others, resamples=50)
    if seeds == 1:
        assert (found.value, found.low, found.high) == pytest.approx((paired.value, paired.low, paired.high))


def test_metric_that_is_no_mean() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(50, 200, size=200)
    nats = tokens * generator.normal(3.0, 0.3, size=200)
    found = bootstrap_interval(PERPLEXITY, [(nats, tokens)], resamples=2000)
    assert found.value == pytest.approx(math.exp(nats.sum() / tokens.sum()))
    # ratio of sums, by the delta method
    rate = nats.sum() / tokens.sum()
    error = math.sqrt(((nats - rate * tokens) ** 2).sum()) / tokens.sum()
    assert math.log(found.low) == pytest.approx(rate - 1.96 * error, abs=0.2 * error)
    assert math.log(found.high) == pytest.approx(rate + 1.96 * error, abs=0.2 * error)


def test_strings_and_lists_of_unequal_length() -> None:
    f1 = bootstrap_interval(metric_function("f1"), [(["a", "b"] * 10, ["a", "b"] * 10)], resamples=20)
    assert f1 == Interval(1.0, 1.0, 1.0)
    ranked = ([[1.0, 0.0], [1.0, 0.0, 0.5]], [[1, 0], [1, 0, 0]])
    assert bootstrap_interval(metric_function("ndcg"), [ranked], resamples=20) == Interval(1.0, 1.0, 1.0)


def test_difference_on_the_same_documents_drops_what_they_share() -> None:
    shared = 10 * _numbers(1, 100)
    better, base = shared + 1 + 0.1 * _numbers(2, 100, seed=1), shared + 0.1 * _numbers(2, 100, seed=2)
    found = bootstrap_difference(MEAN, _by_seed(better), _by_seed(base))
    assert found.value == pytest.approx(better.mean() - base.mean())
    assert 0.9 < found.low < found.value < found.high < 1.1
    alone = bootstrap_interval(MEAN, _by_seed(better))
    assert alone.high - alone.low > 3
    back = bootstrap_difference(MEAN, _by_seed(base), _by_seed(better))
    assert (back.value, back.low, back.high) == pytest.approx((-found.value, -found.high, -found.low))


def test_difference_of_a_column_to_itself_is_nothing() -> None:
    column = _by_seed(_numbers(3, 30))
    assert bootstrap_difference(MEAN, column, column) == Interval(0.0, 0.0, 0.0)


def test_difference_to_a_column_with_other_seeds() -> None:
    found = bootstrap_difference(MEAN, _by_seed(_numbers(3, 50) + 1), _by_seed(_numbers(1, 50, seed=4)))
    assert found.low < found.value < found.high


def test_one_document_says_nothing_of_others() -> None:
    assert bootstrap_interval(MEAN, [([2.0],), ([4.0],)]) == Interval(3.0, None, None)
    assert bootstrap_difference(MEAN, [([2.0],)], [([5.0],)]) == Interval(-3.0, None, None)


def test_all_equal() -> None:
    assert bootstrap_interval(MEAN, [([0.25] * 7,)] * 2) == Interval(0.25, 0.25, 0.25)


def test_undefined_resamples_are_left_out() -> None:
    roc_auc = metric_function("roc_auc")
    # about two resamples in five have no positive document
    found = bootstrap_interval(roc_auc, [([0.9, 0.1, 0.2], [1, 0, 0])], resamples=100)
    assert found == Interval(1.0, 1.0, 1.0)
    nothing = bootstrap_interval(roc_auc, [([0.9, 0.1], [1, 1])], resamples=10)
    assert math.isnan(nothing.value) and nothing.low is nothing.high is None


@pytest.mark.parametrize(
    ("outcomes", "options", "message"),
    [
        ([], {}, "outcomes_by_seed is empty"),
        ([([1.0, 2.0],), ([1.0],)], {}, "1, 2 documents"),
        ([([1.0, 2.0],)], {"resamples": 0}, "resamples=0 must be an integer of at least 1"),
        ([([1.0, 2.0],)], {"level": 95}, "level=95 must be between 0 and 1"),
    ],
)
def test_bad_arguments(outcomes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(MEAN, outcomes, **options)


def test_columns_of_different_documents() -> None:
    with pytest.raises(ValueError, match="2 and 3 documents"):
        bootstrap_difference(MEAN, [([1.0, 2.0],)], [([1.0, 2.0, 3.0],)])
