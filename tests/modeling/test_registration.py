"""A far part and a feature map from outside the package: a class and a row each, and all promises hold."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, LinformerConfig, PerformerConfig, convert
from hf_linattn.modeling import configuration_linattn, far_clusters, naive
from hf_linattn.modeling.blocks import near_tokens
from hf_linattn.modeling.far_part import Chunk, FarKeys, Rows, Slots
from hf_linattn.modeling.feature_maps import FEATURE_MAPS, FeatureMap, Features
from hf_linattn.modeling.methods import METHODS, Method

from ..helpers import assert_values_and_gradients_agree, linear_attention, qkv, tiny_model
from .conformance import (
    test_causality,
    test_errors,
    test_length,
    test_numerics,
    test_padding,
    test_parallel_equals_step,
    test_reference,
    test_saving,
)
from .conformance.cases import DTYPES, TOLERANCE, in_dtype

pytestmark = pytest.mark.core

WINDOWS = pytest.mark.parametrize("window_size", [0, 4])
# queries of a decoder without a window that share what is near
BLOCK = 64


# a far part: one slot for all that is far


class MeanFarPart(FarKeys):
    """One slot: the mean of all far keys and values, with the log of their number."""

    num_slots = 1

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int) -> None:
        self.modules = {}

    def summarize(self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> Slots:
        slots = _means(_tokens(key, value, rows.far_tokens[:, None, :, None]).sum(2, keepdim=True))
        return Slots(slots.key.to(key.dtype), slots.value.to(value.dtype), slots.log_mass)

    def summarize_by_block(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, window: int, scale: float
    ) -> "MeanByBlock":
        return MeanByBlock(_tokens(key, value, rows.far_tokens[:, :, None, None]), window)

    # decoders: the state is the sums of keys, values and ones, (batch, heads, 2 dim + 1)

    def unit(self, window: int) -> int:
        return window or BLOCK

    def block_size(self, window: int) -> int:
        return self.unit(window)

    def near_length(self, window: int, first: int) -> int:
        return 2 * window or BLOCK

    def near_start(self, rank: Tensor, window: int, first: int) -> Tensor:
        return (rank // window - 1) * window if window else rank // BLOCK * BLOCK

    def initial_state(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return (_tokens(key[:, :, :1], value[:, :, :1], torch.zeros(1, dtype=torch.bool)).sum(2),)

    def absorb(
        self, state: tuple[Tensor, ...], key: Tensor, value: Tensor, valid: Tensor, before: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        return (state[0] + _tokens(key, value, valid[:, None, :, None]).sum(2),)

    def save(self, state: tuple[Tensor, ...], count: Tensor) -> tuple[tuple[Tensor, ...], Slots]:
        return state, _means(state[0].unsqueeze(2))

    def chunk(self, state: tuple[Tensor, ...], chunk: Chunk) -> tuple[Slots, tuple[Tensor, ...]]:
        key, value, valid, ranks = chunk.key, chunk.value, chunk.becomes_far, chunk.ranks
        # (batch, blocks, heads, 2 dim + 1), before each block
        valid = torch.ones(1, key.shape[2], dtype=torch.bool) if valid is None else valid
        tokens = _tokens(key, value, valid[:, None, :, None]).unflatten(2, (-1, ranks.shape[2])).sum(3)
        known = torch.cat((state[0].unsqueeze(1), tokens.transpose(1, 2)), dim=1).cumsum(1)
        sums, after = known[:, :-1], known[:, -1].clone()
        slots = _means(sums.unsqueeze(3))
        return Slots(slots.key.to(key.dtype), slots.value.to(key.dtype), slots.log_mass.unsqueeze(3)), (after,)


class MeanByBlock:
    """What blocks of queries see: all tokens but those of three blocks."""

    def __init__(self, tokens: Tensor, window: int) -> None:
        self.tokens, self.window = tokens, window

    def chunk(self, begin: int, end: int) -> Slots:
        near = near_tokens(self.tokens, begin, end, self.window).sum(2)
        # the slot before the heads: (batch, blocks, 1, heads, ...)
        slots = _means((self.tokens.sum(1, keepdim=True) - near).unsqueeze(2))
        return slots._replace(log_mass=slots.log_mass.transpose(2, 3))


def _tokens(key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    """Keys, values and ones side by side, zero where not valid."""
    dtype = torch.promote_types(key.dtype, torch.float32)
    tokens = torch.cat((key.to(dtype), value.to(dtype), torch.ones_like(key[..., :1], dtype=dtype)), dim=-1)
    return tokens.masked_fill(~valid, 0.0)


def _means(sums: Tensor) -> Slots:
    count = sums[..., -1].round()
    means = sums[..., :-1] / count.clamp_min(1).unsqueeze(-1)
    return Slots(*means.chunk(2, dim=-1), count.log())


@pytest.fixture
def mean_config(monkeypatch: pytest.MonkeyPatch) -> type[AttentionConfig]:
    """The class of the settings of a method "mean" that is registered while a test runs."""
    monkeypatch.setattr(configuration_linattn, "_CONFIGS", dict(configuration_linattn._CONFIGS))

    @dataclass(kw_only=True)
    class MeanConfig(AttentionConfig):
        method: ClassVar[str] = "mean"

        flavor: str = field(default="plain", metadata={"choices": ("plain", "second")})

        def __post_init__(self) -> None:
            super().__post_init__()
            configuration_linattn.check_choice("MeanConfig", "flavor", self.flavor, ("plain", "second"))

    row = Method(label="Mean", paper="nobody", config=MeanConfig, encoder=MeanFarPart, decoder=MeanFarPart)
    monkeypatch.setitem(METHODS, "mean", row)
    return MeanConfig


# a feature map: softplus, without directions


class SoftplusMap(FeatureMap):
    """softplus(x) of each coordinate."""

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        return Features(torch.zeros_like(x[..., :1]), F.softplus(x))


@pytest.fixture
def softplus_config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PerformerConfig]:
    """Settings with a map "softplus" that is registered while a test runs."""
    monkeypatch.setitem(FEATURE_MAPS, "softplus", SoftplusMap)
    return lambda **options: PerformerConfig(feature_map="softplus", num_features=8, **options)


@pytest.fixture(params=["far part", "feature map"])
def make_config(request: pytest.FixtureRequest) -> Callable[..., AttentionConfig]:
    """Makes settings of what was registered."""
    return request.getfixturevalue({"far part": "mean_config", "feature map": "softplus_config"}[request.param])


def encoder_of(config: AttentionConfig, **options: Any) -> LinAttnPreTrainedModel:
    return convert(tiny_model(), config, **options)


def decoder_of(config: AttentionConfig, **options: Any) -> LinAttnPreTrainedModel:
    return convert(tiny_model("gpt2", "AutoModelForCausalLM"), config, **options)


@WINDOWS
def test_the_promises_of_an_encoder_hold(
    make_config: Callable[..., AttentionConfig], window_size: int, tmp_path: Path
) -> None:
    config = make_config(window_size=window_size, global_tokens=1, exact_length=0)
    for dtype in DTYPES:
        model, context = in_dtype(encoder_of(config), dtype)
        test_padding.check_rows_do_not_depend_on_their_padding(model, TOLERANCE[dtype], context)
        test_padding.check_rows_of_padding_are_finite(model, context)
        test_numerics.check_results_are_finite(model, padded=True, context=context)
    model = encoder_of(config)
    test_saving.check_a_reload_gives_the_same_bits(model, tmp_path)
    test_length.check_any_length_works(model)
    test_length.check_longer_inputs_are_refused(model)
    test_errors.check_attention_matrices_are_refused(model)
    for mask in test_length.masks(test_length.LENGTH):
        test_length.check_nothing_quadratic_is_allocated(encoder_of(config, max_length=test_length.LENGTH), mask)


@WINDOWS
def test_the_promises_of_a_decoder_hold(
    make_config: Callable[..., AttentionConfig], window_size: int, tmp_path: Path
) -> None:
    config = make_config(window_size=window_size, global_tokens=1)
    model = decoder_of(config)
    test_causality.check_no_output_depends_on_a_later_input(model, (0, 3, 8, 20, 38))
    test_parallel_equals_step.check_steps_are_the_parallel_form(model)
    test_padding.check_rows_do_not_depend_on_their_padding(model, 1e-5)
    test_padding.check_rows_of_padding_are_finite(model, use_cache=True)
    test_numerics.check_results_are_finite(model, padded=True)
    test_length.check_any_length_works(model)
    test_length.check_longer_inputs_are_refused(model)
    test_errors.check_attention_matrices_are_refused(model)
    test_saving.check_a_reload_gives_the_same_bits(model, tmp_path, AutoModelForCausalLM, test_saving.inputs_of("gpt2"))


@WINDOWS
@pytest.mark.parametrize("causal", [False, True])
def test_a_feature_map_from_outside_has_a_reference(
    softplus_config: Callable[..., PerformerConfig], causal: bool, window_size: int
) -> None:
    layer = linear_attention(softplus_config(window_size=window_size), causal=causal)
    for lengths in (None, torch.tensor([30, 17])):
        test_reference.check_the_fast_form_is_the_reference(layer, lengths)


@WINDOWS
@pytest.mark.parametrize("causal", [False, True])
def test_one_slot_is_one_cluster(
    monkeypatch: pytest.MonkeyPatch, mean_config: type[AttentionConfig], causal: bool, window_size: int
) -> None:
    # the dummy far part adds nothing for the spread of its tokens
    monkeypatch.setattr(far_clusters, "SPREAD", 0.0)
    options = {"window_size": window_size, "global_tokens": 1}
    layer = linear_attention(mean_config(**options), causal=causal)
    clusters = LinformerConfig(projection="cluster", landmarks="prototypes", projection_length=1, **options)
    reference = linear_attention(clusters, causal=causal)
    assert_values_and_gradients_agree(layer, lambda *x: naive.attention(reference, *x), qkv(90))


def test_errors_name_what_was_registered(
    mean_config: type[AttentionConfig], softplus_config: Callable[..., PerformerConfig]
) -> None:
    test_errors.check_bad_values_are_refused_by_name(mean_config)
    with pytest.raises(ValueError, match="'softplus'"):
        PerformerConfig(feature_map="other")
    with pytest.raises(ValueError, match="'mean'"):
        AttentionConfig.from_dict({"method": "other"})


def test_nothing_of_it_stays() -> None:
    assert "mean" not in METHODS and "mean" not in configuration_linattn.method_configs()
    assert "softplus" not in FEATURE_MAPS
