"""The quadratic references by themselves: exact arithmetic, one query at a time."""

import math

import pytest
import torch
from torch import Tensor

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig
from hf_linattn.modeling import naive
from hf_linattn.modeling.feature_maps import Features, positive_features

from ..helpers import CAUSAL, METHODS, SPLIT, config_id, linear_attention, qkv, softmax_attention, trained

pytestmark = pytest.mark.core

LENGTH = 14
WAYS = [*((config, False) for config in [*METHODS, *SPLIT]), *((config, True) for config in [*CAUSAL, *SPLIT])]


def test_the_estimate_of_the_worked_example() -> None:
    """d = 2, q = (1, 0), k = (0.5, 0.5), directions (1, 0), (0, 1): 1.4479 for exp(q.k) = 1.6487."""
    query, key = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.5, 0.5]).double()
    directions = torch.eye(2).double()[None]
    features = [positive_features(x.view(1, 1, 1, 2), directions).log2_phi.exp2().flatten() for x in (query, key)]
    estimate = float(features[0] @ features[1])
    assert estimate == pytest.approx((math.exp(0.75) + math.exp(-0.25)) / 2, rel=1e-12)
    assert round(estimate, 4) == 1.4479
    assert round(math.exp(float(query @ key)), 4) == 1.6487


def given_features(x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
    return Features(torch.zeros_like(x[..., :1]), x)


given_features.signed = False
given_features.of_rows = lambda *_: given_features


def test_the_sums_of_the_worked_example() -> None:
    """Key features (1, 0), (0, 2), values 3, 5: query features (1, 1) read 13 / 3, and of the first key alone 3."""
    query, key = torch.ones(1, 1, 2, 2), torch.tensor([[1.0, 0.0], [0.0, 2.0]])[None, None]
    value = torch.tensor([[3.0], [5.0]])[None, None]
    out = naive.performer_attention(query, key, value, given_features)
    torch.testing.assert_close(out.flatten(), torch.tensor([13 / 3, 13 / 3]))
    out = naive.causal_performer_attention(query, key, value, given_features)
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 13 / 3]))


def test_a_segment_counts_as_often_as_it_has_tokens() -> None:
    """One query 1; keys 0, and 2 and 4 whose mean is 3; the far mass of two tokens carries log 2."""
    layer = linear_attention(LinformerConfig(projection="mean", projection_length=2), heads=1, head_dim=1)
    query, key = torch.ones(1, 1, 3, 1), torch.tensor([0.0, 2.0, 4.0]).view(1, 1, 3, 1)
    value = torch.tensor([1.0, 10.0, 20.0]).view(1, 1, 3, 1)
    out = naive.attention(layer, query, key, value)
    expected = (1 + 2 * math.exp(3) * 15) / (1 + 2 * math.exp(3))
    assert out.flatten().tolist() == pytest.approx([expected] * 3, rel=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "config", [LinformerConfig(projection="learned", projection_length=4), PerformerConfig(num_features=8)]
)
def test_a_window_over_everything_is_softmax(config: AttentionConfig, causal: bool) -> None:
    config = type(config)(**{**vars(config), "window_size": LENGTH})
    inputs = qkv(LENGTH, dtype=torch.float64)
    out = naive.attention(linear_attention(config, causal=causal), *inputs)
    past = torch.ones(1, LENGTH, LENGTH).tril().bool() if causal else None
    torch.testing.assert_close(out, softmax_attention(*inputs, past))


@pytest.mark.parametrize(("config", "causal"), WAYS, ids=config_id)
def test_a_row_is_the_row_without_its_padding(config: AttentionConfig, causal: bool) -> None:
    layer = trained(linear_attention(config, causal=causal), 0.1)
    inputs = qkv(LENGTH, scale=0.25, dtype=torch.float64)
    lengths = torch.tensor([LENGTH, 9])
    out = naive.attention(layer, *inputs, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = naive.attention(layer, *(x[row : row + 1, :, :length] for x in inputs))
        torch.testing.assert_close(out[row : row + 1, :, :length], alone)


@pytest.mark.parametrize(("config", "causal"), WAYS, ids=config_id)
def test_the_scale_is_that_of_products_of_queries_and_keys(config: AttentionConfig, causal: bool) -> None:
    layer = linear_attention(config, causal=causal)
    query, key, value = qkv(LENGTH, dtype=torch.float64)
    out = naive.attention(layer, query, key, value, scale=0.3)
    # features see half of it each; prototypes are in the space of the keys as they are
    key_factor = 1.0 if hasattr(layer, "prototypes") else 0.3**0.5
    torch.testing.assert_close(out, naive.attention(layer, query * (0.3 / key_factor), key * key_factor, value))
