"""Linformer's fast form against its quadratic reference, and what it promises of its summaries."""

import pytest
import torch
from hf_linattn.modeling.linformer import LinformerAttention, linformer_attention, linformer_attention_reference
from torch import Tensor

from hf_linattn import LinformerConfig
from hf_linattn.modeling.blocks import near_mask
from hf_linattn.modeling.projections import PROJECTIONS, SHARING, Projection

from ..helpers import assert_values_and_gradients_agree, qkv, softmax_attention

pytestmark = pytest.mark.core

LENGTH = 19  # divided by no window
LENGTHS = torch.tensor([19, 10])
ALL_PROJECTIONS = pytest.mark.parametrize("projection", PROJECTIONS)


def make_projection(projection: str, sharing: str = "heads", slots: int = 4, trained: bool = False) -> Projection:
    """For values of head_dim 4 and two heads; `trained` moves the parameters away from where they start."""
    module = Projection(
        projection=projection, sharing=sharing, slots=slots, max_length=24, num_heads=2, head_dim=4, seed=0
    )
    if trained:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@pytest.mark.parametrize("global_tokens", [0, 2])
@pytest.mark.parametrize("window_size", [0, 3, 32])
@ALL_PROJECTIONS
def test_fast_is_the_reference_in_values_and_gradients(
    projection: str, window_size: int, global_tokens: int, lengths: Tensor | None
) -> None:
    module = make_projection(projection, trained=True)
    options = {"lengths": lengths, "window_size": window_size, "global_tokens": global_tokens}
    real = None if lengths is None else torch.arange(LENGTH) < lengths[:, None]
    assert_values_and_gradients_agree(
        lambda *x: linformer_attention(*x, module, **options),
        lambda *x: linformer_attention_reference(*x, module, **options),
        qkv(LENGTH),
        module.parameters(),
        real=real,
    )


@pytest.mark.parametrize("window_size", [0, 3])
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("projection", ["learned", "conv", "gaussian"])
def test_every_sharing_is_the_reference(projection: str, sharing: str, window_size: int) -> None:
    module = make_projection(projection, sharing, trained=True)
    assert_values_and_gradients_agree(
        lambda *x: linformer_attention(*x, module, lengths=LENGTHS, window_size=window_size),
        lambda *x: linformer_attention_reference(*x, module, lengths=LENGTHS, window_size=window_size),
        qkv(LENGTH),
        module.parameters(),
        real=torch.arange(LENGTH) < LENGTHS[:, None],
    )


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
@pytest.mark.parametrize(("window_size", "global_tokens"), [(3, 0), (3, 2), (0, 2)])
def test_a_branch_that_is_off_is_left_out(window_size: int, global_tokens: int, near: bool, far: bool) -> None:
    module = make_projection("learned", trained=True)
    options = {"window_size": window_size, "global_tokens": global_tokens, "near": near, "far": far}
    assert_values_and_gradients_agree(
        lambda *x: linformer_attention(*x, module, **options),
        lambda *x: linformer_attention_reference(*x, module, **options),
        qkv(LENGTH),
        module.parameters(),
    )


@pytest.mark.parametrize("projection", ["learned", "mean", "max", "conv"])
def test_a_row_no_longer_than_the_projection_is_softmax(projection: str) -> None:
    """A slot then holds one token: nothing is summarised."""
    inputs = qkv(LENGTH, scale=2.0)
    out = linformer_attention(*inputs, make_projection(projection, slots=20), lengths=LENGTHS)
    real = torch.arange(LENGTH) < LENGTHS[:, None]
    torch.testing.assert_close(out, softmax_attention(*inputs, real[:, None, :]))


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@ALL_PROJECTIONS
def test_a_window_over_everything_is_softmax(projection: str, lengths: Tensor | None) -> None:
    inputs = qkv(LENGTH, scale=2.0)
    out = linformer_attention(*inputs, make_projection(projection), window_size=LENGTH, lengths=lengths)
    real = torch.ones(2, LENGTH).bool() if lengths is None else torch.arange(LENGTH) < lengths[:, None]
    torch.testing.assert_close(out, softmax_attention(*inputs, real[:, None, :]))


def test_the_near_part_alone_is_softmax_over_near_keys() -> None:
    inputs = qkv(LENGTH, scale=2.0)
    out = linformer_attention(*inputs, make_projection("mean"), window_size=3, global_tokens=2, far=False)
    seen = near_mask(LENGTH, None, 3, 2, torch.device("cpu"))
    torch.testing.assert_close(out, softmax_attention(*inputs, seen))


@pytest.mark.parametrize("window_size", [0, 3])
@pytest.mark.parametrize("projection", ["learned", "mean", "max", "conv"])
def test_equal_keys_in_a_segment_are_summarised_exactly(projection: str, window_size: int) -> None:
    """A slot weighs as much as the tokens that it stands for."""
    query, key, value = qkv(19, scale=2.0)
    # four slots: the first token alone, and three of six tokens
    repeats = torch.tensor([1, 6, 6, 6])
    key, value = (x[:, :, :4].repeat_interleave(repeats, dim=2) for x in (key, value))
    out = linformer_attention(query, key, value, make_projection(projection), window_size=window_size)
    torch.testing.assert_close(out, softmax_attention(query, key, value))


@pytest.mark.parametrize("window_size", [0, 4])
@pytest.mark.parametrize("projection", ["learned", "mean", "max", "conv"])
def test_equal_values_come_out_as_they_are(projection: str, window_size: int) -> None:
    query, key, value = qkv(LENGTH)
    value = value[:, :, :1].expand_as(value)
    out = linformer_attention(query, key, value, make_projection(projection), window_size=window_size)
    torch.testing.assert_close(out, value)


@pytest.mark.parametrize("first_is_shared", [False, True])
def test_layers_that_share_a_projection_save_it_once(first_is_shared: bool) -> None:
    config = LinformerConfig(projection_length=4, sharing="layers", max_length=24)
    first = LinformerAttention(config, num_heads=2, head_dim=4, seed=0)
    second = LinformerAttention(config, num_heads=2, head_dim=4, seed=1, shared=first if first_is_shared else None)
    assert bool(second.state_dict()) != first_is_shared
    inputs = qkv(LENGTH)
    out = second(*inputs, None)
    with torch.no_grad():
        first.projection.key_weight += 1.0
    assert torch.equal(second(*inputs, None), out) != first_is_shared
