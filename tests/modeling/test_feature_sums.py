"""Sums of features over what is far from a block, on one scale for all blocks."""

import pytest
import torch
from torch import Tensor

from hf_linattn.modeling.feature_sums import SumsByBlock

pytestmark = pytest.mark.core


def far_sums(per_block: Tensor, shift: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """All that `SumsByBlock` gives with so many blocks in a chunk."""
    parts = [(x.clone(), y) for x, y in zip(per_block.split(size, dim=2), shift.split(size, dim=2), strict=True)]
    sums = SumsByBlock(parts)
    before, outputs = sums.start(), []
    for index in range(len(parts)):
        far, before = sums.chunk(index, before)
        outputs.append(far)
    return torch.cat(outputs, dim=2), sums.shift


@pytest.mark.parametrize(("gradients", "one_by_one"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7])
def test_far_sums_are_of_far_blocks_however_many_a_chunk_has(
    blocks: int, gradients: bool, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, or as training adds them up, one by one on a CPU or by a cumulative sum elsewhere."""
    if not one_by_one:
        monkeypatch.setattr(
            "hf_linattn.modeling.feature_sums.running_sums",
            lambda x, y, dim: torch.stack([x, *y], dim=dim).cumsum(dim),
        )
    per_block = torch.randn(2, 3, blocks, 4, 5, dtype=torch.float64)
    shift = torch.randn(2, 3, blocks, 1, 4, dtype=torch.float64)
    # a block without keys
    shift[1, 0, 0] = float("-inf")
    block = torch.arange(blocks)
    far = ((block - block[:, None]).abs() > 1).double()
    expected = torch.einsum("ij,nhjmd->nhimd", far, per_block * shift.exp2().transpose(-1, -2))
    for size in (1, 2, 3, 100):
        with torch.set_grad_enabled(gradients):
            found, scale = far_sums(per_block, shift, size)
        # rows whose only block is the one without keys have no scale: their sums are of nothing
        torch.testing.assert_close(found * scale.nan_to_num(neginf=0.0).exp2().transpose(-1, -2), expected)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_far_sum_keeps_its_digits_beside_a_near_block_of_another_size(gradients: bool) -> None:
    """The total minus the near part would be rounding only."""
    per_block = torch.tensor([1e12, 1.0, 2.0, 3.0]).view(1, 1, 4, 1, 1)
    with torch.set_grad_enabled(gradients):
        found, _ = far_sums(per_block, torch.zeros(1, 1, 4, 1, 1), 4)
    assert found.flatten().tolist()[:2] == [5.0, 3.0]
