"""Performer's fast form against its quadratic reference, exact numbers, and its limits."""

import itertools

import pytest
import torch
from hf_linattn.modeling.performer import (
    PerformerAttention,
    performer_attention,
    performer_attention_reference,
)
from torch import Tensor

from hf_linattn import PerformerConfig
from hf_linattn.modeling.blocks import near_mask
from hf_linattn.modeling.feature_maps import FEATURE_MAPS, FeatureMap, Features
from hf_linattn.modeling.feature_sums import SIGNED_MASS_FLOOR

from ..helpers import assert_values_and_gradients_agree, qkv, softmax_attention

pytestmark = pytest.mark.core

LENGTH = 19  # divided by no window
LENGTHS = torch.tensor([19, 11])
# small enough that no trigonometric mass comes out near zero, where float32 has few digits left
SCALE = 0.25
ALL_FEATURE_MAPS = pytest.mark.parametrize("feature_map", FEATURE_MAPS)


def make_map(feature_map: str, num_features: int = 32, seed: int = 0, heads: int = 2, head_dim: int = 4) -> FeatureMap:
    return FeatureMap(
        feature_map=feature_map,
        num_heads=heads,
        head_dim=head_dim,
        num_features=num_features,
        orthogonal=True,
        seed=seed,
    )


class FixedFeatures:
    """A map whose inputs are the features themselves, given in the exponent or as a factor."""

    signed = False

    def __init__(self, in_exponent: bool) -> None:
        self.in_exponent = in_exponent

    def __call__(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        return Features(x.log2(), None) if self.in_exponent else Features(torch.zeros_like(x[..., :1]), x)


@pytest.mark.parametrize("in_exponent", [True, False])
@pytest.mark.parametrize("attention", [performer_attention, performer_attention_reference])
def test_the_sums_of_the_worked_example(attention, in_exponent: bool) -> None:
    """S = (3, 10), z = (1, 2); query features (1, 1) read 13 / 3."""
    key_features = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    values = torch.tensor([[3.0], [5.0]])
    assert (key_features.T @ values).flatten().tolist() == [3, 10]
    assert key_features.sum(0).tolist() == [1, 2]
    query = torch.ones(2, 2)
    # one row of a batch, one head
    out = attention(query[None, None], key_features[None, None], values[None, None], FixedFeatures(in_exponent))
    assert out.flatten().tolist() == pytest.approx([13 / 3, 13 / 3], rel=1e-6)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@pytest.mark.parametrize("global_tokens", [0, 2])
@pytest.mark.parametrize("window_size", [0, 3, 32])
@ALL_FEATURE_MAPS
def test_fast_is_the_reference_in_values_and_gradients(
    feature_map: str, window_size: int, global_tokens: int, lengths: Tensor | None
) -> None:
    module = make_map(feature_map)
    options = {"lengths": lengths, "window_size": window_size, "global_tokens": global_tokens}
    real = None if lengths is None else torch.arange(LENGTH) < lengths[:, None]
    assert_values_and_gradients_agree(
        lambda *x: performer_attention(*x, module, **options),
        lambda *x: performer_attention_reference(*x, module, **options),
        qkv(LENGTH, scale=SCALE),
        module.parameters(),
        real=real,
    )


@pytest.mark.parametrize("window_size", [0, 4, 64])
@pytest.mark.parametrize("length", [1, 3])
def test_fewer_tokens_than_global_ones(length: int, window_size: int) -> None:
    assert_values_and_gradients_agree(
        lambda *x: performer_attention(*x, make_map("positive"), window_size=window_size, global_tokens=5),
        lambda *x: performer_attention_reference(*x, make_map("positive"), window_size=window_size, global_tokens=5),
        qkv(length, scale=SCALE),
    )


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
@pytest.mark.parametrize(("window_size", "global_tokens"), [(3, 0), (3, 2), (0, 2)])
def test_a_branch_that_is_off_is_left_out(window_size: int, global_tokens: int, near: bool, far: bool) -> None:
    module = make_map("positive")
    options = {"window_size": window_size, "global_tokens": global_tokens, "near": near, "far": far}
    assert_values_and_gradients_agree(
        lambda *x: performer_attention(*x, module, **options),
        lambda *x: performer_attention_reference(*x, module, **options),
        qkv(LENGTH, scale=SCALE),
    )


@ALL_FEATURE_MAPS
def test_learned_weights_get_the_reference_gradient_after_training(feature_map: str) -> None:
    """Queries and keys with maps of their own, offsets and squares away from where they start."""
    module = make_map(feature_map)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    assert_values_and_gradients_agree(
        lambda *x: performer_attention(*x, module, window_size=4, lengths=LENGTHS),
        lambda *x: performer_attention_reference(*x, module, window_size=4, lengths=LENGTHS),
        qkv(LENGTH, scale=SCALE),
        module.parameters(),
        real=torch.arange(LENGTH) < LENGTHS[:, None],
    )


@pytest.mark.parametrize("window_size", [0, 3])
def test_the_two_errors_apart(window_size: int) -> None:
    """Re-association costs rounding; what is far from softmax is the kernel."""
    inputs, module = qkv(LENGTH), make_map("positive")
    fast = performer_attention(*inputs, module, window_size=window_size)
    with torch.no_grad():
        quadratic = performer_attention_reference(*(x.double() for x in inputs), module, window_size=window_size)
    softmax = softmax_attention(*(x.double() for x in inputs))
    assert (fast - quadratic).abs().max() < 1e-5
    assert (fast - softmax).abs().max() > 1e-2


def test_the_kernel_error_shrinks_with_the_number_of_features() -> None:
    inputs = qkv(LENGTH, scale=SCALE)
    errors = []
    for num_features in (16, 256, 4096):
        seeds = [performer_attention(*inputs, make_map("positive", num_features, seed)) for seed in range(20)]
        errors.append(torch.stack([(x - softmax_attention(*inputs)).square().mean() for x in seeds]).mean().item())
    # a sixteenth of the squared error for sixteen times the features, roughly
    assert errors[0] > 4 * errors[1] > 16 * errors[2]


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@ALL_FEATURE_MAPS
def test_a_window_over_everything_is_softmax(feature_map: str, lengths: Tensor | None) -> None:
    inputs = qkv(LENGTH, scale=2.0)
    out = performer_attention(*inputs, make_map(feature_map), window_size=LENGTH, lengths=lengths)
    real = torch.ones(2, LENGTH).bool() if lengths is None else torch.arange(LENGTH) < lengths[:, None]
    expected = softmax_attention(*inputs, real[:, None, :])
    torch.testing.assert_close(out, expected)


def test_the_near_part_alone_is_softmax_over_near_keys() -> None:
    inputs = qkv(LENGTH, scale=2.0)
    out = performer_attention(*inputs, make_map("positive"), window_size=3, global_tokens=2, far=False)
    seen = near_mask(LENGTH, None, 3, 2, torch.device("cpu"))
    torch.testing.assert_close(out, softmax_attention(*inputs, seen))


@pytest.mark.parametrize("window_size", [0, 4])
@ALL_FEATURE_MAPS
def test_equal_values_come_out_as_they_are(feature_map: str, window_size: int) -> None:
    """The weights add up to one, whatever they are."""
    query, key, value = qkv(LENGTH, scale=SCALE)
    value = value[:, :, :1].expand_as(value)
    out = performer_attention(query, key, value, make_map(feature_map, 64), window_size=window_size)
    torch.testing.assert_close(out, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "num_features"), itertools.product((1.0, 5.0, 50.0), (2, 8)))
@pytest.mark.parametrize("window_size", [0, 4])
def test_a_signed_map_gives_bounded_outputs(scale: float, num_features: int, window_size: int) -> None:
    """Negative masses would otherwise divide by next to nothing."""
    query, key, value = qkv(64, scale=scale)
    out = performer_attention(query, key, value, make_map("trigonometric", num_features), window_size=window_size)
    assert out.abs().max() <= value.abs().max() / SIGNED_MASS_FLOOR * (1 + 1e-5)


def test_directions_are_saved_with_the_module_and_no_counter_without_an_interval() -> None:
    config = PerformerConfig(num_features=8)
    module = PerformerAttention(config, num_heads=2, head_dim=4, seed=0)
    assert set(module.state_dict()) == {"feature_map.directions", "feature_map.draws"}
