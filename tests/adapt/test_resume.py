"""A run that is killed and started again, and a run on two processes, are the run that was left alone."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from hf_linattn.adapt import AdaptConfig, adapt, checkpoints
from hf_linattn.adapt.metrics_log import MetricsFile
from hf_linattn.data.documents import DataConfig

from ..helpers import converted_model, inputs_for, outputs_of, tiny_model
from .runs import LEARNED, SETTINGS, Killed, killed_when, losses, same_weights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unbroken(folder: Path, data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("unbroken") / "out"
    adapt(folder, output, AdaptConfig(**SETTINGS), data=data)
    return output


# the third and fourth checkpoint are the last of the first stage and the one that the second begins with
@pytest.mark.parametrize(
    ("save", "when"),
    [
        (1, "before"),
        (1, "after"),
        (2, "within"),
        (3, "after"),
        (4, "within"),
        (4, "after"),
        (6, "within"),
        (8, "after"),
    ],
)
def test_stopped_at_any_checkpoint(
    save: int,
    when: str,
    folder: Path,
    data: DataConfig,
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 0
    original, replace = checkpoints.write, os.replace

    def write(target: Path, *arguments: Any) -> None:
        nonlocal count
        count += target.name == "checkpoint"
        last = count == save and target.name == "checkpoint"
        if last and when == "before":
            raise Killed
        if last and when == "within":
            # the old one is aside, and the new one not yet in its place
            def killed(path: Path, new: Path) -> None:
                if Path(new).name == "checkpoint":
                    raise Killed
                replace(path, new)

            monkeypatch.setattr(os, "replace", killed)
        original(target, *arguments)
        if last:
            raise Killed

    monkeypatch.setattr(checkpoints, "write", write)
    output = tmp_path / "out"
    with pytest.raises(Killed):
        adapt(folder, output, AdaptConfig(**SETTINGS), data=data)
    monkeypatch.undo()
    adapt(folder, output, AdaptConfig(**SETTINGS), data=data)
    assert losses(output) == losses(unbroken)
    assert same_weights(output, unbroken)


@pytest.mark.parametrize("step", [2, 6])
def test_the_record_of_a_killed_run_is_that_of_one_left_alone(
    step: int, folder: Path, data: DataConfig, unbroken: Path, tmp_path: Path
) -> None:
    """Also where the best evaluation is the last one, of which no weights are kept beside the checkpoint."""
    with killed_when(lambda target, state: target.name == "checkpoint" and state["progress"].get("step") == step):
        adapt(folder, tmp_path / "out", AdaptConfig(**SETTINGS), data=data)
    adapt(folder, tmp_path / "out", AdaptConfig(**SETTINGS), data=data)
    records = [json.loads((output / "config.json").read_text()) for output in (tmp_path / "out", unbroken)]
    stages = [record["linattn_training"]["stages"] for record in records]
    for stage in (*stages[0], *stages[1]):
        del stage["seconds"]
    assert stages[0] == stages[1]
    assert stages[1][0]["chosen_step"] == 6


def test_killed_by_the_system(folder: Path, data: DataConfig, unbroken: Path, tmp_path: Path) -> None:
    output = tmp_path / "a run"
    arguments = [folder, output, json.dumps(SETTINGS), json.dumps(dataclasses.asdict(data))]
    command = [sys.executable, "-m", "tests.adapt.adapt_run", *map(str, arguments)]
    metrics = output / "training" / "metrics.jsonl"
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 5:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    assert not (output / "config.json").exists()
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    assert losses(output) == losses(unbroken)
    assert same_weights(output, unbroken)


def launched(config: str, arguments: list[Any], *options: str) -> list[str]:
    """Two processes under `accelerate launch`; what they say."""
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"scripts/accelerate_configs/{config}.yaml",
    ]
    launch += [*options, "--num_cpu_threads_per_process", "1", "--main_process_port", "0"]
    result = subprocess.run(
        [*launch, "-m", "tests.adapt.adapt_run", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    # where DeepSpeed is installed, it tells of the accelerator there too
    return [line for line in result.stdout.splitlines() if "real_accelerator.py" not in line]


def test_two_processes_are_one(folder: Path, data: DataConfig, unbroken: Path, tmp_path: Path) -> None:
    output = tmp_path / "two"
    arguments = [folder, output, json.dumps(SETTINGS), json.dumps(dataclasses.asdict(data))]
    assert launched("multi_cpu", arguments) == ["2 processes"]
    check_same_run(output, unbroken)


@pytest.mark.slow
def test_sharded_over_two_processes_is_one(folder: Path, data: DataConfig, unbroken: Path, tmp_path: Path) -> None:
    output = tmp_path / "sharded"
    arguments = [folder, output, json.dumps(SETTINGS), json.dumps(dataclasses.asdict(data)), "as-gpus"]
    assert launched("fsdp2", arguments, "--mixed_precision", "no") == ["2 processes FSDP"]
    check_same_run(output, unbroken)


@pytest.mark.slow
def test_deepspeed_goes_on_where_it_was_killed(
    folder: Path, data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    outputs = tmp_path / "unbroken", tmp_path / "killed"
    for output, *how in ((outputs[0],), (outputs[1], "kill-5"), (outputs[1],)):
        arguments = [folder, output, json.dumps(SETTINGS), json.dumps(dataclasses.asdict(data)), *how]
        if how:
            with pytest.raises(AssertionError, match="SIGKILL"):
                launched("deepspeed", arguments, "--mixed_precision", "no")
        else:
            assert launched("deepspeed", arguments, "--mixed_precision", "no")[-1] == "2 processes"
    assert losses(outputs[0]) == losses(outputs[1])
    assert same_weights(*outputs)


def check_same_run(output: Path, unbroken: Path) -> None:
    """The same to rounding."""
    found, expected = losses(output), losses(unbroken)
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-4)
    # not the weights: those that change nothing, as a key's bias, follow the rounding
    ours, theirs = (AutoModel.from_pretrained(path).eval() for path in (output, unbroken))
    inputs = inputs_for("AutoModel")
    torch.testing.assert_close(outputs_of(ours, inputs), outputs_of(theirs, inputs), atol=1e-3, rtol=1e-3)


# -- the parts --------------------------------------------------------------------------------------


def test_the_metrics_file_takes_back_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for stage in ("transfer", "distil"):
        for step in (1, 2, 3):
            metrics.write({"stage": stage, "step": step})
    with metrics.path.open("a") as file:
        file.write('{"stage": "dist')
    metrics.take_back(["transfer", "distil"], 2)
    rows = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    assert [(row["stage"], row["step"]) for row in rows] == [
        *(("transfer", i) for i in (1, 2, 3)),
        ("distil", 1),
        ("distil", 2),
    ]
    metrics.take_back(["transfer"], 0)
    assert metrics.path.read_text() == ""


def test_checkpoints_of_model_and_optimizer(tmp_path: Path) -> None:
    model, twin = converted_model(LEARNED), converted_model(LEARNED)
    states = []
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        each(torch.arange(5, 20)[None]).last_hidden_state.sum().backward()
        optimizer.step()
        states.append((optimizer, {p: name for name, p in each.named_parameters()}))
        if each is model:
            tensors = checkpoints.optimizer_state(*states[0])
            checkpoints.write(tmp_path / "checkpoint", checkpoints.model_state(model), tensors, {"step": 1})
    found = checkpoints.find(tmp_path / "checkpoint")
    assert found is not None and checkpoints.read_state(found) == {"step": 1}
    loaded = checkpoints.read_optimizer(found)
    assert loaded is not None
    checkpoints.load_optimizer_state(*states[1], loaded)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert states[0][0].state[p].keys() == states[1][0].state[q].keys()
        assert all(torch.equal(x, states[1][0].state[q][name]) for name, x in states[0][0].state[p].items())
    with pytest.raises(ValueError, match="does not fit the model"):
        checkpoints.load_model_state(tiny_model(), checkpoints.read_model(found))
    assert checkpoints.find(tmp_path / "none") is None
