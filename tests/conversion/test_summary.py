"""What a conversion adds and saves, counted."""

import dataclasses

import pytest

from hf_linattn import LinformerConfig, PerformerConfig
from hf_linattn.conversion.flops import linear_flops
from hf_linattn.conversion.summary import summarize

from ..helpers import converted_model


def test_linformer_is_counted_by_hand() -> None:
    model = converted_model(LinformerConfig(projection_length=8, projection="mean"))
    summary = summarize(model)
    heads, head_dim = model.config.num_attention_heads, model.config.hidden_size // model.config.num_attention_heads
    # q (E k)^T and the weights times F v: 2 operations for each multiply-add, per token, head and layer. Means are no
    # matrix product.
    assert summary.flops == 2 * 2 * 8 * head_dim * heads * summary.layers
    assert summary.softmax_flops == 4 * summary.max_length * head_dim * heads * summary.layers
    assert summary.parameters_added == 0
    # 4 k d n < 4 n n d from n > k on
    assert summary.crossover == 9


def test_layers_left_softmax_are_counted_as_softmax() -> None:
    whole = summarize(converted_model(PerformerConfig(num_features=8)))
    half = summarize(converted_model(PerformerConfig(num_features=8, layers=[1])))
    assert (half.layers, half.converted) == (2, 1)
    assert half.flops == pytest.approx((whole.flops + whole.softmax_flops) / 2)
    assert half.parameters_added * 2 == whole.parameters_added


def test_a_conversion_that_never_pays_says_so() -> None:
    summary = summarize(converted_model(PerformerConfig(num_features=1024)))
    assert summary.crossover is None
    assert f"nowhere up to {summary.max_length} tokens" in str(summary)


def test_slots_by_length_are_counted_and_said() -> None:
    model = converted_model(LinformerConfig(projection_length=2, tokens_per_slot=4))
    settings, config = model.config.attention, model.config
    fixed = dataclasses.replace(settings, tokens_per_slot=None)
    for length in (8, 32, 64):
        as_many = dataclasses.replace(fixed, projection_length=length // 4)
        assert linear_flops(settings, config, length) == linear_flops(as_many, config, length)
    line = "grows with n * n        n / 4 slots for each of n tokens (tokens_per_slot)"
    assert str(summarize(model)).splitlines()[-1] == line
    assert summarize(converted_model(LinformerConfig(projection_length=2))).quadratic == ()
