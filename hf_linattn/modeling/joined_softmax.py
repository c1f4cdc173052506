"""One softmax over keys that come in parts, each part with sums on a scale of its own."""

from typing import NamedTuple

import torch
from torch import Tensor

NEVER = float("-inf")


class Partial(NamedTuple):
    """A softmax over some of the keys, before the division.

    shift: (..., 1), scale of `total`, -inf for a query that has no such keys.
    total: (..., value_dim + 1), sum of exp(logit - shift) times the value and, last, times one.
    """

    shift: Tensor
    total: Tensor


def finite(shift: Tensor) -> Tensor:
    """A shift that can be subtracted: where there are no keys, and any number will do, zero."""
    return shift.nan_to_num(neginf=0.0)


def shifted_exp(exponent: Tensor, shift: Tensor) -> Tensor:
    """exp(exponent - shift), written over `exponent` where no gradient is asked for: two passes over memory fewer."""
    return (exponent - shift).exp() if torch.is_grad_enabled() else exponent.sub_(shift).exp_()


def exact_part(logits: Tensor, seen: Tensor, value_and_one: Tensor) -> Partial:
    """Exact attention of logits (..., queries, keys), which may be written over, to the keys where `seen` is True."""
    logits = masked(logits, ~seen)
    shift = logits.detach().amax(-1, keepdim=True)
    return Partial(shift, shifted_exp(logits, finite(shift)) @ value_and_one)


def masked(exponent: Tensor, out: Tensor) -> Tensor:
    """-inf where `out` is True, written into `exponent` where no gradient is asked for."""
    return exponent.masked_fill(out, NEVER) if torch.is_grad_enabled() else exponent.masked_fill_(out, NEVER)


def join(parts: list[Partial]) -> Tensor:
    """One softmax over the keys of all parts; zeros for a query that has none."""
    total = parts[0].total
    if len(parts) > 1:
        parts = [_own_scale(part) for part in parts]
        shift = finite(torch.stack([part.shift for part in parts]).amax(0))
        total = torch.stack([(part.shift - shift).exp() * part.total for part in parts]).sum(0)
    mass = total[..., -1:]
    none = mass < torch.finfo(mass.dtype).tiny
    return (total[..., :-1] / mass.masked_fill(none, 1.0)).masked_fill(none, 0.0)


def _own_scale(part: Partial) -> Partial:
    """The same with a mass of 1: what is small for its scale must not outdo other parts that are on a lower one."""
    mass = part.total[..., -1:].detach()
    none = mass < torch.finfo(mass.dtype).tiny
    mass = mass.masked_fill(none, 1.0)
    return Partial((part.shift + mass.log()).masked_fill(none, NEVER), part.total / mass)
