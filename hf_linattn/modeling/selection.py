"""Tokens of the clusters that matter most to a block of queries: attended exactly, and not by their slot.

For each block of queries of an encoder, or each query of a decoder, and each head, slots are taken in the order of what
is gained per token that is read,

    gain_s = share_s * var_s / members_s,   share_s = sum_i softmax_s(q_i.k_s + log mass_s) over queries i of the block

with var_s the variance of the members' logits, which a slot leaves out, as long as their members fit into a given
number of tokens. A slot that is taken leaves the summary, so that every far token counts once. Each query has that many
more keys. Models that are trained with sparse attention select blocks of keys by such a share (Yuan et al. 2025,
arXiv:2502.11089).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import between
from .far_part import Slots
from .merge import NEVER


class Taken(NamedTuple):
    """Slots in the order of their gain (..., slots), and which of them are taken.

    ranked: the slots.
    ends: how many members they and those before have.
    fits: which are taken.
    """

    ranked: Tensor
    ends: Tensor
    fits: Tensor

    @property
    def slots(self) -> Tensor:
        """(..., slots) bool: which are taken, in their own order."""
        return torch.zeros_like(self.fits).scatter(-1, self.ranked, self.fits)


def take(gain: Tensor, members: Tensor, count: int) -> Taken:
    """The slots of the greatest gain (..., slots), as long as all their members (..., slots) are at most `count`.

    Those that have more members alone, and those that gain nothing, are left out.
    """
    gain = gain * (members <= count)
    gain, ranked = gain.sort(dim=-1, descending=True, stable=True)
    ends = members.expand_as(ranked).gather(-1, ranked).cumsum(-1)
    return Taken(ranked, ends, (ends <= count) & (gain > 0))


class Selection:
    """Selected tokens of a batch, for chunks of blocks of queries.

    Args:
        query, key, value: (batch, length, heads, dim).
        valid_lengths: (batch or 1,) valid tokens of each row.
        slot: (batch, length, heads) long, the number of slots for a token that is in none.
        members: (batch, heads, slots) how many tokens each slot holds.
        variance: (batch, heads, slots) of the logits of its members.
        window: queries of a block.
        count: how many tokens are selected at most.
        scale: the softmax scale.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        valid_lengths: Tensor,
        slot: Tensor,
        members: Tensor,
        variance: Tensor,
        window: int,
        count: int,
        scale: float,
    ) -> None:
        self.query, self.valid_lengths, self.window, self.scale = query.detach(), valid_lengths, window, scale
        # one row of memory per token and head: (batch * length * heads, dim)
        self.tokens = key.flatten(0, 2), value.flatten(0, 2)
        self.members, self.place = members.long(), torch.arange(count, device=key.device)
        self.gain = variance / members.clamp_min(1)
        # tokens in the order of their slots, and where each slot begins: (batch, heads, length), (batch, heads, slots)
        self.order = slot.transpose(1, 2).argsort(dim=-1, stable=True)
        self.start = self.members.cumsum(-1) - self.members

    def split(self, slots: Slots, begin: int, end: int) -> tuple[Slots, Slots]:
        """The slots of blocks begin .. end - 1 without those that are taken, and the tokens of these.

        Args:
            slots: key, value (batch, blocks, slots, heads, dim); log_mass (batch, blocks, heads, slots).

        Returns:
            Both of these shapes, the tokens with `count` in place of the slots.
        """
        with torch.no_grad():
            taken, position, valid = self._select(slots, begin, end)
        batch, length, heads = self.query.shape[:3]
        row = torch.arange(batch, device=position.device)[:, None, None, None] * length
        # (batch, blocks, count, heads)
        index = (position.transpose(2, 3) + row) * heads + torch.arange(heads, device=position.device)
        key, value = (x.index_select(0, index.flatten()).unflatten(0, index.shape) for x in self.tokens)
        log_mass = torch.zeros_like(valid, dtype=slots.log_mass.dtype).masked_fill(~valid, NEVER)
        left = Slots(slots.key, slots.value, slots.log_mass.masked_fill(taken, NEVER))
        return left, Slots(key.to(slots.key.dtype), value.to(slots.value.dtype), log_mass)

    def _select(self, slots: Slots, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which slots are taken (batch, blocks, heads, slots); positions, and which are valid (..., heads, count)."""
        blocks = end - begin
        gain = self._share(slots, begin, end) * self.gain.unsqueeze(1)
        taken = take(gain, self.members.unsqueeze(1), len(self.place))
        ranked, ends, fits = taken
        members, start = (x.unsqueeze(1).expand_as(ranked).gather(-1, ranked) for x in (self.members, self.start))
        # the members of the taken slots side by side: which slot each place is of, and the how many-th member it holds
        place = self.place.expand(*gain.shape[:-1], -1)
        which = torch.searchsorted(ends, place.contiguous(), right=True).clamp_max(gain.shape[-1] - 1)
        nth = (start - ends + members).gather(-1, which) + place
        order = self.order.unsqueeze(1).expand(-1, blocks, -1, -1)
        position = order.gather(-1, nth.clamp(0, order.shape[-1] - 1))
        # members that are near are among the keys already
        block = torch.arange(begin, end, device=position.device)[:, None, None]
        is_far = (position // self.window - block).abs() > 1
        return taken.slots, position, fits.gather(-1, which) & (place < ends.gather(-1, which)) & is_far

    def _share(self, slots: Slots, begin: int, end: int) -> Tensor:
        """Each slot's share of what the block's valid queries give to slots, (batch, blocks, heads, slots), float32.

        0 for a slot that has no far member.
        """
        query = between(self.query, begin * self.window, end * self.window, dim=1).unflatten(1, (-1, self.window))
        # (batch, blocks, heads, window, dim) @ (batch, blocks, heads, dim, slots)
        logits = (query.to(slots.key.dtype) * self.scale).transpose(2, 3) @ slots.key.detach().permute(0, 1, 3, 4, 2)
        # finite, so that a block which sees no slot is
        log_mass = slots.log_mass.detach().clamp_min(torch.finfo(logits.dtype).min / 2)
        position = torch.arange(begin * self.window, end * self.window, device=query.device).unflatten(
            0, (-1, self.window)
        )
        # (batch or 1, blocks, 1, window, 1)
        valid = (position < self.valid_lengths[:, None, None])[:, :, None, :, None]
        share = ((logits + log_mass.unsqueeze(3)).softmax(-1) * valid).sum(3)
        return share * (slots.log_mass > NEVER)
