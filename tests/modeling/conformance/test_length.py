"""Length: any up to `max_length` works, above it an error names both numbers, and nothing grows quadratically."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel
from hf_linattn.modeling import blocks
from hf_linattn.modeling.cache import LinAttnCacheLayer

from ...helpers import (
    CACHE,
    CAUSAL,
    METHODS,
    POSITIONS,
    PURE,
    config_id,
    linear_attention,
    qkv,
    small,
    tiny_model,
    tokens,
)
from .cases import CASES, DECODER, ENCODER, ONE_EACH, architectures, make_model

pytestmark = pytest.mark.core

LENGTH = 1024
ALL_ARCHITECTURES = pytest.mark.parametrize("architecture", [*architectures(causal=False), *architectures(causal=True)])


# lengths that work


@torch.no_grad()
def check_any_length_works(model: LinAttnPreTrainedModel, longest: int = POSITIONS) -> None:
    for length in (1, 2, 5, longest - 1, longest):
        out = model(tokens(length))[0]
        assert out.shape[:2] == (1, length)
        assert out.isfinite().all()


def check_longer_inputs_are_refused(model: LinAttnPreTrainedModel, longest: int = POSITIONS) -> None:
    """By whatever name they are given."""
    input_ids = tokens(longest + 1)
    embeddings = model.get_input_embeddings()(input_ids)
    for args, kwargs in (((), {"input_ids": input_ids}), ((input_ids,), {}), ((), {"inputs_embeds": embeddings})):
        with pytest.raises(ValueError, match=f"{longest + 1} tokens.*max_length={longest}"):
            model(*args, **kwargs)


@pytest.mark.parametrize(("architecture", "config"), CASES, ids=config_id)
def test_any_length_up_to_the_longest_works(architecture: str, config: AttentionConfig) -> None:
    check_any_length_works(make_model(architecture, config))


@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
@ALL_ARCHITECTURES
def test_a_longer_input_is_refused_with_both_numbers(architecture: str, config: AttentionConfig) -> None:
    check_longer_inputs_are_refused(make_model(architecture, config))


# memory


class LargestTensor(TorchDispatchMode):
    """Watches the size of everything that any operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            # an expanded view has elements that no memory stands behind
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() // leaf.element_size() > self.elements:
                self.elements = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.operation = str(func)
        return out


def largest(model: torch.nn.Module, mask: Tensor | None, length: int = LENGTH) -> LargestTensor:
    """Of a body, forward and backward."""
    input_ids = tokens(length)
    with LargestTensor() as watch:
        model.base_model(input_ids, attention_mask=mask).last_hidden_state.sum().backward()
    return watch


def masks(length: int) -> dict[str, Tensor | None]:
    ones = torch.ones(1, length, dtype=torch.long)
    padded = ones.clone()
    padded[:, length - 300 :] = 0
    return {"none": None, "right": padded, "left": padded.flip(1)}


def check_nothing_quadratic_is_allocated(model: LinAttnPreTrainedModel, mask: str) -> None:
    """Of an encoder, for rows of 1,024 tokens, padded on the side that `mask` names, or "none"."""
    watch = largest(model, masks(LENGTH)[mask])
    assert watch.elements < LENGTH * LENGTH // 4, watch.operation


#: every method with every choice, alone and with near keys
BOTH = [*PURE, *(type(config)(**{**vars(config), "window_size": 8, "global_tokens": 1}) for config in PURE)]


@pytest.mark.parametrize("mask", masks(LENGTH))
@pytest.mark.parametrize("config", BOTH, ids=config_id)
def test_nothing_quadratic_is_allocated(config: AttentionConfig, mask: str) -> None:
    check_nothing_quadratic_is_allocated(make_model(ENCODER, config, max_length=LENGTH), mask)


#: the default of every method, alone and with near keys
DEFAULTS = [small(type(config), **near) for config in ONE_EACH for near in ({}, {"window_size": 8, "global_tokens": 1})]


@pytest.mark.parametrize("architecture", [ENCODER, DECODER])
@pytest.mark.parametrize("config", DEFAULTS, ids=config_id)
def test_the_largest_tensor_grows_linearly(architecture: str, config: AttentionConfig) -> None:
    model = make_model(architecture, config, max_length=2 * LENGTH)
    once = largest(model, masks(LENGTH)["right"]).elements
    assert largest(model, masks(2 * LENGTH)["right"], 2 * LENGTH).elements <= 2 * once


def test_the_watch_sees_what_eager_attention_allocates() -> None:
    model = tiny_model(max_position_embeddings=LENGTH)
    model.set_attn_implementation("eager")
    assert largest(model, None).elements >= LENGTH * LENGTH


#: a decoder that selects tokens keeps them all, and reads a prompt with masks over all
CONSTANT = [config for config in CAUSAL if not getattr(config, "selected_tokens", 0)]


def state_bytes(cache: DynamicCache) -> int:
    return sum(layer.nbytes() for layer in cache.layers if isinstance(layer, LinAttnCacheLayer))


@torch.no_grad()
@pytest.mark.parametrize("config", [config for config in CONSTANT if config.window_size != 6], ids=config_id)
def test_the_state_of_a_decoder_does_not_grow(config: AttentionConfig) -> None:
    model, sizes = make_model(DECODER, config, max_length=4200), {}
    for length in (256, 4096):
        cache = DynamicCache()
        model.base_model(tokens(length), **{CACHE: cache})
        sizes[length] = state_bytes(cache)
        model.base_model(tokens(1), **{CACHE: cache})
        sizes[length + 1] = state_bytes(cache)
    assert len(set(sizes.values())) == 1
    assert 0 < sizes[256] < 2 * 4096 * 32 * 4


# work


class Work(TorchDispatchMode):
    """Adds up the sizes of everything that any operation returns and that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        return out


def elements_written(config: AttentionConfig, length: int, *, causal: bool) -> int:
    # an encoder's `learned` and `gaussian` have a matrix over the longest row, which therefore grows with the row here;
    # a decoder's segments are a share of the longest row, and would grow with it
    layer = linear_attention(dataclasses.replace(config, max_length=1024 if causal else length), causal=causal)
    inputs = qkv(length, batch=1)
    with torch.no_grad(), Work() as work:
        layer(*inputs)
    return work.elements


@pytest.mark.parametrize(
    ("config", "causal"),
    # with slots by length it is n * n / tokens_per_slot
    [
        *((config, False) for config in METHODS if not getattr(config, "tokens_per_slot", None)),
        *((config, True) for config in CONSTANT),
    ],
    ids=config_id,
)
def test_work_grows_linearly(monkeypatch: pytest.MonkeyPatch, config: AttentionConfig, causal: bool) -> None:
    """What is done for the whole row in every chunk of it is no large tensor, and quadratic all the same."""
    # many chunks in a short row
    monkeypatch.setattr(blocks, "_CPU_CHUNK", 16)
    once, twice = (elements_written(config, length, causal=causal) for length in (512, 1024))
    assert twice < 2.3 * once
