"""Spectra and mass of attention matrices whose values are known."""

import math

import pytest
import torch

from hf_linattn.analyze.spectra import (
    LayerSums,
    attention_singular_values,
    energy,
    logit_singular_values,
    rank_of,
)


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _sums(**options) -> LayerSums:
    defaults = {"causal": False, "window_sizes": (4,), "spectrum_length": 64, "feature_error": 0.1}
    return LayerSums(0, **{**defaults, **options})


def test_logits_have_at_most_head_dim_singular_values() -> None:
    query, key = _normal(2, 64, 4), _normal(2, 64, 4, seed=1)
    whole = torch.linalg.svdvals((query @ key.transpose(-1, -2)).double())
    assert int((whole > 1e-6 * whole[:, :1]).sum(-1).max()) == 4
    torch.testing.assert_close(logit_singular_values(query, key), whole[:, :4].float(), rtol=1e-5, atol=1e-5)
    # softmax makes a matrix of full rank of it
    assert int((attention_singular_values(query, key, causal=False) > 1e-7).sum(-1).min()) > 4


def test_uniform_attention_has_rank_one() -> None:
    values = attention_singular_values(torch.zeros(3, 50, 8), _normal(3, 50, 8), causal=False)
    torch.testing.assert_close(values[:, 0], torch.ones(3))
    assert float(values[:, 1:].abs().max()) < 1e-6
    assert rank_of(energy(values), 0.99).tolist() == [1, 1, 1]


def test_attention_to_oneself_has_full_rank() -> None:
    # q.k is large on the diagonal alone
    query = 100 * torch.eye(16)[None]
    values = attention_singular_values(query, query, causal=False)
    torch.testing.assert_close(values, torch.ones(1, 16))
    assert [int(rank_of(energy(values), share)) for share in (0.5, 0.9, 1.0)] == [8, 15, 16]


def test_a_short_row_is_as_long_as_its_values() -> None:
    query = _normal(1, 3, 8)
    assert logit_singular_values(query, query).shape == (1, 3)
    sums = _sums()
    sums.add(query, query)
    layer = sums.result()
    assert len(layer.logit_energy) == 8 and len(layer.attention_energy) == 64
    assert layer.logit_energy[3:] == (1.0,) * 5 and layer.logit_spectrum[3:] == (0.0,) * 5


@pytest.mark.parametrize("causal", [False, True])
def test_mass_and_entropy_of_uniform_attention(causal: bool) -> None:
    length = 300
    sums = _sums(causal=causal, window_sizes=(1, 4, length))
    sums.add(torch.zeros(2, length, 8), _normal(2, length, 8))
    head = sums.result().heads[0]
    seen = torch.arange(1, length + 1, dtype=torch.float64) if causal else torch.full((length,), float(length))
    assert head.entropy == pytest.approx(float(seen.log().mean()), rel=1e-5)
    assert head.first_mass == pytest.approx(float((1 / seen).mean()), rel=1e-5)
    near = (
        seen.clamp_max(4) if causal else torch.tensor([min(i, 3) + min(length - 1 - i, 3) + 1 for i in range(length)])
    )
    assert head.window_mass[1] == pytest.approx(float((near / seen).mean()), rel=1e-5)
    assert head.window_mass[2] == pytest.approx(1.0, rel=1e-5)
    assert head.query_norm == 0.0


def test_features_that_a_wanted_error_needs() -> None:
    # all queries and keys alike: |q + k|^2 = 4 x^2, and Lemma 2 divided by SM^2 gives m
    x = 0.9
    query = torch.zeros(1, 5, 2)
    query[..., 0] = x
    sums = _sums(feature_error=0.05)
    sums.add(query, query)
    s = 4 * x * x
    assert sums.result().heads[0].log10_features == pytest.approx(
        math.log10(math.exp(s) * (1 - math.exp(-s)) / 0.05**2), rel=1e-5
    )


def test_means_over_documents() -> None:
    documents = [_normal(2, 20, 4, seed=seed) for seed in range(2)]
    apart = []
    for document in documents:
        sums = _sums()
        sums.add(document, document)
        apart.append(sums.result().heads[1])
    together = _sums()
    for document in documents:
        together.add(document, document)
    head = together.result().heads[1]
    assert head.entropy == pytest.approx((apart[0].entropy + apart[1].entropy) / 2)
    assert head.attention_rank == pytest.approx(
        [(a + b) / 2 for a, b in zip(*(x.attention_rank for x in apart), strict=True)]
    )
