"""Cutting into blocks, and what is near and far."""

import pytest
import torch
from torch import Tensor

from hf_linattn.modeling.blocks import (
    FarSums,
    far_maxima,
    from_blocks,
    near_keys,
    near_mask,
    to_blocks,
    with_neighbours,
)

LENGTHS = [1, 3, 4, 5, 12, 17]


@pytest.mark.parametrize("length", LENGTHS)
def test_from_blocks_undoes_to_blocks(length: int) -> None:
    x = torch.randn(2, 3, length, 5)
    blocks = to_blocks(x, 4)
    assert blocks.shape == (2, 3, -(-length // 4), 4, 5)
    assert torch.equal(from_blocks(blocks, length), x)


@pytest.mark.parametrize("first", [0, 2, 6])
@pytest.mark.parametrize("length", LENGTHS)
def test_gathered_keys_are_those_of_the_quadratic_mask(length: int, first: int) -> None:
    window = 4
    lengths = torch.tensor([length, max(length - 3, 1)])
    # each key's value is its position, so that what was gathered can be read off
    positions = torch.arange(length, dtype=torch.float64).view(1, 1, length, 1)
    gathered = with_neighbours(to_blocks(positions, window))[0, 0, :, :, 0]
    seen = near_keys(lengths, gathered.shape[0], window, first)
    expected = near_mask(length, lengths, window, 0, lengths.device)
    for row in range(2):
        for query in range(length):
            block = query // window
            found = gathered[block][seen[row, block]].long().tolist()
            assert found == [j for j in range(first, length) if expected[row, query, j]]


@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
def test_far_maxima_are_of_all_blocks_but_the_block_and_its_neighbours(blocks: int) -> None:
    per_block = torch.randn(2, blocks, 3, 4, dtype=torch.float64)
    far = far_maxima(per_block)
    for block in range(blocks):
        others = [other for other in range(blocks) if abs(other - block) > 1]
        nothing = torch.full((2, 3, 4), float("-inf")).double()
        assert torch.equal(far[:, block], per_block[:, others].amax(1) if others else nothing)


def far_sums(weights: Tensor, x: Tensor, window: int, size: int) -> Tensor:
    """All that `FarSums` gives with so many blocks in a run."""
    blocks = -(-x.shape[1] // window)
    runs = [(begin, min(begin + size, blocks)) for begin in range(0, blocks, size)]
    sums = FarSums(weights, x, window, runs)
    before, found = sums.start(), []
    for index in range(len(runs)):
        far, before = sums.run(index, before)
        found.append(far)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_far_sums_are_of_far_tokens_however_many_blocks_a_run_has(
    length: int, heads: int, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether sums are added up one by one, as on a CPU, or by a cumulative sum, as elsewhere."""
    if not one_by_one:
        monkeypatch.setattr("hf_linattn.modeling.blocks._running", lambda x, y: torch.cat((x[:, None], y), 1).cumsum(1))
    window, weights, x = 2, torch.randn(1, heads, 3, length), torch.randn(2, length, 2, 5)
    block = torch.arange(length) // window
    far = ((block - torch.arange(-(-length // window))[:, None]).abs() > 1).float()
    expected = torch.einsum("bl,hrl,nlhd->nbrhd", far, weights[0].expand(2, 3, length), x)
    for size in (1, 2, 3, 100):
        torch.testing.assert_close(far_sums(weights, x, window, size), expected)


def test_a_far_sum_keeps_its_digits_beside_a_near_block_of_another_size() -> None:
    """The total minus the near part would be rounding only."""
    x = torch.tensor([1e12, 1.0, 2.0, 3.0]).view(1, 4, 1, 1)
    assert far_sums(torch.ones(1, 1, 1, 4), x, 1, 4).flatten().tolist()[:2] == [5.0, 3.0]
