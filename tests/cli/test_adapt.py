"""The closing lines of `hf-linattn adapt`, and its exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_linattn.cli.adapt import NOTHING_LEARNED, closing_lines, status
from hf_linattn.cli.main import main

from ..adapt.runs import PROJECTED, converted_folder, write_documents


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted encoder and labelled documents, which options of the command name."""
    root = tmp_path_factory.mktemp("classifier")
    converted_folder(root, PROJECTED)
    write_documents(root / "documents.jsonl", 48)
    return root


def run(root: Path, output: Path, *options: str) -> int:
    call = ["adapt", str(root / "converted"), "--dataset", str(root / "documents.jsonl"), "--label-column", "kind"]
    call += [
        "--output",
        str(output),
        "--transfer-steps",
        "0",
        "--distil-steps",
        "0",
        "--task",
        "sequence-classification",
    ]
    call += ["--sequence-length", "32", "--eval-sequences", "16", "--eval-steps", "5", "--warmup-steps", "0"]
    return main([*call, *options])


def test_the_task_is_told_before_and_after(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(classifier, output, "--task-steps", "60", "--learning-rate", "2e-3") == 0
    out = capsys.readouterr().out
    stage = json.loads((output / "config.json").read_text())["linattn_training"]["stages"][0]
    before, after = stage["eval_metrics_before"]["accuracy"], stage["eval_metrics"]["accuracy"]
    assert after > before
    rows = [json.loads(row) for row in (output / "training" / "metrics.jsonl").read_text().splitlines()]
    assert after in [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert f"accuracy {before:.4g} -> {after:.4g}" in out and "nothing was learned" not in out


def test_nothing_learned_is_told_at_the_end(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # so large that it is worse from the first step on
    options = ("--task-steps", "3", "--learning-rate", "3", "--eval-steps", "1")
    assert run(classifier, tmp_path / "out", *options) == NOTHING_LEARNED
    out = capsys.readouterr().out
    assert "task: nothing was learned. The weights are those that the stage began with. The loss was " in out
    assert "More --task-steps than 3 may help, or a lower --learning-rate than 3." in out
    assert "another folder" in out
    # the finished run says it again
    assert run(classifier, tmp_path / "out", *options) == NOTHING_LEARNED
    assert "nothing was learned" in capsys.readouterr().out


def stage(name: str, **values: Any) -> dict[str, Any]:
    return {"stage": name, "steps": 9, "chosen_step": 9, "eval_loss_before": 1.0, "eval_loss": 0.5, **values}


def test_the_task_counts_and_without_one_every_stage() -> None:
    learned, not_learned = stage("distil"), stage("transfer", chosen_step=0, eval_loss=1.0)
    assert status({"stages": [not_learned, learned]}) == 0
    assert status({"stages": [not_learned]}) == NOTHING_LEARNED
    assert status({"stages": [learned, stage("task", eval_loss=1.2)]}) == NOTHING_LEARNED
    assert status({"stages": [not_learned, stage("task")]}) == 0
    # without an evaluation nothing is known
    record = {"stages": [{"stage": "task", "steps": 9, "chosen_step": 9}]}
    assert status(record) == 0 and closing_lines(record, "out") == ["task: not evaluated"]
