"""What adaptation survives, and what it refuses before work is lost."""

import dataclasses
import json
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from hf_linattn import LinformerConfig, PerformerConfig, convert_checkpoint
from hf_linattn.adapt import AdaptConfig, adapt, checkpoints
from hf_linattn.adapt.batches import Sequences
from hf_linattn.adapt.checkpoints import DIVERGED
from hf_linattn.cli.main import main
from hf_linattn.data.documents import DataConfig

from .runs import SETTINGS, SHORT, Killed, converted_folder, killed_when, lines, losses, same_weights, write_documents

DISTIL = {**SHORT, "transfer_steps": 0, "distil_steps": 6}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(dataset=str(path))


# -- gradient checkpointing ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "opt"])
def test_gradient_checkpointing_changes_nothing(family: str, tmp_path: Path, data: DataConfig) -> None:
    """Not in the transfer either; not after an evaluation; and no dropout comes with its training mode."""
    auto = "AutoModelForCausalLM" if family == "opt" else "AutoModel"
    start = converted_folder(tmp_path, PerformerConfig(num_features=16, feature_map="learned"), family, auto)
    settings = json.loads((start / "config.json").read_text())
    settings |= {key: 0.5 for key in settings if key.endswith(("dropout", "dropout_prob", "layerdrop"))}
    (start / "config.json").write_text(json.dumps(settings))
    for name, on in (("with", True), ("without", False)):
        adapt(start, tmp_path / name, AdaptConfig(**SHORT, gradient_checkpointing=on), data=data)
    found, expected = losses(tmp_path / "with"), losses(tmp_path / "without")
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-5)


def test_gradient_checkpointing_goes_on_after_an_evaluation(
    folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    forward = nn.Module.__call__

    def watch(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(module).__name__ == "Distil" and torch.is_grad_enabled():
            modes.append(module.student.training)  # type: ignore[union-attr]
        return forward(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", watch)
    adapt(folder, tmp_path / "out", AdaptConfig(**DISTIL, gradient_checkpointing=True), data=data)
    assert modes == [True] * 6


# -- the same on every start, and after every end -------------------------------------------------------


def test_adapters_are_drawn_from_the_seed(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        adapt(folder, tmp_path / name, AdaptConfig(**DISTIL, lora_rank=2, seed=seed), data=data)
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert not same_weights(tmp_path / "one", tmp_path / "other")


def test_what_diverged_does_not_replace_the_last_checkpoint(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    good = AdaptConfig(**DISTIL)
    adapt(folder, tmp_path / "unbroken", good, data=data)
    output, bad = tmp_path / "out", dataclasses.replace(good, learning_rate=1e30, checkpoint_steps=4, eval_steps=100)
    with pytest.raises(FloatingPointError, match="training/diverged"):
        adapt(folder, output, bad, data=data)
    assert (output / "training" / DIVERGED / "state.json").is_file()
    assert checkpoints.find(output / "training" / "checkpoint") is None
    adapt(folder, output, good, data=data)
    assert same_weights(output, tmp_path / "unbroken")
    assert not (output / "training" / DIVERGED).exists()


@pytest.mark.parametrize("evaluated", [True, False])
def test_what_diverges_in_the_last_step_is_no_result(
    evaluated: bool, folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step comes after it to notice; an evaluation may, and otherwise the checkpoint does."""
    step = torch.optim.AdamW.step

    def overflow(optimizer: torch.optim.AdamW, *args: Any) -> Any:
        step(optimizer, *args)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].fill_(math.inf)

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    one = {**DISTIL, "distil_steps": 1, "warmup_steps": 0, "keep_best": False, "eval_sequences": 4 * evaluated}
    with pytest.raises(FloatingPointError, match=r"step 1: .*NaN or Inf first in the weight encoder"):
        adapt(folder, tmp_path / "out", AdaptConfig(**one), data=data)
    monkeypatch.undo()
    assert not (tmp_path / "out" / "config.json").exists()
    assert checkpoints.find(tmp_path / "out" / "training" / "checkpoint") is None
    # nothing was kept, and so other settings can lose nothing
    adapt(folder, tmp_path / "out", AdaptConfig(**{**one, "seed": 1}), data=data)


def test_killed_after_an_evaluation_that_no_checkpoint_knows(folder: Path, data: DataConfig, tmp_path: Path) -> None:
    settings = AdaptConfig(**{**SETTINGS, "transfer_steps": 0, "eval_steps": 1, "checkpoint_steps": 4})
    adapt(folder, tmp_path / "unbroken", settings, data=data)
    output = tmp_path / "out"
    with killed_when(lambda target, state: target.name == "best" and state["step"] > 4):
        adapt(folder, output, settings, data=data)
    # no evaluation comes before the last step, so that the best of before cannot be found again
    adapt(folder, output, dataclasses.replace(settings, eval_steps=100), data=data)
    adapt(folder, tmp_path / "again", settings, data=data)
    assert same_weights(tmp_path / "again", tmp_path / "unbroken")


def test_a_stage_that_makes_it_worse_is_left_as_it_began(
    folder: Path, tmp_path: Path, data: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    settings = AdaptConfig(**{**DISTIL, "distil_steps": 3}, learning_rate=1.0, query_key_lr=1.0)
    model = adapt(folder, tmp_path / "out", settings, data=data)
    assert model.config.linattn_training["stages"][0]["chosen_step"] == 0
    assert same_weights(tmp_path / "out", folder)
    evaluated = [row for row in lines(tmp_path / "out") if "eval/loss" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoints_are_trained_in_float32(
    dtype: torch.dtype, folder: Path, tmp_path: Path, data: DataConfig
) -> None:
    start = AutoModel.from_pretrained(folder).to(dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = AdaptConfig(**DISTIL, keep_best=False)
    ours = adapt(start, tmp_path / "out", settings, data=data, tokenizer=tokenizer)
    expected = adapt(start.float(), tmp_path / "float32", settings, data=data, tokenizer=tokenizer)
    assert ours.dtype == dtype
    found = AutoModel.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in expected.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(found[name], tensor.to(found[name].dtype), rtol=0, atol=0)


# -- other data, or another model, than the run began with ----------------------------------------------


def test_another_model_of_the_same_name(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    output, settings = tmp_path / "out", AdaptConfig(**DISTIL)
    adapt(folder, output, settings, data=data)
    other = tmp_path / folder.name
    shutil.copytree(folder, other)
    adapt(other, output, settings, data=data)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(FileExistsError, match=r"holds a run with model='.*', not '.*'"):
        adapt(other, output, settings, data=data)


def test_other_documents_of_the_same_name(folder: Path, tmp_path: Path) -> None:
    data, output, settings = write_documents(tmp_path / "data.jsonl"), tmp_path / "out", AdaptConfig(**DISTIL)
    with killed_when():
        adapt(folder, output, settings, data=data)
    write_documents(tmp_path / "data.jsonl", 40)
    with pytest.raises(ValueError, match=r"dataset='.*data.jsonl' is not what it was"):
        adapt(folder, output, settings, data=data)
    write_documents(tmp_path / "data.jsonl")
    adapt(folder, output, settings, data=data)


def test_a_run_of_an_earlier_version_goes_on(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    """It wrote down fewer settings, and had what is the default of the others."""
    output = tmp_path / "out"
    adapt(folder, output, AdaptConfig(**DISTIL), data=data)
    path = output / "training" / "settings.json"
    settings = json.loads(path.read_text())
    del settings["weights"], settings["config"]["adam_beta2"], settings["data"]["streaming"]
    path.write_text(json.dumps(settings))
    adapt(folder, output, AdaptConfig(**DISTIL), data=data)
    with pytest.raises(FileExistsError, match=r"holds a run with adam_beta2=0.99, not 0.9;"):
        adapt(folder, output, AdaptConfig(**DISTIL, adam_beta2=0.9), data=data)


def test_rates_may_be_changed_while_a_run_goes_on(
    folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The result tells of it; and of a finished run nothing may be changed."""
    output, settings = tmp_path / "out", AdaptConfig(**DISTIL, learning_rate=1e-4)
    with killed_when():
        adapt(folder, output, settings, data=data)
    lower = dataclasses.replace(settings, learning_rate=1e-5)
    monkeypatch.setattr(logging.getLogger("hf_linattn"), "propagate", True)
    model = adapt(folder, output, lower, data=data)
    assert "Going on from step 2 of stage 'distil', learning_rate=1e-05 in place of 0.0001." in caplog.text
    record = model.config.linattn_training
    assert record["changes"] == [{"stage": "distil", "step": 2, "learning_rate": [1e-4, 1e-5]}]
    evaluated = [row["eval/loss"] for row in lines(output) if "eval/loss" in row]
    stage = record["stages"][0]
    assert [stage["eval_loss_before"], stage["eval_loss"]] == [evaluated[0], min(evaluated)]
    adapt(folder, output, dataclasses.replace(lower, eval_steps=1), data=data)
    with pytest.raises(FileExistsError, match=r"holds a run with learning_rate=1e-05, not 0\.0001"):
        adapt(folder, output, settings, data=data)


# -- starts that came to nothing --------------------------------------------------------------------------


def test_killed_before_anything_was_written(
    folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any) -> None:
        raise Killed

    monkeypatch.setattr("hf_linattn.adapt.run.write_text", killed)
    with pytest.raises(Killed):
        adapt(folder, tmp_path / "out", AdaptConfig(**DISTIL), data=data)
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["training", ".lock"]
    monkeypatch.undo()
    adapt(folder, tmp_path / "out", AdaptConfig(**DISTIL), data=data)


def test_a_mistake_may_be_corrected(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    output, settings = tmp_path / "out", AdaptConfig(**DISTIL)
    with pytest.raises(ValueError, match="'txt'"):
        adapt(folder, output, settings, data=dataclasses.replace(data, text_column="txt"))
    adapt(folder, output, settings, data=data)


def test_killed_when_the_result_was_there(
    folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, settings = tmp_path / "out", AdaptConfig(**DISTIL)

    def killed(target: Path) -> None:
        raise Killed

    monkeypatch.setattr(checkpoints, "remove", killed)
    with pytest.raises(Killed):
        adapt(folder, output, settings, data=data)
    monkeypatch.undo()
    assert (output / "training" / "checkpoint").is_dir()
    adapt(folder, output, settings, data=data)
    assert sorted(path.name for path in (output / "training").iterdir()) == [".lock", "metrics.jsonl", "settings.json"]


def test_what_cannot_be_adapted_is_refused(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match=r"output_dir='.*file' is a file"):
        adapt(folder, tmp_path / "file", AdaptConfig(**DISTIL), data=data)
    with pytest.raises(TypeError, match="data is a list; it must be a DataConfig"):
        adapt(folder, tmp_path / "out", AdaptConfig(**DISTIL), data=[{"text": "w5"}])  # type: ignore[arg-type]
    choice = converted_folder(tmp_path / "choice", auto="AutoModelForMultipleChoice")
    with pytest.raises(ValueError, match="is a LinAttnBertForMultipleChoice"):
        adapt(choice, tmp_path / "out", AdaptConfig(**DISTIL), data=data)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, bare / name)
    with pytest.raises(ValueError, match="tokenizer is missing"):
        adapt(bare, tmp_path / "out", AdaptConfig(**DISTIL), data=data)
    with pytest.raises(ValueError, match="shuffle_pool=2 is less than batch_size=4"):
        AdaptConfig(**DISTIL, shuffle_pool=2)


def test_a_run_goes_on_with_what_it_began_with(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    output, settings = tmp_path / "out", AdaptConfig(**DISTIL)
    adapt(folder, output, settings, data=data, eval_data=data)
    (output / "config.json").unlink()
    with pytest.raises(FileExistsError, match="holds a run with dataset="):
        adapt(folder, output, settings, data=data)
    other = tmp_path / "other" / "converted"
    convert_checkpoint(folder.parent / "base", other, LinformerConfig(projection="learned", projection_length=8))
    with pytest.raises(FileExistsError, match="holds a run with linattn="):
        adapt(other, output, settings, data=data, eval_data=data)


# -- data -----------------------------------------------------------------------------------------------


def test_streams_are_read_as_other_data_are(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "data.jsonl"
    words = [f"w{i}" for i in range(60)]
    rows = [{"text": [" ".join(words[i:]), "end"], "kind": ["a", "b", "c"][i % 3]} for i in range(12)]
    write_rows(path, [*rows, {"text": "", "kind": "a"}])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pools = []
    for streaming in (False, True):
        config = DataConfig(dataset=str(path), label_column="kind", label_value="a", streaming=streaming)
        sequences = Sequences(data=config, tokenizer=tokenizer, length=32, whole=True)
        pools.append(next(iter(sequences.pools())))
    assert pools[0] == pools[1]
    assert {example.label for example in pools[1]} == {"yes", "no"}
    with pytest.raises(ValueError, match="max_per_class=1 needs all documents"):
        next(Sequences(data=dataclasses.replace(config, max_per_class=1), tokenizer=tokenizer, length=32).pools())
    # a ClassLabel of -1 is none
    features = Features({"text": Value("string"), "kind": ClassLabel(names=["a", "b"])})
    Dataset.from_dict({"text": ["w1 w2"] * 4, "kind": [0, 1, -1, 0]}, features=features).to_parquet(
        tmp_path / "x.parquet"
    )
    config = DataConfig(dataset=str(tmp_path / "x.parquet"), label_column="kind", streaming=True)
    with pytest.raises(ValueError, match="row 2: label_column='kind' has no class"):
        list(Sequences(data=config, tokenizer=tokenizer, length=32, whole=True).pools())


@pytest.mark.parametrize("streaming", [False, True])
def test_data_without_rows(streaming: bool, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    config = DataConfig(dataset=str(tmp_path / "empty.jsonl"), streaming=streaming)
    with pytest.raises(ValueError, match=r"empty\.jsonl"):
        adapt(folder, tmp_path / "out", AdaptConfig(**DISTIL), data=config)


def test_batches_in_which_nothing_has_a_label(tmp_path: Path, folder: Path) -> None:
    unknown = write_rows(tmp_path / "unknown.jsonl", [{"text": "zzz yyy xxx " * 9}] * 12)
    settings = {**SHORT, "transfer_steps": 0, "distil_steps": 0, "eval_sequences": 2, "batch_size": 1}
    model = adapt(folder, tmp_path / "out", AdaptConfig(**settings, task="masked-lm", task_steps=2), data=unknown)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert all(math.isfinite(row[2]) for row in losses(tmp_path / "out"))


def test_one_text_is_trained_on_and_nothing_held_out(tmp_path: Path, folder: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", [{"text": " ".join(f"w{i}" for i in range(20))}])
    adapt(folder, tmp_path / "out", AdaptConfig(**{**DISTIL, "batch_size": 1}), data=one)
    assert not any("eval/loss" in row for row in lines(tmp_path / "out"))


def test_classes_that_the_head_does_not_have(tmp_path: Path, folder: Path, data: DataConfig) -> None:
    labelled = dataclasses.replace(data, label_column="kind")
    other = write_rows(tmp_path / "other.jsonl", [{"text": "w1 w2 w3", "kind": "mid"}] * 4)
    settings = AdaptConfig(**SHORT, task="sequence-classification", task_steps=2)
    with pytest.raises(ValueError, match=r"label_column='kind' of '.*other\.jsonl': 'mid' is no class of the model"):
        adapt(
            folder, tmp_path / "out", settings, data=labelled, eval_data=dataclasses.replace(other, label_column="kind")
        )
    with pytest.raises(ValueError, match="eval_data needs a label_column"):
        adapt(folder, tmp_path / "out", settings, data=labelled, eval_data=other)
    assert not (tmp_path / "out").exists()


# -- models and settings --------------------------------------------------------------------------------


def test_models_that_do_not_fit(tmp_path: Path, folder: Path, data: DataConfig) -> None:
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["query"]), model)
    with pytest.raises(ValueError, match="merge them before"):
        adapt(model, tmp_path / "out", AdaptConfig(**DISTIL), data=data, tokenizer=tokenizer)
    tokenizer.add_tokens(["new"])
    with pytest.raises(ValueError, match=r"it has 101 tokens, and the model's vocab_size=100"):
        adapt(folder, tmp_path / "new", AdaptConfig(**DISTIL), data=data, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="eval_sequences=0 with eval_data"):
        adapt(folder, tmp_path / "x", AdaptConfig(**{**DISTIL, "eval_sequences": 0}), data=data, eval_data=data)


def test_the_tokenizer_that_was_given_is_saved(tmp_path: Path, folder: Path, data: DataConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 77
    adapt(folder, tmp_path / "out", AdaptConfig(**DISTIL), data=data, tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 77
    assert not list((tmp_path / "out").glob(".unfinished-*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0.0 must be a number above 0"),
        ({"learning_rate": math.inf}, "learning_rate=inf must be a number of at least 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"adam_beta2": 1.0}, "adam_beta2=1.0 must be below 1"),
        ({"lora_rank": 2, "lora_dropout": 1.0}, "lora_dropout=1.0 must be below 1"),
        ({"lora_rank": 2, "lora_targets": []}, r"lora_targets=\[\] must be a list"),
        ({"lora_rank": 2, "lora_targets": "query"}, "lora_targets='query' must be a list"),
    ],
)
def test_settings_that_would_teach_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptConfig(**settings)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_checkpoints(file: str, damage: str, tmp_path: Path, folder: Path, data: DataConfig) -> None:
    output, settings = tmp_path / "out", AdaptConfig(**DISTIL)
    with killed_when():
        adapt(folder, output, settings, data=data)
    path = output / "training" / "checkpoint" / file
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if file == "state.json" and damage == "gone":
        # a checkpoint without it is none: the run begins again
        adapt(folder, output, settings, data=data)
        return
    with pytest.raises(ValueError, match=r"training/checkpoint' is damaged .* Remove it to train from the start"):
        adapt(folder, output, settings, data=data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": None}, "architectures=None must name one of 'LinAttn"),
        ({"architectures": ["Other"]}, r"architectures=\['Other'\] must name one of 'LinAttn"),
        ({"linattn": {"max_length": None}}, "linattn.max_length is missing"),
    ],
)
def test_damaged_configs(change: dict[str, Any], message: str, tmp_path: Path, folder: Path, data: DataConfig) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        adapt(broken, tmp_path / "out", AdaptConfig(**DISTIL), data=data)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "renamed"])
def test_damaged_weights(damage: str, tmp_path: Path, folder: Path, data: DataConfig) -> None:
    """One line that names the file, or of a weight that is gone its name; nothing is written."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    path = broken / "model.safetensors"
    content = path.read_bytes()
    name = b"encoder.layer.0.attention.self.query.weight"
    path.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "flipped": bytes([255]) + content[1:],
            "empty": b"",
            "renamed": content.replace(name, name.replace(b"query", b"quers")),
        }[damage]
    )
    message = rf"no weights for {name.decode()}" if damage == "renamed" else r"broken/model\.safetensors' is damaged"
    with pytest.raises(ValueError, match=message):
        adapt(broken, tmp_path / "out", AdaptConfig(**DISTIL), data=data)
    assert damage == "renamed" or not (tmp_path / "out").exists()
    if damage != "renamed":
        with pytest.raises(ValueError, match=message):
            adapt(folder, tmp_path / "out", AdaptConfig(**DISTIL), data=data, base=broken)


def test_token_ids_beyond_the_vocabulary(tmp_path: Path, folder: Path, data: DataConfig) -> None:
    """Ids may have gaps: a tokenizer of few tokens can have an id that the model has not."""
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, 99))]
    vocabulary = {word: index for index, word in enumerate(words)} | {"w99": 150}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings["model"]["vocab"] = vocabulary
    wide = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)), pad_token="[PAD]", mask_token="[MASK]"
    )
    assert len(wide) == 100
    with pytest.raises(ValueError, match=r"the id of its token 'w99' is 150, and the model's vocab_size=100 allows 0"):
        adapt(folder, tmp_path / "out", AdaptConfig(**DISTIL), data=data, tokenizer=wide)
    assert not (tmp_path / "out").exists()


_LIMITED = """
import json, resource, signal, sys
import torch
from hf_linattn.cli.main import main
torch.set_num_threads(1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from hf_linattn.adapt import checkpoints
original, written = checkpoints.write, []
def write(*arguments):
    # a limit to the size of files is what a full disk is: less than the second checkpoint needs
    if len(written) == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    written.append(arguments)
    original(*arguments)
checkpoints.write = write
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk(tmp_path: Path, folder: Path, data: DataConfig) -> None:
    """One line says what is kept, and the same command ends as if the disk had not been full."""
    settings = {**DISTIL, "eval_sequences": 0}
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    call = ["adapt", str(folder), "--dataset", data.dataset, *options, "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, *call], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert "the disk is full" in told and "the last checkpoint is intact" in told and "same command continues" in told
    assert "Traceback" not in done.stderr
    assert main(call) == 0
    adapt(folder, tmp_path / "unbroken", AdaptConfig(**settings), data=data)
    assert same_weights(tmp_path / "out", tmp_path / "unbroken")
