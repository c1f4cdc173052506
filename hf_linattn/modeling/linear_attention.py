"""Linear attention of one layer: exact attention to near keys, merged with the far part of a method.

    out_i = (sum_{j near i} exp(q_i.k_j) v_j + far numerator_i) / (sum_{j near i} exp(q_i.k_j) + far mass_i)

Encoders: near are the keys of the query's block of `window_size` tokens and of the two beside it. Decoders: those of
the query's block and of the one before it, up to the query; positions are ranks, which count the valid tokens of a row.
In both, the first `global_tokens` keys are near every (later) query. All else is for the far part (`far_part`), which
answers with keys (one softmax over all) or with sums (merged by their mass).

What is large, features and logits, is made for a chunk of queries at a time and stays in the processor's cache.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .blocks import (
    after_end,
    at,
    between,
    chunk_size,
    chunks,
    concatenate,
    near_keys,
    near_tokens,
    recomputed,
)
from .cache import LinAttnCacheLayer
from .far_part import FarKeys, FarPart, FarSums, Rows, Settings, Slots
from .merge import LOG2_E, NEVER, exact_part, merge, with_one
from .methods import METHODS
from .near import NearPart, causal_global_part, causal_window_part
from .state import State, empty_state, first_tokens, last_tokens


class LinearAttention(nn.Module):
    """The module `linattn` that hangs under a converted attention module.

    Args:
        config: settings of the layer, a config of one of `METHODS`.
        causal: a decoder's.
        seed: of random features and fixed projections.
        shared: another layer's module whose far part this layer uses (sharing="layers").
    """

    training_forwards: Tensor

    def __init__(
        self,
        config: Any,
        *,
        num_heads: int,
        head_dim: int,
        causal: bool,
        seed: int,
        shared: "LinearAttention | None" = None,
    ) -> None:
        super().__init__()
        self.config, self.causal, self.owns_far_part = config, causal, shared is None
        # switches: see `LinAttnPreTrainedModel.branches`
        self.near, self.far, self.exact = config.near, config.far, True
        method = METHODS[config.method]
        make: Any = method.decoder if causal else method.encoder
        if shared is None:
            self.far_part: Any = make(config, num_heads=num_heads, head_dim=head_dim, seed=seed)
            # under the names that checkpoints have
            for name, module in self.far_part.modules.items():
                self.add_module(name, module)
        else:
            self.far_part = shared.far_part
        if getattr(config, "redraw_interval", None) is not None:
            # saved with the weights, so that a resumed run draws at the same steps
            self.register_buffer("training_forwards", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        """Fill whatever was not loaded from a checkpoint."""
        if self.owns_far_part:
            self.far_part.reset_parameters()
        if "training_forwards" in self._buffers and not self.training_forwards.is_meta:
            init.zeros_(self.training_forwards)

    def redraw(self) -> None:
        """Draw random directions anew, where there are any."""
        for module in self.far_part.modules.values():
            if hasattr(module, "redraw"):
                module.redraw()

    def count_training_forward(self) -> None:
        """Called before each forward pass of the model in training: draws new directions every `redraw_interval`."""
        interval = getattr(self.config, "redraw_interval", None)
        if not interval:
            return
        forwards = int(self.training_forwards)
        if forwards and forwards % interval == 0:
            self.redraw()
        self.training_forwards += 1

    def settings(self, scale: float = 1.0) -> Settings:
        """How near and far are merged, for this softmax scale."""
        config = self.config
        return Settings(
            window_size=config.window_size,
            global_tokens=config.global_tokens,
            near=self.near,
            far=self.far,
            scale=scale,
            global_queries=config.global_queries,
            # an ablation is of linear attention
            exact_length=(config.exact_length or 0) if self.exact and self.near and self.far else 0,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor | None = None,
        cache: LinAttnCacheLayer | None = None,
        *,
        scale: float = 1.0,
    ) -> Tensor:
        """Attention in time and memory linear in the length.

        Args:
            query, key: (batch, heads, length, head_dim).
            value: (batch, heads, length, value_dim).
            lengths: (batch,) number of valid tokens per row, which stand first; None when nothing is padded.
            cache: of a decoder, holds the state of earlier tokens and takes the new one. None: there are none.
            scale: what products of queries and keys are multiplied by.

        Returns:
            (batch, heads, length, value_dim) in the dtype of `value`. In a decoder zeros for padding and for queries
            that see no key.
        """
        settings = self.settings(scale)
        if not self.causal:
            return attend(query, key, value, self.far_part, lengths, settings)
        if cache is None:
            return attend_causally(query, key, value, self.far_part, None, lengths, settings)[0]
        out, cache.state = attend_causally(query, key, value, self.far_part, cache.state, lengths, settings)
        return out


# encoders


def attend(
    query: Tensor, key: Tensor, value: Tensor, far: FarPart, lengths: Tensor | None, settings: Settings
) -> Tensor:
    """Attention of an encoder; arguments and result as in `LinearAttention.forward`."""
    length, exact = query.shape[2], settings.exact_length
    if length <= exact:
        return exact_attention(query, key, value, lengths, settings.scale)
    if lengths is None or not exact:
        return _attend_linearly(query, key, value, far, lengths, settings)
    short = lengths <= exact
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        # both for all rows: no shape depends on how many are short
        first = slice(0, exact)
        out = exact_attention(
            query[:, :, first], key[:, :, first], value[:, :, first], lengths.clamp_max(exact), settings.scale
        )
        out = F.pad(out, (0, 0, 0, length - exact))
        return out.where(short[:, None, None, None], _attend_linearly(query, key, value, far, lengths, settings))
    outputs, order = [], []
    for is_short in (True, False):
        rows = (short == is_short).nonzero()[:, 0]
        if not len(rows):
            continue
        # as wide as the longest of these rows: the short ones do not pay for the long ones' padding
        width = max(int(lengths[rows].max()), 1)
        all_rows = len(rows) == len(lengths)
        q, k, v = (x[:, :, :width] if all_rows else x[rows, :, :width] for x in (query, key, value))
        if is_short:
            out = exact_attention(q, k, v, lengths[rows], settings.scale)
        else:
            out = _attend_linearly(q, k, v, far, lengths[rows], settings)
        outputs.append(F.pad(out, (0, 0, 0, length - width)) if width < length else out)
        order.append(rows)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)[torch.cat(order).argsort()]


def exact_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of (batch, heads, queries, dim) to all keys, `lengths` (batch,) of each row valid."""
    mask = None
    if lengths is not None:
        # a row without a valid token looks at its first one: finite, and nobody reads it
        mask = (torch.arange(key.shape[2], device=key.device) < lengths.clamp_min(1)[:, None])[:, None, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _attend_linearly(
    query: Tensor, key: Tensor, value: Tensor, far: FarPart, lengths: Tensor | None, settings: Settings
) -> Tensor:
    length = query.shape[2]
    # a block longer than the rows is the row, and there are no more first tokens than tokens
    window, first = min(settings.window_size, length), min(settings.global_tokens, length)
    settings = settings._replace(window_size=window, global_tokens=first)
    rows = Rows(lengths, length, first, query.device)
    if isinstance(far, FarSums):
        out = _merge_with_sums(query, key, value, far, rows, settings)
    elif window:
        out = _attend_in_blocks(query, key, value, far, rows, settings)  # type: ignore[arg-type]
    else:
        out = _attend_to_all(query, key, value, far, rows, settings)  # type: ignore[arg-type]
    if not (settings.global_queries and settings.near and first):
        return out
    leading = exact_attention(query[:, :, :first], key, value, lengths, settings.scale)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return torch.cat((leading, out[:, :, first:]), dim=2)
    out[:, :, :first] = leading
    return out


def _attend_to_all(query: Tensor, key: Tensor, value: Tensor, far: FarKeys, rows: Rows, settings: Settings) -> Tensor:
    """Without a window all queries see the same keys."""
    first = rows.first

    # what all queries see: (batch, heads, keys, dim), and masks (batch, 1 or heads, keys)
    parts = []
    if settings.near and first:
        parts.append(Slots(key[:, :, :first], value[:, :, :first], _log(rows.global_tokens)[:, None]))
    if settings.far:
        parts.append(far.summarize(query, key, value, rows))
    keys, values, masks = zip(*parts, strict=True)
    return _softmax(query, torch.cat(keys, dim=2), torch.cat(values, dim=2), _side_by_side(masks), settings.scale)


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, far: FarKeys, rows: Rows, settings: Settings
) -> Tensor:
    """What blocks of queries see differs: it is gathered for a chunk of blocks at a time.

    Tensors are (batch, length, heads, dim) here, as models hold them in memory: neighboring blocks are then one
    piece of memory, and so is the output of a chunk.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    window, first, length = settings.window_size, rows.first, rows.length
    summaries = far.summarize_by_block(query, key, value, rows, window) if settings.far else None
    first_mask, valid_lengths = _log(rows.global_tokens), rows.valid_lengths

    def attend_chunk(begin: int, end: int) -> Tensor:
        # keys and values (batch, blocks, keys, heads, dim), and masks (batch, blocks, 1 or heads, keys)
        parts = []
        if settings.near and first:
            leading = [x[:, None, :first].expand(-1, end - begin, -1, -1, -1) for x in (key, value)]
            parts.append(Slots(leading[0], leading[1], first_mask[:, None, None].expand(-1, end - begin, -1, -1)))
        if summaries is not None:
            slots = summaries.chunk(begin, end)
            parts.append(Slots(slots.key.to(key.dtype), slots.value.to(key.dtype), slots.log_mass))
        if settings.near:
            near = [near_tokens(x, begin, end, window) for x in (key, value)]
            exists = near_keys(valid_lengths, end - begin, window, first, start=begin)
            parts.append(Slots(near[0], near[1], _log(exists)[:, :, None]))
        keys, values, masks = zip(*parts, strict=True)
        # blocks become rows of the batch: (batch * blocks, heads, window, dim)
        queries = between(query, begin * window, end * window, dim=1).unflatten(1, (-1, window)).flatten(0, 1)
        out = _softmax(
            queries.transpose(1, 2),
            torch.cat(keys, dim=2).flatten(0, 1).transpose(1, 2),
            torch.cat(values, dim=2).flatten(0, 1).transpose(1, 2),
            _side_by_side(masks).expand(key.shape[0], -1, -1, -1).flatten(0, 1),
            settings.scale,
        )
        # and rows of the batch become blocks again
        return out.transpose(1, 2).unflatten(0, (-1, end - begin))

    outputs = [recomputed(attend_chunk, length, *chunk) for chunk in chunks(-(-length // window), window, query.device)]
    # (batch, blocks, window, heads, dim) -> (batch, length, heads, dim); after `cat`, which makes one piece of memory
    # of them whatever an exporter puts in the place of the softmax
    return torch.cat(outputs, dim=1).flatten(1, 2)[:, :length].transpose(1, 2)


def _merge_with_sums(query: Tensor, key: Tensor, value: Tensor, far: FarSums, rows: Rows, settings: Settings) -> Tensor:
    """Near keys and sums merged by their mass, a chunk of queries at a time; float32."""
    dtype, window, length = value.dtype, settings.window_size, rows.length
    query, key, value = query.float(), key.float(), value.float()
    # of whole blocks, or of tokens
    tokens = max(window, 1)
    of_blocks = chunks(-(-length // tokens), tokens, query.device)
    reader = far.reader(key, value, rows, window, of_blocks, settings.scale) if settings.far else None
    near = NearPart(query, key, value, rows, settings) if settings.near and (window or rows.first) else None

    def attend_chunk(index: int, carry: Any) -> tuple[Tensor, Any]:
        begin, end = of_blocks[index]
        parts = [] if near is None else near.parts(begin, end)
        if reader is not None:
            queries = between(query, begin * tokens, end * tokens, dim=2)
            part, carry = reader.read(index, queries, carry, not parts)
            parts.append(part)
        # (batch, heads, tokens, dim) -> (batch, tokens, heads, dim), as models hold them in memory
        return merge(parts).transpose(1, 2), carry

    def outputs() -> Iterator[Tensor]:
        carry = None if reader is None else reader.start()
        for index in range(len(of_blocks)):
            out, carry = recomputed(attend_chunk, length, index, carry)
            yield out

    return concatenate(outputs(), of_blocks[-1][1] * tokens)[:, :length].transpose(1, 2).to(dtype)


def _softmax(query: Tensor, key: Tensor, value: Tensor, log_mass: Tensor, scale: float) -> Tensor:
    """Attention of (batch, heads, length, dim) to keys that stand for some mass, (batch or 1, heads or 1, keys)."""
    # -inf becomes finite, so that a row that sees nothing stays finite
    mask = log_mass.to(query.dtype).clamp_min(torch.finfo(query.dtype).min / 2).unsqueeze(-2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _log(valid: Tensor) -> Tensor:
    """Log of the mass of single keys: 0 for those that are valid, -inf for the others."""
    return torch.zeros(valid.shape, device=valid.device).masked_fill(~valid, NEVER)


def _side_by_side(masks: Any) -> Tensor:
    """Masks of all parts, expanded to the same rows and heads, one after the other."""
    shape = torch.broadcast_shapes(*(mask.shape[:-1] for mask in masks))
    return torch.cat([mask.expand(*shape, -1) for mask in masks], dim=-1)


# decoders


def attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    far: FarPart,
    state: State | None,
    lengths: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, State]:
    """Attention of new tokens, any number of them, that come after those of `state`, and the state after them.

    `state` is what the call before returned; None is the state before the first token, and cheaper. The other arguments
    and the result are as in `LinearAttention.forward`. That rows with a state stay within the longest length is for the
    caller to see to.

    Raises:
        ValueError: the rows are longer than the far part's `max_length`, where it has one.
    """
    longest = getattr(far, "max_length", None)
    if longest is not None and query.shape[2] > longest:
        raise ValueError(f"{query.shape[2]} tokens are more than max_length={longest} of this model's projections.")
    if state is None:
        known = empty_state(
            key,
            value,
            global_tokens=settings.global_tokens,
            near_length=far.near_length(settings.window_size, settings.global_tokens),
            far=far.initial_state(key, value),
        )
    else:
        known = state
    if isinstance(far, FarKeys) and settings.far:
        seen = None if state is None else state.seen
        known = known._replace(far=far.arrive(known.far, key, value, seen, lengths, settings.global_tokens))
    if state is not None and query.shape[2] == 1:
        return _step(query, key, value, far, known, lengths, settings)
    out, far_state = _in_chunks(query, key, value, far, known, lengths, settings, from_start=state is None)
    return out, known.advance(key, value, lengths, far_state, from_start=state is None)


def _in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    far: FarPart,
    state: State,
    lengths: Tensor | None,
    settings: Settings,
    *,
    from_start: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs of many tokens, and the far part's state after them; with far=False the one before.

    Positions are those of a grid of blocks: with a window, a row's first new token stands at `offset` in its block.
    """
    length, window, first, device = query.shape[2], settings.window_size, settings.global_tokens, query.device
    reach, block = far.reach(window, first), far.block_size(window)
    # one row of ranks for all rows, where all begin at 0
    seen = state.seen[:1] if from_start else state.seen
    unit = far.unit(window)
    offset = seen % unit if unit and not from_start else None
    grid = length if offset is None else length + unit - 1
    # sums are made for whole blocks of the window
    whole = window if window and isinstance(far, FarSums) else 1
    block = min(block, whole * -(-grid // whole))
    grid = block * -(-grid // block)
    leading = [
        first_tokens(None if from_start else old, new, first, state.seen)
        for old, new in ((state.global_key, key), (state.global_value, value))
    ]
    # queries stand at the positions of the grid, keys and values `origin` later: from `reach` tokens before it
    origin = 0
    if not from_start:
        before = state.near_key.shape[2]
        position = torch.arange(grid + reach, device=device) - (0 if offset is None else offset[:, None])
        position = position.expand(seen.shape[0], -1)
        query = at(query, position[:, :grid]) if offset is not None else query
        key, value = (
            at(torch.cat(tokens, dim=2), position + before - reach)
            for tokens in ((state.near_key, key), (state.near_value, value))
        )
        origin = reach
    start = seen if offset is None else seen - offset
    # of all keys, from `reach` before the grid
    rank = (start - reach)[:, None] + torch.arange(grid + reach, device=device)
    # keys that the next token finds far: all that any valid query here does
    total = seen + (length if lengths is None else lengths)
    limit = far.near_start(total, window, first) if unit else total
    # nothing is padded, or exact: no mask
    all_far = from_start and lengths is None and not unit and not first and grid == length
    becomes_far = None if all_far else (rank >= first) & (rank < limit[:, None])
    chunk: Any = _chunk_with_keys if isinstance(far, FarKeys) else _chunk_with_sums

    def attend_chunk(begin: int, end: int, *far_state: Tensor) -> tuple[Tensor, ...]:
        queries = between(query, begin, end, dim=2)
        keys, values = (between(x, origin + begin - reach, origin + end, dim=2) for x in (key, value))
        # after the last token, zeros that no valid query sees
        of_chunk = slice(begin, end + reach)
        out, far_state = chunk(
            queries,
            keys,
            values,
            leading,
            rank[:, of_chunk],
            None if becomes_far is None else becomes_far[:, of_chunk],
            far,
            far_state,
            settings,
            block,
            end if from_start else None,
        )
        return out, *far_state

    size, far_state = block * max(chunk_size(device) // block, 1), state.far

    def outputs() -> Iterator[Tensor]:
        nonlocal far_state
        for begin in range(0, grid, size):
            out, *after = recomputed(attend_chunk, length, begin, min(begin + size, grid), *far_state)
            far_state = tuple(after)
            # (batch, heads, tokens, dim) -> (batch, tokens, heads, dim), as models hold them in memory
            yield out.transpose(1, 2)

    out = concatenate(outputs(), grid).transpose(1, 2)
    out = out[:, :, :length] if offset is None else at(out, offset[:, None] + torch.arange(length, device=device))
    return after_end(out, lengths), far_state


def _chunk_with_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    leading: list[Tensor],
    rank: Tensor,
    becomes_far: Tensor | None,
    far: FarKeys,
    state: tuple[Tensor, ...],
    settings: Settings,
    block: int,
    end: int | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A chunk of blocks of queries: each block has one list of keys, and each query its own mask over it."""
    window, first, reach = settings.window_size, settings.global_tokens, rank.shape[1] - query.shape[2]
    ranks = rank[:, reach:].unflatten(1, (-1, block))
    blocks = ranks.shape[1]
    # keys and values (batch, blocks, heads, keys, dim), and masks (rows, blocks, 1 or heads, block, keys)
    parts = []
    if settings.near:
        # overlapping lists of keys, one for each block: (batch, heads, blocks, dim, keys) to the above
        near = [x.unfold(2, reach + block, block).permute(0, 2, 1, 4, 3) for x in (key, value)]
        near_rank = rank.unfold(1, reach + block, block).unsqueeze(2)
        begins = far.near_start(ranks, window, first).clamp_min(first).unsqueeze(-1)
        valid = (near_rank >= begins) & (near_rank <= ranks.unsqueeze(-1))
        parts.append(Slots(near[0], near[1], _as_mask(valid.unsqueeze(2), query)))
    if settings.near and first:
        valid = torch.arange(first, device=query.device) <= ranks.unsqueeze(-1)
        parts.append(Slots(leading[0].unsqueeze(1), leading[1].unsqueeze(1), _as_mask(valid.unsqueeze(2), query)))
    if settings.far:
        tokens = slice(reach - window, reach - window + query.shape[2])
        slots, state = far.chunk(
            state,
            ranks,
            key[:, :, tokens],
            value[:, :, tokens],
            None if becomes_far is None else becomes_far[:, tokens],
            window,
            first,
            end,
        )
        parts.append(slots)
    return _masked_softmax(query.unflatten(2, (blocks, -1)).transpose(1, 2), parts, settings).transpose(1, 2).flatten(
        2, 3
    ), state


def _masked_softmax(query: Tensor, parts: list[Slots], settings: Settings) -> Tensor:
    """Attention of queries (batch, blocks, heads, block, dim) to the keys of all parts; zeros for queries without any.

    The parts have keys (batch, blocks or 1, heads, keys, dim) and masks (rows, blocks, 1 or heads, 1 or block, keys).
    """
    batch, blocks = query.shape[:2]
    mask = _side_by_side([part.log_mass for part in parts])
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


def _chunk_with_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    leading: list[Tensor],
    rank: Tensor,
    becomes_far: Tensor | None,
    far: FarSums,
    state: tuple[Tensor, ...],
    settings: Settings,
    block: int,
    end: int | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A chunk of queries: its near part and what it reads of the sums, merged by their mass; float32 or float64."""
    window, dtype, out_dtype = settings.window_size, torch.promote_types(query.dtype, torch.float32), value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    parts = []
    if settings.near and window:
        parts.append(causal_window_part(query, key, with_one(value), rank, settings))
    if settings.near and settings.global_tokens:
        first_key, first_value = (x.to(dtype) for x in leading)
        parts.append(causal_global_part(query, first_key, first_value, rank[:, window:], settings))
    if settings.far:
        tokens = query.shape[2]
        part, state = far.chunk(
            query,
            key[:, :, :tokens],
            value[:, :, :tokens],
            None if becomes_far is None else becomes_far[:, :tokens],
            state,
            block,
            window,
            settings.scale,
            not parts,
        )
        parts.append(part)
    return merge(parts).to(out_dtype), state


def _step(
    query: Tensor, key: Tensor, value: Tensor, far: FarPart, state: State, lengths: Tensor | None, settings: Settings
) -> tuple[Tensor, State]:
    """One new token per row, or none where `lengths` is 0."""
    window, first, device, rank = settings.window_size, settings.global_tokens, query.device, state.seen
    far_state = state.far
    if settings.far and not window and isinstance(far, FarSums):
        # the query's own key is far
        valid = (rank >= first) if lengths is None else (rank >= first) & (lengths > 0)
        far_state = far.absorb(far_state, key, value, valid[:, None], settings.scale)
    # the last tokens before the new one, and the new one
    keys, values = torch.cat((state.near_key, key), dim=2), torch.cat((state.near_value, value), dim=2)
    after = State(
        rank + (1 if lengths is None else lengths),
        first_tokens(state.global_key, key, first, rank),
        first_tokens(state.global_value, value, first, rank),
        last_tokens(keys, keys.shape[2] - 1, lengths, 1),
        last_tokens(values, values.shape[2] - 1, lengths, 1),
        far_state,
    )
    near_rank = rank[:, None] + torch.arange(1 - keys.shape[2], 1, device=device)
    begins = far.near_start(rank, window, first).clamp_min(first)
    is_near = near_rank >= begins[:, None]
    past = torch.arange(first, device=device) <= rank[:, None]

    near = [(keys, values, is_near)] if settings.near and (window or isinstance(far, FarKeys)) else []
    near += [(after.global_key, after.global_value, past)] if settings.near and first else []
    if isinstance(far, FarKeys):
        # keys (batch, 1, heads, keys, dim), masks (batch, 1, 1 or heads, 1, keys)
        parts = [
            Slots(x.unsqueeze(1), y.unsqueeze(1), _as_mask(valid[:, None, None, None], query)) for x, y, valid in near
        ]
        if settings.far:
            nothing = key[:, :, :0], value[:, :, :0], None
            parts.append(far.chunk(far_state, rank[:, None, None], *nothing, window, first, None)[0])
        out = _masked_softmax(query.unsqueeze(1), parts, settings).squeeze(1)
    else:
        assert isinstance(far, FarSums)
        out = _step_with_sums(query, near, far, far_state, settings).to(value.dtype)

    if settings.far and far.unit(window):
        after = _absorb_block(after, far, settings, new=None if lengths is None else lengths > 0)
    return after_end(out, lengths), after


def _step_with_sums(
    query: Tensor,
    near: list[tuple[Tensor, Tensor, Tensor]],
    far: FarSums,
    far_state: tuple[Tensor, ...],
    settings: Settings,
) -> Tensor:
    """One query per row: its near keys and values, those that are valid (batch, keys), and the sums, merged."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, parts = query.to(dtype), []
    for key, value, valid in near:
        logits = (query * (settings.scale * LOG2_E)) @ key.to(dtype).transpose(-1, -2)
        parts.append(exact_part(logits, valid[:, None, None], with_one(value.to(dtype))))
    if settings.far:
        parts.append(far.read(query, far_state, settings.scale, not parts))
    return merge(parts)


def _absorb_block(state: State, far: FarPart, settings: Settings, new: Tensor | None) -> State:
    """The state once the next token begins a block: the last block that is far from it becomes far.

    That is the last block but one, or, without a window, the last one.
    """
    unit, lag = far.unit(settings.window_size), settings.window_size
    begins = state.seen % unit == 0
    begins = begins if new is None else begins & new
    eager = state.seen.device.type == "cpu" and not torch.compiler.is_compiling()
    if eager and not bool(begins.any()):
        return state
    oldest = state.near_key.shape[2] - lag - unit
    tokens = slice(oldest, oldest + unit)
    rank = (state.seen - lag - unit)[:, None] + torch.arange(unit, device=begins.device)
    valid = begins[:, None] & (rank >= settings.global_tokens)
    key, value = state.near_key[:, :, tokens], state.near_value[:, :, tokens]
    return state._replace(far=far.absorb(state.far, key, value, valid, settings.scale))
