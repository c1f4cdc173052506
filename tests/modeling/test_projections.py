"""Segments, and what E and F are made of and start as."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_linattn.modeling.projections import PROJECTIONS, SHARING, FarMeans, Projection, segment

pytestmark = pytest.mark.core


def make(projection: str, sharing: str = "heads", slots: int = 4, seed: int = 0, max_length: int = 24) -> Projection:
    return Projection(
        projection=projection, sharing=sharing, slots=slots, max_length=max_length, num_heads=2, head_dim=3, seed=seed
    )


def expected_slots(tokens: int, slots: int, first: int) -> list[int]:
    """The slot of each of `tokens` tokens, the first of which may have one of its own."""
    alone = int(first == 0 and slots > 1)
    shared = max(tokens - alone, 1)
    return [0] * min(alone, tokens) + [alone + r * (slots - alone) // shared for r in range(tokens - alone)]


def means(x: Tensor, slots: list[int], reduce: Callable[..., Tensor] = torch.mean) -> Tensor:
    """(batch, heads, length, dim) -> (batch, heads, slots, dim), one slot's tokens at a time."""
    members = [[r for r, slot in enumerate(slots) if slot == s] for s in range(max(slots) + 1)]
    return torch.stack([reduce(x[:, :, tokens], dim=2) for tokens in members], dim=2)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("slots", [1, 2, 4, 7, 40])
def test_segments_hold_each_valid_token_once_in_order_and_evenly(slots: int, first: int) -> None:
    lengths = torch.tensor([19, 8, 1, 0])
    cut = segment(lengths, 19, slots, first)
    assert torch.equal(cut.members.sum(1), cut.valid.long())
    for row, length in enumerate(lengths.tolist()):
        count = max(length - first, 0)
        assert cut.valid[row].nonzero().flatten().tolist() == list(range(first, first + count))
        assert cut.slot[row, first : first + count].tolist() == expected_slots(count, slots, first)
        sizes = cut.members[row].sum(-1).tolist()
        evenly = sizes[1:] if first == 0 and slots > 1 else sizes
        assert max(evenly) - min(evenly) <= 1
        assert max(sizes) <= 1 or count > slots


@pytest.mark.parametrize("projection", ["learned", "mean", "conv"])
def test_every_trained_projection_starts_as_the_segment_mean(projection: str) -> None:
    key, value = torch.randn(2, 1, 2, 20, 3)
    slots = expected_slots(18, 4, 0)
    summaries = make(projection)(key, value, segment(torch.tensor([18]), 20, 4))
    torch.testing.assert_close(summaries.key, means(key, slots))
    torch.testing.assert_close(summaries.value, means(value, slots))
    assert summaries.log_mass.exp().flatten().round().tolist() == [1, 6, 6, 5]


def test_max_takes_the_largest_of_each_segment() -> None:
    key, value = torch.randn(2, 1, 2, 20, 3)
    summaries = make("max")(key, value, segment(torch.tensor([20]), 20, 4))
    torch.testing.assert_close(summaries.key, means(key, expected_slots(20, 4, 0), torch.amax))


def test_gaussian_entries_are_fixed_and_have_variance_one_over_k() -> None:
    module = make("gaussian", slots=50, max_length=2000)
    assert not list(module.parameters())
    for side in ("key", "value"):
        entries = getattr(module, f"{side}_weight")
        assert entries.mean().abs() < 0.002
        assert entries.var().item() == pytest.approx(1 / 50, rel=0.02)
    assert not torch.equal(module.key_weight, module.value_weight)
    assert torch.equal(module.key_weight, make("gaussian", slots=50, max_length=2000).key_weight)
    assert not torch.equal(module.key_weight, make("gaussian", slots=50, max_length=2000, seed=1).key_weight)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_sharing_says_how_many_matrices_there_are(projection: str, sharing: str) -> None:
    state = make(projection, sharing).state_dict()
    shape = {"learned": (4, 24), "conv": (math.ceil(24 / 4), 3), "gaussian": (4, 24)}.get(projection)
    sides = ["key_weight"] if sharing in ("key_value", "layers") else ["key_weight", "value_weight"]
    heads = 2 if sharing == "none" else 1
    expected = dict.fromkeys(sides, (heads, *shape)) if shape else {}
    if projection == "learned":
        expected["bias"] = (heads, 4)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_one_set_of_weights_serves_every_length(projection: str) -> None:
    module = make(projection)
    for length in (1, 2, 7, 23, 24):
        key, value = torch.randn(2, 1, 2, length, 3)
        summaries = module(key, value, segment(torch.tensor([length]), length, 4))
        assert summaries.key.shape == (1, 2, 4, 3)
        assert summaries.key.isfinite().all()
        # all of a row's mass, and no more
        assert summaries.log_mass.exp().sum().item() == pytest.approx(length)


@pytest.mark.parametrize("tokens", [6, 12])
def test_what_a_row_teaches_holds_for_a_row_of_twice_the_length(tokens: int) -> None:
    """Two tokens of the longer row have together the weight of one of the shorter, and all columns take part."""
    projection = make("learned")
    weight = projection.key_weight
    torch.nn.init.normal_(weight)
    short, long = (
        projection.deviation("key", segment(torch.tensor([length]), length, 4)) for length in (tokens, 2 * tokens)
    )
    # pairs of neighbors in the longer row
    torch.testing.assert_close(long.unflatten(-1, (tokens, 2)).sum(-1), short)
    spans = weight.unflatten(-1, (tokens, 24 // tokens)).mean(-1)
    torch.testing.assert_close(short[0], spans * 4 / tokens)
    (short.sum()).backward()
    assert bool((weight.grad != 0).all())


def test_a_row_of_the_longest_length_has_a_column_for_each_token() -> None:
    """The shortcut that rows without padding take is what the general way gives."""
    projection = make("learned", sharing="none")
    torch.nn.init.normal_(projection.key_weight)
    general, shortcut = (
        projection.deviation("key", segment(torch.tensor([24]), 24, 4, padded=padded)) for padded in (True, False)
    )
    torch.testing.assert_close(general, shortcut)
    torch.testing.assert_close(shortcut[0], projection.key_weight * 4 / 24)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("window", [2, 3, 7])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_far_means_are_of_far_tokens_only(slots: int, window: int, first: int) -> None:
    lengths, x = torch.tensor([19, 11]), torch.randn(2, 19, 2, 3)
    segments = segment(lengths, 19, slots, first)
    block, blocks = torch.arange(19) // window, -(-19 // window)
    # (blocks, length) and (batch, blocks, slots, length)
    far = (block - torch.arange(blocks)[:, None]).abs() > 1
    members = (segments.members[:, None] & far[:, None]).float()
    counts = members.sum(-1)
    means_by_block = FarMeans(x, segments, counts, window).chunk(0, blocks)
    expected = torch.einsum("nbsl,nlhd->nbshd", members, x) / counts.clamp_min(1)[..., None, None]
    exists = counts > 0
    torch.testing.assert_close(means_by_block[exists], expected[exists])
