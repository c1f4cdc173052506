"""The fast form of every way to attend is its quadratic reference: values and gradients, against float64."""

import dataclasses

import pytest
import torch
from torch import Tensor

from hf_linattn import AttentionConfig
from hf_linattn.modeling import naive
from hf_linattn.modeling.linear_attention import LinearAttention

from ...helpers import (
    CAUSAL,
    SPLIT,
    assert_values_and_gradients_agree,
    config_id,
    in_chunks,
    linear_attention,
    qkv,
    trained,
)
from .cases import WAYS, is_signed

pytestmark = pytest.mark.core

LENGTH = 30
ALL_WAYS = pytest.mark.parametrize(
    ("config", "causal"),
    [*((config, False) for config in WAYS), *((config, True) for config in [*CAUSAL, *SPLIT])],
    ids=config_id,
)
LENGTHS = pytest.mark.parametrize("lengths", [None, torch.tensor([30, 17])], ids=["full", "padded"])


def check_the_fast_form_is_the_reference(
    layer: LinearAttention, lengths: Tensor | None, *, scale: float = 0.25, tolerance: float = 2e-5
) -> None:
    """Heads of 4, two of them. `scale` keeps masses that may cancel away from zero."""
    assert_values_and_gradients_agree(
        lambda *x: layer(*x, lengths),
        lambda *x: naive.attention(layer, *x, lengths),
        qkv(LENGTH, scale=scale),
        layer.parameters(),
        valid=None if lengths is None else torch.arange(LENGTH) < lengths[:, None],
        tolerance=tolerance,
    )


def layer_of(config: AttentionConfig, causal: bool) -> LinearAttention:
    if is_signed(config):
        # estimates that come out near zero or below are guarded, which a decoder's reference is not
        config = dataclasses.replace(config, num_features=128)
    return trained(linear_attention(config, causal=causal), 0.2)


@LENGTHS
@ALL_WAYS
def test_the_fast_form_is_the_reference(config: AttentionConfig, causal: bool, lengths: Tensor | None) -> None:
    scale = 0.1 if is_signed(config) else 0.25
    check_the_fast_form_is_the_reference(layer_of(config, causal), lengths, scale=scale)


@torch.no_grad()
@pytest.mark.parametrize("config", CAUSAL, ids=config_id)
def test_step_by_step_is_the_reference(config: AttentionConfig) -> None:
    layer, inputs = layer_of(config, True), qkv(LENGTH, scale=0.1 if is_signed(config) else 0.25)
    out, _ = in_chunks(layer, inputs, [9] + [1] * 14 + [7])
    expected = naive.attention(layer, *(x.double() for x in inputs))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
