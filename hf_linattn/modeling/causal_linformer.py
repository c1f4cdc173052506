"""Causal Linformer attention: exact attention to late keys, joined with summaries of segments that ended before them.

    out_i = softmax over { q_i.k_j, j near i } and { q_i.(E k)_s + log g, s < V_i } of { v_j } and { (F v)_s }

The projections of the paper (arXiv:2006.04768) mix all positions, so no row of E k could be used before
the sequence ends. Here slot s holds segment s of the row alone: with G = global_tokens and
g = ceil(max_length / projection_length), the tokens of rank G + s g .. G + (s + 1) g - 1. Ranks count the
tokens of a row, padding is not counted.

The window of query i starts W_i = (i // window_size - 1) * window_size, at the block before the query's,
or, with window_size=0, at the query itself. V_i = (W_i - G) // g segments ended before it. Near is all
that follows them, G + V_i g .. i: the window, and before it up to g - 1 tokens of a segment that reaches
into the window. With the first G keys, which are exact for all, every key j <= i is seen exactly once.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .blocks import after_end, between, first_tokens, newest_tokens, recomputed
from .cache import LinAttnCacheLayer
from .linformer import LinformerAttention
from .merge import NEVER
from .projections import PROJECTIONS

# Queries that share one gathered list of keys, at least, and tokens that are worked on at a time.
_BLOCK, _PIECE = 128, 512


class CausalLinformerState(NamedTuple):
    """All that later tokens need of a row's first `seen` tokens. Its size does not depend on their number.

    The first dimension of each tensor is the batch, so that rows are chosen by `index_select(0, rows)`.

    seen: (batch,) long.
    global_key, global_value: (batch, heads, global_tokens, dim), the first keys and values.
    near_key, near_value: (batch, heads, `near_length` - 1, dim), the last keys and values, the newest last.
    summary_key, summary_value: (batch, heads, projection_length, dim), float32; of the open segment what
        its tokens so far contribute, of later ones zeros.
    """

    seen: Tensor
    global_key: Tensor
    global_value: Tensor
    near_key: Tensor
    near_value: Tensor
    summary_key: Tensor
    summary_value: Tensor


class CausalProjection(nn.Module):
    """E and F of one layer, or, with sharing="layers", of all: how a segment of `segment_length` tokens is summarised.

    Args:
        projection: `mean`; `learned` (per slot, E[s, t] = (1 + D[s, t]) / g for the t-th token of the
            segment, with D and a bias on the slot's log mass trained, both 0 at the start); `conv` (a
            weight per token of the segment and channel, the same for all slots, 1 at the start);
            `max` (largest entry per channel).
        sharing: `none` one E and F per head; `heads` one E and F for all heads; `key_value` one E = F
            for all heads; `layers` likewise, and the same for all layers.
        slots: Linformer's k.
        max_length: longest row.

    Raises:
        ValueError: `projection` cannot be causal, or does not exist.
    """

    def __init__(
        self, *, projection: str, sharing: str, slots: int, max_length: int, num_heads: int, head_dim: int
    ) -> None:
        super().__init__()
        if projection == "gaussian":
            raise ValueError(
                "projection='gaussian' cannot be causal: each of its slots mixes all tokens of a document with random "
                "signs, so that no slot is finished, or has a known mass, before the document ends. "
                "Use learned, mean, max or conv."
            )
        if projection not in PROJECTIONS:
            raise ValueError(f"projection={projection!r} is not one of learned, mean, max, conv.")
        self.projection, self.sharing, self.slots, self.max_length = projection, sharing, slots, max_length
        self.segment_length = math.ceil(max_length / slots)
        heads = num_heads if sharing == "none" else 1
        self.sides = ("key",) if sharing in ("key_value", "layers") else ("key", "value")
        for side in self.sides:
            if projection == "learned":
                self.register_parameter(f"{side}_weight", nn.Parameter(torch.empty(heads, slots, self.segment_length)))
            elif projection == "conv":
                self.register_parameter(
                    f"{side}_weight", nn.Parameter(torch.empty(heads, self.segment_length, head_dim))
                )
        if projection == "learned":
            self.bias = nn.Parameter(torch.empty(heads, slots))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill whatever was not loaded from a checkpoint; nothing on the meta device."""
        if any(parameter.is_meta for parameter in self.parameters()):
            return
        for side in self.sides:
            if self.projection == "learned":
                init.zeros_(getattr(self, f"{side}_weight"))
            elif self.projection == "conv":
                init.ones_(getattr(self, f"{side}_weight"))
        if self.projection == "learned":
            init.zeros_(self.bias)

    def log_mass(self, like: Tensor) -> Tensor:
        """Log of what each slot stands for once its segment has ended, (heads or 1, slots), of the dtype of `like`."""
        log_length = like.new_full((1, self.slots), math.log(self.segment_length))
        return log_length + self.bias.to(like.dtype) if self.projection == "learned" else log_length

    def _weight(self, side: str, slot: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor | float:
        """Weight of each token in its summary: (rows, tokens) -> (rows, heads or 1, tokens, 1 or dim)."""
        if self.projection == "mean":
            return 1 / self.segment_length
        weight = getattr(self, f"{side if side in self.sides else 'key'}_weight").to(dtype)
        if self.projection == "conv":
            return weight[:, place].transpose(0, 1) / self.segment_length
        # (heads, rows, tokens) -> (rows, heads, tokens, 1)
        return (1 + weight[:, slot, place].transpose(0, 1).unsqueeze(-1)) / self.segment_length

    def summarise(self, x: Tensor, side: str, lengths: Tensor | None = None, first: int = 0) -> Tensor:
        """Summaries of the segments of whole rows (batch, heads, length, dim): (batch, heads, segments, dim).

        The last one may be open. `lengths` (batch,): how many tokens are real; `first`: tokens before segment 0.
        """
        if lengths is not None:
            real = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
            x = x.masked_fill(~real[:, None, :, None], self._none)
        x = x[:, :, first:]
        x = F.pad(x, (0, 0, 0, -x.shape[2] % self.segment_length), value=self._none)
        if self.projection == "max":
            # split the length into segments
            maxima = x.unflatten(2, (-1, self.segment_length)).amax(3)
            return maxima.masked_fill(maxima == self._none, 0.0)
        rank = torch.arange(x.shape[2], device=x.device)[None]
        weight = self._weight(side, rank // self.segment_length, rank % self.segment_length, x.dtype)
        return (x * weight).unflatten(2, (-1, self.segment_length)).sum(3)

    def add(self, summaries: Tensor, x: Tensor, side: str, rank: Tensor, held: Tensor) -> Tensor:
        """`summaries` (batch, heads, slots, dim) with new tokens x (batch, heads, length, dim) added to their segments.

        rank: (batch, length), counted from the first token of segment 0; held: (batch, length) bool, tokens to add.
        """
        slot, place = rank // self.segment_length, rank % self.segment_length
        held = held & (slot < self.slots) & (rank >= 0)
        if self.projection == "max":
            # a slot whose segment has not begun holds nothing yet
            begun = torch.arange(self.slots, device=x.device) * self.segment_length < rank[:, :1]
            summaries = summaries.masked_fill(~begun[:, None, :, None], self._none)
        else:
            known_slot, known_place = slot.clamp(0, self.slots - 1), place.clamp_min(0)
            x = x * self._weight(side, known_slot, known_place, x.dtype)
        x = x.masked_fill(~held[:, None, :, None], self._none)
        index = slot.clamp(0, self.slots - 1)[:, None, :, None].expand(x.shape)
        summaries = summaries.scatter_reduce(2, index, x, "amax" if self.projection == "max" else "sum")
        return summaries.masked_fill(summaries == self._none, 0.0) if self.projection == "max" else summaries

    @property
    def _none(self) -> float:
        """What an absent token contributes."""
        return float("-inf") if self.projection == "max" else 0.0

    def extra_repr(self) -> str:
        return (
            f"projection={self.projection!r}, sharing={self.sharing!r}, slots={self.slots}, "
            f"segment_length={self.segment_length}"
        )


def _before_window(segment_length: int, window: int, first: int) -> int:
    """Most tokens that a query sees exactly before its window, of a segment that reaches into the window."""
    common = math.gcd(window, segment_length)
    return segment_length - common + -first % common


def near_length(projection: CausalProjection, window_size: int, global_tokens: int) -> int:
    """Most keys that a query sees exactly, its own among them and the global ones left out."""
    if not window_size:
        return projection.segment_length
    return 2 * window_size + _before_window(projection.segment_length, window_size, global_tokens)


def _ended_segments(rank: Tensor, segment_length: int, window: int, first: int) -> Tensor:
    """V: how many segments ended before the window of a query of this rank."""
    start = (rank // window - 1) * window if window else rank
    return (start - first).clamp_min(0) // segment_length


def causal_linformer_state(
    key: Tensor, value: Tensor, projection: CausalProjection, *, window_size: int = 0, global_tokens: int = 0
) -> CausalLinformerState:
    """The state before the first token, for keys and values like these (batch, heads, any length, dim)."""
    batch, heads, _, _ = key.shape
    dtype = torch.promote_types(key.dtype, torch.float32)
    near = near_length(projection, window_size, global_tokens) - 1

    def tokens(like: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
        return like.new_zeros(batch, heads, count, like.shape[-1], dtype=dtype)

    return CausalLinformerState(
        torch.zeros(batch, dtype=torch.long, device=key.device),
        tokens(key, global_tokens),
        tokens(value, global_tokens),
        tokens(key, near),
        tokens(value, near),
        tokens(key, projection.slots, dtype),
        tokens(value, projection.slots, dtype),
    )


def causal_linformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: CausalProjection,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """Causal Linformer attention in time and memory linear in the length.

    Args:
        query, key: (batch, heads, length, head_dim).
        value: (batch, heads, length, value_dim).
        projection: the layer's E and F.
        lengths: (batch,) number of real tokens per row, which stand first; None when nothing is padded.
        window_size: block size of the window; 0 for none: only the query's own segment is exact.
        global_tokens: that many first keys are exact for every later query.
        near, far: False leaves out all exact keys, or all summaries.
        scale: what products of queries and keys are multiplied by.

    Returns:
        (batch, heads, length, value_dim) in the dtype of `value`, zeros for padding and for queries that see no key.

    Raises:
        ValueError: the rows are longer than the projection's `max_length`.
    """
    settings: dict[str, Any] = {
        "window_size": window_size,
        "global_tokens": global_tokens,
        "near": near,
        "far": far,
        "scale": scale,
    }
    return _attend(query, key, value, projection, None, lengths, **settings)[0]


def causal_linformer_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: CausalProjection,
    state: CausalLinformerState | None = None,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, CausalLinformerState]:
    """Causal Linformer attention of new tokens, any number of them, that come after those of `state`.

    Args:
        state: what the call before returned; None is the state before the first token, and cheaper.
        lengths: (batch,) number of new tokens per row that are real, at least 0; real ones stand first.

    The other arguments are as in `causal_linformer_attention`, and the same in all calls of a sequence.
    That rows stay within `max_length` is for the caller to see to: what comes after it is never summarised.

    Returns:
        (batch, heads, length, value_dim) in the dtype of `value`, zeros for padding, and the new state.
    """
    settings: dict[str, Any] = {
        "window_size": window_size,
        "global_tokens": global_tokens,
        "near": near,
        "far": far,
        "scale": scale,
    }
    return _attend(query, key, value, projection, state, lengths, **settings)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: CausalProjection,
    state: CausalLinformerState | None,
    lengths: Tensor | None,
    *,
    window_size: int,
    global_tokens: int,
    near: bool,
    far: bool,
    scale: float,
) -> tuple[Tensor, CausalLinformerState]:
    length, first = query.shape[2], global_tokens
    if length > projection.max_length:
        raise ValueError(
            f"{length} tokens are more than max_length={projection.max_length} of this model's projections."
        )
    start = state or causal_linformer_state(key, value, projection, window_size=window_size, global_tokens=first)
    old_global = (None, None) if state is None else (state.global_key, state.global_value)
    global_key, global_value = (
        first_tokens(old, new, first, start.seen) for old, new in zip(old_global, (key, value), strict=True)
    )
    summary_key, summary_value = start.summary_key, start.summary_value
    if far:
        old_seen = None if state is None else state.seen
        summary_key = _summaries(projection, summary_key, key, "key", old_seen, lengths, first)
        summary_value = _summaries(projection, summary_value, value, "value", old_seen, lengths, first)

    out = _exact_and_summaries(
        query,
        (key, value),
        None if state is None else (state.near_key, state.near_value),
        (global_key, global_value),
        (summary_key, summary_value) if far else None,
        # one row of ranks for all rows, where all begin at 0
        start.seen if state is not None else start.seen[:1],
        projection,
        window=window_size,
        near=near,
        scale=scale,
    )
    near_key, near_value = (
        newest_tokens(old, new, lengths) for old, new in ((start.near_key, key), (start.near_value, value))
    )
    new_seen = start.seen + (length if lengths is None else lengths)
    return after_end(out, lengths), CausalLinformerState(
        new_seen, global_key, global_value, near_key, near_value, summary_key, summary_value
    )


def _summaries(
    projection: CausalProjection,
    old: Tensor,
    x: Tensor,
    side: str,
    seen: Tensor | None,
    lengths: Tensor | None,
    first: int,
) -> Tensor:
    """The summaries after new tokens x; `seen` (batch,): how many tokens came before, None for none."""
    x = x.to(old.dtype)
    if seen is None:
        summaries = projection.summarise(x, side, lengths, first)
        return F.pad(summaries, (0, 0, 0, projection.slots - summaries.shape[2]))
    position = torch.arange(x.shape[2], device=x.device)
    held = (position < (x.shape[2] if lengths is None else lengths[:, None])).expand(x.shape[0], -1)
    return projection.add(old, x, side, seen[:, None] + position - first, held)


def _exact_and_summaries(
    query: Tensor,
    tokens: tuple[Tensor, Tensor],
    before: tuple[Tensor, Tensor] | None,
    leading: tuple[Tensor, Tensor],
    summaries: tuple[Tensor, Tensor] | None,
    seen: Tensor,
    projection: CausalProjection,
    *,
    window: int,
    near: bool,
    scale: float,
) -> Tensor:
    """The softmax of each query over exact keys, global keys and summaries.

    Args:
        tokens: keys and values of the queries' own positions.
        before: those before them; None where all rows begin at rank 0, so that blocks of queries are blocks of the
            window.
        leading: keys and values of the global tokens.
        seen: (rows,) rank of the first query.
    """
    length, device = query.shape[2], query.device
    first, segment_length = leading[0].shape[2], projection.segment_length
    # queries that share a list of keys, and how far back the list reaches before the first of them
    if before is not None:
        block, reach, origin = _BLOCK, before[0].shape[2], before[0].shape[2]
        tokens = torch.cat((before[0], tokens[0]), dim=2), torch.cat((before[1], tokens[1]), dim=2)
    elif window:
        block, reach, origin = window * -(-_BLOCK // window), window + _before_window(segment_length, window, first), 0
    else:
        block, reach, origin = _BLOCK, segment_length - 1, 0
    block = min(block, length)
    grid = block * -(-length // block)
    rank = seen[:, None] + torch.arange(grid, device=device)
    token_rank = seen[:, None] + torch.arange(-reach, grid, device=device)
    ended = _ended_segments(rank, segment_length, window, first)
    if summaries is not None:
        # (1 or heads, slots)
        log_mass = projection.log_mass(summaries[0]).to(query.dtype)
        summaries = summaries[0].to(query.dtype), summaries[1].to(query.dtype)

    def attend(begin: int, end: int) -> Tensor:
        # (rows, blocks, block, 1)
        ranks = rank[:, begin:end].unflatten(1, (-1, block)).unsqueeze(-1)
        past = ended[:, begin:end].unflatten(1, (-1, block)).unsqueeze(-1)
        # (batch, blocks, heads, keys, dim), and which of them queries see: (rows, blocks, block, keys)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        masks: list[Tensor] = []
        if near:
            # overlapping lists of keys, one for each block: (batch, heads, blocks, dim, keys) to the above
            for parts, x in zip((keys, values), tokens, strict=True):
                lists = between(x, origin + begin - reach, origin + end, dim=2).unfold(2, reach + block, block)
                parts.append(lists.permute(0, 2, 1, 4, 3))
            near_rank = token_rank[:, begin : end + reach].unfold(1, reach + block, block).unsqueeze(2)
            masks.append((near_rank >= first + past * segment_length) & (near_rank <= ranks))
        if near and first:
            for parts, x in zip((keys, values), leading, strict=True):
                parts.append(x.unsqueeze(1))
            masks.append(torch.arange(first, device=device) <= ranks)
        if summaries is not None:
            # rows that begin at rank 0 have ended no more segments than this
            slots = summaries[0].shape[2]
            slots = min(slots, max(end - first, 0) // segment_length) if before is None else slots
            for parts, x in zip((keys, values), summaries, strict=True):
                parts.append(x[:, None, :, :slots])
            masks.append(torch.arange(slots, device=device) < past)
        seen_keys = torch.cat(masks, dim=-1)
        if summaries is not None:
            # single keys first, whose mass is 1: (1 or heads, keys)
            added = F.pad(log_mass[:, :slots], (seen_keys.shape[-1] - slots, 0))
        else:
            added = query.new_zeros(1, seen_keys.shape[-1])
        return _softmax(between(query, begin, end, dim=2), keys, values, seen_keys, added, near, scale)

    size = block * max(_PIECE // block, 1)
    pieces = [recomputed(attend, length, begin, min(begin + size, grid)) for begin in range(0, grid, size)]
    return torch.cat(pieces, dim=2)[:, :, :length]


def _softmax(
    query: Tensor, keys: list[Tensor], values: list[Tensor], seen: Tensor, log_mass: Tensor, near: bool, scale: float
) -> Tensor:
    """Attention of query (batch, heads, length, dim) to lists of keys per block, those that are seen.

    Args:
        seen: (rows, blocks, block, keys), bool.
        log_mass: (1 or heads, keys), log of what each key stands for.
    """
    batch, blocks = query.shape[0], seen.shape[1]
    if not seen.shape[-1]:
        return query.new_zeros(*query.shape[:3], values[0].shape[-1])

    def joined(parts: list[Tensor]) -> Tensor:
        parts = [part.expand(batch, blocks, *part.shape[2:]) for part in parts]
        # blocks become rows of the batch: (batch * blocks, heads, keys, dim)
        return torch.cat(parts, dim=3).flatten(0, 1)

    nothing = None
    if not near:
        # a query that sees no key looks at all of them, and its output is dropped
        nothing = ~seen.any(-1, keepdim=True)
        seen = seen | nothing
    # (rows, blocks, 1 or heads, block, keys): one mask for all heads, unless their keys weigh differently
    mask = log_mass.unsqueeze(1).where(seen.unsqueeze(2), NEVER)
    out = F.scaled_dot_product_attention(
        query.unflatten(2, (blocks, -1)).transpose(1, 2).flatten(0, 1),
        joined(keys),
        joined(values),
        attn_mask=mask.expand(batch, *mask.shape[1:]).flatten(0, 1),
        scale=scale,
    )
    # and rows of the batch become blocks again: (batch, blocks, heads, block, dim)
    out = out.unflatten(0, (batch, blocks))
    if nothing is not None:
        out = out.masked_fill(nothing.unsqueeze(2), 0.0)
    return out.transpose(1, 2).flatten(2, 3)


def causal_linformer_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: CausalProjection,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """The same formula, one query at a time. Arguments as in `causal_linformer_attention`."""
    heads, g, first = query.shape[1], projection.segment_length, global_tokens
    query, outputs = query * scale, []
    for i in range(query.shape[2]):
        start = max((i // window_size - 1) * window_size, 0) if window_size else i
        ended = max(start - first, 0) // g
        exact = [j for j in range(i + 1) if j < first or j >= first + ended * g] if near else []
        logits, taken = query[:, :, i, None] @ key[:, :, exact].transpose(-1, -2), value[:, :, exact]
        for s in range(ended if far else 0):
            segment = slice(first + s * g, first + (s + 1) * g)
            summary_key = _reference_summary(projection, "key", key[:, :, segment], s)
            mass = projection.log_mass(query)[:, s].expand(heads)[:, None, None]
            logits = torch.cat((logits, query[:, :, i, None] @ summary_key.transpose(-1, -2) + mass), dim=-1)
            taken = torch.cat((taken, _reference_summary(projection, "value", value[:, :, segment], s)), dim=2)
        # a query that sees no key at all gets zeros
        outputs.append(logits.softmax(-1) @ taken)
    return after_end(torch.cat(outputs, dim=2), lengths)


def _reference_summary(projection: CausalProjection, side: str, x: Tensor, slot: int) -> Tensor:
    """One slot's projected key or value, (batch, heads, 1, dim), from the tokens x of its segment."""
    if projection.projection == "max":
        return x.amax(2, keepdim=True)
    if projection.projection == "mean":
        return x.mean(2, keepdim=True)
    weight = getattr(projection, f"{side if side in projection.sides else 'key'}_weight").to(x.dtype)
    if projection.projection == "conv":
        return (x * weight).mean(2, keepdim=True)
    return (x * (1 + weight[:, slot, :, None])).mean(2, keepdim=True)


class CausalLinformerAttention(LinformerAttention):
    """Causal Linformer attention of one layer: the module that hangs under a converted attention module."""

    causal = True

    def _make_projection(self, num_heads: int, head_dim: int, seed: int) -> CausalProjection:
        # nothing in it is random: no seed
        return CausalProjection(
            projection=self.config.projection,
            sharing=self.config.sharing,
            slots=self.config.projection_length,
            max_length=self.config.max_length or 0,
            num_heads=num_heads,
            head_dim=head_dim,
        )

    def forward(  # type: ignore[override]  # a cache in, and its new state in it
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor | None,
        cache: LinAttnCacheLayer | None,
        *,
        scale: float = 1.0,
    ) -> Tensor:
        """As `causal_linformer_attention`, or, with a cache layer, `causal_linformer_prefill` from and to its state."""
        settings = {"lengths": lengths, "scale": scale, **self.config.joining()}
        if cache is None:
            return causal_linformer_attention(query, key, value, self.used_projection, **settings)
        out, cache.state = causal_linformer_prefill(query, key, value, self.used_projection, cache.state, **settings)
        return out
