"""Sums S = sum phi(k) v^T and z = sum phi(k) over keys, each feature on a scale of its own, and reading from them.

Sums come as one tensor (..., features, value_dim + 1): the values carry a column of ones, whose sums are z.
Their `shift` (..., 1, features or 1) is the largest base-2 exponent of each feature over the keys: taken out of the
sums and given back to the queries, it cancels exactly. Nothing can overflow, and every feature has a key
that counts as one, so that no query finds all of them underflown.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import running_sums, to_blocks
from .feature_maps import FeatureMap, Features
from .merge import NEVER, Partial, finite, masked, shifted_exp2

# Least share of the largest possible mass that a map with negative features is taken to have: such an
# estimate can come out as zero or below, and this bounds the output by 100 times the largest value.
SIGNED_MASS_FLOOR = 1e-2


def bounded_features(feature_map: FeatureMap, x: Tensor, side: str, *, scale: float, alone: bool = False) -> Features:
    """The map's features and, if they can be negative, one more for the keys' largest possible mass.

    By Cauchy and Schwarz phi(q).phi(k) is at most |phi(q)||phi(k)|, which for m / 2 pairs of cos and sin
    is m / 2 times the exponentials. Queries have a zero there: it takes no part in the estimate.

    alone: nothing else is summed up with these features, so that the scale of a query cancels.
    """
    # a gradient of that scale would be zero, but not missing
    features = feature_map(x, side, scale, relative=alone and side == "query" and not torch.is_grad_enabled())
    if not feature_map.signed:
        return features
    largest = 0.0 if side == "query" else features.factor.shape[-1] / 2
    return Features(features.log2_phi, F.pad(features.factor, (0, 1), value=largest))


def features_in_blocks(features: Features, window: int) -> Features:
    """Both parts as `to_blocks` cuts them."""
    factor = None if features.factor is None else to_blocks(features.factor, window)
    return Features(to_blocks(features.log2_phi, window), factor)


def expand(features: Features, shift: Tensor) -> Tensor:
    """phi * 2 ** shift from its two parts, the shift applied inside the exponent."""
    exponent = features.log2_phi + shift
    phi = exponent.exp2() if torch.is_grad_enabled() else exponent.exp2_()
    return phi if features.factor is None else phi * features.factor


def expand_to_one(features: Features, scale: Tensor) -> tuple[Tensor, Tensor]:
    """phi * 2 ** (scale - shift) and the shift, (..., 1), which makes the largest exponent of each token 0.

    The shift of a token whose features are all zero is -inf. The features may be written over.
    """
    exponent = features.log2_phi + scale if torch.is_grad_enabled() else features.log2_phi.add_(scale)
    shift = exponent.detach().amax(-1, keepdim=True)
    phi = shifted_exp2(exponent, finite(shift))
    return phi if features.factor is None else phi * features.factor, shift


def sum_up(features: Features, value_and_one: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S and z of the keys where `valid` is True, and their shift: (..., M, value_dim + 1), (..., 1, M or 1).

    With None all are. The features may be written over.
    """
    if valid is not None:
        features = Features(masked(features.log2_phi, ~valid), features.factor)
    phi, shift = expand_to_most(features)
    return phi.transpose(-1, -2) @ value_and_one, shift


def expand_to_most(features: Features) -> tuple[Tensor, Tensor]:
    """phi * 2 ** -shift and the shift, the largest exponent per feature, so that no query finds all underflown.

    The features may be written over.
    """
    shift = features.log2_phi.detach().amax(-2, keepdim=True)
    phi = shifted_exp2(features.log2_phi, finite(shift))
    return (phi if features.factor is None else phi * features.factor), shift


def rescale(sums: Tensor, shift: Tensor, new_shift: Tensor) -> Tensor:
    """Sums on another scale, at least as large: (..., M, value_dim + 1)."""
    return sums * (shift - finite(new_shift)).exp2().transpose(-1, -2)


def add(sums: Tensor, shift: Tensor, more: Tensor, more_shift: Tensor) -> tuple[Tensor, Tensor]:
    """Two sums, each on its scale, as one."""
    new_shift = torch.maximum(shift, more_shift)
    return rescale(sums, shift, new_shift) + rescale(more, more_shift, new_shift), new_shift


def add_keys(sums: Tensor, shift: Tensor, features: Features, value_and_one: Tensor, valid: Tensor | None) -> None:
    """Add keys to sums on a scale, in place: arguments as in `sum_up`, and what that returned."""
    log2_phi = features.log2_phi if valid is None else masked(features.log2_phi, ~valid)
    new_shift = torch.maximum(shift, log2_phi.detach().amax(-2, keepdim=True))
    scale = finite(new_shift)
    sums.mul_((shift - scale).exp2().transpose(-1, -2))
    phi = shifted_exp2(log2_phi, scale)
    phi = phi if features.factor is None else phi * features.factor
    if phi.shape[-2] == 1:
        # one key: twice as fast as a matrix product
        sums.addcmul_(phi.transpose(-1, -2), value_and_one)
    else:
        add_product(sums, phi.transpose(-1, -2), value_and_one)
    shift.copy_(new_shift)


def add_product(total: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """total + x @ y, written over `total`, which is one piece of memory."""
    # all leading dimensions as one batch
    total.view(-1, *total.shape[-2:]).baddbmm_(x.flatten(0, -3), y.flatten(0, -3))
    return total


class SumsByBlock:
    """S and z of all keys that are far from a block of queries, a chunk of blocks at a time.

    The sums of all blocks are kept: as much memory as the features of the keys where a block has value_dim + 1 tokens,
    and more for smaller ones. What lies before a chunk is carried from chunk to chunk, what lies after it is added up
    ahead.
    Nothing is subtracted from the sum over all keys: that would leave only rounding where the near blocks hold almost
    everything.

    Args:
        parts: for each chunk what `sum_up` returns of each of its blocks: (batch, heads, blocks, M, value_dim + 1) and
            (batch, heads, blocks, 1, M or 1). The sums may be written over.

    Attributes:
        shift: of all sums, (batch, heads, 1, 1, M or 1).
    """

    def __init__(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        self.shift = torch.cat([shift for _, shift in parts], dim=2).amax(2, keepdim=True)
        scales = [(shift - finite(self.shift)).exp2().transpose(-1, -2) for _, shift in parts]
        multiply = torch.mul if torch.is_grad_enabled() else Tensor.mul_
        self.sums = [multiply(sums, scale) for (sums, _), scale in zip(parts, scales, strict=True)]
        # sums over the blocks from `end + 1` on, for each chunk; from the last to the first
        self.after = [self.start()]
        for index in range(len(self.sums) - 1, 0, -1):
            after = self.after[-1] + self.sums[index][:, :, 1:].sum(2)
            if index + 1 < len(self.sums):
                after = after + self.sums[index + 1][:, :, 0]
            self.after.append(after)
        self.after.reverse()

    def start(self) -> Tensor:
        """The sum over no keys, (batch, heads, M, value_dim + 1): `before` of the first chunk."""
        return torch.zeros_like(self.sums[0][:, :, 0])

    def chunk(self, index: int, before: Tensor) -> tuple[Tensor, Tensor]:
        """The sums for each block of a chunk, and `before` for the next.

        Args:
            before: the sum over all blocks before begin - 1.

        Returns:
            (batch, heads, end - begin, M, value_dim + 1) and (batch, heads, M, value_dim + 1).
        """
        # the blocks begin - 1 .. end, zeros where there is none
        blocks = list(self.sums[index].unbind(2))
        blocks.insert(0, self.sums[index - 1][:, :, -1] if index else self.start())
        blocks.append(self.sums[index + 1][:, :, 0] if index + 1 < len(self.sums) else self.start())
        count = len(blocks) - 2
        if torch.is_grad_enabled() or before.device.type != "cpu" or torch.compiler.is_compiling():
            earlier = running_sums(before, blocks[:count], dim=2)
            later = running_sums(self.after[index], blocks[:2:-1], dim=2).flip(2)
            return earlier[:, :, :-1] + later, earlier[:, :, -1]
        # the same with less memory passed: one addition after the other, each in place
        far = torch.empty_like(self.sums[index])
        places = [*far.unbind(2), torch.empty_like(before)]
        places[0].copy_(before)
        for block, earlier_sum, place in zip(blocks, places, places[1:], strict=False):
            torch.add(earlier_sum, block, out=place)
        later_sum = self.after[index].clone()
        for place, block in zip(places[-2::-1], blocks[::-1], strict=False):
            place += later_sum
            later_sum += block
        return far, places[-1]


def read(query: Features, sums: Tensor, shift: Tensor, signed: bool) -> Partial:
    """What queries (..., queries, M) read from the sums."""
    phi, read_shift = expand_to_one(query, finite(shift))
    total = phi @ sums
    if signed:
        total = floor_mass(total, sums[..., -1:, -1:])
    return Partial(read_shift.masked_fill(shift[..., :1] == NEVER, NEVER), total)


def floor_mass(total: Tensor, largest: Tensor) -> Tensor:
    """Keep an estimated mass that may be negative above a share of the largest possible one."""
    mass = torch.maximum(total[..., -1:], SIGNED_MASS_FLOOR * largest)
    return torch.cat((total[..., :-1], mass), dim=-1)
