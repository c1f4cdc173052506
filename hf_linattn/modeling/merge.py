"""One softmax over keys that come in parts, each part with sums on a scale of its own.

All exponents are base-2 logs: where the result underflows, as it does for masked logits and many features, PyTorch's
`exp` takes 10 to 100 times as long on CPUs with MKL, and `exp2` does not.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = float("-inf")
LOG2_E = math.log2(math.e)


class Partial(NamedTuple):
    """A softmax over some of the keys, before the division.

    shift: (..., 1), base-2 log of the scale of `total`, -inf for a query that has no such keys.
    total: (..., value_dim + 1), sum of 2 ** (logit - shift) times the value and, last, times one.
    """

    shift: Tensor
    total: Tensor


def with_one(value: Tensor) -> Tensor:
    """Values with a column of ones: one product then gives sums and mass."""
    return F.pad(value, (0, 1), value=1.0)


def finite(shift: Tensor) -> Tensor:
    """A shift that can be subtracted: where there are no keys, and any number will do, zero."""
    return shift.nan_to_num(neginf=0.0)


def shifted_exp2(exponent: Tensor, shift: Tensor) -> Tensor:
    """2 ** (exponent - shift), written over `exponent` where no gradient is asked for: two passes over memory fewer."""
    return (exponent - shift).exp2() if torch.is_grad_enabled() else exponent.sub_(shift).exp2_()


def exact_part(logits: Tensor, valid: Tensor | None, value_and_one: Tensor) -> Partial:
    """Exact attention to the keys where `valid` is True; with None to all of them.

    Args:
        logits: (..., queries, keys), times log2(e); may be written over.
    """
    logits = logits if valid is None else masked(logits, ~valid)
    shift = logits.detach().amax(-1, keepdim=True)
    return Partial(shift, shifted_exp2(logits, finite(shift)) @ value_and_one)


def masked(exponent: Tensor, out: Tensor) -> Tensor:
    """-inf where `out` is True, written into `exponent` where no gradient is asked for."""
    # the mask is the smaller one, being the same for all heads, and a sum is several times as fast as filling in
    never = torch.zeros(out.shape, dtype=exponent.dtype, device=out.device).masked_fill_(out, NEVER)
    return exponent + never if torch.is_grad_enabled() else exponent.add_(never)


def merge(parts: list[Partial]) -> Tensor:
    """One softmax over the keys of all parts; zeros for a query that has none."""
    total = parts[0].total
    if len(parts) > 1:
        sizes = [_size(part) for part in parts]
        largest = finite(torch.stack(sizes).amax(0))
        # zero for parts without keys, whose shift may be anything
        scales = [
            (part.shift - largest).masked_fill(size == NEVER, NEVER).exp2()
            for part, size in zip(parts, sizes, strict=True)
        ]
        total = total * scales[0] if torch.is_grad_enabled() else total.mul_(scales[0])
        for part, scale in zip(parts[1:], scales[1:], strict=True):
            total = torch.addcmul(total, part.total, scale)
    mass = total[..., -1:]
    none = mass < torch.finfo(mass.dtype).tiny
    return total[..., :-1] / mass.masked_fill(none, float("inf"))


def _size(part: Partial) -> Tensor:
    """Base-2 log of the mass, without gradient, (..., 1), -inf for none.

    Parts are weighted by it and not by their shift: what is small for its scale must not outdo others on a lower one.
    """
    mass = part.total[..., -1:].detach()
    none = mass < torch.finfo(mass.dtype).tiny
    return (part.shift + mass.masked_fill(none, 1.0).log2()).masked_fill(none, NEVER)
