"""The task stage of decoders, and a task with distillation beside it."""

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_linattn import convert_checkpoint
from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.data.documents import DataConfig

from ..helpers import save_tokenizer, tiny_model
from .runs import PROJECTED, SHORT, converted_folder, lines

TASK = {**SHORT, "transfer_steps": 0, "distil_steps": 0, "task_steps": 3}


@pytest.mark.parametrize(
    ("family", "head", "task"),
    [("gpt2", "AutoModelForCausalLM", "causal-lm"), ("bert", "AutoModelForMaskedLM", "masked-lm")],
)
def test_distillation_beside_a_task_is_the_same_in_parts(
    family: str, head: str, task: str, tmp_path: Path, data: DataConfig
) -> None:
    """Rows have more or fewer labels; each counts once in the distillation all the same."""
    start = converted_folder(tmp_path, PROJECTED, family, head)
    path = start / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({key: 0.0 if "drop" in key else value for key, value in settings.items()}))
    config = AdaptConfig(**TASK, task=task, task_distillation=20.0)
    for name, size in (("whole", None), ("parts", 1)):
        adapt(start, tmp_path / name, dataclasses.replace(config, micro_batch_size=size), data=data)
    for found, expected in zip(lines(tmp_path / "parts"), lines(tmp_path / "whole"), strict=True):
        names = [name for name in expected if name.rpartition("/")[2] in ("loss", "accuracy", "hidden_error")]
        assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-4)


def test_a_decoder_without_next_tokens_is_distilled_by_its_hidden_states(tmp_path: Path, data: DataConfig) -> None:
    labelled = dataclasses.replace(data, label_column="kind")
    config = AdaptConfig(**{**TASK, "distil_steps": 4}, task="sequence-classification")
    start = converted_folder(tmp_path, PROJECTED, "gpt2", "AutoModelForCausalLM")
    adapt(start, tmp_path / "out", config, data=labelled)
    distilled = [line for line in lines(tmp_path / "out") if line["stage"] == "distil"]
    assert "eval/pooled_cosine" in distilled[0] and "eval/kl" not in distilled[0]
    assert distilled[-1]["eval/loss"] < distilled[0]["eval/loss"]


@pytest.mark.parametrize("pad_token_id", [None, 3])
def test_padding_is_not_taken_for_the_last_token(pad_token_id: int | None, tmp_path: Path, data: DataConfig) -> None:
    """What a model knows as padding is what batches are padded with: rows are classified alike alone and together."""
    base = tmp_path / "base"
    save_tokenizer(base)
    tiny_model("gpt2", "AutoModelForCausalLM", pad_token_id=pad_token_id).save_pretrained(base)
    convert_checkpoint(base, tmp_path / "converted", PROJECTED)
    labelled = dataclasses.replace(data, label_column="kind")
    config = AdaptConfig(**TASK, task="sequence-classification")
    for name, size in (("together", None), ("alone", 1)):
        settings = dataclasses.replace(config, micro_batch_size=size)
        model = adapt(tmp_path / "converted", tmp_path / name, settings, data=labelled)
    first = [lines(tmp_path / name)[0]["eval/loss"] for name in ("together", "alone")]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    assert model.config.pad_token_id == AutoTokenizer.from_pretrained(base).pad_token_id


def test_one_class_is_none(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text("".join(json.dumps({"text": f"w{i} w{i + 1}", "kind": "only"}) + "\n" for i in range(20)))
    labelled = DataConfig(dataset=str(path), label_column="kind")
    with pytest.raises(ValueError, match="label_column='kind': 'only' is the only class"):
        adapt(folder, tmp_path / "out", AdaptConfig(**TASK, task="sequence-classification"), data=labelled)
