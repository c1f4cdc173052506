"""Causal Performer attention (FAVOR+, arXiv:2009.14794): parallel over chunks, or from a state of fixed size.

    out_i = (sum_{j near i} exp(q_i.k_j) v_j + phi(q_i) S_i) / (sum_{j near i} exp(q_i.k_j) + phi(q_i) z_i)

with S_i = sum_{j far from i} phi(k_j) v_j^T and z_i = sum_{j far from i} phi(k_j), over keys j <= i only.
Positions are ranks: tokens are counted per row, padding is not. Near are the keys of the query's block
of `window_size` ranks and of the block before it, and the first `global_tokens` keys; far is all that is
earlier. With window_size=0 all keys but the global ones are far, the query's own among them.

Nothing here looks at later keys, stabilisers included: each chunk of queries reads sums over earlier
chunks, on a scale per feature that is the maximum over earlier keys, and the scale of pairs within a
chunk is a running maximum. Everything is computed in float32, or in float64 for float64 inputs. Without a window, and
where they can be used, the kernels of flash-linear-attention do the sums (`kernels`).
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import (
    after_end,
    at,
    between,
    first_tokens,
    from_blocks,
    last_tokens,
    newest_tokens,
    piece_size,
    put_together,
    recomputed,
    to_blocks,
)
from .cache import LinAttnCacheLayer
from .feature_maps import FeatureMap, Features
from .feature_sums import (
    add,
    bounded_features,
    expand,
    expand_to_one,
    features_in_blocks,
    floor_mass,
    read,
    sum_up,
)
from .kernels import gated_part, kernels_for
from .merge import LOG2_E, NEVER, Partial, exact_part, finite, join, masked, with_one
from .performer import PerformerAttention

# Queries per chunk without a window, and the least number with one: measured on 2 cores with 64 to 256 features.
_CHUNK, _LEAST_CHUNK = 64, 64
# Least estimate, as a share of what the scales of a query and a key allow. Smaller ones would be lost to
# underflow, and with no other key in sight (window_size=0) a query would be left with no mass at all.
_LEAST_ESTIMATE = 1e-30


class CausalPerformerState(NamedTuple):
    """All that later tokens need of a row's first `seen` tokens. Its size does not depend on their number.

    The first dimension of each tensor is the batch, so that rows are chosen by `index_select(0, rows)`.
    With w = window_size, b = seen // w the block of the next token, and M the number of features (one
    more for `trigonometric`: the largest mass that its keys could have):

    seen: (batch,) long.
    global_key, global_value: (batch, heads, global_tokens, dim), the first keys and values.
    near_key, near_value: (batch, heads, 2 w, dim), the last 2 w keys and values, the newest last.
    sums: (batch, heads, M, value_dim + 1), S and, as the last column, z of all blocks before b - 1, with
        the features divided by 2 ** shift. window_size=0: of all keys.
    shift: (batch, heads, 1, M or 1), the largest base-2 log of a feature of these keys, -inf where there are none.
    waiting_sums, waiting_shift: the same for ranks (b - 1) w .. seen - w - 1, which are near until block
        b + 1 begins; of size 0 for window_size=0. Each token adds one key here, so that no step is
        more work than another.
    """

    seen: Tensor
    global_key: Tensor
    global_value: Tensor
    near_key: Tensor
    near_value: Tensor
    sums: Tensor
    shift: Tensor
    waiting_sums: Tensor
    waiting_shift: Tensor


def _running_shifts(shift: Tensor, key: Features) -> Tensor:
    """Largest base-2 log of each feature before each chunk and after the last: (batch, heads, chunks + 1, 1, M or 1).

    Args:
        shift: that of earlier keys, (batch, heads, 1, M or 1).
        key: features in chunks, (batch, heads, chunks, chunk, M or 1), -inf where there is no key.
    """
    per_chunk = key.log2_phi.detach().amax(3, keepdim=True)
    return torch.cat((shift.unsqueeze(2), per_chunk), dim=2).cummax(2).values


def _scan(sums: Tensor, shifts: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """What is known before each chunk, (batch, heads, chunks, M, value_dim + 1), and after the last.

    Args:
        sums: of earlier keys, (batch, heads, M, value_dim + 1), on the first of the shifts.
        shifts: as `_running_shifts` returns them.
        added: sums of each chunk, on the shift after it.
    """
    kept = (shifts[:, :, :-1] - finite(shifts[:, :, 1:])).exp2().transpose(-1, -2).unbind(2)
    steps = list(zip(kept, added.unbind(2), strict=True))
    if torch.is_grad_enabled():
        known = list(accumulate(steps, lambda sums, step: torch.addcmul(step[1], sums, step[0]), initial=sums))
        return torch.stack(known[:-1], dim=2), known[-1]
    # each written where it belongs
    before = torch.empty_like(added)
    places = [*before.unbind(2), torch.empty_like(sums)]
    places[0].copy_(sums)
    for (keep, new), earlier, later in zip(steps, places[:-1], places[1:], strict=True):
        torch.addcmul(new, earlier, keep, out=later)
    return before, places[-1]


def _far_part(
    query: Features,
    key: Features,
    value_and_one: Tensor,
    held: Tensor | None,
    sums: Tensor,
    shift: Tensor,
    *,
    chunk: int,
    window: int,
    signed: bool,
) -> tuple[Partial, Tensor, Tensor]:
    """The estimate of many queries, chunk by chunk, and the sums after them.

    Args:
        query: features at positions 0 .. length - 1, a multiple of `chunk`.
        key, value_and_one: of keys `window` ranks earlier: in these positions a query sees all keys of
            earlier blocks, or, with window = 0, all keys up to its own.
        held: (rows, length) bool, which keys are real and not global; none before the first of them is seen.
            None for all.
        sums, shift: of earlier keys.
    """
    length = query.log2_phi.shape[2]
    query, key = features_in_blocks(query, chunk), features_in_blocks(key, chunk)
    value_and_one = to_blocks(value_and_one, chunk)
    if held is not None:
        # (rows, 1, chunks, chunk, 1)
        held = held.unflatten(1, (-1, chunk))[:, None, ..., None]
        key = Features(masked(key.log2_phi, ~held), key.factor)
    shifts = _running_shifts(shift, key)
    before_shift, shift = shifts[:, :, :-1], shifts[:, :, -1]
    base = before_shift
    if window != chunk:
        # Keys of the same chunk are met as pairs. Their scale per feature is that of earlier chunks, or, where there
        # is none, of the first key: the rest must not matter to queries that do not see it.
        first = slice(1) if held is None else held.to(torch.uint8).argmax(3, keepdim=True)
        log2_phi = key.log2_phi.detach()
        log_first = log2_phi[:, :, :, first] if isinstance(first, slice) else log2_phi.take_along_dim(first, dim=3)
        base = log_first.where(base == NEVER, base)
    phi = expand(key, -finite(shifts[:, :, 1:]))
    before, sums = _scan(sums, shifts, phi.transpose(-1, -2) @ value_and_one)
    if window == chunk:
        part = read(query, before, before_shift, signed)
        return Partial(from_blocks(part.shift, length), from_blocks(part.total, length)), sums, shift

    base = finite(base)
    phi_query, read_shift = expand_to_one(query, base)
    # and per key a scale of its own, (batch, heads, chunks, chunk, 1), given back below
    phi_key, key_shift = expand_to_one(key, -base)
    level = _running_level(key_shift, window)
    # the largest scale that a query finds; that of the earlier chunks is 0
    level = torch.maximum(level, torch.zeros_like(level).masked_fill(before_shift[..., :1] == NEVER, NEVER))
    # zero for pairs that do not see each other, whose scales may be beyond any number
    scale = (key_shift.transpose(-1, -2) - finite(level)).exp2_()
    if window:
        block = torch.arange(chunk, device=level.device) // window
        scale = scale.masked_fill_(block[:, None] <= block, 0.0)
    else:
        scale = scale.tril_()
    earlier = (-finite(level)).exp2_()
    estimate = phi_query @ phi_key.transpose(-1, -2)
    total = phi_query @ before
    if torch.is_grad_enabled():
        estimate = estimate if window or signed else estimate.clamp_min(_LEAST_ESTIMATE)
        total = torch.addcmul((estimate * scale) @ value_and_one, total, earlier)
    else:
        # the same in place
        estimate = estimate if window or signed else estimate.clamp_min_(_LEAST_ESTIMATE)
        total = _add_product(total.mul_(earlier), estimate.mul_(scale), value_and_one)
    if signed and key.factor is not None:
        largest = (key.factor[..., -1:].transpose(-1, -2) * scale).sum(-1, keepdim=True)
        total = floor_mass(total, earlier * before[..., -1:, -1:] + largest)
    return Partial(from_blocks(read_shift + level, length), from_blocks(total, length)), sums, shift


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """total + x @ y, written over `total`, which is one piece of memory."""
    # all leading dimensions as one batch
    total.flatten(0, -3).baddbmm_(x.flatten(0, -3), y.flatten(0, -3))
    return total


def _running_level(key_shift: Tensor, window: int) -> Tensor:
    """Largest of (batch, heads, chunks, chunk, 1) up to each position; with a window, in earlier blocks of it."""
    if not window:
        return key_shift.cummax(3).values
    # split the chunk into blocks, take the maximum of each: (batch, heads, chunks, blocks, 1, 1)
    blocks = key_shift.unflatten(3, (-1, window)).amax(4, keepdim=True).cummax(3).values
    earlier = torch.cat((torch.full_like(blocks[:, :, :, :1], NEVER), blocks[:, :, :, :-1]), dim=3)
    # every position of a block has the same: blocks and positions back into one chunk
    return earlier.expand(-1, -1, -1, -1, window, -1).flatten(3, 4)


def _near_part(
    query: Tensor, key: Tensor, value_and_one: Tensor, rank: Tensor, window: int, first: int, scale: float
) -> Partial:
    """Exact attention to the query's block and the one before it. Keys and ranks begin one block before the queries."""
    query_blocks = to_blocks(query, window)

    def two_blocks(x: Tensor) -> Tensor:
        blocks = to_blocks(x, window)
        return torch.cat((blocks[:, :, :-1], blocks[:, :, 1:]), dim=3)

    position = torch.arange(2 * window, device=query.device)
    # (window, 2 * window): the key is not later than the query
    past = position <= position[window:, None]
    # (rows, 1, blocks, 1, 2 * window): the key is there, and not global
    there = two_blocks((rank >= first)[:, None, :, None]).transpose(-1, -2)
    part = exact_part(
        (query_blocks * (scale * LOG2_E)) @ two_blocks(key).transpose(-1, -2), past & there, two_blocks(value_and_one)
    )
    return Partial(from_blocks(part.shift, query.shape[2]), from_blocks(part.total, query.shape[2]))


def causal_performer_state(
    key: Tensor, value: Tensor, feature_map: FeatureMap, *, window_size: int = 0, global_tokens: int = 0
) -> CausalPerformerState:
    """The state before the first token, for keys and values like these (batch, heads, any length, dim)."""
    batch, heads, _, _ = key.shape
    dtype = torch.promote_types(key.dtype, torch.float32)
    features = bounded_features(feature_map, key[:, :, :0].to(dtype), "key", scale=1.0)
    num_features = features.log2_phi.shape[-1] if features.factor is None else features.factor.shape[-1]
    scales = features.log2_phi.shape[-1]
    waiting = bool(window_size)

    def tokens(like: Tensor, count: int) -> Tensor:
        return like.new_zeros(batch, heads, count, like.shape[-1])

    return CausalPerformerState(
        torch.zeros(batch, dtype=torch.long, device=key.device),
        tokens(key, global_tokens),
        tokens(value, global_tokens),
        tokens(key, 2 * window_size),
        tokens(value, 2 * window_size),
        key.new_zeros(batch, heads, num_features, value.shape[-1] + 1, dtype=dtype),
        key.new_full((batch, heads, 1, scales), NEVER, dtype=dtype),
        key.new_zeros(batch, heads, num_features * waiting, value.shape[-1] + 1, dtype=dtype),
        key.new_full((batch, heads, 1, scales * waiting), NEVER, dtype=dtype),
    )


def causal_performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """Causal Performer attention in time and memory linear in the length.

    Args:
        query, key: (batch, heads, length, head_dim).
        value: (batch, heads, length, value_dim).
        feature_map: the layer's `FeatureMap`.
        lengths: (batch,) number of real tokens per row, which stand first; None when nothing is padded.
        window_size: block size of the exact part; 0 for none.
        global_tokens: that many first keys are exact for every later query.
        near, far: False leaves that part of the formula out.
        scale: what products of queries and keys are multiplied by.

    Returns:
        (batch, heads, length, value_dim) in the dtype of `value`, zeros for padding.
    """
    settings: dict[str, Any] = {
        "window_size": window_size,
        "global_tokens": global_tokens,
        "near": near,
        "far": far,
        "scale": scale,
    }
    return _parallel(query, key, value, feature_map, None, lengths, **settings)[0]


def causal_performer_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    state: CausalPerformerState | None = None,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, CausalPerformerState]:
    """Causal Performer attention of new tokens, any number of them, that come after those of `state`.

    Args:
        state: what the call before returned; None is the state before the first token, and cheaper.
        lengths: (batch,) number of new tokens per row that are real, at least 0; real ones stand first.

    The other arguments are as in `causal_performer_attention`, and the same in all calls of a sequence.

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
    if state is not None and query.shape[2] == 1:
        return _step(query, key, value, feature_map, state, lengths, **settings)
    out, sums, shift = _parallel(query, key, value, feature_map, state, lengths, **settings)

    length, start = (
        query.shape[2],
        state or causal_performer_state(key, value, feature_map, window_size=window_size, global_tokens=global_tokens),
    )
    seen = start.seen + (length if lengths is None else lengths)
    old_global = (None, None) if state is None else (state.global_key, state.global_value)
    global_key, global_value = (
        first_tokens(old, new, global_tokens, start.seen) for old, new in zip(old_global, (key, value), strict=True)
    )
    near_key, near_value = (
        newest_tokens(old, new, lengths) for old, new in ((start.near_key, key), (start.near_value, value))
    )
    waiting = start.waiting_sums, start.waiting_shift
    if far and window_size:
        # the older half of what is near, without the block that is far already
        rank = (seen - 2 * window_size)[:, None] + torch.arange(window_size, device=key.device)
        held = (rank >= (seen // window_size - 1)[:, None] * window_size) & (rank >= global_tokens)
        older = near_key[:, :, :window_size].to(sums.dtype)
        features = bounded_features(feature_map, older, "key", scale=scale)
        older_value = with_one(near_value[:, :, :window_size].to(sums.dtype))
        waiting = sum_up(features, older_value, held[:, None, :, None])
    # of a view, what it has
    shift = shift.clone()
    return out, CausalPerformerState(seen, global_key, global_value, near_key, near_value, sums, shift, *waiting)


def _parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    state: CausalPerformerState | None,
    lengths: Tensor | None,
    *,
    window_size: int,
    global_tokens: int,
    near: bool,
    far: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of many tokens, and the sums and the shift after them; with far=False those of `state`."""
    length, window, device = query.shape[2], window_size, query.device
    out_dtype, dtype = value.dtype, torch.promote_types(query.dtype, torch.float32)
    # rank of each row's first new token
    seen = torch.zeros(1, dtype=torch.long, device=device) if state is None else state.seen
    chunk = window * -(-_LEAST_CHUNK // window) if window else _CHUNK
    # blocks are counted in ranks: a row's first new token stands at `offset` in its block
    offset = seen % window if window and state is not None else None
    grid = length if offset is None else length + window - 1
    chunk = min(chunk, grid if not window else window * -(-grid // window))
    grid = chunk * -(-grid // chunk)

    first_keys, first_values = (
        first_tokens(old, new, global_tokens, seen)
        for old, new in (
            (None if state is None else state.global_key, key),
            (None if state is None else state.global_value, value),
        )
    )
    # queries stand at the positions of the grid, keys and values `origin` later: from one block before it
    if offset is None or state is None:
        origin, start = 0, seen
    else:
        position = torch.arange(grid + window, device=device) - offset[:, None]
        query = at(query, position[:, :grid])
        key, value = (
            at(torch.cat(tokens, dim=2), position + window)
            for tokens in ((state.near_key, key), (state.near_value, value))
        )
        origin, start = window, seen - offset
    first_keys, first_values = first_keys.to(dtype), with_one(first_values.to(dtype))
    rank = (start - window)[:, None] + torch.arange(grid + window, device=device)
    # keys that the next token finds far: all that any real query here does
    total = seen + (length if lengths is None else lengths)
    limit = (total // window - 1) * window if window else total
    held = (rank >= global_tokens) & (rank < limit[:, None])
    # nothing is padded, or exact: no mask
    all_held = state is None and lengths is None and not window and not global_tokens and grid == length
    known = causal_performer_state(key, value, feature_map) if state is None else state
    sums, shift = known.sums, known.shift
    far_part = (
        gated_part
        if not window and kernels_for(query, dtype, feature_map.signed)
        else partial(_far_part, chunk=chunk, window=window, signed=feature_map.signed)
    )

    def attend(begin: int, end: int, sums: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries = between(query, begin, end, dim=2).to(dtype)
        keys, values = (between(x, origin + begin - window, origin + end, dim=2).to(dtype) for x in (key, value))
        values, ranks = with_one(values), rank[:, begin : end + window]
        parts = []
        if near and window:
            parts.append(_near_part(queries, keys, values, ranks, window, global_tokens, scale))
        if near and global_tokens:
            past = torch.arange(global_tokens, device=device) <= ranks[:, window:, None]
            parts.append(
                exact_part((queries * (scale * LOG2_E)) @ first_keys.transpose(-1, -2), past[:, None], first_values)
            )
        if far:
            part, sums, shift = far_part(
                bounded_features(feature_map, queries, "query", scale=scale, alone=not parts),
                bounded_features(feature_map, keys[:, :, : end - begin], "key", scale=scale),
                values[:, :, : end - begin],
                None if all_held else held[:, begin:end],
                sums,
                shift,
            )
            parts.append(part)
        return join(parts).to(out_dtype), sums, shift

    # a piece at a time: what is large, features and logits, then stays in the processor's cache
    size = chunk * max(piece_size(device) // chunk, 1)

    def outputs() -> Iterator[Tensor]:
        nonlocal sums, shift
        for begin in range(0, grid, size):
            piece, sums, shift = recomputed(attend, length, begin, min(begin + size, grid), sums, shift)
            # (batch, heads, tokens, dim) -> (batch, tokens, heads, dim), as models hold them in memory
            yield piece.transpose(1, 2)

    out = put_together(outputs(), grid).transpose(1, 2)
    out = out[:, :, :length] if offset is None else at(out, offset[:, None] + torch.arange(length, device=device))
    return after_end(out, lengths), sums, shift


def _step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    state: CausalPerformerState,
    lengths: Tensor | None,
    *,
    window_size: int,
    global_tokens: int,
    near: bool,
    far: bool,
    scale: float,
) -> tuple[Tensor, CausalPerformerState]:
    """One new token per row, or none where `lengths` is 0."""
    dtype, device, window = state.sums.dtype, query.device, window_size
    new = torch.ones_like(state.seen) if lengths is None else lengths
    rank, seen = state.seen, state.seen + new
    global_key = first_tokens(state.global_key, key, global_tokens, rank)
    global_value = first_tokens(state.global_value, value, global_tokens, rank)
    # the 2 w tokens before the new one, and the new one
    keys, values = torch.cat((state.near_key, key), dim=2), torch.cat((state.near_value, value), dim=2)
    query = query.to(dtype)

    parts = []
    if near and window:
        near_rank = rank[:, None] + torch.arange(-2 * window, 1, device=device)
        is_near = (near_rank >= global_tokens) & (near_rank >= (rank // window - 1)[:, None] * window)
        logits = (query * (scale * LOG2_E)) @ keys.to(dtype).transpose(-1, -2)
        parts.append(exact_part(logits, is_near[:, None, None], with_one(values.to(dtype))))
    if near and global_tokens:
        logits = (query * (scale * LOG2_E)) @ global_key.to(dtype).transpose(-1, -2)
        past = torch.arange(global_tokens, device=device) <= rank[:, None]
        parts.append(exact_part(logits, past[:, None, None], with_one(global_value.to(dtype))))
    sums, shift, waiting = state.sums, state.shift, (state.waiting_sums, state.waiting_shift)
    if far:
        # with a window, the key that is w older is the next to become far
        age = slice(window, window + 1)
        held = (rank - window >= global_tokens) & (new > 0)
        features = bounded_features(feature_map, keys[:, :, age].to(dtype), "key", scale=scale)
        added = sum_up(features, with_one(values[:, :, age].to(dtype)), held[:, None, None, None])
        if not window:
            sums, shift = add(sums, shift, *added)
        parts.append(read(bounded_features(feature_map, query, "query", scale=scale), sums, shift, feature_map.signed))
        if window:
            waiting = add(*waiting, *added)
            # the next token begins a block: what waited is far from it
            full = (seen % window == 0)[:, None, None, None]
            merged = add(sums, shift, *waiting)
            sums, shift = torch.where(full, merged[0], sums), torch.where(full, merged[1], shift)
            waiting = waiting[0].masked_fill(full, 0.0), waiting[1].masked_fill(full, NEVER)
    near_key, near_value = (last_tokens(x, 2 * window, lengths, 1) for x in (keys, values))
    return after_end(join(parts), lengths).to(value.dtype), CausalPerformerState(
        seen, global_key, global_value, near_key, near_value, sums, shift, *waiting
    )


def causal_performer_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """The same formula with the whole (length, length) matrix of weights, in the dtype of the inputs.

    No stabiliser: meant for float64 inputs of moderate size. Arguments as in `causal_performer_attention`.
    """
    length = query.shape[2]
    query, key = query * scale**0.5, key * scale**0.5
    phi_query = expand(feature_map(query, "query"), query.new_zeros(()))
    phi_key = expand(feature_map(key, "key"), key.new_zeros(()))
    position = torch.arange(length, device=query.device)
    past = position <= position[:, None]
    is_near = past & (position < global_tokens)
    if window_size:
        block = position // window_size
        is_near = is_near | (past & (block[:, None] - block <= 1))
    exact = (query @ key.transpose(-1, -2)).exp() * (is_near if near else 0)
    estimate = (phi_query @ phi_key.transpose(-1, -2)) * (past & ~is_near if far else 0)
    weights = exact + estimate
    mass = weights.sum(-1, keepdim=True)
    # a query that sees no key at all gets zeros
    out = weights @ value / mass.where(mass != 0, torch.ones_like(mass))
    return after_end(out, lengths)


class CausalPerformerAttention(PerformerAttention):
    """Causal Performer attention of one layer: the module that hangs under a converted attention module."""

    causal = True

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
        """As `causal_performer_attention`, or, with a cache layer, `causal_performer_prefill` from and to its state."""
        settings = {"lengths": lengths, "scale": scale, **self.config.joining()}
        if cache is None:
            return causal_performer_attention(query, key, value, self.feature_map, **settings)
        out, cache.state = causal_performer_prefill(query, key, value, self.feature_map, cache.state, **settings)
        return out
