"""The mask function and the attention function, called as Transformers calls them."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from hf_linattn import AttentionConfig
from hf_linattn.modeling.attention_interface import ATTENTION_NAME, linattn_attention_forward, linattn_mask

from ..helpers import METHODS, config_id, linear_attention, qkv, softmax_attention

pytestmark = pytest.mark.core

RIGHT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def mask_of(attention_mask: Tensor | None, mask_function=bidirectional_mask_function) -> Tensor | None:
    return linattn_mask(2, 4, 4, mask_function=mask_function, attention_mask=attention_mask)


def attention_module(config: AttentionConfig | None) -> nn.Module:
    """An attention module with two heads of four, with linear attention under it or, for None, without."""
    module = nn.Module()
    if config is not None:
        module.linattn = linear_attention(config)
    return module


def test_both_functions_are_registered_under_one_name() -> None:
    assert AttentionInterface()[ATTENTION_NAME] is linattn_attention_forward
    assert AttentionMaskInterface()[ATTENTION_NAME] is linattn_mask


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (torch.ones(2, 4), None),
        (torch.ones(2, 4).bool(), None),
        (RIGHT, torch.tensor([4, 2])),
        (RIGHT.float(), torch.tensor([4, 2])),
        (torch.zeros(2, 4), torch.tensor([0, 0])),
        (RIGHT.flip(1), RIGHT.flip(1).bool()),
        (torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]), torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()),
    ],
    ids=["none", "ones", "bools", "right", "floats", "zeros", "left", "holes"],
)
def test_the_mask_stays_small(given: Tensor | None, expected: Tensor | None) -> None:
    mask = mask_of(given)
    if expected is None:
        assert mask is None
    else:
        assert mask.dtype == expected.dtype
        assert torch.equal(mask, expected)


def test_a_mask_per_query_and_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 1, 4, 4\).*\(batch, length\)"):
        mask_of(torch.ones(2, 1, 4, 4))
    query, key, value = qkv(4)
    with pytest.raises(ValueError, match=r"\(2, 1, 4, 4\).*\(batch, length\)"):
        linattn_attention_forward(attention_module(METHODS[0]), query, key, value, torch.ones(2, 1, 4, 4))


def test_masks_that_are_more_than_padding_are_refused() -> None:
    """Layers know their sliding windows themselves; masks with anything else are refused."""
    for sliding in (sliding_window_bidirectional_mask_function(4), sliding_window_causal_mask_function(4)):
        assert mask_of(None, sliding) is None
        for other in (and_masks(sliding, causal_mask_function), or_masks(sliding, causal_mask_function)):
            with pytest.raises(ValueError, match="padding masks only: custom masks"):
                mask_of(None, other)
    with pytest.raises(ValueError, match="padding masks only: custom masks"):
        mask_of(None, or_masks(sliding_window_overlay(4), causal_mask_function))
    with pytest.raises(ValueError, match="padding masks only: custom masks"):
        mask_of(None, chunked_causal_mask_function(4, torch.zeros(2)))


@pytest.mark.parametrize("config", [None, *METHODS], ids=config_id)
@pytest.mark.parametrize("scaling", [None, 0.25])
def test_scaling_is_that_of_the_logits(config: AttentionConfig | None, scaling: float | None) -> None:
    query, key, value = qkv(12)
    module = attention_module(config)
    out, probabilities = linattn_attention_forward(module, query, key, value, None, scaling=scaling)
    assert probabilities is None
    assert out.shape == (2, 12, 2, 4)
    assert out.is_contiguous()
    # all of the scale on one side gives the same logits (features of q and k see half of it each)
    factor = 0.5 if scaling is None else scaling
    # and prototypes are in the space of the keys as they are
    key_factor = 1.0 if hasattr(getattr(module, "linattn", None), "prototypes") else factor**0.5
    query, key = query * (factor / key_factor), key * key_factor
    expected, _ = linattn_attention_forward(module, query, key, value, None, scaling=1.0)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("mask", [None, torch.tensor([12, 7]), (torch.arange(12) != 3).expand(2, 12)])
def test_a_layer_that_was_not_converted_is_softmax(mask: Tensor | None) -> None:
    query, key, value = qkv(12)
    out, _ = linattn_attention_forward(attention_module(None), query, key, value, mask, scaling=0.5)
    valid = torch.ones(2, 12).bool() if mask is None else mask if mask.ndim == 2 else torch.arange(12) < mask[:, None]
    torch.testing.assert_close(out.transpose(1, 2), softmax_attention(query * 0.5, key, value, valid[:, None]))


@pytest.mark.parametrize("config", METHODS, ids=config_id)
def test_a_mask_with_holes_is_the_row_without_them(config: AttentionConfig) -> None:
    query, key, value = qkv(12, batch=1)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1]]).bool()
    module = attention_module(config)
    out, _ = linattn_attention_forward(module, query, key, value, mask)
    short, _ = linattn_attention_forward(module, *(x[:, :, mask[0]] for x in (query, key, value)), None)
    torch.testing.assert_close(out[:, mask[0]], short)


@pytest.mark.parametrize("config", METHODS, ids=config_id)
def test_gradients_reach_queries_keys_and_values_through_a_mask_and_stop_at_padding(config: AttentionConfig) -> None:
    inputs = [x.requires_grad_() for x in qkv(12)]
    mask = torch.ones(2, 12).bool()
    mask[1, :5] = False
    out, _ = linattn_attention_forward(attention_module(config), *inputs, mask)
    out[mask].square().sum().backward()
    for x in inputs:
        assert x.grad.isfinite().all()
        assert x.grad[1, :, 5:].abs().sum() > 0
        assert (x.grad[1, :, :5] == 0).all()
