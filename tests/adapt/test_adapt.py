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
from peft import PeftModel
from transformers import AutoModel

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, PerformerConfig
from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.adapt.config import TRACKERS
from hf_linattn.adapt.losses import divergence, mean_cosine, pooled, relative_error
from hf_linattn.adapt.metrics_log import first_non_finite
from hf_linattn.adapt.stages import add_labels, without_near
from hf_linattn.adapt.stages.distillation import Distil
from hf_linattn.adapt.stages.transfer import Transfer
from hf_linattn.adapt.teacher import softmax_teacher
from hf_linattn.data.documents import DataConfig
from hf_linattn.modeling.modeling_linattn import HEAD_CLASSES
from hf_linattn.utils.lock import only_one

from ..helpers import (
    CAUSAL_FEW,
    DECODERS,
    ENCODERS,
    PURE,
    as_trained,
    config_id,
    converted_model,
    inputs_for,
    outputs_of,
    run_python,
    tiny_model,
    tokens,
)
from .runs import LEARNED, PROJECTED, SHORT, converted_folder, lines, losses

# -- losses -----------------------------------------------------------------------------------------


def test_losses_of_known_numbers() -> None:
    wanted = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [5.0, 5.0]]])
    found = torch.tensor([[[3.0, 0.0], [1.0, 1.0]], [[2.0, 0.0], [9.0, 9.0]]])
    real = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    torch.testing.assert_close(relative_error(found, wanted, real), torch.tensor([17 / 26, 8 / 4]))
    torch.testing.assert_close(mean_cosine(found, wanted, real), torch.tensor([(0.6 + 0.5**0.5) / 2, 0.0]))
    torch.testing.assert_close(pooled(found, real, "mean"), torch.tensor([[2.0, 0.5], [2.0, 0.0]]))
    torch.testing.assert_close(pooled(found, real, "cls"), torch.tensor([[3.0, 0.0], [2.0, 0.0]]))


def test_divergence_is_that_of_the_distributions() -> None:
    found, wanted = torch.randn(2, 1, 3, 7)
    expected = torch.distributions.kl_divergence(
        *(torch.distributions.Categorical(logits=x / 2) for x in (wanted, found))
    )
    torch.testing.assert_close(divergence(found, wanted, torch.ones(1, 3), 2.0), 4 * expected.mean(-1))


# -- stages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_the_teacher_is_the_base_model(family: str) -> None:
    config = PerformerConfig(num_features=8, feature_map="learned")
    model = as_trained(converted_model(config, family, max_length=80))
    inputs = inputs_for("AutoModel")
    expected = outputs_of(tiny_model(family), {**inputs, **({"use_cache": False} if family in DECODERS else {})})
    for teacher in (softmax_teacher(model), softmax_teacher(model, tiny_model(family))):
        options = {"use_cache": False} if family in DECODERS else {}
        found = outputs_of(teacher, {**inputs, **options})
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        assert not any(p.requires_grad for p in teacher.parameters())


def test_the_teacher_must_fit() -> None:
    model = converted_model(LEARNED)
    with pytest.raises(ValueError, match="hidden_size=16"):
        softmax_teacher(model, tiny_model(hidden_size=16))
    with pytest.raises(ValueError, match="model_type='roberta'"):
        softmax_teacher(model, tiny_model("roberta"))


@pytest.mark.parametrize("extension", ["repeat", "interpolate"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_teacher_has_the_positions_of_its_base(family: str, extension: str) -> None:
    """Made longer as the model's were, and not those that have been trained since."""
    model = converted_model(PROJECTED, family, max_length=96, position_extension=extension)
    inputs = inputs_for("AutoModel", 90)
    before = outputs_of(softmax_teacher(model), inputs)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight += 1e-3 * torch.randn_like(
            model.embeddings.position_embeddings.weight
        )
    torch.testing.assert_close(outputs_of(softmax_teacher(model, tiny_model(family)), inputs), before)


@pytest.mark.parametrize("family", ["albert", "bert", "distilbert", "gpt2", "llama", "opt"])
def test_transfer_compares_each_layer_on_the_inputs_of_the_base(family: str) -> None:
    """With the rest of the model as it was, what comes out of the student is the base model's output."""
    model = as_trained(converted_model(PerformerConfig(num_features=8, feature_map="learned"), family))
    base = tiny_model(family)
    seen = []
    model.base_model.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    batch = inputs_for("AutoModel")
    out = Transfer(model, model, softmax_teacher(model))(batch)
    assert len(out.metrics) == base.config.num_hidden_layers
    assert out.loss > 0.01
    with torch.no_grad():
        expected = base(**batch)[0]
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(seen[0][real], expected[real], atol=2e-5, rtol=2e-5)
    # and afterwards the student is itself again
    with torch.no_grad():
        assert (model(**batch)[0][real] - expected[real]).abs().max() > 1e-3


def test_transfer_leaves_out_layers_that_are_not_converted() -> None:
    model = converted_model(PerformerConfig(num_features=8, feature_map="learned", layers=[1]))
    assert list(Transfer(model, model, softmax_teacher(model))(inputs_for("AutoModel")).metrics) == ["cosine/layer_0"]


@pytest.mark.parametrize("config", [PURE[0], LEARNED], ids=config_id)
def test_a_perfect_student_has_no_loss(config: AttentionConfig) -> None:
    # rows of 8 tokens have a slot for each, and a window of 4 sees 12 tokens at once
    model = converted_model(config)
    batch = {"input_ids": tokens(8, batch=2)}
    teacher = softmax_teacher(model)
    options = {"hidden_weight": 1.0, "embedding_weight": 1.0, "logits_weight": 1.0, "temperature": 1.0}
    for stage in (Transfer(model, model, teacher), Distil(model, model, teacher, pooling="mean", **options)):
        assert stage(batch).loss.item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_teacher_of_more_precision_than_its_student(family: str) -> None:
    """DeepSpeed casts the weights that it trains, and not the teacher's."""
    model = converted_model(LEARNED, family)
    teacher, batch = softmax_teacher(model), inputs_for("AutoModel")
    options = {"hidden_weight": 1.0, "embedding_weight": 1.0, "logits_weight": 0.0, "temperature": 1.0}
    stages = [Transfer(model, model, teacher)]
    stages += [Distil(model, model, teacher, pooling="mean", **options)] if family == "bert" else []
    expected = [stage(batch).loss.item() for stage in stages]
    model.bfloat16()
    assert [stage(batch).loss.item() for stage in stages] == pytest.approx(expected, rel=0.1)
    assert teacher.dtype == torch.float32


def test_branches_are_switched_off_for_a_while_and_never_all() -> None:
    model = converted_model(LEARNED)
    batch = inputs_for("AutoModel")
    before = outputs_of(model, batch)
    with without_near(model):
        assert (outputs_of(model, batch) - before).abs().max() > 1e-3
    assert torch.equal(outputs_of(model, batch), before)
    model.set_branches(far=False)
    near_only = outputs_of(model, batch)
    with without_near(model):
        assert torch.equal(outputs_of(model, batch), near_only)


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


# -- LoRA -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_lora_reload_and_merge(family: str, tmp_path: Path, data: DataConfig) -> None:
    auto = "AutoModelForCausalLM" if family == "gpt2" else "AutoModel"
    start = converted_folder(tmp_path, CAUSAL_FEW[3], family, auto)
    settings = AdaptConfig(**SHORT, lora_rank=2, learning_rate=1e-2)
    model = adapt(start, tmp_path / "out", settings, data=data)
    assert type(model) is HEAD_CLASSES[family][type(model).__name__.removeprefix("LinAttn")]
    inputs = inputs_for(auto)
    loaded = type(model).from_pretrained(tmp_path / "out").eval()
    assert torch.equal(outputs_of(loaded, inputs), outputs_of(model, inputs))
    fresh = type(model).from_pretrained(start).eval()
    assert (outputs_of(fresh, inputs) - outputs_of(model, inputs)).abs().max() > 1e-3
    # what only the adapter may change: all other weights are those of the start, or they are merged into it
    adapted = PeftModel.from_pretrained(fresh, tmp_path / "out" / "adapter").eval()
    torch.testing.assert_close(outputs_of(adapted, inputs), outputs_of(model, inputs), atol=1e-5, rtol=1e-5)
    size = sum(p.stat().st_size for p in (tmp_path / "out" / "adapter").glob("*.safetensors"))
    assert size < (tmp_path / "out" / "model.safetensors").stat().st_size
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = type(model).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(outputs_of(again, inputs), outputs_of(model, inputs), atol=1e-5, rtol=1e-5)


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
