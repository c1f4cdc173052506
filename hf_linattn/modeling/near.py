"""Exact attention to near keys and to the first tokens as one part of a merge, a chunk of queries at a time.

Without gradients, on a CPU, PyTorch's fused kernel computes an encoder's near part: no keys are gathered and no logits
stored. It returns the logarithm of the keys' mass, by which parts of one softmax are merged and which
`scaled_dot_product_attention`, the same kernel, keeps to itself. It has no gradient for that, so that training goes by
`exact_part`.
"""

from typing import Any

import torch
from torch import Tensor

from .blocks import between, near_keys, near_tokens, to_blocks
from .far_part import Rows, Settings
from .merge import LOG2_E, NEVER, Partial, exact_part, with_one

_KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
# The kernel is called for each block: smaller ones are faster side by side.
_LEAST_WINDOW = 32


class NearPart:
    """Encoders: exact attention of a block of queries to itself, to the two blocks beside it, and to the first tokens.

    Args:
        query, key, value: (batch, heads, length, dim).
        settings: window_size=0 leaves the first tokens.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, settings: Settings) -> None:
        self.query, self.key, self.value = query, key, value
        self.rows, self.window_size, self.scale = rows, settings.window_size, settings.scale
        self.valid_lengths = rows.valid_lengths
        self.global_key, self.global_value = key[:, :, : rows.first], value[:, :, : rows.first]
        # (batch, global_tokens): of short rows they are not all there
        self.global_valid = rows.global_tokens
        self.fused = self.window_size >= _LEAST_WINDOW and _can_fuse(query, key, value)
        # rows of one length are one batch: (rows, number of their valid keys)
        self.batches = [(slice(None), query.shape[2])]
        if rows.lengths is not None and self.fused:
            ends = self.valid_lengths.expand(query.shape[0]).tolist()
            self.batches = [(slice(row, row + 1), end) for row, end in enumerate(ends)]

    def parts(self, begin: int, end: int) -> list[Partial]:
        """Parts of (batch, heads, tokens, _) for queries of blocks begin .. end - 1, or without a window of tokens."""
        if not self.window_size:
            queries = self.query[:, :, begin:end] * (self.scale * LOG2_E)
            valid = self.global_valid[:, None, None]
            return [exact_part(queries @ self.global_key.transpose(-1, -2), valid, with_one(self.global_value))]
        # the first tokens are among the near keys of some of these blocks
        early = (begin - 1) * self.window_size < self.rows.first
        if not self.fused:
            return [_tokens(self._gathered(begin, end, early))]
        parts = [self._fused(begin, end)]
        return [*parts, _tokens(self._global(begin, end, early))] if self.rows.first else parts

    def _queries(self, begin: int, end: int) -> Tensor:
        """Zeros after the end of the rows."""
        return between(self.query, begin * self.window_size, end * self.window_size, dim=2)

    def _gathered(self, begin: int, end: int, early: bool) -> Partial:
        """All keys of each block side by side."""
        valid = None
        # in between, all exist
        if self.rows.lengths is not None or early or (end + 1) * self.window_size > self.query.shape[2]:
            blocks = near_keys(self.valid_lengths, end - begin, self.window_size, self.rows.first, start=begin)
            valid = torch.cat((self.global_valid.unsqueeze(1).expand(*blocks.shape[:2], -1), blocks), dim=-1)
            # (batch, 1, blocks, 1, keys)
            valid = valid[:, None, :, None]

        def gather(x: Tensor, first: Tensor) -> Tensor:
            # (batch, blocks, keys, heads, dim) -> (batch, heads, blocks, keys, dim)
            blocks = near_tokens(x.transpose(1, 2), begin, end, self.window_size).permute(0, 3, 1, 2, 4)
            return torch.cat((first.unsqueeze(2).expand(-1, -1, end - begin, -1, -1), blocks), dim=3)

        keys, values = gather(self.key, self.global_key), gather(self.value, self.global_value)
        # (batch, heads, blocks, window, dim)
        queries = (self._queries(begin, end) * (self.scale * LOG2_E)).unflatten(2, (-1, self.window_size))
        return exact_part(queries @ keys.transpose(-1, -2), valid, with_one(values))

    def _global(self, begin: int, end: int, early: bool) -> Partial:
        """The first tokens alone, for blocks that do not have them among their neighbors."""
        valid = None
        if self.rows.lengths is not None or early:
            block = torch.arange(begin, end, device=self.query.device)[:, None]
            away = torch.arange(self.rows.first, device=self.query.device) // self.window_size - block
            # (batch, 1, blocks, 1, global_tokens)
            valid = (self.global_valid[:, None] & (away.abs() > 1))[:, None, :, None]
        logits = self._queries(begin, end) @ (self.global_key * (self.scale * LOG2_E)).transpose(-1, -2)
        return exact_part(logits.unflatten(2, (-1, self.window_size)), valid, with_one(self.global_value).unsqueeze(2))

    def _fused(self, begin: int, end: int) -> Partial:
        """The near keys alone, one block after the other."""
        batch, heads, length, dim = self.query.shape
        tokens, start = (end - begin) * self.window_size, begin * self.window_size
        # (batch, tokens, heads, dim + 1), as the kernel writes, viewed with the heads first; no mass after the end
        total = self.query.new_zeros(batch, tokens, heads, dim + 1).transpose(1, 2)
        shift = self.query.new_full((batch, tokens, heads, 1), NEVER).transpose(1, 2)
        for row, valid in self.batches:
            for first in range(start, start + tokens, self.window_size):
                last = min(first + self.window_size, length)
                keys = slice(max(first - self.window_size, 0), min(last + self.window_size, valid))
                if keys.start >= keys.stop:
                    break
                queries, key, value = self.query[row, :, first:last], self.key[row, :, keys], self.value[row, :, keys]
                out, log_mass = _KERNEL(queries, key, value, scale=self.scale)
                place = slice(first - start, last - start)
                total[row, :, place, :-1] = out
                # the sums are divided by the mass already
                total[row, :, place, -1] = 1.0
                shift[row, :, place, 0] = log_mass
        return Partial(shift.mul_(LOG2_E), total)


def _tokens(part: Partial) -> Partial:
    """(batch, heads, blocks, window, dim) -> (batch, heads, tokens, dim)."""
    return Partial(part.shift.flatten(2, 3), part.total.flatten(2, 3))


def causal_window_part(query: Tensor, key: Tensor, value_and_one: Tensor, rank: Tensor, settings: Settings) -> Partial:
    """Decoders: exact attention of (batch, heads, tokens, dim) to the query's block and the one before it.

    Keys and their ranks (rows, tokens + window) begin one block before the queries. Global tokens are left out.
    """
    window = settings.window_size

    def two_blocks(x: Tensor) -> Tensor:
        blocks = to_blocks(x, window)
        return torch.cat((blocks[:, :, :-1], blocks[:, :, 1:]), dim=3)

    position = torch.arange(2 * window, device=query.device)
    # (window, 2 * window): the key is not later than the query
    past = position <= position[window:, None]
    # (rows, 1, blocks, 1, 2 * window): the key exists, and is not global
    valid = two_blocks((rank >= settings.global_tokens)[:, None, :, None]).transpose(-1, -2)
    queries = to_blocks(query, window) * (settings.scale * LOG2_E)
    return _tokens(exact_part(queries @ two_blocks(key).transpose(-1, -2), past & valid, two_blocks(value_and_one)))


def causal_global_part(query: Tensor, key: Tensor, value: Tensor, rank: Tensor, settings: Settings) -> Partial:
    """Decoders: exact attention of queries of these ranks (rows, tokens) to keys and values of the first tokens."""
    past = torch.arange(key.shape[2], device=query.device) <= rank[..., None]
    logits = (query * (settings.scale * LOG2_E)) @ key.transpose(-1, -2)
    return exact_part(logits, past[:, None], with_one(value))


def _can_fuse(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel can be used: on a CPU, without gradients, and where no graph is recorded."""
    return (
        _KERNEL is not None
        and query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == value.shape[-1]
        # which the kernel takes for granted
        and all(x.stride(-1) == 1 for x in (query, key, value))
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )
