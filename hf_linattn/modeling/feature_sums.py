"""Sums S = sum phi(k) v^T and z = sum phi(k) over keys, each feature on a scale of its own, and reading from them.

Sums come as one tensor (..., features, value_dim + 1): the values carry a column of ones, whose sums are z.
Their `shift` (..., 1, features or 1) is the largest base-2 exponent of each feature over the keys: taken out of the
sums and given back to the queries, it cancels exactly. Nothing can overflow, and every feature has a key
that counts as one, so that no query finds all of them underflown.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import to_blocks
from .feature_maps import FeatureMap, Features
from .joined_softmax import NEVER, Partial, finite, shifted_exp2

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


def sum_up(features: Features, value_and_one: Tensor, held: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S and z of the keys where `held` is True, and their shift: (..., M, value_dim + 1), (..., 1, M or 1).

    With None all are, and the features may be written over.
    """
    if held is not None:
        features = Features(features.log2_phi.masked_fill(~held, NEVER), features.factor)
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
