"""Numbers: no dtype, autocast included, gives NaN or Inf for inputs of any scale, forward and backward."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel

from ...helpers import (
    CACHE,
    CAUSAL,
    CAUSAL_FEW,
    config_id,
    logits_in_pieces,
    prompts,
    small,
    tokens,
    variants,
)
from .cases import DECODER, DECODERS, DTYPES, ENCODER, ENCODERS, WAYS, in_dtype, make_model, output_of
from .cases import REGISTRY as METHODS

pytestmark = pytest.mark.core

FEW_CAUSAL = pytest.mark.parametrize("config", CAUSAL_FEW, ids=config_id)
#: names of the weights of queries and keys in the architectures on which every way is tested
QUERIES_AND_KEYS = {ENCODER: ("query.", "key."), DECODER: ("c_attn",)}


def scale_queries_and_keys(model: LinAttnPreTrainedModel, factor: float) -> None:
    """Queries and keys, and with them the square root of their products."""
    names = QUERIES_AND_KEYS[model.config.base_model_type]
    width = 2 * model.config.hidden_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                # of GPT-2's one matrix the first two thirds
                (parameter[..., :width] if "c_attn" in name else parameter).mul_(factor)


def check_results_are_finite(
    model: LinAttnPreTrainedModel, *, padded: bool, context: AbstractContextManager[Any] | None = None
) -> None:
    """Outputs, and gradients of those of valid tokens."""
    mask = torch.ones(2, 30, dtype=torch.long)
    if padded:
        mask[1, 11:] = 0
    with context or nullcontext():
        out = output_of(model, tokens(30, batch=2), mask)
    assert out.isfinite().all()
    out[mask.bool()].float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    model.zero_grad()


@pytest.mark.parametrize("dtype", DTYPES, ids=config_id)
@pytest.mark.parametrize("config", WAYS, ids=config_id)
def test_large_queries_and_keys_give_finite_results(config: AttentionConfig, dtype: torch.dtype | str) -> None:
    """Queries and keys scaled so that each product is up to 300 times as large as the tiny model's."""
    model, context = in_dtype(make_model(ENCODER, config), dtype)
    before = 1.0
    for scale, padded in ((1.0, True), (30.0, False), (300.0, True), (300.0, False)):
        scale_queries_and_keys(model, (scale / before) ** 0.5)
        before = scale
        check_results_are_finite(model, padded=padded, context=context)


@pytest.mark.parametrize(("architecture", "config"), [case for case in ENCODERS if case[0] != ENCODER], ids=config_id)
def test_every_encoder_is_finite_in_half_precision(architecture: str, config: AttentionConfig) -> None:
    for dtype in DTYPES:
        model, context = in_dtype(make_model(architecture, config), dtype)
        check_results_are_finite(model, padded=True, context=context)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=config_id)
@pytest.mark.parametrize("config", CAUSAL, ids=config_id)
def test_large_queries_and_keys_give_finite_results_in_decoders(config: AttentionConfig, dtype: torch.dtype) -> None:
    model = make_model(DECODER, config).to(dtype)
    scale_queries_and_keys(model, 10.0)
    inputs = prompts(40, 23)
    logits = model(**inputs).logits
    assert logits.isfinite().all()
    logits[inputs["attention_mask"].bool()].float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    if config in CAUSAL_FEW:
        steps, _ = logits_in_pieces(model, inputs, [20] + [1] * 20)
        assert steps.isfinite().all()


@pytest.mark.parametrize(("architecture", "config"), DECODERS, ids=config_id)
def test_autocast_of_decoders_is_finite(architecture: str, config: AttentionConfig) -> None:
    check_results_are_finite(
        make_model(architecture, config), padded=True, context=torch.autocast("cpu", dtype=torch.bfloat16)
    )


@torch.no_grad()
@FEW_CAUSAL
def test_autocast_is_near_float32(config: AttentionConfig) -> None:
    model, inputs = make_model(DECODER, config), prompts(40, 23)
    valid = inputs["attention_mask"].bool()
    expected = output_of(model, inputs["input_ids"], inputs["attention_mask"])[valid]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = output_of(model, inputs["input_ids"], inputs["attention_mask"])[valid]
        steps, _ = logits_in_pieces(model, inputs, [20, 1, 19])
    for found in (logits.float(), steps[valid].float()):
        if getattr(config, "projection", None) == "cluster":
            # a key between two clusters may go to either, and the queries that look at it see that
            near = (found - expected).abs() <= 0.1 + 0.1 * expected.abs()
            assert near.float().mean() > 0.98
            continue
        torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)


LONG = [
    config
    for method in METHODS.values()
    for window in (0, 64)
    for config in variants(method.config, window_size=window)
    if type(config)(**{**vars(config), "window_size": 0, "global_tokens": 0}) in CAUSAL
]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=config_id)
@pytest.mark.parametrize("config", LONG, ids=config_id)
def test_long_prompts_are_finite_in_half_precision(config: AttentionConfig, dtype: torch.dtype) -> None:
    if hasattr(config, "projection_length"):
        config = small(type(config), **{**vars(config), "projection_length": 64})
    model = make_model(DECODER, config, max_length=8200).to(dtype)
    cache = DynamicCache()
    hidden = model.base_model(tokens(8192), **{CACHE: cache}).last_hidden_state
    assert hidden.dtype == dtype
    assert hidden.isfinite().all()
    for _ in range(2):
        assert model(tokens(1), **{CACHE: cache}).logits.isfinite().all()
    assert cache.get_seq_length() == 8194
