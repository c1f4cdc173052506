"""Metrics: values that are known, through `evaluate` and on arrays, without a network."""

import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest

from hf_linattn.evaluate import metrics
from hf_linattn.evaluate.metrics import METRICS, load_metric, metric_function

from ..helpers import run_python

# metric, predictions, references, value
KNOWN: list[tuple[str, Any, Any, float]] = [
    ("accuracy", [0, 1, 1, 0], [0, 1, 0, 1], 0.5),
    ("accuracy", ["a", "b", "b"], ["a", "b", "c"], 2 / 3),
    # of a: precision 1, recall 1/2; of b: 1/2 and 1
    ("f1", ["a", "b", "b"], ["a", "a", "b"], 2 / 3),
    ("f1", [0, 0, 0, 0], [0, 0, 1, 1], 1 / 3),
    # of four pairs of a positive and a negative, three are in order
    ("roc_auc", [0.9, 0.4, 0.5, 0.1], [1, 1, 0, 0], 0.75),
    ("roc_auc", [0.5, 0.5], [1, 0], 0.5),
    # the relevant one is second, then first
    ("ndcg", [[0.1, 0.2, 0.0], [0.5, 0.2]], [[1, 0, 0], [1, 0]], (1 / math.log2(3) + 1) / 2),
    ("ndcg", [[2.0, 1.0]], [[0, 0]], 0.0),
    ("spearman", [1, 2, 3, 4], [10, 20, 40, 30], 0.8),
    ("spearman", [1.0, 5.0, 9.0], [3.0, 2.0, 1.0], -1.0),
    ("perplexity", [10 * math.log(2), 20 * math.log(4)], [10, 20], 2 ** (5 / 3)),
    ("perplexity", [0.0], [7], 1.0),
    ("mean", [1.0, 2.0, 6.0], None, 3.0),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path / "metrics")


@pytest.mark.parametrize(("name", "predictions", "references", "expected"), KNOWN)
def test_known_values_through_evaluate_and_on_arrays(
    name: str, predictions: Any, references: Any, expected: float
) -> None:
    arrays = [predictions] if references is None else [predictions, references]
    assert metric_function(name)(*arrays) == pytest.approx(expected, abs=1e-12)
    if name != "ndcg":
        assert metric_function(name)(*map(np.array, arrays)) == pytest.approx(expected, abs=1e-12)
    found = load_metric(name).compute(predictions=predictions, references=references)
    assert found == {name: pytest.approx(expected, abs=1e-12)}


def test_known_values_cover_all_metrics() -> None:
    assert {name for name, *_ in KNOWN} == set(METRICS)


@pytest.mark.parametrize(("name", "predictions", "references", "expected"), KNOWN)
def test_means_are_means_of_documents(name: str, predictions: Any, references: Any, expected: float) -> None:
    per_document = metric_function(name).per_document
    if name in ("accuracy", "ndcg", "mean"):
        assert per_document is not None
        values = per_document(predictions, references)
        assert values.shape == (len(predictions),)
        assert values.mean() == pytest.approx(expected, abs=1e-12)
    else:
        assert per_document is None


@pytest.mark.parametrize("name", METRICS)
def test_the_function_of_the_bootstrap_is_the_module_of_evaluate(name: str) -> None:
    """On documents with ties, of several classes; the module is loaded by the path of the installed package."""
    draw = np.random.default_rng(0)
    scores, labels = draw.integers(0, 20, 60) / 7, draw.integers(0, 4, 60)
    arguments: dict[str, list[Any]] = {
        "accuracy": [draw.integers(0, 4, 60), labels],
        "f1": [draw.integers(0, 4, 60), labels],
        "mean": [scores],
        "ndcg": [draw.integers(0, 9, (20, 15)) / 3, draw.integers(0, 2, (20, 15)).astype(float)],
        "perplexity": [scores * 9, draw.integers(1, 50, 60)],
        "roc_auc": [scores, labels % 2],
        "spearman": [scores, draw.integers(0, 20, 60) / 3],
    }
    arrays = [array.tolist() for array in arguments[name]]
    module = evaluate.load(str(Path(metrics.__file__).with_name(f"{name}.py")), keep_in_memory=True)
    computed = module.compute(**dict(zip(("predictions", "references"), arrays, strict=False)))
    assert computed[name] == pytest.approx(metric_function(name)(*arrays), abs=1e-12)


def test_examples_in_batches() -> None:
    metric = load_metric("accuracy")
    for prediction, reference in (([0, 1], [0, 0]), ([1, 1], [1, 1])):
        metric.add_batch(predictions=prediction, references=reference)
    assert metric.compute() == {"accuracy": 0.75}


def test_ndcg_of_the_first_candidates() -> None:
    predictions, references = [[0.1, 0.2, 0.0]], [[1, 0, 0]]
    assert load_metric("ndcg").compute(predictions=predictions, references=references, k=1) == {"ndcg": 0.0}
    assert metric_function("ndcg").function(predictions, references, k=1) == 0.0


@pytest.mark.parametrize(
    ("name", "predictions", "references"),
    [("roc_auc", [0.1, 0.2], [1, 1]), ("spearman", [1.0, 1.0], [1.0, 2.0]), ("spearman", [3.0], [2.0])],
)
def test_what_is_not_defined_is_nan_without_a_warning(name: str, predictions: Any, references: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(metric_function(name)(predictions, references))


@pytest.mark.parametrize("load", [load_metric, metric_function])
def test_unknown_metric_lists_those_that_exist(load: Any) -> None:
    with pytest.raises(ValueError, match=r"metric='bleu' is not one of 'accuracy', 'f1'.*'spearman'"):
        load("bleu")


@pytest.mark.parametrize("name", sorted(set(METRICS) - {"mean"}))
def test_lengths_that_differ(name: str) -> None:
    predictions, references = ([[1.0, 0.0]], [[1, 0], [0, 1]]) if name == "ndcg" else ([1], [1, 0])
    with pytest.raises(ValueError, match="There are 1 predictions for 2 references"):
        metric_function(name)(predictions, references)
    with pytest.raises(ValueError, match=r"predictions \(1\) and references \(2\)"):
        load_metric(name).compute(predictions=predictions, references=references)


@pytest.mark.parametrize(
    ("name", "predictions", "references", "message"),
    [
        ("accuracy", [], [], "are empty"),
        ("mean", [], None, "at least one"),
        ("accuracy", [1], ["1"], "both must be the same"),
        ("mean", [1.0, math.nan], None, "1 numbers of 2 that are not finite"),
        ("roc_auc", [0.1, 0.2], [1, 2], "references holds 1, 2; they must be 0 or 1"),
        ("ndcg", [[1.0, 2.0]], [[1.0]], "Query 0 has 2 scores for 1 relevances"),
        ("ndcg", [[1.0]], [[1.0]], "at least two candidates"),
        ("perplexity", [-1.0], [3], "holds -1"),
        ("perplexity", [1.0], [0], "at least 1 predicted token"),
    ],
)
def test_bad_inputs(name: str, predictions: Any, references: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric_function(name)(predictions, references)


_SCRIPT = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("the network was used")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import evaluate
from hf_linattn.evaluate.metrics import METRICS, load_metric

metrics = [load_metric(name) for name in METRICS]
for _ in range(5):
    assert load_metric("f1").compute(predictions=[0, 1], references=[0, 1]) == {"f1": 1.0}
assert all(type(metric).__module__.startswith("evaluate_modules.") for metric in metrics)
"""


def test_two_processes_at_once_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a fresh cache that both fill, and no variable that says offline
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    running = [
        subprocess.Popen([sys.executable, "-I", "-c", _SCRIPT], stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def test_package_folder_may_be_read_only(tmp_path: Path) -> None:
    code = """
import shutil, stat, sys
from pathlib import Path
import hf_linattn
copy = Path(sys.argv[1]) / "hf_linattn"
shutil.copytree(Path(hf_linattn.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
for path in [*copy.rglob("*"), copy]:
    path.chmod(0o555 if path.is_dir() else 0o444)
for name in [name for name in sys.modules if name.startswith("hf_linattn")]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
from hf_linattn.evaluate import metrics
assert metrics.__file__.startswith(sys.argv[1])
before = sorted(copy.rglob("*"))
assert metrics.load_metric("mean").compute(predictions=[1.0, 3.0]) == {"mean": 2.0}
assert sorted(copy.rglob("*")) == before
"""
    process = run_python(code, tmp_path / "a folder", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
