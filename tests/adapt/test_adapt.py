"""Adaptation of tiny models: what each stage teaches, and that a run is the same however it is parted."""

import json
import math
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModel

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel
from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.adapt.config import TRACKERS
from hf_linattn.adapt.metrics_log import first_non_finite
from hf_linattn.adapt.stages import add_labels
from hf_linattn.adapt.stages.transfer import Transfer
from hf_linattn.adapt.teacher import softmax_teacher
from hf_linattn.data.documents import DataConfig
from hf_linattn.utils.lock import only_one

from ..helpers import (
    CAUSAL_FEW,
    config_id,
    converted_model,
    inputs_for,
    outputs_of,
    run_python,
    tiny_model,
    tokens,
)
from .runs import LEARNED, PROJECTED, SHORT, converted_folder, lines, losses

# -- whole runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LEARNED, PROJECTED], ids=config_id)
def test_adaptation_brings_the_model_closer_to_its_base(
    config: AttentionConfig, tmp_path: Path, data: DataConfig
) -> None:
    start = converted_folder(tmp_path, config)
    # projections this small learn with steps that are too large for those of real models
    rates = {"transfer_projection_lr": 1e-2, "projection_lr": 1e-3}
    settings = AdaptConfig(**{**SHORT, **rates, "transfer_steps": 20, "distil_steps": 20})
    model = adapt(start, tmp_path / "out", settings, data=data)
    teacher = softmax_teacher(converted_model(config))
    inputs = {"input_ids": tokens(32, batch=4, seed=3)}

    def error(student: LinAttnPreTrainedModel) -> float:
        wanted = outputs_of(teacher, {**inputs, "attention_mask": torch.ones(4, 32)})
        return float((outputs_of(student, {**inputs, "attention_mask": torch.ones(4, 32)}) - wanted).square().mean())

    assert error(model) < 0.7 * error(converted_model(config))
    rows = [row for row in lines(tmp_path / "out") if "loss" in row]
    assert [row["stage"] for row in rows] == ["transfer"] * 20 + ["distil"] * 20
    for row in rows:
        assert {"cosine/layer_0", "cosine/layer_1", "tokens_per_second", "gradient_norm/query_key"} <= row.keys()
    evaluated = [row["eval/loss"] for row in lines(tmp_path / "out") if "eval/loss" in row]
    # and before the first step of each stage
    assert len(evaluated) == 22


def test_no_path_of_this_machine_is_recorded_of_models_that_were_loaded_before(
    folder: Path, tmp_path: Path, data: DataConfig
) -> None:
    model = AutoModel.from_pretrained(folder)
    settings = AdaptConfig(**{**SHORT, "transfer_steps": 1, "distil_steps": 0, "eval_sequences": 0})
    trained = adapt(model, tmp_path / "out", settings, data=data)
    assert trained.config.linattn_training["model"] == "converted"
    for written in ("config.json", "training/settings.json"):
        assert str(folder.parent) not in (tmp_path / "out" / written).read_text()


def test_the_result_is_a_full_checkpoint_that_tells_how_it_was_trained(
    folder: Path, tmp_path: Path, data: DataConfig
) -> None:
    model = adapt(folder, tmp_path / "out", AdaptConfig(**SHORT), data=data)
    record = model.config.linattn_training
    assert [stage["stage"] for stage in record["stages"]] == ["transfer", "distil"]
    assert record["steps"] == 8 and record["tokens"] > 8 * 4 * 10
    assert record["data"]["dataset"] == "documents.jsonl" and record["model"] == "converted"
    assert "base" not in record
    assert str(tmp_path) not in json.dumps(record)
    assert sorted(p.name for p in (tmp_path / "out" / "training").glob("[!.]*")) == ["metrics.jsonl", "settings.json"]
    assert {p.name for p in folder.iterdir()} <= {p.name for p in (tmp_path / "out").iterdir()}
    code = (
        "import sys, json, torch; from transformers import AutoModel, AutoTokenizer; "
        "m = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval(); "
        "AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True); "
        "torch.set_grad_enabled(False); "
        "x = m(input_ids=torch.arange(5, 25)[None]).last_hidden_state; "
        "print(json.dumps([m.config.linattn_training, x.flatten().tolist()]))"
    )
    result = run_python(code, tmp_path / "out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found_record, found = json.loads(result.stdout)
    assert found_record == json.loads(json.dumps(record))
    with torch.no_grad():
        expected = model(input_ids=torch.arange(5, 25)[None]).last_hidden_state.flatten().tolist()
    assert found == expected
    # started again, there is nothing left to do; with other settings it is another run
    again = adapt(folder, tmp_path / "out", AdaptConfig(**SHORT), data=data)
    assert torch.equal(outputs_of(again, inputs_for("AutoModel")), outputs_of(model, inputs_for("AutoModel")))
    with pytest.raises(FileExistsError, match="batch_size=4, not 8"):
        adapt(folder, tmp_path / "out", AdaptConfig(**{**SHORT, "batch_size": 8}), data=data)
    # what was trained is no teacher for itself
    with pytest.raises(ValueError, match="base is missing"):
        adapt(tmp_path / "out", tmp_path / "more", AdaptConfig(**SHORT), data=data)


def test_accumulated_parts_are_the_whole_batch(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    for name, size in (("whole", None), ("parts", 1)):
        adapt(folder, tmp_path / name, AdaptConfig(**SHORT, micro_batch_size=size), data=data)
    found, expected = losses(tmp_path / "parts"), losses(tmp_path / "whole")
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-4)


@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
@pytest.mark.parametrize("distillation", [0.0, 0.5])
def test_tasks_of_encoders(task: str, distillation: float, folder: Path, tmp_path: Path, data: DataConfig) -> None:
    labelled = DataConfig(dataset=data.dataset, label_column="kind")
    settings = AdaptConfig(
        **{**SHORT, "transfer_steps": 0, "distil_steps": 0, "batch_size": 8},
        task=task,
        task_steps=25,
        learning_rate=3e-3,
        task_distillation=distillation,
    )
    model = adapt(folder, tmp_path / "out", settings, data=labelled)
    rows = [row for row in lines(tmp_path / "out") if "loss" in row]
    assert sum(row["loss"] for row in rows[-5:]) < 0.95 * sum(row["loss"] for row in rows[:5])
    assert ("hidden_error" in rows[0]) == bool(distillation)
    if task == "sequence-classification":
        assert model.config.label2id == {"high": 0, "low": 1}
        assert rows[-1]["accuracy"] > 0.8


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_decoder_learns_from_logits_and_next_tokens(family: str, tmp_path: Path, data: DataConfig) -> None:
    start = converted_folder(tmp_path, CAUSAL_FEW[3], family, "AutoModelForCausalLM")
    settings = AdaptConfig(**{**SHORT, "distil_steps": 10}, task="causal-lm", task_steps=20, learning_rate=3e-3)
    model = adapt(start, tmp_path / "out", settings, data=data)
    assert type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    rows = [row for row in lines(tmp_path / "out") if "loss" in row]
    kl = [row["kl"] for row in rows if row["stage"] == "distil"]
    assert sum(kl[-3:]) < sum(kl[:3])
    task = [row["loss"] for row in rows if row["stage"] == "task"]
    assert sum(task[-3:]) < sum(task[:3])


def test_masked_labels() -> None:
    class Tokenizer:
        all_special_ids = (2, 3)
        mask_token_id = 4

        def __len__(self) -> int:
            return 100

    ids = [2, *range(5, 95), 3]
    row = add_labels([{"input_ids": ids}], "masked-lm", Tokenizer(), 0.5, random.Random(0))[0]
    guessed = [index for index, label in enumerate(row["labels"]) if label != -100]
    assert len(guessed) == 45 and 0 not in guessed and len(ids) - 1 not in guessed
    assert all(row["labels"][index] == ids[index] for index in guessed)
    assert 0.6 < sum(row["input_ids"][index] == 4 for index in guessed) / 45 < 0.95
    assert all(row["input_ids"][i] == ids[i] for i in range(len(ids)) if i not in guessed)


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"window_dropout": 1.5}, "window_dropout=1.5"),
        ({"task": "masked-lm"}, "task_steps=0"),
        ({"task": "parsing", "task_steps": 1}, "task='parsing' is not one of"),
        ({"transfer_steps": 0, "distil_steps": 0}, "nothing to train"),
        ({"batch_size": 4, "micro_batch_size": 3}, "micro_batch_size=3"),
        ({"tracker": "paper"}, "tracker='paper' is not one of"),
        ({"lora_targets": ["query"]}, "needs a lora_rank"),
    ],
)
def test_settings_that_are_not_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"sequence_length": 100}, ValueError, "sequence_length=100 is more than the model's max_length=64"),
        ({"task": "causal-lm", "task_steps": 1}, ValueError, "is an encoder"),
        ({"task": "sequence-classification", "task_steps": 1}, ValueError, "label_column"),
        ({"batch_size": 400}, ValueError, "gives fewer sequences"),
        ({"transfer_feature_lr": 0.0, "transfer_query_key_lr": 0.0}, ValueError, "nothing to train"),
    ],
)
def test_runs_that_cannot_be(
    settings: dict[str, Any], error: type[Exception], message: str, folder: Path, tmp_path: Path, data: DataConfig
) -> None:
    with pytest.raises(error, match=message):
        adapt(folder, tmp_path / "out", AdaptConfig(**{**SHORT, **settings}), data=data)


def test_a_tracker_that_is_not_installed(
    folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="tracker='wandb' is not installed: pip install wandb"):
        adapt(folder, tmp_path / "out", AdaptConfig(**SHORT, tracker="wandb"), data=data)
    assert not (tmp_path / "out").exists()


def test_trackers_count_on_through_the_stages(
    folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B drops what has a smaller step than something before."""
    logged: list[tuple[int, str]] = []
    monkeypatch.setattr("hf_linattn.adapt.inputs.check_tracker", lambda name: None)
    monkeypatch.setattr(Accelerator, "init_trackers", lambda *args, **kwargs: None)
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: logged.append((step, next(iter(values)))))
    adapt(folder, tmp_path / "out", AdaptConfig(**{**SHORT, "eval_sequences": 0}, tracker="wandb"), data=data)
    assert [step for step, _ in logged] == list(range(1, 9))
    assert [name.partition("/")[0] for _, name in logged] == ["transfer"] * 4 + ["distil"] * 4


@pytest.mark.parametrize("tracker", TRACKERS)
def test_trackers_that_are_installed(
    tracker: str, folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip(tracker)
    here = set(Path.cwd().iterdir())
    adapt(folder, tmp_path / "out", AdaptConfig(**{**SHORT, "eval_sequences": 0}, tracker=tracker), data=data)
    assert set(Path.cwd().iterdir()) == here
    training = tmp_path / "out" / "training"
    if tracker == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(training / "linattn"))
        events.Reload()
        expected = [row["loss"] for row in lines(tmp_path / "out") if row["stage"] == "distil"]
        assert [event.step for event in events.Scalars("distil/loss")] == [5, 6, 7, 8]
        assert [event.value for event in events.Scalars("distil/loss")] == pytest.approx(expected)
    elif tracker == "wandb":
        assert len(list((training / "wandb").glob("offline-run-*/*.wandb"))) == 1
    else:
        with sqlite3.connect(tmp_path / "trackio" / "linattn.db") as database:
            assert [step for (step,) in database.execute("select step from metrics")] == list(range(1, 9))


def test_fsdp_without_accelerators_is_refused(
    folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate would leave it out without a word."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP was asked for, and Accelerate runs NO instead"):
        adapt(folder, tmp_path / "out", AdaptConfig(**SHORT), data=data)


def test_other_models_and_folders_are_refused(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    with pytest.raises(ValueError, match="convert it first"):
        adapt(folder.parent / "base", tmp_path / "out", data=data)
    with pytest.raises(TypeError, match="BertModel"):
        adapt(tiny_model(), tmp_path / "out", data=data)  # type: ignore[arg-type]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no run that could be continued"):
        adapt(folder, tmp_path, AdaptConfig(**SHORT), data=data)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_one_run_to_a_folder(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    adapt(folder, tmp_path / "out", AdaptConfig(**SHORT), data=data)
    (tmp_path / "out" / "config.json").unlink()
    with only_one(tmp_path / "out" / "training"), pytest.raises(FileExistsError, match="Another process"):
        adapt(folder, tmp_path / "out", AdaptConfig(**SHORT), data=data)


# -- numbers that are not finite --------------------------------------------------------------------


def test_nan_names_the_layer_and_keeps_a_checkpoint(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    settings = {**SHORT, "transfer_feature_lr": 1e38, "checkpoint_steps": 100, "transfer_steps": 6}
    with pytest.raises(FloatingPointError, match=r"Stage 'transfer', step \d: .* first in .*linattn"):
        adapt(folder, tmp_path / "out", AdaptConfig(**settings), data=data)
    assert (tmp_path / "out" / "training" / "diverged" / "state.json").is_file()
    assert not (tmp_path / "out" / "config.json").exists()


def test_where_a_number_stops_being_finite() -> None:
    model = converted_model(LEARNED)
    stage = Transfer(model, model, softmax_teacher(model))
    batch = {"input_ids": tokens(12, batch=2)}
    assert first_non_finite(stage, model, batch, {}) == "the loss"
    # backward goes from the last to the first, and so does what is not finite
    norms = {"first": torch.tensor(math.nan), "second": torch.tensor(math.inf), "third": torch.tensor(1.0)}
    assert first_non_finite(stage, model, batch, norms) == "the gradient of second"
    model.encoder.layer[1].attention.self.value.bias.data[3] = float("inf")
    assert first_non_finite(stage, model, batch, norms) == "the weight encoder.layer.1.attention.self.value.bias"
