"""Converted decoders' generation config, saved and loaded, and pipelines. The same bits: see `conformance`."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

from hf_linattn import PerformerConfig, convert, convert_checkpoint

from ..helpers import (
    DECODERS,
    decoder,
    save_tokenizer,
    tiny_model,
    tokens,
)

pytestmark = pytest.mark.core

CAUSAL_LM = "AutoModelForCausalLM"


def test_a_folder_gives_what_the_loaded_model_gives(tmp_path: Path) -> None:
    config = PerformerConfig(num_features=16, window_size=4)
    for family in DECODERS:
        base = tiny_model(family, CAUSAL_LM)
        base.save_pretrained(tmp_path / family)
        first, second = convert(base, config, max_length=128), convert(tmp_path / family, config, max_length=128)
        assert type(first) is type(second)
        with torch.no_grad():
            assert torch.equal(first(tokens(100)).logits, second(tokens(100)).logits)


@pytest.mark.parametrize("family", DECODERS)
def test_the_generation_config_is_carried_over_and_written(tmp_path: Path, family: str) -> None:
    base = tiny_model(family, CAUSAL_LM)
    base.generation_config = GenerationConfig(
        do_sample=True, temperature=0.625, top_k=7, max_new_tokens=11, pad_token_id=1, bos_token_id=2
    )
    base.save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    config = PerformerConfig(num_features=16, window_size=4)

    def settings(found: GenerationConfig) -> tuple:
        return found.do_sample, found.temperature, found.top_k, found.max_new_tokens, found.pad_token_id

    expected = (True, 0.625, 7, 11, 1)
    model = convert(base, config)
    assert settings(model.generation_config) == expected
    # a copy
    model.generation_config.top_k = 9
    assert settings(base.generation_config) == expected
    written = convert_checkpoint(tmp_path / "base", tmp_path / "out", config, max_length=128)
    assert settings(written.generation_config) == expected
    assert settings(GenerationConfig.from_pretrained(tmp_path / "out")) == expected
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert settings(loaded.generation_config) == expected
    torch.manual_seed(0)
    first = loaded.generate(tokens(9))
    torch.manual_seed(0)
    assert torch.equal(written.generate(tokens(9)), first)
    assert first.shape == (1, 20)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 128


def test_the_text_generation_pipeline_runs_on_the_folder(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    model = decoder(PerformerConfig(num_features=16, window_size=4), max_length=128)
    model.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path))
    assert type(pipe.model) is type(model)
    text = "w7 w8 w9 w7"
    settings = {"max_new_tokens": 8, "do_sample": False}
    inputs = pipe.tokenizer(text, return_tensors="pt")
    expected = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **settings)
    (result,) = pipe(text, return_tensors=True, **settings)
    assert result["generated_token_ids"] == expected[0].tolist()
    (result,) = pipe(text, **settings)
    assert result["generated_text"].startswith(text)
    # and in batches
    pipe.tokenizer.padding_side = "left"
    batch = pipe([text, "w11"], batch_size=2, **settings)
    assert batch[0][0] == result
    assert batch[1] == pipe("w11", **settings)
