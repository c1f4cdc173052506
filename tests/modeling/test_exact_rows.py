"""Rows and tokens of an encoder that are exact: short rows (`exact_length`), and queries of the first tokens."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.modeling import naive
from hf_linattn.modeling.linear_attention import LinearAttention

from ..helpers import (
    DECODERS,
    ENCODERS,
    METHODS,
    POSITIONS,
    assert_values_and_gradients_agree,
    config_id,
    inputs_for,
    linear_attention,
    outputs_of,
    prompts,
    qkv,
    small,
    softmax_attention,
    tiny_model,
    trained,
)
from .conformance.cases import ONE_EACH, is_signed

pytestmark = pytest.mark.core

LENGTH, EXACT = 30, 12
#: rows that are exact, in the middle of others; one is as long as it may be, one by one token longer, one is empty
LENGTHS = torch.tensor([30, 5, 13, 12, 0, 1])
ALL_WAYS = pytest.mark.parametrize("config", METHODS, ids=config_id)


def layer_of(config: AttentionConfig, **settings: Any) -> LinearAttention:
    return trained(linear_attention(dataclasses.replace(config, **settings)), 0.1)


def inputs_of(config: AttentionConfig, **options: Any) -> list[Tensor]:
    return qkv(LENGTH, **{"batch": len(LENGTHS), "scale": 0.25 if is_signed(config) else 1.0, **options})


def is_ablation(config: AttentionConfig) -> bool:
    return not (config.near and config.far)


# exact_length


@torch.no_grad()
@ALL_WAYS
def test_short_rows_are_softmax_and_long_ones_as_without(config: AttentionConfig) -> None:
    layer, linear = layer_of(config, exact_length=EXACT), layer_of(config, exact_length=0)
    inputs = inputs_of(config)
    out = layer(*inputs, LENGTHS, scale=0.5)
    assert out.isfinite().all()
    for row, length in enumerate(LENGTHS.tolist()):
        own = [x[row : row + 1, :, :length] for x in inputs]
        if not length:
            continue
        if length <= EXACT and not is_ablation(config):
            expected = softmax_attention(own[0] * 0.5, *own[1:])
        else:
            expected = linear(*own, scale=0.5)
        torch.testing.assert_close(out[row : row + 1, :, :length], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
@pytest.mark.parametrize("lengths", [[5, 12, 1], [13, 20, 30], [30, 3, 13], [12, 13, 0], [0, 0, 0]], ids=str)
def test_a_row_does_not_depend_on_what_other_rows_are(config: AttentionConfig, lengths: list[int]) -> None:
    """Whether all are exact, none, or some; and not on their order."""
    layer, inputs = layer_of(config, exact_length=EXACT), inputs_of(config, batch=3)
    out = layer(*inputs, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        alone = layer(*(x[row : row + 1] for x in inputs), torch.tensor([length]))
        torch.testing.assert_close(out[row, :, :length], alone[0, :, :length], rtol=1e-5, atol=1e-6)
        unpadded = layer(*(x[row : row + 1, :, : max(length, 1)] for x in inputs))
        torch.testing.assert_close(out[row, :, :length], unpadded[0, :, :length], rtol=1e-5, atol=1e-5)
    order = torch.tensor([2, 0, 1])
    permuted = layer(*(x[order] for x in inputs), torch.tensor(lengths)[order])
    valid = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None])[order]
    torch.testing.assert_close(permuted.transpose(1, 2)[valid], out[order].transpose(1, 2)[valid], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [None, LENGTHS, LENGTHS.clamp_max(12), LENGTHS.clamp_min(13)])
@ALL_WAYS
def test_mixed_batches_are_the_reference(config: AttentionConfig, lengths: Tensor | None) -> None:
    layer = layer_of(
        dataclasses.replace(config, exact_length=EXACT), **({"num_features": 128} if is_signed(config) else {})
    )
    # an empty row has no output that is read
    lengths = None if lengths is None else lengths.clamp_min(1)
    assert_values_and_gradients_agree(
        lambda *x: layer(*x, lengths),
        lambda *x: naive.attention(layer, *x, lengths),
        qkv(LENGTH, batch=len(LENGTHS), scale=0.1 if is_signed(config) else 0.25),
        layer.parameters(),
        valid=None if lengths is None else torch.arange(LENGTH) < lengths[:, None],
    )


@torch.no_grad()
@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
def test_compiled_and_traced_layers_take_mixed_batches(config: AttentionConfig) -> None:
    """No shape depends on how many rows are short: one graph is right for other lengths."""
    layer, inputs = layer_of(config, exact_length=EXACT).requires_grad_(False), inputs_of(config)
    graph = torch.jit.trace(lambda q, k, v, lengths: layer(q, k, v, lengths), (*inputs, LENGTHS), check_trace=False)
    for lengths in (LENGTHS, LENGTHS.flip(0), torch.full_like(LENGTHS, 30), torch.full_like(LENGTHS, 7)):
        valid = torch.arange(LENGTH) < lengths[:, None]
        out, expected = graph(*inputs, lengths), layer(*inputs, lengths)
        torch.testing.assert_close(out.transpose(1, 2)[valid], expected.transpose(1, 2)[valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
def test_padding_does_not_show_through_in_exact_rows(config: AttentionConfig) -> None:
    layer, inputs = layer_of(config, exact_length=EXACT), inputs_of(config)
    expected = layer(*inputs, LENGTHS)
    padding = torch.arange(LENGTH) >= LENGTHS[:, None]
    changed = [x.masked_fill(padding[:, None, :, None], 1e9) for x in inputs]
    out, valid = layer(*changed, LENGTHS), ~padding
    assert torch.equal(out.transpose(1, 2)[valid], expected.transpose(1, 2)[valid])
    changed = [x.requires_grad_() for x in changed]
    layer(*changed, LENGTHS).transpose(1, 2)[valid].square().sum().backward()
    for x in changed:
        assert (x.grad.transpose(1, 2)[padding] == 0).all() and x.grad.isfinite().all()


@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
def test_an_ablation_and_the_switch_turn_exact_rows_off(config: AttentionConfig) -> None:
    inputs = inputs_of(config)
    for switch in ("near", "far", "exact"):
        layer, linear = layer_of(config, exact_length=LENGTH), layer_of(config, exact_length=0)
        assert not torch.allclose(layer(*inputs), linear(*inputs), atol=1e-3)
        setattr(layer, switch, False)
        setattr(linear, switch, False)
        assert torch.equal(layer(*inputs), linear(*inputs))


@torch.no_grad()
@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_converted_encoder_is_its_base_for_what_that_reads(architecture: str, config: AttentionConfig) -> None:
    """By default, with a window: rows as long as the base reads are exact, and longer ones are not."""
    base = tiny_model(architecture)
    model = convert(base, dataclasses.replace(config, exact_length=None), max_length=2 * POSITIONS)
    assert model.attention_config.exact_length == POSITIONS
    inputs = inputs_for("AutoModel", POSITIONS)
    torch.testing.assert_close(outputs_of(model, inputs), outputs_of(base, inputs), rtol=1e-4, atol=1e-4)
    # beside a longer row too
    longer = prompts(POSITIONS, 20, 2 * POSITIONS, side="right")
    out = model(**longer)[0]
    for row, length in enumerate((POSITIONS, 20)):
        expected = base(longer["input_ids"][row : row + 1, :length])[0][0]
        torch.testing.assert_close(out[row, :length], expected, rtol=1e-4, atol=1e-4)
    without = convert(base, dataclasses.replace(config, exact_length=0), max_length=2 * POSITIONS)
    assert without.attention_config.exact_length == 0
    assert torch.allclose(without(**longer)[0][2], out[2], atol=1e-5)
    assert not torch.allclose(outputs_of(without, inputs), outputs_of(base, inputs), atol=1e-3)


@pytest.mark.parametrize("config_class", [LinformerConfig, PerformerConfig])
def test_without_a_window_nothing_is_exact_by_default(config_class: type[AttentionConfig]) -> None:
    assert convert(tiny_model(), small(config_class, exact_length=None)).attention_config.exact_length == 0


@pytest.mark.parametrize("architecture", DECODERS)
def test_exact_rows_of_a_decoder_are_refused(architecture: str) -> None:
    base = tiny_model(architecture, "AutoModelForCausalLM")
    with pytest.raises(ValueError, match=f"exact_length=8 must be 0 or left out: {architecture} is a decoder"):
        convert(base, small(LinformerConfig, exact_length=8))
    assert convert(base, small(PerformerConfig, window_size=4, exact_length=None)).attention_config.exact_length == 0


# global_queries


@torch.no_grad()
@ALL_WAYS
def test_first_tokens_see_every_token_and_the_others_see_the_same(config: AttentionConfig) -> None:
    inputs, lengths = inputs_of(config, batch=3), torch.tensor([30, 17, 2])
    config = dataclasses.replace(config, global_tokens=3)
    out = layer_of(config, global_queries=True)(*inputs, lengths, scale=0.5)
    without = layer_of(config, global_queries=False)(*inputs, lengths, scale=0.5)
    for row, length in enumerate(lengths.tolist()):
        query, key, value = (x[row : row + 1, :, :length] for x in inputs)
        expected = softmax_attention(query[:, :, :3] * 0.5, key, value)
        torch.testing.assert_close(out[row : row + 1, :, : min(3, length)], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(out[row, :, 3:length], without[row, :, 3:length])


@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
def test_first_tokens_see_every_token_unless_their_branch_is_off(config: AttentionConfig) -> None:
    inputs = inputs_of(config)
    layers = [layer_of(config, global_queries=value) for value in (True, False)]
    assert not torch.allclose(layers[0](*inputs), layers[1](*inputs), atol=1e-4)
    for layer in layers:
        layer.near = False
    assert torch.equal(layers[0](*inputs), layers[1](*inputs))


@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
def test_a_decoders_first_tokens_see_what_is_before_them(config: AttentionConfig) -> None:
    inputs = qkv(LENGTH)
    outputs = [
        linear_attention(dataclasses.replace(config, global_queries=value, global_tokens=3), causal=True)(*inputs)
        for value in (True, False)
    ]
    assert torch.equal(*outputs)
