"""Linformer's projections of keys and values along the length (arXiv:2006.04768, equation 7).

A row of L real tokens is cut into segments, wherever its padding stands. The first token, which
pretrained models look at from everywhere, has a slot of its own, unless it is a global token that is seen
exactly; the others are shared out evenly over the slots that are left: r-th of R tokens to slot
floor(r * slots / R). A row no longer than `projection_length` has at most one token in a slot, and
attention to its slots is exact. `learned` adds to these segment means a trained matrix over all tokens, so
that E and F are as general as the paper's, and start as means:

    E[s, r] = 1[r in segment s] / c_s + (projection_length / L) * D[s, r]

with c_s the number of real tokens in segment s and D = 0 at the start.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .blocks import far_maxima, far_sums, to_blocks

PROJECTIONS = ("learned", "mean", "max", "conv", "gaussian")
SHARING = ("none", "heads", "key_value", "layers")


class Segments(NamedTuple):
    """Which slot each token is summarised in; one row of a batch per leading index, or one for all.

    rank: (batch, length) long, position among the row's summarised tokens.
    total: (batch, 1) long, how many tokens the row's slots hold, at least 1.
    held: (batch, length) bool, whether a slot holds the token.
    slot: (batch, length) long, that slot.
    phase: (batch, length) float, how far into its segment the token stands, from 0 to below 1.
    members: (batch, slots, length) bool, `slot` as one-hot rows.
    """

    rank: Tensor
    total: Tensor
    held: Tensor
    slot: Tensor
    phase: Tensor
    members: Tensor


def segment(lengths: Tensor, length: int, slots: int, first: int = 0) -> Segments:
    """Cut tokens `first` .. lengths - 1 of each row into `slots` segments."""
    alone = int(first == 0 and slots > 1)
    rank = torch.arange(length, device=lengths.device) - first
    total = lengths[:, None] - first
    held = (rank >= 0) & (rank < total)
    rank, total = rank.clamp_min(0).expand_as(held), total.clamp_min(1)
    spread, shared = (rank - alone).clamp_min(0) * (slots - alone), (total - alone).clamp_min(1)
    slot = torch.where(rank < alone, 0, alone + spread // shared)
    members = (slot[:, None] == torch.arange(slots, device=lengths.device)[:, None]) & held[:, None]
    return Segments(rank, total, held, slot, (spread % shared) / shared, members)


class Summaries(NamedTuple):
    """Projected keys and values, and the log of how many tokens each stands for.

    key, value: (batch, heads, [blocks,] slots, dim); log_mass: (batch, heads or 1, [blocks,] slots), -inf
    for a slot that holds nothing. With blocks, what each block of queries sees of its far tokens only.
    """

    key: Tensor
    value: Tensor
    log_mass: Tensor


class Projection(nn.Module):
    """E and F of one layer, or, with sharing="layers", of all.

    Args:
        projection: one of `PROJECTIONS`; `conv` is a convolution per channel whose stride is the segment
            and starts as the mean, `gaussian` has fixed entries from N(0, 1 / slots).
        sharing: `none` one E and F per head; `heads` one E and F for all heads; `key_value` one E = F
            for all heads; `layers` likewise, and the same for all layers.
        slots: Linformer's k.
        max_length: longest row.
        seed: seed of the fixed entries.
    """

    def __init__(
        self, *, projection: str, sharing: str, slots: int, max_length: int, num_heads: int, head_dim: int, seed: int
    ) -> None:
        super().__init__()
        self.projection, self.sharing, self.slots, self.seed = projection, sharing, slots, seed
        self.max_length = max_length
        heads = num_heads if sharing == "none" else 1
        self.sides = ("key",) if sharing in ("key_value", "layers") else ("key", "value")
        for side in self.sides:
            if projection == "learned":
                self.register_parameter(f"{side}_weight", nn.Parameter(torch.empty(heads, slots, max_length)))
            elif projection == "conv":
                kernel = math.ceil(max_length / slots)
                self.register_parameter(f"{side}_weight", nn.Parameter(torch.empty(heads, kernel, head_dim)))
            elif projection == "gaussian":
                self.register_buffer(f"{side}_weight", torch.empty(heads, slots, max_length))
        if projection == "learned":
            self.bias = nn.Parameter(torch.empty(heads, slots))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill whatever was not loaded from a checkpoint; nothing on the meta device."""
        if any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            return
        generator = torch.Generator("cpu").manual_seed(self.seed)
        for side in self.sides:
            if self.projection == "learned":
                init.zeros_(getattr(self, f"{side}_weight"))
            elif self.projection == "conv":
                init.ones_(getattr(self, f"{side}_weight"))
            elif self.projection == "gaussian":
                weight = getattr(self, f"{side}_weight")
                entries = torch.randn(weight.shape, generator=generator, device="cpu", dtype=torch.float32)
                init.copy_(weight, entries / math.sqrt(self.slots))
        if self.projection == "learned":
            init.zeros_(self.bias)

    def forward(self, key: Tensor, value: Tensor, segments: Segments, window: int | None = None) -> Summaries:
        """Summaries of keys and values (batch, heads, length, dim).

        With `window`, a summary for each block of that many queries, of the tokens far from it alone.
        """
        counts = segments.members.sum(-1, dtype=key.dtype)
        if window is not None:
            per_block = _blocks_of(segments.members.to(key.dtype)[:, None], window).sum(-1)
            # (batch, 1, slots, blocks) counts of each block -> (batch, blocks, slots) counts of the far ones
            counts = far_sums(per_block.transpose(-1, -2).unsqueeze(-1)).squeeze(-1)[:, 0]
        log_mass = counts.log().unsqueeze(1)
        if self.projection == "learned":
            bias = self.bias.to(key.dtype)
            log_mass = log_mass + (bias if window is None else bias.unsqueeze(1))
        if self.projection == "gaussian":
            # an entry mixes all tokens alike: every slot stands for its share of all of them
            share = counts.sum(-1, keepdim=True) / self.slots
            log_mass = share.log().expand_as(counts).unsqueeze(1)
        key = self._project(key, "key", segments, window)
        return Summaries(key, self._project(value, "value", segments, window), log_mass)

    def _project(self, x: Tensor, side: str, segments: Segments, window: int | None) -> Tensor:
        if self.projection == "max":
            return _segment_max(x, segments, self.slots, window)
        if self.projection == "gaussian":
            matrix = self.columns(side, segments.rank) * segments.held[:, None, None]
            return _apply(matrix.to(x.dtype), x, window)
        if self.projection == "conv":
            x = x * self.kernel(side, segments).to(x.dtype)
        if self.projection != "learned":
            return _segment_mean(x, segments, window)
        deviation = self.deviation(side, segments)
        if window is None:
            return (_mean_matrix(segments) + deviation).to(x.dtype) @ x
        return _segment_mean(x, segments, window) + _apply(deviation.to(x.dtype), x, window)

    def columns(self, side: str, column: Tensor) -> Tensor:
        """Columns of the side's matrix: (batch, length) indices -> (batch, heads or 1, slots, length).

        Indices are ranks or relative positions: a row's result does not depend on where its padding stands.
        """
        return self._weight(side)[:, :, column].permute(2, 0, 1, 3)

    def deviation(self, side: str, segments: Segments) -> Tensor:
        """What `learned` adds to the segment means, (batch, heads or 1, slots, length).

        A token has the mean of the columns that belong to its relative position in the row, on the scale of
        max_length: what short rows teach holds for long ones too.
        """
        begin = segments.rank * self.max_length // segments.total
        end = torch.maximum((segments.rank + 1) * self.max_length // segments.total, begin + 1)
        # the mean of a span is a difference of two running sums
        sums = nn.functional.pad(self._weight(side).float().cumsum(-1), (1, 0))
        end = end.clamp_max(self.max_length)
        begin = begin.clamp_max(self.max_length - 1)
        scale = self.slots / segments.total * segments.held / (end - begin)
        # (heads or 1, slots, batch, length) -> (batch, heads or 1, slots, length)
        difference = (sums[:, :, end] - sums[:, :, begin]).permute(2, 0, 1, 3)
        return difference * scale[:, None, None]

    def kernel(self, side: str, segments: Segments) -> Tensor:
        """The convolution's weight for each token: (batch, heads or 1, length, head_dim)."""
        kernel = self._weight(side)
        return kernel[:, (segments.phase * kernel.shape[1]).long()].transpose(0, 1)

    def _weight(self, side: str) -> Tensor:
        return getattr(self, f"{side if side in self.sides else 'key'}_weight")

    def extra_repr(self) -> str:
        return f"projection={self.projection!r}, sharing={self.sharing!r}, slots={self.slots}"


def _blocks_of(matrix: Tensor, window: int) -> Tensor:
    """(..., slots, length) -> (..., slots, blocks, window), zeros after the end."""
    padded = nn.functional.pad(matrix, (0, -matrix.shape[-1] % window))
    # split the length into blocks of `window` positions
    return padded.unflatten(-1, (-1, window))


def _apply(matrix: Tensor, x: Tensor, window: int | None) -> Tensor:
    """matrix (batch, heads, slots, length) @ x (batch, heads, length, dim); with `window`, of far tokens per block."""
    if window is None:
        return matrix @ x
    # (batch, heads, blocks, slots, window) @ (batch, heads, blocks, window, dim): one product for each block
    return far_sums(_blocks_of(matrix, window).transpose(2, 3) @ to_blocks(x, window))


def _mean_matrix(segments: Segments) -> Tensor:
    """(batch, 1, slots, length): each slot's row averages its members."""
    return (segments.members / segments.members.sum(-1, keepdim=True).clamp_min(1))[:, None]


def _segment_mean(x: Tensor, segments: Segments, window: int | None) -> Tensor:
    # averages of the whole segment first: sums of many half-precision keys would overflow
    matrix = _mean_matrix(segments).to(x.dtype)
    mean = _apply(matrix, x, window)
    if window is None:
        return mean
    # (batch, 1, blocks, slots, 1): which share of a segment's members is far from the block
    share = far_sums(_blocks_of(matrix, window).sum(-1).transpose(-1, -2).unsqueeze(-1))
    return mean / share.where(share > 0, torch.ones_like(share))


def _segment_max(x: Tensor, segments: Segments, slots: int, window: int | None) -> Tensor:
    batch, heads, length, dim = x.shape
    block = torch.zeros(length, dtype=torch.long, device=x.device)
    if window is not None:
        block = torch.arange(length, device=x.device) // window
    blocks = int(-(-length // window)) if window is not None else 1
    # one bucket per block and slot, and per block a last one for what no slot holds
    bucket = block * (slots + 1) + segments.slot.where(segments.held, slots)
    index = bucket[:, None, :, None].expand(batch, heads, length, dim)
    maxima = x.new_full((batch, heads, blocks * (slots + 1), dim), float("-inf"))
    maxima = maxima.scatter_reduce(2, index, x, "amax")
    # split the buckets into (blocks, slots + 1) and drop the last
    maxima = maxima.unflatten(2, (blocks, slots + 1))[..., :slots, :]
    maxima = maxima.squeeze(2) if window is None else far_maxima(maxima)
    return maxima.masked_fill(maxima == float("-inf"), 0.0)
