"""Saving: after a reload, here or in a fresh process, with the package or without it, all bits are the same."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel

import hf_linattn
from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, modeling
from hf_linattn.modeling.modeling_linattn import MODEL_CLASSES

from ...helpers import (
    CAUSAL,
    DECODERS,
    ENCODERS,
    PURE,
    SHARED,
    SPLIT,
    as_trained,
    can_be_causal,
    config_id,
    converted_model,
    inputs_for,
    linear_attention,
    outputs_of,
    positions_of,
    prompts,
    run_python,
    small,
    tiny_model,
)
from .cases import DECODER, ENCODER, ONE_EACH, WAYS, is_causal, make_model

pytestmark = pytest.mark.core

MASKED_LM, CAUSAL_LM = "AutoModelForMaskedLM", "AutoModelForCausalLM"
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 2}


def _kinds(*, causal: bool) -> list[AttentionConfig]:
    """Settings whose layers differ in what they save: of those that save the same, the first."""
    kinds: dict[object, AttentionConfig] = {}
    for config in [*ONE_EACH, *PURE, *SHARED]:
        if not causal or can_be_causal(config):
            # without a window, what decoders read here may be all exact
            config = dataclasses.replace(config, window_size=4) if causal else config
            tensors = linear_attention(config, causal=causal).state_dict()
            shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
            kinds.setdefault((shapes, getattr(config, "sharing", None) == "layers"), config)
    return list(kinds.values())


def _saved() -> dict[str, tuple[str, AttentionConfig]]:
    """Folder name -> architecture and settings: every architecture and every kind of parameter and buffer."""
    pairs = []
    for causal, names in ((False, ENCODERS), (True, DECODERS)):
        kinds = _kinds(causal=causal)
        pairs += [(names[i % len(names)], kinds[i % len(kinds)]) for i in range(max(len(names), len(kinds)))]
    pairs += [
        (name, small(type(config), layers=[1], window_size=4)) for name in (ENCODER, DECODER) for config in ONE_EACH
    ]
    pairs += [(name, config) for name in (ENCODER, DECODER) for config in SPLIT]
    return {f"{name} {config_id(config)}": (name, config) for name, config in pairs}


def folder_of(architecture: str) -> str:
    """The first of an architecture."""
    return next(folder for folder, (name, _) in SAVED.items() if name == architecture)


SAVED = _saved()

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
import transformers
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
outputs = {}
for folder in sorted(Path(root).iterdir()):
    auto = getattr(transformers, (folder / "auto.txt").read_text())
    model = auto.from_pretrained(folder, **({"trust_remote_code": True} if package == "without" else {}))
    assert not model.training and type(model).__name__.startswith("LinAttn")
    origin = "transformers_modules" if package == "without" else "hf_linattn"
    assert type(model).__module__.startswith(origin), type(model)
    inputs = load_file(folder / "inputs.safetensors")
    with torch.no_grad():
        outputs[folder.name + " logits"] = model(**inputs).logits
    if (folder / "generates").exists():
        prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        settings = {"max_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 2}
        outputs[folder.name + " greedy"] = model.generate(**prompt, **settings)
        outputs[folder.name + " beams"] = model.generate(**prompt, num_beams=2, **settings)
        try:
            model.generate(**prompt, prompt_lookup_num_tokens=2, max_new_tokens=4)
        except ValueError as error:
            assert "assisted generation is not supported" in str(error)
        else:
            raise AssertionError("assisted decoding was not refused")
save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, out)
"""

LOAD_PLAINLY = """
import sys
sys.modules["hf_linattn"] = None
import transformers
getattr(transformers, sys.argv[2]).from_pretrained(sys.argv[1])
"""


def auto_of(architecture: str) -> str:
    return CAUSAL_LM if is_causal(architecture) else MASKED_LM


def inputs_of(architecture: str) -> dict[str, Tensor]:
    if not is_causal(architecture):
        return inputs_for(MASKED_LM)
    inputs = prompts(60, 31)
    return {**inputs, "position_ids": positions_of(inputs["attention_mask"])}


@torch.no_grad()
def results_of(model: LinAttnPreTrainedModel, inputs: dict[str, Tensor], *, generate: bool) -> dict[str, Tensor]:
    results = {"logits": model(**inputs).logits}
    if generate:
        prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        results["greedy"] = model.generate(**prompt, **OPTIONS)
        results["beams"] = model.generate(**prompt, num_beams=2, **OPTIONS)
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder of saved models, and what each gave before it was saved."""
    root, expected = tmp_path_factory.mktemp("folders with a space"), {}
    for name, (architecture, config) in SAVED.items():
        model = converted_model(config, architecture, auto_of(architecture), max_length=128)
        # the first of every architecture as it is made, with directions drawn anew, and the rest as after training
        if name == folder_of(architecture):
            model.redraw_features()
        else:
            model = as_trained(model)
        inputs = inputs_of(architecture)
        generate = is_causal(architecture)
        results = results_of(model, inputs, generate=generate)
        expected |= {f"{name} {what}": tensor for what, tensor in results.items()}
        model.save_pretrained(root / name)
        save_file(inputs, root / name / "inputs.safetensors")
        (root / name / "auto.txt").write_text(auto_of(architecture))
        if generate:
            (root / name / "generates").touch()
    return root, expected


@pytest.mark.parametrize("name", ["configuration_linattn", "modeling_linattn"])
def test_files_that_travel_import_themselves_all_that_they_need(name: str) -> None:
    """Transformers 5.8 copies the files that a file names, and not those that these name."""

    def named(file: str) -> set[str]:
        text = (Path(modeling.__file__).parent / f"{file}.py").read_text(encoding="utf-8")
        return set(re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE))

    needed, new = set(), {name}
    while new:
        needed |= new
        new = {other for file in new for other in named(file)} - needed
    assert needed - {name} == named(name) - {name}


@pytest.mark.parametrize("package", ["with", "without"])
def test_a_fresh_process_gives_the_same_bits(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, package: str
) -> None:
    root, expected = saved
    place = Path(hf_linattn.__file__).parents[1] if package == "with" else package
    done = run_python(LOAD, root, tmp_path / "outputs.safetensors", place, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outputs = load_file(tmp_path / "outputs.safetensors")
    assert set(outputs) == set(expected)
    assert [name for name in expected if not torch.equal(outputs[name], expected[name])] == []


@pytest.mark.parametrize("name", SAVED)
def test_the_same_process_gives_the_same_bits_and_not_the_bases(
    saved: tuple[Path, dict[str, Tensor]], name: str
) -> None:
    root, expected = saved
    architecture, config = SAVED[name]
    auto, inputs = auto_of(architecture), inputs_of(architecture)
    model = getattr(transformers, auto).from_pretrained(root / name)
    assert type(model).__module__ == "hf_linattn.modeling.modeling_linattn"
    assert type(model.config.attention) is type(config)
    logits = expected[f"{name} logits"]
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits)
        assert not torch.allclose(tiny_model(architecture, auto)(**inputs).logits, logits, atol=1e-3)


@pytest.mark.parametrize("architecture", [ENCODER, DECODER])
def test_loading_without_the_package_or_trust_says_what_to_do(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, architecture: str
) -> None:
    done = run_python(LOAD_PLAINLY, saved[0] / folder_of(architecture), auto_of(architecture), cwd=tmp_path)
    assert done.returncode != 0
    assert "trust_remote_code=True" in done.stderr


@pytest.mark.parametrize("architecture", [*ENCODERS, *DECODERS])
def test_every_head_of_the_architecture_loads_from_one_folder(
    saved: tuple[Path, dict[str, Tensor]], architecture: str
) -> None:
    folder = saved[0] / folder_of(architecture)
    config = AutoConfig.from_pretrained(folder)
    autos = {auto for auto, classes in MODEL_CLASSES.items() if architecture in classes}
    assert set(config.auto_map) == {"AutoConfig", *autos}
    base = tiny_model(architecture, auto_of(architecture))
    prefix, body = base.base_model_prefix, base.base_model.state_dict()
    # positions were added, and a pooler, which a language model does not have, comes up new
    kept = [key for key in body if not any(part in key for part in ("position", "pooler", "wpe"))]
    for auto in autos:
        model = getattr(transformers, auto).from_pretrained(folder)
        assert type(model) is MODEL_CLASSES[auto][architecture]
        state = model.base_model.state_dict()
        # some heads of decoders call their body by another name, in Transformers too, and load nothing into it
        if model.base_model_prefix == prefix:
            assert all(torch.equal(state[key], body[key]) for key in kept)


def check_a_reload_gives_the_same_bits(
    model: LinAttnPreTrainedModel, folder: Path, auto: Any = AutoModel, inputs: dict[str, Tensor] | None = None
) -> None:
    """In this process, weights and outputs."""
    inputs = inputs_for("AutoModel") if inputs is None else inputs
    model.save_pretrained(folder)
    loaded = auto.from_pretrained(folder)
    assert type(loaded) is type(model)
    assert loaded.dtype == model.dtype
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    model.config.use_cache = loaded.config.use_cache = False
    assert torch.equal(outputs_of(loaded, inputs), outputs_of(model, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=config_id)
@pytest.mark.parametrize("config", WAYS, ids=config_id)
def test_half_precision_is_kept(tmp_path: Path, config: AttentionConfig, dtype: torch.dtype) -> None:
    check_a_reload_gives_the_same_bits(make_model(ENCODER, config).to(dtype), tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=config_id)
@pytest.mark.parametrize("config", CAUSAL[::3], ids=config_id)
def test_half_precision_is_kept_in_decoders(tmp_path: Path, config: AttentionConfig, dtype: torch.dtype) -> None:
    model = make_model(DECODER, config).to(dtype)
    check_a_reload_gives_the_same_bits(model, tmp_path, transformers.AutoModelForCausalLM, inputs_of(DECODER))


@pytest.mark.parametrize("config", WAYS, ids=config_id)
def test_a_second_round_trip_changes_nothing(tmp_path: Path, config: AttentionConfig) -> None:
    make_model(ENCODER, config).save_pretrained(tmp_path / "once")
    AutoModel.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "once/config.json").read_text() == (tmp_path / "twice/config.json").read_text()
