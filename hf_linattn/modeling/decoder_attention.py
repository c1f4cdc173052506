"""Attention of a decoder: each query sees the keys of its block and of the one before it, up to its own, and the far
part of all earlier ones. New tokens come in parallel, or after those of a `State`.

What is large, features and logits, is made for a chunk of queries at a time and stays in the processor's cache.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import after_end, at, between, chunk_size, concatenate, is_large, recomputed
from .decoder_step import step
from .far_part import Chunk, FarKeys, FarPart, FarSums, Settings, Slots, side_by_side
from .merge import NEVER, merge, with_one
from .near import causal_global_part, causal_window_part
from .state import State, empty_state


def attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    far: FarPart,
    state: State | None,
    lengths: Tensor | None,
    settings: Settings,
    *,
    keep: bool = True,
) -> tuple[Tensor, State | None]:
    """Attention of new tokens, any number of them, that come after those of `state`, and the state after them.

    `state` is what the call before returned, and is used up; None is the state before the first token, and cheaper.
    keep=False: no tokens follow, and the state after these is None. The other arguments and the result are as in
    `LinearAttention.forward`. That rows with a state stay within the longest length is for the caller to see to.

    Raises:
        ValueError: the rows are longer than the far part's `max_length`, where it has one.
    """
    longest = getattr(far, "max_length", None)
    if longest is not None and query.shape[2] > longest:
        raise ValueError(f"{query.shape[2]} tokens are more than max_length={longest} of this model's projections.")
    if state is None:
        state = empty_state(key, value, far, settings)
        far = state.part or far
        return _Queries(query, key, value, far, state, lengths, settings, from_start=True, keep=keep).attend()
    far = state.part or far
    query, key, value = (x.to(state.key.dtype) for x in (query, key, value))
    if query.shape[2] == 1:
        return step(query, key, value, far, state, lengths, settings)
    return _Queries(query, key, value, far, state, lengths, settings, from_start=False, keep=keep).attend()


class _Queries:
    """Many new tokens, which stand at the positions of a grid of blocks, and their attention, chunk by chunk.

    With a window and a state, a row's first new token stands at `offset` in its block.

    Args:
        state: before the new tokens.
        from_start: there are no earlier tokens, so that one row of ranks is that of all rows.
        keep: the state after the new tokens is asked for.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        far: FarPart,
        state: State,
        lengths: Tensor | None,
        settings: Settings,
        *,
        from_start: bool,
        keep: bool,
    ) -> None:
        length, device = query.shape[2], query.device
        window, first = settings.window_size, settings.global_tokens
        self.far, self.settings, self.length, self.from_start = far, settings, length, from_start
        self.lengths = lengths
        self.after = state.advance(key, value, lengths, from_start=from_start) if keep or not from_start else None
        # the global tokens
        if self.after is None:
            self.leading = between(key, 0, first, dim=2), between(value, 0, first, dim=2)
        else:
            self.leading = self.after.key[:, :, :first], self.after.value[:, :, :first]
        self.reach = reach = far.reach(window, first)
        unit, seen = far.unit(window), state.seen[:1] if from_start else state.seen
        self.offset = offset = seen % unit if unit and not from_start else None
        grid = length if offset is None else length + unit - 1
        # sums are made for whole blocks of the window
        whole = window if window and isinstance(far, FarSums) else 1
        self.block = block = min(far.block_size(window), whole * -(-grid // whole))
        self.grid = grid = block * -(-grid // block)
        # queries stand at the positions of the grid, keys and values `origin` later: from `reach` tokens before it
        self.query, self.key, self.value, self.origin = query, key, value, 0
        if not from_start:
            position = torch.arange(grid + reach, device=device) - (0 if offset is None else offset[:, None])
            position = position.expand(seen.shape[0], -1)
            if offset is not None:
                self.query = at(query, position[:, :grid])
            # the last tokens, and after them the new ones
            last = seen[:, None] + torch.arange(-state.near_length, 0, device=device)
            self.key, self.value = (
                at(torch.cat((state.near_tokens(x, last), new), dim=2), position + state.near_length - reach)
                for x, new in ((state.key, key), (state.value, value))
            )
            self.origin = reach
        start = seen if offset is None else seen - offset
        # of all keys, from `reach` before the grid
        self.rank = (start - reach)[:, None] + torch.arange(grid + reach, device=device)
        # nothing is padded, or exact: no mask
        all_far = from_start and lengths is None and not unit and not first and grid == length
        # keys that become far: those that the next token finds far, as far as any valid query here does
        total = seen + (length if lengths is None else lengths)
        limit = far.near_start(total, window, first) if unit else total
        self.becomes_far = None if all_far else (self.rank >= first) & (self.rank < limit[:, None])
        self.far_state = far.load(state.far, state.slots)
        if settings.far and not far.absorbs:
            self.far_state = self._with_all(seen, total)

    def _with_all(self, seen: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        """The far part's state once all tokens have come, `total` (rows,) in each row."""
        window, first = self.settings.window_size, self.settings.global_tokens
        # from the first token on that is not far
        begin = self.far.near_start(seen, window, first).clamp_min(first)
        if self.from_start:
            key, value = self.key[:, :, first:], self.value[:, :, first:]
        else:
            position = begin[:, None] - self.rank[:, :1] + torch.arange(self.rank.shape[1], device=seen.device)
            key, value = at(self.key, position), at(self.value, position)
        valid = None
        if self.lengths is not None or not self.from_start:
            valid = begin[:, None] + torch.arange(key.shape[2], device=seen.device) < total[:, None]
        return self.far.absorb(self.far_state, key, value, valid, begin - first, self.settings.scale)

    def attend(self) -> tuple[Tensor, State | None]:
        """Outputs (batch, heads, length, dim), and the state after them; with far=False without what became far."""
        far_state, large = self.far_state, is_large(self.query, self.length)

        def outputs() -> Iterator[Tensor]:
            nonlocal far_state
            size = self.block * max(chunk_size(self.query.device) // self.block, 1)
            for begin in range(0, self.grid, size):
                end = min(begin + size, self.grid)
                out, *after = recomputed(self._attend_chunk, large, begin, end, *far_state)
                far_state = tuple(after)
                # (batch, heads, tokens, dim) -> (batch, tokens, heads, dim), as models hold them in memory
                yield out.transpose(1, 2)

        out = concatenate(outputs(), self.grid).transpose(1, 2)
        if self.offset is None:
            out = out[:, :, : self.length]
        else:
            out = at(out, self.offset[:, None] + torch.arange(self.length, device=out.device))
        after = None if self.after is None else self.after.settle(self.far, far_state, self.settings)
        return after_end(out, self.lengths), after

    def _attend_chunk(self, begin: int, end: int, *far_state: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the positions begin .. end - 1 of the grid, (batch, heads, tokens, dim), and the state after."""
        query = between(self.query, begin, end, dim=2)
        # after the last token, zeros that no valid query sees
        key, value = (
            between(x, self.origin + begin - self.reach, self.origin + end, dim=2) for x in (self.key, self.value)
        )
        rank = self.rank[:, begin : end + self.reach]
        window = self.settings.window_size
        # of these keys, those of `window` ranks before the queries
        becoming = slice(self.reach - window, self.reach - window + end - begin)
        chunk = Chunk(
            query,
            # (rows, blocks, block)
            rank[:, self.reach :].unflatten(1, (-1, self.block)),
            key[:, :, becoming],
            value[:, :, becoming],
            None if self.becomes_far is None else self.becomes_far[:, begin : end + self.reach][:, becoming],
            self.settings,
            end if self.from_start else None,
        )
        attend = self._with_keys if isinstance(self.far, FarKeys) else self._with_sums
        return attend(chunk, key, value, rank, far_state)

    def _with_keys(
        self, chunk: Chunk, key: Tensor, value: Tensor, rank: Tensor, far_state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Each block of queries has one list of keys, and each query its own mask over it."""
        settings, block, ranks = self.settings, self.block, chunk.ranks.unsqueeze(-1)
        # keys and values (batch, blocks, heads, keys, dim), and masks (rows, blocks, 1 or heads, block, keys)
        parts = []
        if settings.near:
            # overlapping lists of keys, one for each block: (batch, heads, blocks, dim, keys) to the above
            near = [x.unfold(2, self.reach + block, block).permute(0, 2, 1, 4, 3) for x in (key, value)]
            near_rank = rank.unfold(1, self.reach + block, block).unsqueeze(2)
            begins = self.far.near_start(chunk.ranks, settings.window_size, settings.global_tokens)
            valid = (near_rank >= begins.clamp_min(settings.global_tokens).unsqueeze(-1)) & (near_rank <= ranks)
            parts.append(Slots(near[0], near[1], _as_mask(valid.unsqueeze(2), key)))
        if settings.near and settings.global_tokens:
            valid = torch.arange(settings.global_tokens, device=key.device) <= ranks
            first_key, first_value = (x.unsqueeze(1) for x in self.leading)
            parts.append(Slots(first_key, first_value, _as_mask(valid.unsqueeze(2), key)))
        if settings.far:
            assert isinstance(self.far, FarKeys)
            slots, far_state = self.far.chunk(far_state, chunk)
            parts.append(slots)
        # blocks before heads: (batch, blocks, heads, block, dim)
        queries = chunk.query.unflatten(2, (-1, block)).transpose(1, 2)
        return _masked_softmax(queries, parts, settings).transpose(1, 2).flatten(2, 3), *far_state

    def _with_sums(
        self, chunk: Chunk, key: Tensor, value: Tensor, rank: Tensor, far_state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """The near part and what is read of the sums, merged by their mass; float32 or float64."""
        settings, dtype = self.settings, torch.promote_types(key.dtype, torch.float32)
        query, key, value_and_one = chunk.query.to(dtype), key.to(dtype), with_one(value.to(dtype))
        parts = []
        if settings.near and settings.window_size:
            parts.append(causal_window_part(query, key, value_and_one, rank, settings))
        if settings.near and settings.global_tokens:
            first_key, first_value = (x.to(dtype) for x in self.leading)
            parts.append(causal_global_part(query, first_key, first_value, rank[:, self.reach :], settings))
        if settings.far:
            assert isinstance(self.far, FarSums)
            chunk = chunk._replace(query=query, key=chunk.key.to(dtype), value=chunk.value.to(dtype))
            part, far_state = self.far.chunk(far_state, chunk, alone=not parts)
            parts.append(part)
        return merge(parts).to(value.dtype), *far_state


def _masked_softmax(query: Tensor, parts: list[Slots], settings: Settings) -> Tensor:
    """Attention of queries (batch, blocks, heads, block, dim) to the keys of all parts; zeros for queries without any.

    The parts have keys (batch, blocks or 1, heads, keys, dim) and masks (rows, blocks, 1 or heads, 1 or block, keys).
    """
    batch, blocks = query.shape[:2]
    mask = side_by_side([part.log_mass for part in parts])
    if not mask.shape[-1]:
        return query.new_zeros(*query.shape[:-1], parts[0].value.shape[-1])
    nothing = None
    if not settings.near:
        # a query that sees no key looks at all of them, and its output is dropped
        nothing = (mask == NEVER).all(-1, keepdim=True)
        mask = mask.masked_fill(nothing, 0.0)

    def together(tensors: list[Tensor]) -> Tensor:
        tensors = [x.expand(batch, blocks, *x.shape[2:]) for x in tensors]
        # blocks become rows of the batch: (batch * blocks, heads, keys, dim)
        return torch.cat(tensors, dim=3).flatten(0, 1)

    out = F.scaled_dot_product_attention(
        query.flatten(0, 1),
        together([part.key for part in parts]),
        together([part.value for part in parts]),
        attn_mask=mask.expand(batch, blocks, *mask.shape[2:]).flatten(0, 1),
        scale=settings.scale,
    )
    # and rows of the batch become blocks again
    out = out.unflatten(0, (batch, blocks))
    return out if nothing is None else out.masked_fill(nothing, 0.0)


def _as_mask(valid: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(valid.shape, dtype=like.dtype, device=valid.device).masked_fill_(~valid, NEVER)
