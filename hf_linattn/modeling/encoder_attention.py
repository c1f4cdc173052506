"""Attention of an encoder: each query sees the keys of its block, of the two blocks beside it, and the far part.

What is large, features and logits, is made for a chunk of queries at a time and stays in the processor's cache.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import between, chunks, concatenate, is_large, near_keys, near_tokens, recomputed
from .far_part import FarKeys, FarPart, FarSums, Rows, Settings, Slots, side_by_side
from .merge import NEVER, merge
from .near import NearPart


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
        parts.append(far.summarize(query, key, value, rows, settings.scale))
    keys, values, masks = zip(*parts, strict=True)
    return _softmax(query, torch.cat(keys, dim=2), torch.cat(values, dim=2), side_by_side(masks), settings.scale)


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, far: FarKeys, rows: Rows, settings: Settings
) -> Tensor:
    """What blocks of queries see differs: it is gathered for a chunk of blocks at a time.

    Tensors are (batch, length, heads, dim) here, as models hold them in memory: neighboring blocks are then one
    piece of memory, and so is the output of a chunk.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    window, first, length = settings.window_size, rows.first, rows.length
    summaries = far.summarize_by_block(query, key, value, rows, window, settings.scale) if settings.far else None
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
            side_by_side(masks).expand(key.shape[0], -1, -1, -1).flatten(0, 1),
            settings.scale,
        )
        # and rows of the batch become blocks again
        return out.transpose(1, 2).unflatten(0, (-1, end - begin))

    large = is_large(query, length)
    outputs = [recomputed(attend_chunk, large, *chunk) for chunk in chunks(-(-length // window), window, query.device)]
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
    reader = far.reader(query, key, value, rows, window, of_blocks, settings.scale) if settings.far else None
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
        carry, large = None if reader is None else reader.start(), is_large(query, length)
        for index in range(len(of_blocks)):
            out, carry = recomputed(attend_chunk, large, index, carry)
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
