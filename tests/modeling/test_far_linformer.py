"""Linformer's far part: the fast form is the quadratic reference, and what it promises of its summaries."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import LinformerConfig
from hf_linattn.modeling import blocks, naive
from hf_linattn.modeling.causal_projections import CausalProjection
from hf_linattn.modeling.far_linformer import CausalLinformerFarPart
from hf_linattn.modeling.linear_attention import LinearAttention
from hf_linattn.modeling.projections import PROJECTIONS, SHARING

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
LENGTHS = torch.tensor([19, 10])
VALID = torch.arange(LENGTH) < LENGTHS[:, None]
ALL_PROJECTIONS = pytest.mark.parametrize("projection", PROJECTIONS)

# decoders: of rows of 100 tokens
CAUSAL_LENGTH, HEAD_DIM = 100, 8
CAUSAL_PROJECTIONS = [projection for projection in PROJECTIONS if projection != "gaussian"]
# (slots, window_size, global_tokens): segments of 7, 3 and 21 tokens, which divide the window or not
SETTINGS = [(15, 0, 0), (15, 0, 3), (15, 7, 0), (15, 8, 2), (34, 16, 1), (5, 4, 0), (5, 30, 4)]
ALL_SETTINGS = pytest.mark.parametrize(("slots", "window_size", "global_tokens"), SETTINGS)


def encoder(projection: str, slots: int = 4, **settings: Any) -> LinearAttention:
    """Two heads of 4, for rows of up to 24 tokens."""
    return linear_attention(
        LinformerConfig(projection=projection, projection_length=slots, max_length=24, **settings), causal=False
    )


def decoder(
    projection: str = "learned", slots: int = 15, max_length: int = CAUSAL_LENGTH + 2, **settings: Any
) -> LinearAttention:
    """Two heads of 8."""
    config = LinformerConfig(projection=projection, projection_length=slots, max_length=max_length, **settings)
    return linear_attention(config, causal=True, head_dim=HEAD_DIM)


def causal_inputs(length: int = CAUSAL_LENGTH, **options: Any) -> list[Tensor]:
    return qkv(length, dim=HEAD_DIM, **options)


def assert_is_reference(layer: LinearAttention, lengths: Tensor | None = None) -> None:
    assert_values_and_gradients_agree(
        lambda *x: layer(*x, lengths),
        lambda *x: naive.attention(layer, *x, lengths),
        qkv(LENGTH),
        layer.parameters(),
        valid=None if lengths is None else torch.arange(LENGTH) < lengths[:, None],
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of queries, and several chunks of them, in short rows."""
    monkeypatch.setattr(CausalLinformerFarPart, "least_block", 16)
    monkeypatch.setattr(blocks, "_CPU_CHUNK", 32)


# encoders


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@pytest.mark.parametrize("global_tokens", [0, 2])
@pytest.mark.parametrize("window_size", [0, 3, 32])
@ALL_PROJECTIONS
def test_the_fast_form_is_the_reference_in_values_and_gradients(
    projection: str, window_size: int, global_tokens: int, lengths: Tensor | None
) -> None:
    assert_is_reference(trained(encoder(projection, window_size=window_size, global_tokens=global_tokens)), lengths)


@pytest.mark.parametrize("window_size", [0, 3])
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("projection", ["learned", "conv", "gaussian"])
def test_every_sharing_is_the_reference(projection: str, sharing: str, window_size: int) -> None:
    assert_is_reference(trained(encoder(projection, sharing=sharing, window_size=window_size)), LENGTHS)


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
@pytest.mark.parametrize(("window_size", "global_tokens"), [(3, 0), (3, 2), (0, 2)])
def test_a_branch_that_is_off_is_left_out(window_size: int, global_tokens: int, near: bool, far: bool) -> None:
    settings = {"window_size": window_size, "global_tokens": global_tokens, "near": near, "far": far}
    assert_is_reference(trained(encoder("learned", **settings)))


@pytest.mark.parametrize("projection", ["learned", "mean", "max", "conv"])
def test_a_row_no_longer_than_the_projection_is_softmax(projection: str) -> None:
    """A slot then holds one token: nothing is summarized."""
    inputs = qkv(LENGTH, scale=2.0)
    out = encoder(projection, slots=20)(*inputs, LENGTHS)
    torch.testing.assert_close(out, softmax_attention(*inputs, VALID[:, None, :]))


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@ALL_PROJECTIONS
def test_a_window_over_everything_is_softmax(projection: str, lengths: Tensor | None) -> None:
    inputs = qkv(LENGTH, scale=2.0)
    out = encoder(projection, window_size=LENGTH)(*inputs, lengths)
    valid = torch.ones(2, LENGTH).bool() if lengths is None else VALID
    torch.testing.assert_close(out, softmax_attention(*inputs, valid[:, None, :]))


@pytest.mark.parametrize("global_queries", [False, True])
def test_the_near_part_alone_is_softmax_over_near_keys(global_queries: bool) -> None:
    inputs = qkv(LENGTH, scale=2.0)
    out = encoder("mean", window_size=3, global_tokens=2, global_queries=global_queries, far=False)(*inputs)
    near = naive._near_mask(LENGTH, None, 3, 2, torch.device("cpu")).clone()
    near[:, :2] |= global_queries
    torch.testing.assert_close(out, softmax_attention(*inputs, near))


@pytest.mark.parametrize("window_size", [0, 3])
@pytest.mark.parametrize("projection", ["learned", "mean", "max", "conv"])
def test_equal_keys_in_a_segment_are_summarized_exactly(projection: str, window_size: int) -> None:
    """A slot weighs as much as the tokens that it stands for."""
    query, key, value = qkv(19, scale=2.0)
    # four slots: the first token alone, and three of six tokens
    repeats = torch.tensor([1, 6, 6, 6])
    key, value = (x[:, :, :4].repeat_interleave(repeats, dim=2) for x in (key, value))
    out = encoder(projection, window_size=window_size)(query, key, value)
    torch.testing.assert_close(out, softmax_attention(query, key, value))


@pytest.mark.parametrize("window_size", [0, 4])
@pytest.mark.parametrize("projection", ["learned", "mean", "max", "conv"])
def test_equal_values_come_out_as_they_are(projection: str, window_size: int) -> None:
    query, key, value = qkv(LENGTH)
    value = value[:, :, :1].expand_as(value)
    torch.testing.assert_close(encoder(projection, window_size=window_size)(query, key, value), value)


@pytest.mark.parametrize("first_is_shared", [False, True])
def test_layers_that_share_a_projection_save_it_once(first_is_shared: bool) -> None:
    config = LinformerConfig(projection="learned", projection_length=4, sharing="layers", max_length=24)
    first = LinearAttention(config, num_heads=2, head_dim=4, causal=False, seed=0)
    shared = first if first_is_shared else None
    second = LinearAttention(config, num_heads=2, head_dim=4, causal=False, seed=1, shared=shared)
    assert bool(second.state_dict()) != first_is_shared
    inputs = qkv(LENGTH)
    out = second(*inputs)
    with torch.no_grad():
        first.projection.key_weight += 1.0
    assert torch.equal(second(*inputs), out) != first_is_shared


# decoders


def assert_causal_is_reference(layer: LinearAttention) -> None:
    """In float64 to rounding, and in float32."""
    results = []
    for function, dtype in (
        (layer, torch.float64),
        (layer, torch.float32),
        (lambda *x: naive.attention(layer, *x), torch.float64),
    ):
        inputs = [x.requires_grad_() for x in causal_inputs(dtype=dtype)]
        out = function(*inputs)
        weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        gradients = torch.autograd.grad(
            (out * weights).sum(), [*inputs, *layer.parameters()], materialize_grads=True, allow_unused=True
        )
        results.append([out.detach(), *gradients])
    for exact, rounded, expected in zip(*results, strict=True):
        # parameters and their gradients are float32
        tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(exact, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(rounded.double(), expected.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[1][0].double(), results[2][0], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("small_chunks")
@ALL_SETTINGS
@pytest.mark.parametrize("projection", CAUSAL_PROJECTIONS)
def test_the_causal_form_is_the_reference(projection: str, slots: int, window_size: int, global_tokens: int) -> None:
    settings = {"window_size": window_size, "global_tokens": global_tokens}
    assert_causal_is_reference(trained(decoder(projection, slots, **settings)))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("projection", ["learned", "conv"])
def test_every_causal_sharing_is_the_reference(projection: str, sharing: str) -> None:
    layer = trained(decoder(projection, sharing=sharing, window_size=8))
    assert layer.projection.key_weight.shape[0] == (2 if sharing == "none" else 1)
    assert hasattr(layer.projection, "value_weight") == (sharing in ("none", "heads"))
    assert_causal_is_reference(layer)
    inputs = causal_inputs()
    torch.testing.assert_close(in_chunks(layer, inputs, [9] + [1] * 91)[0], layer(*inputs), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
@ALL_SETTINGS
def test_a_causal_branch_that_is_off_is_left_out(
    near: bool, far: bool, slots: int, window_size: int, global_tokens: int
) -> None:
    layer = trained(decoder(slots=slots, window_size=window_size, global_tokens=global_tokens))
    # settings refuse far=False without a window and global tokens, where an open segment is still near
    layer.near, layer.far = near, far
    assert_causal_is_reference(layer)
    inputs = causal_inputs()
    out = layer(*inputs)
    steps, _ = in_chunks(layer, inputs, [5] + [1] * 20 + [75])
    torch.testing.assert_close(steps, out, rtol=0, atol=1e-5)
    if not near:
        # the first queries have nothing that is far
        assert (out[:, :, : max(window_size, 1)] == 0).all()


@pytest.mark.usefixtures("small_chunks")
@ALL_SETTINGS
@pytest.mark.parametrize("projection", CAUSAL_PROJECTIONS)
def test_identical_keys_are_summarized_exactly(
    projection: str, slots: int, window_size: int, global_tokens: int
) -> None:
    """With one key throughout, every query reads the mean of all values up to its own."""
    query, key, value = causal_inputs()
    key = key[:, :, :1].expand_as(key)
    # values equal within a segment, so that max is their mean too
    segment = (torch.arange(CAUSAL_LENGTH) - global_tokens).clamp_min(0) // math.ceil((CAUSAL_LENGTH + 2) / slots)
    value = value[:, :, segment]
    out = decoder(projection, slots, window_size=window_size, global_tokens=global_tokens)(query, key, value)
    expected = value.cumsum(2) / torch.arange(1, CAUSAL_LENGTH + 1)[:, None]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_chunks")
def test_segments_of_one_token_are_softmax() -> None:
    query, key, value = causal_inputs(scale=2.0)
    out = trained(decoder("mean", slots=CAUSAL_LENGTH, max_length=CAUSAL_LENGTH))(query, key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@ALL_SETTINGS
def test_a_state_keeps_the_most_keys_that_are_near(slots: int, window_size: int, global_tokens: int) -> None:
    far = decoder(slots=slots).far_part
    rank = torch.arange(2000)
    near = 1 + rank - far.near_start(rank, window_size, global_tokens)
    most = int(near.max())
    # with a window, as many before the block of any query
    assert far.near_length(window_size, global_tokens) == most
    assert far.reach(window_size, global_tokens) == most - max(window_size, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("projection", CAUSAL_PROJECTIONS)
@pytest.mark.parametrize("window_size", [0, 64])
def test_long_and_large_inputs_are_finite(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, projection: str, window_size: int
) -> None:
    monkeypatch.setattr(blocks, "_CPU_CHUNK", 1024)
    settings = {"window_size": window_size, "global_tokens": 1}
    layer = trained(decoder(projection, slots=128, max_length=8193, **settings))
    for scale in (0.3, 30.0):
        inputs = [x.requires_grad_() for x in causal_inputs(8192, batch=1, scale=scale, dtype=dtype)]
        out, state = from_state(layer, inputs)
        out.float().square().mean().backward()
        assert out.dtype == dtype and out.isfinite().all()
        assert all(x.grad.isfinite().all() for x in inputs)
        out, state = from_state(layer, (x[:, :, -1:].detach() for x in inputs), state)
        assert out.isfinite().all() and all(x.isfinite().all() for x in state.tensors())


def test_what_cannot_be_causal_is_refused() -> None:
    with pytest.raises(ValueError, match="projection='gaussian' cannot be causal: each of its slots mixes all tokens"):
        decoder("gaussian")
    with pytest.raises(ValueError, match="projection='median' is not one of learned, mean, max, conv"):
        CausalProjection(projection="median", sharing="heads", slots=15, max_length=102, num_heads=2, head_dim=HEAD_DIM)


def test_rows_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="103 tokens are more than max_length=102"):
        decoder()(*causal_inputs(103))


@torch.no_grad()
@pytest.mark.usefixtures("small_chunks")
def test_learned_and_conv_start_as_the_mean() -> None:
    inputs = causal_inputs()
    expected = decoder("mean", window_size=8)(*inputs)
    for projection in ("learned", "conv"):
        torch.testing.assert_close(decoder(projection, window_size=8)(*inputs), expected, rtol=0, atol=1e-6)
