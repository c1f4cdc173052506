"""What DESIGN section 6 promises of converted encoders, over every method, dtype and side of the padding."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig

from ..helpers import ENCODERS, METHODS, POSITIONS, SHARED, config_id, converted_model, tokens

pytestmark = pytest.mark.core

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_METHODS = pytest.mark.parametrize("config", [*METHODS, *SHARED], ids=config_id)
ALL_DTYPES = pytest.mark.parametrize("dtype", [*DTYPES, "autocast"], ids=config_id)
# a few roundings of the dtype, as hidden states of size 1 to 3 go through two layers
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2, "autocast": 6e-2}


def model_and_context(
    config: AttentionConfig, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, AbstractContextManager]:
    """A converted BERT in the dtype, or in float32 with the context of bfloat16 autocast."""
    if dtype == "autocast":
        return converted_model(config), torch.autocast("cpu", dtype=torch.bfloat16)
    return converted_model(config).to(dtype), nullcontext()


def hidden_states(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The last hidden states, with positions counted over real tokens."""
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
    return model(input_ids=input_ids, attention_mask=mask, position_ids=positions).last_hidden_state


@pytest.mark.parametrize("side", ["left", "right", "inside"])
@ALL_DTYPES
@ALL_METHODS
def test_a_row_does_not_depend_on_its_padding(config: AttentionConfig, dtype: torch.dtype | str, side: str) -> None:
    model, context = model_and_context(config, dtype)
    row, other = tokens(23)[0], tokens(40, seed=1)[0]
    real = {
        "left": torch.arange(17, 40),
        "right": torch.arange(23),
        "inside": torch.randperm(40, generator=torch.Generator().manual_seed(0))[:23].sort().values,
    }[side]
    # padding of random tokens: not even a padding embedding may show through
    batch = torch.stack((other.index_put((real,), row), other))
    mask = torch.ones_like(batch)
    mask[0] = torch.zeros(40, dtype=torch.long).index_fill(0, real, 1)
    with torch.no_grad(), context:
        alone = hidden_states(model, row[None])[0]
        padded = hidden_states(model, batch, mask)[0, real]
        full = hidden_states(model, other[None])[0]
        beside = hidden_states(model, batch, mask)[1]
    tolerance = TOLERANCE[dtype]
    if getattr(config, "feature_map", "") == "trigonometric":
        # positive and negative terms cancel: a mass of a tenth of them has one digit less
        tolerance *= 10
    torch.testing.assert_close(padded.float(), alone.float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(beside.float(), full.float(), atol=tolerance, rtol=tolerance)


@ALL_DTYPES
@ALL_METHODS
def test_a_mask_of_ones_is_no_mask(config: AttentionConfig, dtype: torch.dtype | str) -> None:
    model, context = model_and_context(config, dtype)
    input_ids = tokens(30, batch=2)
    with torch.no_grad(), context:
        without = model(input_ids).last_hidden_state
        assert torch.equal(model(input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state, without)


@pytest.mark.parametrize("mask", [(0, 30), (1, 29), (0, 0)], ids=["empty row", "one token", "nothing at all"])
@ALL_DTYPES
@ALL_METHODS
def test_rows_of_padding_are_finite_forward_and_backward(
    config: AttentionConfig, dtype: torch.dtype | str, mask: tuple[int, int]
) -> None:
    model, context = model_and_context(config, dtype)
    attention_mask = (torch.arange(30) < torch.tensor(mask)[:, None]).long()
    for flipped in (attention_mask, attention_mask.flip(1)):
        with context:
            out = hidden_states(model, tokens(30, batch=2), flipped)
        assert out.isfinite().all()
        out.float().square().mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        model.zero_grad()


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("padded", [False, True])
@ALL_DTYPES
@ALL_METHODS
def test_large_queries_and_keys_give_finite_results(
    config: AttentionConfig, dtype: torch.dtype | str, padded: bool, scale: float
) -> None:
    """Queries and keys scaled so that each product is up to `scale` times as large as the tiny model's."""
    model, context = model_and_context(config, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("query.", "key.")):
                parameter *= scale**0.5
    mask = torch.ones(2, 30, dtype=torch.long)
    if padded:
        mask[1, 11:] = 0
    with context:
        out = hidden_states(model, tokens(30, batch=2), mask)
    assert out.isfinite().all()
    out[mask.bool()].float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("length", [1, 2, 5, 63, 64])
@ALL_METHODS
def test_any_length_up_to_the_longest_works(config: AttentionConfig, length: int) -> None:
    with torch.no_grad():
        out = converted_model(config)(tokens(length)).last_hidden_state
    assert out.shape == (1, length, 32)
    assert out.isfinite().all()


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("how", ["input_ids", "positional", "inputs_embeds"])
def test_a_longer_input_is_refused_with_both_numbers(family: str, how: str) -> None:
    model = converted_model(PerformerConfig(num_features=16), family)
    input_ids = tokens(POSITIONS + 1)
    with pytest.raises(ValueError, match=f"{POSITIONS + 1} tokens.*max_length={POSITIONS}"):
        if how == "positional":
            model(input_ids)
        else:
            model(**{how: model.get_input_embeddings()(input_ids) if how == "inputs_embeds" else input_ids})


@ALL_METHODS
def test_eval_is_deterministic(config: AttentionConfig) -> None:
    model = converted_model(config)
    with torch.no_grad():
        first = model(tokens(30)).last_hidden_state
        torch.manual_seed(99)
        assert torch.equal(model(tokens(30)).last_hidden_state, first)


@pytest.mark.parametrize(
    "config",
    [LinformerConfig(projection_length=8, window_size=4), PerformerConfig(num_features=16, window_size=4)],
    ids=config_id,
)
@pytest.mark.parametrize("family", ENCODERS)
def test_right_padding_changes_nothing_in_any_family(family: str, config: AttentionConfig) -> None:
    model = converted_model(config, family)
    row = tokens(23)
    padded = torch.cat((row, torch.ones(1, 17, dtype=torch.long)), dim=1)
    with torch.no_grad():
        alone = model(row).last_hidden_state
        out = model(padded, attention_mask=(torch.arange(40) < 23)[None].long()).last_hidden_state[:, :23]
    torch.testing.assert_close(out, alone, atol=2e-5, rtol=2e-5)
