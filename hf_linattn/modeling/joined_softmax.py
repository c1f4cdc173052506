"""One softmax over keys that come in parts, each part with sums on a scale of its own.

All exponents are base-2 logs: where the result underflows, as it does for masked logits and many features, PyTorch's
`exp` takes 10 to 100 times as long on CPUs with MKL, and `exp2` does not.
"""

import math
from typing import NamedTuple

import torch
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


def finite(shift: Tensor) -> Tensor:
    """A shift that can be subtracted: where there are no keys, and any number will do, zero."""
    return shift.nan_to_num(neginf=0.0)


def shifted_exp2(exponent: Tensor, shift: Tensor) -> Tensor:
    """2 ** (exponent - shift), written over `exponent` where no gradient is asked for: two passes over memory fewer."""
    return (exponent - shift).exp2() if torch.is_grad_enabled() else exponent.sub_(shift).exp2_()


def exact_part(logits: Tensor, seen: Tensor, value_and_one: Tensor) -> Partial:
    """Exact attention to the keys where `seen` is True.

    Args:
        logits: (..., queries, keys), times log2(e); may be written over.
    """
    logits = masked(logits, ~seen)
    shift = logits.detach().amax(-1, keepdim=True)
    return Partial(shift, shifted_exp2(logits, finite(shift)) @ value_and_one)


def masked(exponent: Tensor, out: Tensor) -> Tensor:
    """-inf where `out` is True, written into `exponent` where no gradient is asked for."""
    return exponent.masked_fill(out, NEVER) if torch.is_grad_enabled() else exponent.masked_fill_(out, NEVER)


def join(parts: list[Partial]) -> Tensor:
    """One softmax over the keys of all parts; zeros for a query that has none."""
    total = parts[0].total
    if len(parts) > 1:
        parts = [_own_scale(part) for part in parts]
        shift = finite(torch.stack([part.shift for part in parts]).amax(0))
        total = torch.stack([(part.shift - shift).exp2() * part.total for part in parts]).sum(0)
    mass = total[..., -1:]
    none = mass < torch.finfo(mass.dtype).tiny
    return total[..., :-1] / mass.masked_fill(none, float("inf"))


def _own_scale(part: Partial) -> Partial:
    """The same with a mass of 1: what is small for its scale must not outdo other parts that are on a lower one."""
    mass = part.total[..., -1:].detach()
    none = mass < torch.finfo(mass.dtype).tiny
    mass = mass.masked_fill(none, 1.0)
    return Partial((part.shift + mass.log2()).masked_fill(none, NEVER), part.total / mass)
