"""Padding: a row's result does not depend on it, rows of nothing else are finite, and no mask is a mask of ones."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel
from hf_linattn.modeling.modeling_linattn import sliding_layers

from ...helpers import config_id, tokens
from .cases import (
    CASES,
    DECODERS,
    DTYPES,
    ENCODER,
    ENCODERS,
    TOLERANCE,
    WAYS,
    in_dtype,
    is_signed,
    make_model,
    output_of,
    takes_positions,
)

pytestmark = pytest.mark.core

LENGTH, WIDTH = 23, 40
#: where the tokens of a padded row stand
PLACES = {
    "right": torch.arange(LENGTH),
    "left": torch.arange(WIDTH - LENGTH, WIDTH),
    "both": torch.arange(5, 5 + LENGTH),
    "inside": torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))[:LENGTH].sort().values,
}
ALL_WAYS = pytest.mark.parametrize("config", WAYS, ids=config_id)
ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=config_id)


@torch.no_grad()
def check_rows_do_not_depend_on_their_padding(
    model: LinAttnPreTrainedModel, tolerance: float, context: AbstractContextManager[Any] | None = None
) -> None:
    """Alone and beside a longer row, with padding on any side, a row has the same outputs."""
    row, other = tokens(LENGTH)[0], tokens(WIDTH, seed=1)[0]
    with context or nullcontext():
        alone, full = output_of(model, row[None])[0], output_of(model, other[None])[0]
        for name, places in PLACES.items():
            if name != "right" and not takes_positions(model):
                continue
            # a sliding window counts the padding inside a row, as in the base model
            if name == "inside" and sliding_layers(model.config):
                continue
            # padding of random tokens: not even a padding embedding may show through
            batch = torch.stack((other.index_put((places,), row), other))
            mask = torch.ones_like(batch)
            mask[0] = torch.zeros(WIDTH, dtype=torch.long).index_fill(0, places, 1)
            out = output_of(model, batch, mask)
            torch.testing.assert_close(out[0, places].float(), alone.float(), atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(out[1].float(), full.float(), atol=tolerance, rtol=tolerance)


def check_rows_of_padding_are_finite(
    model: LinAttnPreTrainedModel, context: AbstractContextManager[Any] | None = None, **options: Any
) -> None:
    """Rows without a token and with one, beside others and alone, forward and backward."""
    for lengths in ([0, 1, 29, 30], [0, 0, 0, 0]):
        mask = (torch.arange(30) < torch.tensor(lengths)[:, None]).long()
        for sided in (mask, mask.flip(1)):
            with context or nullcontext():
                out = output_of(model, tokens(30, batch=4), sided, **options)
            assert out.isfinite().all()
            out.float().square().mean().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            model.zero_grad()


@ALL_DTYPES
@ALL_WAYS
def test_an_encoders_row_does_not_depend_on_its_padding(config: AttentionConfig, dtype: torch.dtype | str) -> None:
    model, context = in_dtype(make_model(ENCODER, config), dtype)
    # a mass of a tenth of the terms that cancel has one digit less
    tolerance = TOLERANCE[dtype] * (10 if is_signed(config) else 1)
    check_rows_do_not_depend_on_their_padding(model, tolerance, context)


@pytest.mark.parametrize(("architecture", "config"), [case for case in ENCODERS if case[0] != ENCODER], ids=config_id)
def test_nor_does_that_of_any_encoder(architecture: str, config: AttentionConfig) -> None:
    check_rows_do_not_depend_on_their_padding(make_model(architecture, config), 2e-5)


@pytest.mark.parametrize(("architecture", "config"), DECODERS, ids=config_id)
def test_a_decoders_row_does_not_depend_on_its_padding(architecture: str, config: AttentionConfig) -> None:
    model, tolerance = make_model(architecture, config), 1e-5
    if is_signed(config):
        # cancellation: see test_parallel_equals_step.py; in float64 nothing of it is left
        model, tolerance = model.double(), 1e-10
    check_rows_do_not_depend_on_their_padding(model, tolerance)


@ALL_DTYPES
@ALL_WAYS
def test_rows_of_padding_are_finite_in_an_encoder(config: AttentionConfig, dtype: torch.dtype | str) -> None:
    check_rows_of_padding_are_finite(*in_dtype(make_model(ENCODER, config), dtype))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(("architecture", "config"), DECODERS, ids=config_id)
def test_rows_of_padding_are_finite_in_a_decoder(architecture: str, config: AttentionConfig, use_cache: bool) -> None:
    check_rows_of_padding_are_finite(make_model(architecture, config), use_cache=use_cache)


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "config"), CASES, ids=config_id)
def test_a_mask_of_ones_is_no_mask(architecture: str, config: AttentionConfig) -> None:
    model, input_ids = make_model(architecture, config), tokens(30, batch=2)
    for dtype in DTYPES:
        model, context = in_dtype(model, dtype)
        with context:
            without = model(input_ids)[0]
            assert torch.equal(model(input_ids, attention_mask=torch.ones_like(input_ids))[0], without)
