"""Errors name the field, the value it got and what is allowed, and the supported architectures."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, T5Config, T5Model

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, convert
from hf_linattn.modeling.architectures import ARCHITECTURES
from hf_linattn.modeling.feature_maps import FEATURE_MAPS

from ...helpers import CACHE, choices, logits_in_pieces, prompts, small, tiny_model, tokens
from .cases import ONE_EACH, REGISTRY, architectures, make_model

pytestmark = pytest.mark.core

CLASSES = [method.config for method in REGISTRY.values()]
#: of each type of a field, values that are never allowed
_NEVER = {"int": (-1, 1.5, "8", True, None), "bool": (1, "no", None), "int | None": (-1, 1.5, "8", True)}
ALL_ARCHITECTURES = pytest.mark.parametrize("architecture", [*architectures(causal=False), *architectures(causal=True)])
DECODERS_ONLY = pytest.mark.parametrize("architecture", architectures(causal=True))


def _type_of(field: dataclasses.Field[Any]) -> str:
    return field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))


def bad_values(config_class: type[AttentionConfig]) -> list[tuple[str, Any]]:
    """Each field with values that it refuses."""
    return [
        (field.name, value)
        for field in dataclasses.fields(config_class)
        for value in (("other", None, 3) if "choices" in field.metadata else _NEVER.get(_type_of(field), ()))
    ]


def check_bad_values_are_refused_by_name(config_class: type[AttentionConfig]) -> None:
    """And where there is a choice, with all names that are allowed."""
    for name, value in bad_values(config_class):
        with pytest.raises(ValueError) as error:
            config_class(**{name: value})
        text = str(error.value)
        assert config_class.__name__ in text and f"{name}={value!r}" in text
        assert all(repr(choice) in text for choice in choices(config_class).get(name, ()))


@pytest.mark.parametrize("config_class", CLASSES)
def test_bad_values_are_refused_by_name(config_class: type[AttentionConfig]) -> None:
    assert len(bad_values(config_class)) > 20
    check_bad_values_are_refused_by_name(config_class)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_a_number_of_features_that_directions_do_not_divide_is_refused(feature_map: str) -> None:
    (config_class,) = (cls for cls in CLASSES if "feature_map" in choices(cls))
    each = FEATURE_MAPS[feature_map].features_per_direction
    if each == 1:
        config_class(feature_map=feature_map, num_features=7)
        return
    with pytest.raises(ValueError, match=f"num_features=7 must be a multiple of {each}.*{feature_map}"):
        config_class(feature_map=feature_map, num_features=7)


def test_an_architecture_that_is_not_supported_is_answered_with_those_that_are() -> None:
    base = T5Model(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=10))
    with pytest.raises(ValueError) as error:
        convert(base, ONE_EACH[0])
    assert "t5" in str(error.value)
    assert all(re.search(rf"\b{re.escape(name)}\b", str(error.value)) for name in ARCHITECTURES)


def check_attention_matrices_are_refused(model: LinAttnPreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"output_attentions=True.*no matrix"):
        model(tokens(8), output_attentions=True)


@ALL_ARCHITECTURES
def test_attention_matrices_are_refused(architecture: str) -> None:
    check_attention_matrices_are_refused(make_model(architecture, ONE_EACH[0]))


def base_of(architecture: str) -> PreTrainedModel:
    return tiny_model(architecture, "AutoModelForCausalLM" if ARCHITECTURES[architecture].causal else "AutoModel")


@ALL_ARCHITECTURES
def test_layers_that_do_not_exist_are_refused(architecture: str) -> None:
    message = "one attention module" if ARCHITECTURES[architecture].shares_layers else r"layers=\[0, 2\].*0 to 1"
    for config_class in CLASSES:
        with pytest.raises(ValueError, match=message):
            convert(base_of(architecture), small(config_class, layers=[0, 2]))


@DECODERS_ONLY
def test_what_cannot_be_causal_is_refused_with_the_reason(architecture: str) -> None:
    (config_class,) = (cls for cls in CLASSES if "projection" in choices(cls))
    with pytest.raises(ValueError, match=r"projection='gaussian' cannot be causal.*learned, mean, max or conv"):
        convert(base_of(architecture), config_class(projection="gaussian"))


# OPT itself does not look for packed texts
@pytest.mark.parametrize("architecture", [name for name in architectures(causal=True) if name != "opt"])
def test_packed_texts_are_refused(architecture: str) -> None:
    positions = torch.cat((torch.arange(12), torch.arange(8)))[None]
    with pytest.raises(ValueError, match=r"position_ids that start again.*a row of its own"):
        make_model(architecture, ONE_EACH[0])(tokens(20), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("width", [19, 21, 40])
@DECODERS_ONLY
def test_a_mask_of_another_width_is_refused(architecture: str, width: int, use_cache: bool) -> None:
    mask = torch.ones(2, width, dtype=torch.long)
    for padded in (mask, mask.index_put((torch.tensor(1), torch.arange(5)), torch.tensor(0))):
        with pytest.raises(ValueError, match=rf"{width} columns for 20 tokens"):
            make_model(architecture, ONE_EACH[0])(tokens(20, batch=2), attention_mask=padded, use_cache=use_cache)


@DECODERS_ONLY
def test_a_mask_without_the_cached_tokens_is_refused(architecture: str) -> None:
    model = make_model(architecture, ONE_EACH[0])
    _, cache = logits_in_pieces(model, prompts(12), [12])
    with pytest.raises(ValueError, match="1 columns for 13 tokens, the cached ones included"):
        model(tokens(1), attention_mask=torch.ones(1, 1), **{CACHE: cache})
