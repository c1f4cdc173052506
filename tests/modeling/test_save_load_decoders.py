"""Converted decoders, saved and loaded again, with the package and without it, give and generate the same."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

import hf_linattn
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert, convert_checkpoint
from hf_linattn.modeling.modeling_linattn import MODEL_CLASSES

from ..helpers import (
    CAUSAL,
    DECODERS,
    config_id,
    decoder,
    positions_of,
    prompts,
    run_python,
    save_tokenizer,
    tiny_model,
    tokens,
)

pytestmark = pytest.mark.core

CAUSAL_LM = "AutoModelForCausalLM"
#: folder name -> settings and family; every family once, every kind of parameter and buffer once
SAVED: dict[str, tuple[AttentionConfig, str]] = {
    **{family: (PerformerConfig(num_features=16, window_size=4), family) for family in DECODERS},
    "linformer": (LinformerConfig(projection_length=8, sharing="none"), "gpt2"),
    "conv": (LinformerConfig(projection_length=8, projection="conv", window_size=4, global_tokens=1), "llama"),
    "shared": (LinformerConfig(projection_length=8, sharing="layers"), "opt"),
    "learned": (PerformerConfig(num_features=16, feature_map="learned"), "gpt_neox"),
    "one layer": (PerformerConfig(num_features=16, layers=[1]), "gpt2"),
}
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 2}

# run in a process of its own: loads every folder below argv[1], and writes logits and generated tokens to argv[2]
LOAD = """
import sys
root, out, package = sys.argv[1:]
if package == "without":
    sys.modules["hf_linattn"] = None  # any import of it fails
else:
    sys.path.insert(0, package)
    import hf_linattn
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
found = {}
for folder in sorted(Path(root).iterdir()):
    options = {"trust_remote_code": True} if package == "without" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not model.training and type(model).__name__.startswith("LinAttn")
    origin = "transformers_modules" if package == "without" else "hf_linattn"
    assert type(model).__module__.startswith(origin), type(model)
    torch.set_num_threads(1)
    inputs = load_file(folder / "inputs.safetensors")
    with torch.no_grad():
        found[folder.name + " logits"] = model(**inputs).logits
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 2}
    found[folder.name + " greedy"] = model.generate(**prompt, **settings)
    found[folder.name + " beams"] = model.generate(**prompt, num_beams=2, **settings)
    try:
        model.generate(**prompt, prompt_lookup_num_tokens=2, max_new_tokens=4)
    except ValueError as error:
        assert "assisted generation is not supported" in str(error)
    else:
        raise AssertionError("assisted decoding was not refused")
save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)
"""


def prompt_and_positions() -> dict[str, Tensor]:
    inputs = prompts(60, 31)
    return {**inputs, "position_ids": positions_of(inputs["attention_mask"])}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder of saved models, and what each gave before it was saved."""
    root, expected = tmp_path_factory.mktemp("folders with a space"), {}
    inputs = prompt_and_positions()
    prompt = prompts(60, 31)
    for name, (config, family) in SAVED.items():
        model = decoder(config, family, max_length=128)
        with torch.no_grad():
            expected[f"{name} logits"] = model(**inputs).logits
        expected[f"{name} greedy"] = model.generate(**prompt, **OPTIONS)
        expected[f"{name} beams"] = model.generate(**prompt, num_beams=2, **OPTIONS)
        model.save_pretrained(root / name)
        save_file(inputs, root / name / "inputs.safetensors")
    return root, expected


@pytest.mark.parametrize("package", ["with", "without"])
def test_a_fresh_process_gives_and_generates_the_same(saved, tmp_path: Path, package: str) -> None:
    root, expected = saved
    place = Path(hf_linattn.__file__).parents[1] if package == "with" else package
    done = run_python(LOAD, root, tmp_path / "found.safetensors", place, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "found.safetensors")
    assert set(found) == set(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", SAVED)
def test_the_same_process_gives_the_same_bits_and_not_the_bases(saved, name: str) -> None:
    root, expected = saved
    inputs = prompt_and_positions()
    model = AutoModelForCausalLM.from_pretrained(root / name)
    assert type(model).__module__ == "hf_linattn.modeling.modeling_linattn"
    with torch.no_grad():
        logits = model(**inputs).logits
        assert torch.equal(logits, expected[f"{name} logits"])
        base = tiny_model(SAVED[name][1], CAUSAL_LM)(**inputs).logits
    assert not torch.allclose(base, logits, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=config_id)
@pytest.mark.parametrize("config", CAUSAL[::3], ids=config_id)
def test_half_precision_is_kept(tmp_path: Path, config: AttentionConfig, dtype: torch.dtype) -> None:
    model, inputs = decoder(config).to(dtype), prompt_and_positions()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("family", DECODERS)
def test_every_head_of_the_family_loads_from_one_folder(saved, family: str) -> None:
    config = AutoConfig.from_pretrained(saved[0] / family)
    autos = {auto for auto, classes in MODEL_CLASSES.items() if family in classes}
    assert set(config.auto_map) == {"AutoConfig", *autos}
    for auto in autos:
        model = getattr(transformers, auto).from_pretrained(saved[0] / family)
        assert type(model) is MODEL_CLASSES[auto][family]


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
