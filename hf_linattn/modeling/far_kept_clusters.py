"""Clusters of earlier keys in a decoder that keeps all tokens, so that those that matter to a query can be read.

    members of slot s: the far keys nearest to prototype s, as in `far_clusters`
    taken: slots by what is gained per token that is read, as in `selection`, for each query alone

with var_s the mean square distance of the members to their mean, which is proportional to the variance of the logits of
queries in any direction. The state grows with the text, by the keys and values of all far tokens. A token of decoding
compares its query with the slots and reads the members of those that are taken; many tokens at once have masks over all
far tokens, so that reading a prompt takes as long as softmax does, or longer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .far_clusters import CausalClusterFarPart
from .far_part import Chunk, Slots
from .merge import NEVER
from .selection import Taken, take


class CausalKeptClusterFarPart(CausalClusterFarPart):
    """The state is that of `CausalClusterFarPart`, and after it

    * the sum of squares of each prototype's keys, (batch, heads, slots), float32;
    * of the far tokens keys and values, (batch, heads, tokens, dim) each, and slots, (batch, heads, tokens) long, which
      are `num_slots` where a row has no token.
    """

    reads_tokens = True

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int) -> None:
        super().__init__(config, num_heads=num_heads, head_dim=head_dim, seed=seed)
        self.selected_tokens = config.selected_tokens
        # switches: see `LinAttnPreTrainedModel.branches`
        self.switches = {"summary": True, "selected": True}

    def initial_state(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        batch, heads = key.shape[:2]
        sums = super().initial_state(key, value)
        tokens = (x.new_zeros(batch, heads, 0, x.shape[-1]) for x in (key, value))
        return (*sums, torch.zeros_like(sums[2]), *tokens, sums[2].new_zeros(batch, heads, 0, dtype=torch.long))

    def _by_block(self, slot: Tensor, key: Tensor, value: Tensor, block: int) -> tuple[Tensor, ...]:
        # the square of each key is one more channel of its value
        square = key.to(torch.promote_types(key.dtype, torch.float32)).square().sum(-1, keepdim=True)
        keys, values, members = super()._by_block(slot, key, torch.cat((value.to(square.dtype), square), dim=-1), block)
        return keys, values[..., :-1], members, values[..., -1]

    def absorb(
        self, state: tuple[Tensor, ...], key: Tensor, value: Tensor, valid: Tensor | None, before: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        slot = self._slots(key, valid)
        return (*self._with_block(state[:4], slot, key, value), *_append(state[4:], key, value, slot))

    def chunk(self, state: tuple[Tensor, ...], chunk: Chunk) -> tuple[Slots, tuple[Tensor, ...]]:
        earlier, block = state[4].shape[2], chunk.ranks.shape[2]
        slot = self._slots(chunk.key, chunk.becomes_far)
        slots, sums, known = self._known(state[:4], chunk, slot)
        tokens = _append(state[4:], chunk.key, chunk.value, slot)
        state = (*sums, *tokens)
        if not self.switches["selected"]:
            return slots, state
        # (batch, blocks, heads, block, dim), and the same for each query of a block: (batch, blocks, heads, 1, slots)
        query = chunk.query.unflatten(2, (-1, block)).transpose(1, 2)
        taken = self._take(query, slots, known, chunk.settings.scale).slots
        # tokens that became far before the block, and are in a slot that the query takes
        number = torch.arange(tokens[0].shape[2], device=query.device)
        exists = number < earlier + block * torch.arange(query.shape[1], device=query.device)[:, None]
        index = tokens[2][:, None, :, None].expand(-1, *query.shape[1:4], -1)
        read = F.pad(taken, (0, 1)).gather(-1, index) & exists[:, None, None]
        masks = self._masks(slots.log_mass, taken), _mask(read, slots.log_mass)
        # tokens are the same for all blocks: (batch, blocks, heads, slots and tokens, dim)
        key, value = (
            torch.cat((x, y.unsqueeze(1).expand(-1, x.shape[1], -1, -1, -1)), dim=3)
            for x, y in ((slots.key, tokens[0]), (slots.value, tokens[1]))
        )
        return Slots(key, value, torch.cat(masks, dim=-1)), state

    def read_tokens(self, query: Tensor, state: tuple[Tensor, ...], slots: Slots, scale: float) -> Slots:
        """Slots (batch, heads, slots, dim) without those that a query (batch, heads, 1, dim) takes, and their tokens.

        Returns:
            key, value (batch, heads, slots + selected_tokens, dim); log_mass (batch, heads, slots + selected_tokens).
        """
        if not self.switches["selected"]:
            return slots
        sums = tuple(x.unsqueeze(1) for x in state[:4])
        whole = Slots(slots.key.unsqueeze(1), slots.value.unsqueeze(1), slots.log_mass[:, None, :, None])
        # (batch, heads, slots)
        taken = self._take(query.unsqueeze(1), whole, sums, scale).slots[:, 0, :, 0]
        read = F.pad(taken, (0, 1)).gather(-1, state[6]).long().cumsum(-1)
        # the place of the first, the second and so on token that is read
        number = torch.arange(1, self.selected_tokens + 1, device=query.device).expand(*read.shape[:2], -1)
        place = torch.searchsorted(read, number.contiguous())
        exists = place < read.shape[-1]
        masks = self._masks(slots.log_mass, taken), _mask(exists, slots.log_mass)
        if not read.shape[-1]:
            return slots
        index = place.clamp_max(read.shape[-1] - 1).unsqueeze(-1)
        key, value = (
            torch.cat((x, y.gather(2, index.expand(-1, -1, -1, y.shape[-1]))), dim=2)
            for x, y in ((slots.key, state[4]), (slots.value, state[5]))
        )
        return Slots(key, value, torch.cat(masks, dim=-1))

    @torch.no_grad()
    def _take(self, query: Tensor, slots: Slots, sums: tuple[Tensor, ...], scale: float) -> Taken:
        """What each query (batch, blocks, heads, queries, dim) takes of sums (batch, blocks, heads, slots, ...)."""
        keys, _, members, squares = sums
        count = members.clamp_min(1)
        spread = (squares / count - (keys / count.unsqueeze(-1)).square().sum(-1)).clamp_min(0)
        logits = (query.to(keys.dtype) * scale) @ (keys / count.unsqueeze(-1)).mT
        share = (logits + slots.log_mass.to(keys.dtype).clamp_min(torch.finfo(keys.dtype).min / 2)).softmax(-1)
        gain = share * (spread / count * (members > 0)).unsqueeze(3)
        return take(gain, members.long().unsqueeze(3), self.selected_tokens)

    def _masks(self, log_mass: Tensor, taken: Tensor) -> Tensor:
        """The log mass of slots that are left."""
        taken = taken if self.switches["summary"] else torch.ones_like(taken)
        return log_mass.expand(taken.shape).masked_fill(taken, NEVER)


def _append(tokens: tuple[Tensor, ...], *new: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.cat(pair, dim=2) for pair in zip(tokens, new, strict=True))


def _mask(exists: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(exists.shape, dtype=like.dtype, device=exists.device).masked_fill(~exists, NEVER)
