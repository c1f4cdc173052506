"""Adapters: that one, put onto the converted model, is the result."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, PeftModel
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.data.documents import DataConfig
from hf_linattn.modeling.modeling_linattn import HEAD_CLASSES
from hf_linattn.publish.checks import check_folder

from ..helpers import (
    CAUSAL_FEW,
    inputs_for,
    outputs_of,
    tokens,
)
from .runs import PROJECTED, SHORT, converted_folder

TASK = {**SHORT, "transfer_steps": 0, "distil_steps": 0, "task_steps": 4, "lora_rank": 2}


@pytest.mark.parametrize(
    ("family", "head", "task"),
    [
        # no pooler in the checkpoint
        ("bert", "AutoModelForMaskedLM", "sequence-classification"),
        ("albert", "AutoModelForMaskedLM", "sequence-classification"),
        # no head at all
        ("bert", "AutoModel", "masked-lm"),
        # one head's name is the end of another's
        ("distilbert", "AutoModel", "sequence-classification"),
        ("roberta", "AutoModel", "sequence-classification"),
        ("gpt2", "AutoModelForCausalLM", "sequence-classification"),
    ],
)
def test_an_adapter_has_what_was_drawn(family: str, head: str, task: str, tmp_path: Path, data: DataConfig) -> None:
    start = converted_folder(tmp_path, PROJECTED, family, head)
    labelled = DataConfig(dataset=data.dataset, label_column="kind")
    adapt(start, tmp_path / "out", AdaptConfig(**TASK, task=task), data=labelled)
    auto = AutoModelForMaskedLM if task == "masked-lm" else AutoModelForSequenceClassification
    result = auto.from_pretrained(tmp_path / "out").eval()
    # draws its own pooler or head
    torch.manual_seed(1)
    converted = auto.from_pretrained(start, config=AutoConfig.from_pretrained(tmp_path / "out"))
    beside = PeftModel.from_pretrained(converted, tmp_path / "out" / "adapter").eval()
    ids = tokens(20)
    torch.testing.assert_close(beside(ids).logits, result(ids).logits, rtol=1e-4, atol=1e-5)
    merged = beside.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, result(ids).logits, rtol=1e-4, atol=1e-5)
    assert merged.config.id2label == result.config.id2label


@pytest.mark.parametrize("given", ["absolute", "relative", "loaded"])
def test_an_adapter_names_its_base_as_it_was_given(
    given: str, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = converted_folder(tmp_path, PROJECTED, auto="AutoModelForMaskedLM")
    monkeypatch.chdir(tmp_path)
    source: Any = {"absolute": start, "relative": "converted"}.get(given)
    name = str(source or start)
    source = source or AutoModelForMaskedLM.from_pretrained(start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    settings = AdaptConfig(**{**SHORT, "transfer_steps": 0, "distil_steps": 2, "lora_rank": 2, "learning_rate": 1e-2})
    result = adapt(source, tmp_path / "out", settings, data=data, tokenizer=tokenizer)
    adapter = tmp_path / "out" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == name
    again = AutoPeftModel.from_pretrained(str(adapter)).eval()
    assert type(again.get_base_model()) is type(result)
    torch.testing.assert_close(again(tokens(20)).logits, result(tokens(20)).logits, rtol=1e-4, atol=1e-5)
    # the result names no path of this machine, and a push takes nothing of the adapter
    for file in [*(tmp_path / "out").glob("*"), *(adapter.rglob("*") if given == "relative" else [])]:
        if file.suffix in (".json", ".md"):
            assert str(tmp_path) not in file.read_text(), file
    assert not any(file.startswith("adapter") for file in check_folder(tmp_path / "out"))


def test_targets_that_are_none_are_refused(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    config = AdaptConfig(**{**SHORT, "lora_rank": 2, "lora_targets": ["q_proj"]})
    with pytest.raises(
        ValueError, match=r"lora_targets=\['q_proj'\]: linear layers of this model are dense, key, query"
    ):
        adapt(folder, tmp_path / "out", config, data=data)


def test_an_output_layer_that_is_the_embedding_has_no_adapter(tmp_path: Path, data: DataConfig) -> None:
    start = converted_folder(tmp_path, PROJECTED, "gpt2", "AutoModelForCausalLM")
    config = AdaptConfig(**{**SHORT, "lora_rank": 2, "lora_targets": ["c_attn", "lm_head"]})
    with pytest.raises(ValueError, match=r"lora_targets=.*lm_head.*the output layer is the embedding too"):
        adapt(start, tmp_path / "out", config, data=data)


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
