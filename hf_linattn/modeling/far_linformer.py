"""Linformer's far part: projections of keys and values along the length (Wang et al. 2020, arXiv:2006.04768).

    far keys and values of query i = { (E k)_s, (F v)_s, with log mass log c_s }, s = 1 .. projection_length

where slot s stands for c_s tokens, all of them far from i, so that a far key that is repeated c_s times is summarized
without error.

In a decoder slot s is segment s of the row (`causal_projections`), of g tokens after the G global ones. The window of
query i starts at W = (i // window_size - 1) * window_size, the block before the query's, or, with window_size=0, at the
query itself. V = (W - G) // g segments ended before it. Near is all that follows them, from rank G + V g on: the
window, and before it up to g - 1 tokens of a segment that reaches into the window. So each key counts once.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .blocks import with_neighbors
from .causal_projections import CausalProjection
from .far_part import Chunk, FarKeys, Rows, Slots
from .merge import NEVER
from .projections import FarSummaries, Projection, segment


class LinformerFarPart(FarKeys):
    """Linformer's far part in an encoder: E and F over the whole row."""

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int) -> None:
        self.projection = Projection(
            projection=config.projection,
            sharing=config.sharing,
            slots=config.projection_length,
            max_length=config.max_length,
            num_heads=num_heads,
            head_dim=head_dim,
            seed=seed,
        )
        self.modules = {"projection": self.projection}

    def summarize(self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> Slots:
        return self.projection(key, value, self._segments(rows))

    def summarize_by_block(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, window: int, scale: float
    ) -> "_BlockSummaries":
        return _BlockSummaries(self.projection, key, value, self._segments(rows), window)

    def _segments(self, rows: Rows) -> Any:
        slots, padded = self.projection.slots, rows.lengths is not None
        return segment(rows.valid_lengths, rows.length, slots, first=rows.first, padded=padded)


class _BlockSummaries:
    """What blocks of queries see of all slots: summaries of the tokens that are far from the block."""

    def __init__(self, projection: Projection, key: Tensor, value: Tensor, segments: Any, window: int) -> None:
        counts = segments.counts_by_block(window)
        # whole numbers: exact
        counts = counts.sum(1, keepdim=True) - with_neighbors(counts.unsqueeze(2)).sum(2)
        self.key = FarSummaries(projection, key, "key", segments, counts, window)
        self.value = FarSummaries(projection, value, "value", segments, counts, window)
        # (batch, blocks, 1 or heads, slots)
        self.log_mass = projection.log_mass(counts).unsqueeze(2)
        if projection.projection == "learned":
            self.log_mass = self.log_mass + projection.bias.float()

    def chunk(self, begin: int, end: int) -> Slots:
        return Slots(self.key.chunk(begin, end), self.value.chunk(begin, end), self.log_mass[:, begin:end])


class CausalLinformerFarPart(FarKeys):
    """Linformer's far part in a decoder: a slot for each segment that ended.

    Its state is the slots, keys and values (batch, heads, projection_length, dim): zeros for segments to come.
    """

    # a slot is there from when the last token of its segment arrives, and is seen once the segment is far
    absorbs = False
    least_block = 128

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int) -> None:
        # nothing in it is random: no seed
        self.projection = CausalProjection(
            projection=config.projection,
            sharing=config.sharing,
            slots=config.projection_length,
            max_length=config.max_length,
            num_heads=num_heads,
            head_dim=head_dim,
        )
        self.num_slots = config.projection_length
        self.modules = {"projection": self.projection}

    @property
    def max_length(self) -> int:
        return self.projection.max_length

    def reach(self, window: int, first: int) -> int:
        g = self.projection.segment_length
        if not window:
            return g - 1
        # and before the window the longest part of a segment that reaches into it
        common = math.gcd(window, g)
        return window + g - common + -first % common

    def near_length(self, window: int, first: int) -> int:
        return self.reach(window, first) + max(window, 1)

    def near_start(self, rank: Tensor, window: int, first: int) -> Tensor:
        return first + self._ended(rank, window, first) * self.projection.segment_length

    def leaving(self, window: int) -> int:
        # whole segments
        g = self.projection.segment_length
        return g * -(-max(window, 1) // g)

    def quiet_steps(self, seen: Tensor, window: int, first: int) -> Tensor:
        # without a window at the end of a segment
        unit = window or self.projection.segment_length
        return unit - (seen if window else seen - first) % unit

    def _ended(self, rank: Tensor, window: int, first: int) -> Tensor:
        """V: how many segments ended before the window of a query of this rank."""
        start = (rank // window - 1) * window if window else rank
        return (start - first).clamp_min(0) // self.projection.segment_length

    def initial_state(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return ()

    def load(self, state: tuple[Tensor, ...], slots: Slots) -> tuple[Tensor, ...]:
        return slots.key, slots.value

    def save(self, state: tuple[Tensor, ...], count: Tensor) -> tuple[tuple[Tensor, ...], Slots]:
        ended = (count // self.projection.segment_length)[:, None, None]
        exists = torch.arange(self.num_slots, device=count.device) < ended
        return (), Slots(state[0], state[1], self.projection.log_mass(state[0]).where(exists, NEVER))

    def absorb(
        self, state: tuple[Tensor, ...], key: Tensor, value: Tensor, valid: Tensor | None, before: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        """The tokens begin with a segment; what is left of the last one that is not whole is left out."""
        g = self.projection.segment_length
        segments = min(key.shape[2] // g, self.num_slots)
        # (rows, segments), distinct numbers even where there are none any more
        slot = before[:, None] // g + torch.arange(segments, device=before.device)
        whole = slot < self.num_slots
        if valid is not None:
            whole = whole & valid[:, g - 1 : segments * g : g]
        # (batch, segments) of slots that stand before heads
        index = torch.arange(key.shape[0], device=key.device)[:, None], slot % self.num_slots
        whole = whole[:, :, None, None]

        def with_new(slots: Tensor, x: Tensor, side: str) -> Tensor:
            # sums of half-precision keys could overflow
            x = x[:, :, : segments * g].to(torch.promote_types(x.dtype, torch.float32))
            # split into segments
            new = self.projection.summarize(x.unflatten(2, (segments, g)), side, index[1]).to(slots.dtype)
            # (batch, heads, slots, dim) -> (batch, slots, heads, dim), which is indexed in whole rows
            slots, new = slots.transpose(1, 2), new.transpose(1, 2)
            return slots.index_put(index, torch.where(whole, new, slots[index])).transpose(1, 2)

        return with_new(state[0], key, "key"), with_new(state[1], value, "value")

    def chunk(self, state: tuple[Tensor, ...], chunk: Chunk) -> tuple[Slots, tuple[Tensor, ...]]:
        window, first = chunk.settings.window_size, chunk.settings.global_tokens
        slots = self.num_slots
        if chunk.end is not None:
            # no more segments than these have ended
            slots = min(slots, max(chunk.end - first, 0) // self.projection.segment_length)
        ended = self._ended(chunk.ranks, window, first).unsqueeze(-1)
        exists = torch.arange(slots, device=ended.device) < ended
        # (1 or heads, 1, slots), and where a segment has ended: (rows, blocks, 1 or heads, block, slots)
        log_mass = self.projection.log_mass(state[0])[:, None, :slots]
        log_mass = log_mass.where(exists.unsqueeze(2), NEVER)
        return Slots(state[0][:, None, :, :slots], state[1][:, None, :, :slots], log_mass), state
