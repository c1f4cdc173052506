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

from .blocks import FarDifferences, far_maxima
from .far_part import Slots

PROJECTIONS = ("learned", "mean", "max", "conv", "gaussian")
SHARING = ("none", "heads", "key_value", "layers")


class Segments(NamedTuple):
    """Which slot each token is summarized in; one row of a batch per leading index, or one for all.

    rank: (batch, length) long, position among the row's summarized tokens.
    total: (batch, 1) long, how many tokens the row's slots hold, at least 1.
    valid: (batch, length) bool, whether a slot holds the token.
    slot: (batch, length) long, that slot; what no slot holds has any.
    phase: (batch, length) float, how far into its segment the token stands, from 0 to below 1.
    slots: how many there are.
    common_total: `total` where it is the same for all rows and known without looking at a tensor, else None.
    """

    rank: Tensor
    total: Tensor
    valid: Tensor
    slot: Tensor
    phase: Tensor
    slots: int
    common_total: int | None

    @property
    def members(self) -> Tensor:
        """(batch, slots, length) bool, `slot` as one-hot rows."""
        slots = torch.arange(self.slots, device=self.slot.device)
        return (self.slot[:, None] == slots[:, None]) & self.valid[:, None]

    @property
    def counts(self) -> Tensor:
        """(batch, slots) float, how many tokens each slot holds."""
        valid = self.valid.float()
        return valid.new_zeros(valid.shape[0], self.slots).scatter_add(1, self.slot, valid)

    def counts_by_block(self, window: int) -> Tensor:
        """(batch, blocks, slots) float, how many tokens of each block of `window` tokens each slot holds."""
        blocks, valid = -(-self.slot.shape[1] // window), self.valid.float()
        block = torch.arange(self.slot.shape[1], device=valid.device) // window
        counts = valid.new_zeros(valid.shape[0], blocks * self.slots)
        return counts.scatter_add(1, block * self.slots + self.slot, valid).unflatten(1, (blocks, self.slots))

    @property
    def share(self) -> Tensor:
        """(batch, length) float, each token's weight in the mean of its slot."""
        return self.valid / self.counts.gather(1, self.slot).clamp_min(1)

    def means(self, x: Tensor) -> Tensor:
        """Mean of the members of each slot, x (batch, length, channels): (batch, slots, channels)."""
        return add_rows(x * self.share.unsqueeze(-1), self.slot, self.slots)

    def add_means(self, matrix: Tensor) -> Tensor:
        """The matrix that takes the means added, in place, to (batch, heads or 1, slots, length)."""
        # one entry in each column, the same for all heads: (batch, heads or 1, 1, length)
        slot, share = (x[:, None, None].expand(-1, matrix.shape[1], -1, -1) for x in (self.slot, self.share))
        return matrix.scatter_add_(2, slot, share)


def segment(lengths: Tensor, length: int, slots: int, first: int = 0, *, padded: bool = True) -> Segments:
    """Cut tokens `first` .. lengths - 1 of each row into `slots` segments; padded=False: all rows are `length` long."""
    alone = int(first == 0 and slots > 1)
    rank = torch.arange(length, device=lengths.device) - first
    total = lengths[:, None] - first
    valid = (rank >= 0) & (rank < total)
    rank, total = rank.clamp_min(0).expand_as(valid), total.clamp_min(1)
    spread, shared = (rank - alone).clamp_min(0) * (slots - alone), (total - alone).clamp_min(1)
    slot = torch.where(rank < alone, 0, alone + spread // shared).clamp_max(slots - 1)
    common_total = None if padded else max(length - first, 1)
    return Segments(rank, total, valid, slot, (spread % shared) / shared, slots, common_total)


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

    def forward(self, key: Tensor, value: Tensor, segments: Segments) -> Slots:
        """Summaries of keys and values (batch, heads, length, dim)."""
        log_mass = self.log_mass(segments.counts).unsqueeze(1)
        if self.projection == "learned":
            log_mass = log_mass + self.bias.to(log_mass.dtype)
        return Slots(self._project(key, "key", segments), self._project(value, "value", segments), log_mass)

    def log_mass(self, counts: Tensor) -> Tensor:
        """Log of what slots that hold so many tokens stand for, (..., slots), without the bias of `learned`."""
        if self.projection == "gaussian":
            # an entry mixes all tokens alike: every slot stands for its share of all of them
            counts = (counts.sum(-1, keepdim=True) / self.slots).expand_as(counts)
        return counts.log()

    def _project(self, x: Tensor, side: str, segments: Segments) -> Tensor:
        if self.projection == "max":
            return segment_max(x, segments, self.slots, None)
        if self.projection == "conv":
            x = x * self.kernel(side, segments).to(x.dtype)
        matrix = self.matrix(side, segments)
        if matrix is not None and self.projection == "learned":
            matrix = segments.add_means(matrix)
        if matrix is not None and matrix.shape[1] != 1:
            return matrix.to(x.dtype) @ x
        # all heads side by side: (batch, length, heads * dim) -> (batch, slots, heads * dim)
        tokens = x.transpose(1, 2).flatten(2)
        summaries = (
            segments.means(tokens.to(torch.promote_types(x.dtype, torch.float32)))
            if matrix is None
            else matrix.squeeze(1).to(x.dtype) @ tokens
        )
        return summaries.to(x.dtype).unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)

    def matrix(self, side: str, segments: Segments) -> Tensor | None:
        """What is added to the segment means, or stands in their place: (batch, heads or 1, slots, length)."""
        if self.projection == "gaussian":
            return self.columns(side, segments.rank) * segments.valid[:, None, None]
        return self.deviation(side, segments) if self.projection == "learned" else None

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
        weight = self._weight(side).float()
        if segments.common_total == self.max_length:
            # a column for each token
            return weight * (self.slots / segments.total * segments.valid)[:, None, None]
        # where the columns of each token begin, and those of the last one end: (batch, length + 1)
        rank = nn.functional.pad(segments.rank, (0, 1))
        rank[:, -1:] = segments.rank[:, -1:] + 1
        begin = (rank * self.max_length // segments.total).clamp_max(self.max_length)
        # the mean of a span is a difference of two running sums: (heads or 1, slots, batch, length + 1)
        sums = nn.functional.pad(weight.cumsum(-1), (1, 0))[:, :, begin]
        scale = self.slots / segments.total * segments.valid / begin.diff(dim=-1).clamp_min(1)
        # (heads or 1, slots, batch, length) -> (batch, heads or 1, slots, length)
        return sums.diff(dim=-1).permute(2, 0, 1, 3) * scale[:, None, None]

    def kernel(self, side: str, segments: Segments) -> Tensor:
        """The convolution's weight for each token: (batch, heads or 1, length, head_dim)."""
        kernel = self._weight(side)
        return kernel[:, (segments.phase * kernel.shape[1]).long()].transpose(0, 1)

    def _weight(self, side: str) -> Tensor:
        return getattr(self, f"{side if side in self.sides else 'key'}_weight")

    def extra_repr(self) -> str:
        return f"projection={self.projection!r}, sharing={self.sharing!r}, slots={self.slots}"


class FarSummaries:
    """Summaries of keys or values as blocks of queries see them, of far tokens only, a chunk of blocks at a time.

    Args:
        x: (batch, length, heads, dim).
        side: "key" or "value".
        far_counts: (batch, blocks, slots), how many tokens of each slot are far from each block.
        window: tokens of a block.
    """

    def __init__(
        self, projection: Projection, x: Tensor, side: str, segments: Segments, far_counts: Tensor, window: int
    ) -> None:
        self.maxima: Tensor | None = None
        self.means: FarMeans | None = None
        self.sums: FarDifferences | None = None
        if projection.projection == "max":
            # (batch, heads, blocks, slots, dim) -> (batch, blocks, slots, heads, dim)
            maxima = segment_max(x.transpose(1, 2), segments, projection.slots, window)
            self.maxima = maxima.permute(0, 2, 3, 1, 4)
            return
        if projection.projection == "conv":
            x = x * projection.kernel(side, segments).transpose(1, 2).to(x.dtype)
        if projection.projection != "gaussian":
            self.means = FarMeans(x, segments, far_counts, window)
        if (matrix := projection.matrix(side, segments)) is not None:
            self.sums = FarDifferences(matrix.float(), x, window)

    def chunk(self, begin: int, end: int) -> Tensor:
        """Summaries for the blocks begin .. end - 1, (batch, blocks, slots, heads, dim)."""
        if self.maxima is not None:
            return self.maxima[:, begin:end]
        parts = [part.chunk(begin, end) for part in (self.means, self.sums) if part is not None]
        return parts[0] if len(parts) == 1 else parts[1].add_(parts[0])


class FarMeans:
    """Segment means as blocks of queries see them, of far tokens only.

    Those of segments that are far as a whole are the same for all blocks. A block sees at most two others in
    part: the one in which its near tokens begin, and the one in which they end.
    """

    def __init__(self, x: Tensor, segments: Segments, far_counts: Tensor, window: int) -> None:
        slot, length, blocks = segments.slot, x.shape[1], far_counts.shape[1]
        # averages first: sums of many half-precision keys would overflow
        weighted = x.flatten(2).float() * segments.share.unsqueeze(-1)
        self.whole, self.heads = add_rows(weighted, slot, segments.slots), x.shape[2:]
        # the slots in which block j begins, and in which the block before it ends; at 0 and at the end, those of
        # the first and the last token
        edge = torch.arange(blocks + 1, device=x.device) * window
        begins, ends = slot[:, edge.clamp_max(length - 1)], slot[:, (edge - 1).clamp(0, length - 1)]
        # per block, sums over the tokens that share a segment with the next one, or with the one before
        block = torch.arange(length, device=x.device) // window
        left, right = (
            add_rows(weighted, block.where(slot == shared[:, block], blocks), blocks + 1)[:, :-1]
            for shared in (begins[:, 1:], ends[:, :-1])
        )
        # for block j: of the segment of token (j - 1) w what is before it, of that of token (j + 2) w - 1 what is after
        left = nn.functional.pad(_sums_of_groups(left, begins[:, 1:]), (0, 0, 2, 0))[:, :blocks]
        right = _sums_of_groups(right.flip(1), ends[:, :-1].flip(1)).flip(1)
        right = nn.functional.pad(right, (0, 0, 0, 2))[:, 2:]
        block = torch.arange(blocks, device=x.device)
        first, last = begins[:, (block - 1).clamp_min(0)], ends[:, (block + 2).clamp_max(blocks)]
        same = (first == last).unsqueeze(-1)
        # (batch, blocks, 2): which slots, and (batch, blocks, 2, heads * dim): their means
        slots, parts = torch.stack((first, last), dim=2), torch.stack((left + right * same, right + left * same), dim=2)
        total = segments.counts.gather(1, slots.flatten(1)).unflatten(1, (-1, 2))
        self.parts = parts * (total / far_counts.gather(2, slots).clamp_min(1)).unsqueeze(-1)
        # a slot is written once, or gradients would count twice: a second time goes to one more, which is cut off
        self.slots = torch.stack((first, last.masked_fill(first == last, segments.slots)), dim=2)
        self.whole = nn.functional.pad(self.whole, (0, 0, 0, 1))

    def chunk(self, begin: int, end: int) -> Tensor:
        """The means for the blocks begin .. end - 1, (batch, blocks, slots, heads, dim)."""
        slots, parts = self.slots[:, begin:end, :, None], self.parts[:, begin:end]
        whole = self.whole.unsqueeze(1).expand(-1, end - begin, -1, -1)
        return whole.scatter(2, slots.expand(parts.shape), parts)[:, :, :-1].unflatten(3, self.heads)


def add_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sums of x (batch, length, channels) over tokens of one index (batch or 1, length): (batch, rows, channels)."""
    batch = x.shape[0]
    index = (torch.arange(batch, device=x.device)[:, None] * rows + index).flatten()
    return x.new_zeros(batch * rows, x.shape[2]).index_add(0, index, x.flatten(0, 1)).unflatten(0, (batch, rows))


def _sums_of_groups(x: Tensor, group: Tensor) -> Tensor:
    """Running sums of x (batch, blocks, dim) that start anew with each group of equal, neighboring numbers."""
    reach = 1
    while reach < x.shape[1]:
        same = group[:, reach:] == group[:, :-reach]
        x = torch.cat((x[:, :reach], x[:, reach:] + x[:, :-reach] * same.unsqueeze(-1)), dim=1)
        reach *= 2
    return x


def segment_max(x: Tensor, segments: Segments, slots: int, window: int | None) -> Tensor:
    batch, heads, length, dim = x.shape
    block = torch.zeros(length, dtype=torch.long, device=x.device)
    if window is not None:
        block = torch.arange(length, device=x.device) // window
    blocks = int(-(-length // window)) if window is not None else 1
    # one bucket per block and slot, and per block a last one for what no slot holds
    bucket = block * (slots + 1) + segments.slot.where(segments.valid, slots)
    index = bucket[:, None, :, None].expand(batch, heads, length, dim)
    maxima = x.new_full((batch, heads, blocks * (slots + 1), dim), float("-inf"))
    maxima = maxima.scatter_reduce(2, index, x, "amax")
    # split the buckets into (blocks, slots + 1) and drop the last
    maxima = maxima.unflatten(2, (blocks, slots + 1))[..., :slots, :]
    maxima = maxima.squeeze(2) if window is None else far_maxima(maxima)
    return maxima.masked_fill(maxima == float("-inf"), 0.0)
