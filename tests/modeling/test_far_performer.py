"""Performer's far part: the fast form is the quadratic reference, exact numbers, and its limits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import PerformerConfig
from hf_linattn.modeling import naive
from hf_linattn.modeling.decoder_attention import attend_causally
from hf_linattn.modeling.encoder_attention import attend
from hf_linattn.modeling.far_part import Settings
from hf_linattn.modeling.far_performer import PerformerFarPart
from hf_linattn.modeling.feature_maps import FEATURE_MAPS, Features
from hf_linattn.modeling.feature_sums import SIGNED_MASS_FLOOR
from hf_linattn.modeling.linear_attention import LinearAttention

from ..helpers import (
    assert_values_and_gradients_agree,
    from_state,
    in_chunks,
    linear_attention,
    qkv,
    softmax_attention,
    trained,
)

pytestmark = pytest.mark.core

LENGTH = 19  # divided by no window
LENGTHS = torch.tensor([19, 11])
VALID = torch.arange(LENGTH) < LENGTHS[:, None]
# small enough that no trigonometric mass comes out near zero, where float32 has few digits left
SCALE = 0.25
ALL_FEATURE_MAPS = pytest.mark.parametrize("feature_map", FEATURE_MAPS)

# decoders: of rows of 150 tokens
CAUSAL_LENGTH, HEAD_DIM = 150, 8
# (window_size, global_tokens): none; windows of less than a chunk, of one chunk, of more than one; global tokens
SETTINGS = [(0, 0), (0, 3), (4, 0), (4, 6), (24, 1), (70, 2)]
ALL_SETTINGS = pytest.mark.parametrize(("window_size", "global_tokens"), SETTINGS)


def encoder(feature_map: str = "positive", num_features: int = 32, seed: int = 0, **settings: Any) -> LinearAttention:
    """Two heads of 4."""
    return linear_attention(
        PerformerConfig(feature_map=feature_map, num_features=num_features, **settings), causal=False, seed=seed
    )


def decoder(feature_map: str = "positive", num_features: int = 32, **settings: Any) -> LinearAttention:
    """Two heads of 8."""
    config = PerformerConfig(feature_map=feature_map, num_features=num_features, **settings)
    return linear_attention(config, causal=True, head_dim=HEAD_DIM)


def causal_inputs(length: int = CAUSAL_LENGTH, scale: float = 0.5, **options: Any) -> list[Tensor]:
    return qkv(length, dim=HEAD_DIM, scale=scale, **options)


def assert_is_reference(layer: LinearAttention, lengths: Tensor | None = None, length: int = LENGTH) -> None:
    assert_values_and_gradients_agree(
        lambda *x: layer(*x, lengths),
        lambda *x: naive.attention(layer, *x, lengths),
        qkv(length, scale=SCALE),
        layer.parameters(),
        valid=None if lengths is None else torch.arange(length) < lengths[:, None],
    )


class FixedFeatures(torch.nn.Module):
    """A map whose inputs are the features themselves, given in the exponent or as a factor."""

    signed = False

    def __init__(self, in_exponent: bool) -> None:
        super().__init__()
        self.in_exponent = in_exponent

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        return Features(x.log2(), None) if self.in_exponent else Features(torch.zeros_like(x[..., :1]), x)

    def of_now(self, dtype: torch.dtype) -> "FixedFeatures":
        return self

    def of_rows(self, *_: Any) -> "FixedFeatures":
        return self


def fixed_far_part(in_exponent: bool) -> PerformerFarPart:
    far = PerformerFarPart(PerformerConfig(num_features=2), num_heads=1, head_dim=2, seed=0)
    far.feature_map = FixedFeatures(in_exponent)
    return far


# the worked example: key features (1, 0), (0, 2), values 3, 5; one row of a batch, one head
KEY_FEATURES = torch.tensor([[1.0, 0.0], [0.0, 2.0]])[None, None]
VALUES = torch.tensor([[3.0], [5.0]])[None, None]


@pytest.mark.parametrize("in_exponent", [True, False])
@pytest.mark.parametrize(
    "attention",
    [
        lambda q, k, v, far: attend(q, k, v, far, None, Settings()),
        lambda q, k, v, far: naive.performer_attention(q, k, v, far.feature_map),
    ],
    ids=["fast", "reference"],
)
def test_the_sums_of_the_worked_example(attention: Callable[..., Tensor], in_exponent: bool) -> None:
    """S = (3, 10), z = (1, 2); query features (1, 1) read 13 / 3."""
    assert (KEY_FEATURES.mT @ VALUES).flatten().tolist() == [3, 10]
    assert KEY_FEATURES.sum(-2).flatten().tolist() == [1, 2]
    out = attention(torch.ones(1, 1, 2, 2), KEY_FEATURES, VALUES, fixed_far_part(in_exponent))
    assert out.flatten().tolist() == pytest.approx([13 / 3, 13 / 3], rel=1e-6)


def test_the_running_sums_of_the_worked_example() -> None:
    """S = (3, 10), z = (1, 2) after both keys; query features (1, 1) read 3 after one and 13 / 3 after both."""
    query = torch.ones(1, 1, 2, 2)
    out, state = attend_causally(query, KEY_FEATURES, VALUES, fixed_far_part(False), None, None, Settings())
    sums, shift = state.far
    torch.testing.assert_close(sums[0, 0] * shift.exp2(), torch.tensor([[[[3.0, 1.0], [10.0, 2.0]]]]))
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 13 / 3]))


# encoders


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@pytest.mark.parametrize("global_tokens", [0, 2])
@pytest.mark.parametrize("window_size", [0, 3, 32])
@ALL_FEATURE_MAPS
def test_the_fast_form_is_the_reference_in_values_and_gradients(
    feature_map: str, window_size: int, global_tokens: int, lengths: Tensor | None
) -> None:
    assert_is_reference(encoder(feature_map, window_size=window_size, global_tokens=global_tokens), lengths)


@pytest.mark.parametrize("window_size", [0, 4, 64])
@pytest.mark.parametrize("length", [1, 3])
def test_fewer_tokens_than_global_ones(length: int, window_size: int) -> None:
    assert_is_reference(encoder(window_size=window_size, global_tokens=5), length=length)


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
@pytest.mark.parametrize(("window_size", "global_tokens"), [(3, 0), (3, 2), (0, 2)])
def test_a_branch_that_is_off_is_left_out(window_size: int, global_tokens: int, near: bool, far: bool) -> None:
    assert_is_reference(encoder(window_size=window_size, global_tokens=global_tokens, near=near, far=far))


@ALL_FEATURE_MAPS
def test_learned_weights_get_the_reference_gradient_after_training(feature_map: str) -> None:
    """Queries and keys with maps of their own, offsets and squares away from where they start."""
    assert_is_reference(trained(encoder(feature_map, window_size=4), 0.2), LENGTHS)


@pytest.mark.parametrize("window_size", [0, 3])
def test_the_two_errors_apart(window_size: int) -> None:
    """Re-association costs rounding; what is far from softmax is the kernel."""
    inputs, layer = qkv(LENGTH), encoder(window_size=window_size)
    fast = layer(*inputs)
    with torch.no_grad():
        quadratic = naive.attention(layer, *(x.double() for x in inputs))
    softmax = softmax_attention(*(x.double() for x in inputs))
    assert (fast - quadratic).abs().max() < 1e-5
    assert (fast - softmax).abs().max() > 1e-2


def test_the_kernel_error_shrinks_with_the_number_of_features() -> None:
    inputs = qkv(LENGTH, scale=SCALE)
    errors = []
    for num_features in (16, 256, 4096):
        outputs = [encoder("positive", num_features, seed)(*inputs) for seed in range(20)]
        errors.append(torch.stack([(x - softmax_attention(*inputs)).square().mean() for x in outputs]).mean().item())
    # a sixteenth of the squared error for sixteen times the features, roughly
    assert errors[0] > 4 * errors[1] > 16 * errors[2]


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@ALL_FEATURE_MAPS
def test_a_window_over_everything_is_softmax(feature_map: str, lengths: Tensor | None) -> None:
    inputs = qkv(LENGTH, scale=2.0)
    out = encoder(feature_map, window_size=LENGTH)(*inputs, lengths)
    valid = torch.ones(2, LENGTH).bool() if lengths is None else VALID
    torch.testing.assert_close(out, softmax_attention(*inputs, valid[:, None, :]))


@pytest.mark.parametrize("global_queries", [False, True])
def test_the_near_part_alone_is_softmax_over_near_keys(global_queries: bool) -> None:
    inputs = qkv(LENGTH, scale=2.0)
    out = encoder(window_size=3, global_tokens=2, global_queries=global_queries, far=False)(*inputs)
    near = naive._near_mask(LENGTH, None, 3, 2, torch.device("cpu")).clone()
    near[:, :2] |= global_queries
    torch.testing.assert_close(out, softmax_attention(*inputs, near))


@pytest.mark.parametrize("window_size", [0, 4])
@ALL_FEATURE_MAPS
def test_equal_values_come_out_as_they_are(feature_map: str, window_size: int) -> None:
    """The weights add up to one, whatever they are."""
    query, key, value = qkv(LENGTH, scale=SCALE)
    value = value[:, :, :1].expand_as(value)
    out = encoder(feature_map, 64, window_size=window_size)(query, key, value)
    torch.testing.assert_close(out, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 5.0, 50.0])
@pytest.mark.parametrize("num_features", [2, 8])
@pytest.mark.parametrize("window_size", [0, 4])
def test_a_signed_map_gives_bounded_outputs(scale: float, num_features: int, window_size: int) -> None:
    """Negative masses would otherwise divide by next to nothing."""
    query, key, value = qkv(64, scale=scale)
    out = encoder("trigonometric", num_features, window_size=window_size)(query, key, value)
    assert out.abs().max() <= value.abs().max() / SIGNED_MASS_FLOOR * (1 + 1e-5)


def test_directions_are_saved_with_the_module_and_no_counter_without_an_interval() -> None:
    assert set(encoder().state_dict()) == {"feature_map.directions", "feature_map.draws"}


# decoders


@ALL_FEATURE_MAPS
@ALL_SETTINGS
def test_the_causal_form_is_the_reference(feature_map: str, window_size: int, global_tokens: int) -> None:
    # trigonometric estimates that come out near zero or below are guarded, which the reference is not
    scale, features = (0.1, 128) if feature_map == "trigonometric" else (0.5, 32)
    layer = decoder(feature_map, features, window_size=window_size, global_tokens=global_tokens)
    results = []
    for function, dtype in (
        (layer, torch.float64),
        (layer, torch.float32),
        (lambda *x: naive.attention(layer, *x), torch.float64),
    ):
        inputs = [x.requires_grad_() for x in causal_inputs(scale=scale, dtype=dtype)]
        out = function(*inputs)
        weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        gradients = torch.autograd.grad((out * weights).sum(), [*inputs, *layer.parameters()])
        results.append([out.detach(), *gradients])
    for exact, rounded, expected in zip(*results, strict=True):
        # parameters and their gradients are float32
        tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(exact, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(rounded.double(), expected.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[1][0].double(), results[2][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
@pytest.mark.parametrize(("window_size", "global_tokens"), [(4, 0), (24, 2), (0, 2)])
def test_a_causal_branch_that_is_off_is_left_out(near: bool, far: bool, window_size: int, global_tokens: int) -> None:
    inputs, layer = causal_inputs(), decoder(window_size=window_size, global_tokens=global_tokens, near=near, far=far)
    out = layer(*inputs)
    expected = naive.attention(layer, *(x.double() for x in inputs))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    steps, _ = in_chunks(layer, inputs, [5] + [1] * 20 + [125])
    torch.testing.assert_close(steps, out, rtol=0, atol=1e-5)
    if not near:
        # the first queries have nothing that is far
        assert (out[:, :, : window_size or global_tokens] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@ALL_FEATURE_MAPS
@pytest.mark.parametrize("window_size", [0, 16, 64])
def test_long_and_large_inputs_are_finite(dtype: torch.dtype, feature_map: str, window_size: int) -> None:
    layer = decoder(feature_map, 16, window_size=window_size, global_tokens=1)
    length = 8192 if feature_map == "positive" else 1024
    # elu features of large negative inputs are 0 to rounding: there the true gradient is beyond float16
    for scale in (0.3, 3.0) if feature_map == "elu" else (0.3, 10.0, 100.0):
        inputs = [x.requires_grad_() for x in causal_inputs(length, batch=1, scale=scale, dtype=dtype)]
        out, state = from_state(layer, inputs)
        out.float().square().mean().backward()
        assert out.dtype == dtype and out.isfinite().all()
        assert all(x.grad.isfinite().all() for x in inputs)
        assert not any(x.isnan().any() or x.isposinf().any() for x in state.tensors())
        out, state = from_state(layer, (x[:, :, -1:].detach() for x in inputs), state)
        assert out.isfinite().all() and not any(x.isnan().any() or x.isposinf().any() for x in state.tensors())


def test_every_query_keeps_some_mass_at_any_scale() -> None:
    """The outputs of a pure Performer are averages of values, also where all estimates are tiny."""
    query, key, value = causal_inputs(scale=20.0)
    for inputs in ((query, key), (query, -query), (query, key * 0)):
        out = decoder()(*inputs, torch.ones_like(value))
        torch.testing.assert_close(out, torch.ones_like(out))
