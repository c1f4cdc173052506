"""Cutting into blocks, and what is near and far."""

import pytest
import torch

from hf_linattn.modeling.blocks import (
    far_maxima,
    from_blocks,
    near_keys,
    to_blocks,
    with_neighbors,
)
from hf_linattn.modeling.naive import _near_mask

pytestmark = pytest.mark.core

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
    gathered = with_neighbors(to_blocks(positions, window))[0, 0, :, :, 0]
    valid = near_keys(lengths, gathered.shape[0], window, first)
    expected = _near_mask(length, lengths, window, 0, lengths.device)
    for row in range(2):
        for query in range(length):
            block = query // window
            keys = gathered[block][valid[row, block]].long().tolist()
            assert keys == [j for j in range(first, length) if expected[row, query, j]]


@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
def test_far_maxima_are_of_all_blocks_but_the_block_and_its_neighbors(blocks: int) -> None:
    per_block = torch.randn(2, blocks, 3, 4, dtype=torch.float64)
    far = far_maxima(per_block)
    for block in range(blocks):
        others = [other for other in range(blocks) if abs(other - block) > 1]
        nothing = torch.full((2, 3, 4), float("-inf")).double()
        assert torch.equal(far[:, block], per_block[:, others].amax(1) if others else nothing)
