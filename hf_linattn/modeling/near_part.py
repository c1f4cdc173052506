"""Exact attention to near keys and to the first tokens, a run of blocks at a time: one part of a bidirectional join.

Without gradients, on a CPU, PyTorch's fused kernel finds it: no keys are gathered and no logits stored. It returns the
logarithm of the keys' mass, by which parts of one softmax are joined and which `scaled_dot_product_attention`, the same
kernel, keeps to itself. It has no gradient for that, so that training goes by `exact_part`.
"""

from typing import Any

import torch
from torch import Tensor

from .blocks import between, near_keys, near_tokens, row_lengths
from .merge import LOG2_E, NEVER, Partial, exact_part, with_one

_KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
# The kernel is called for each block: smaller ones are faster side by side.
_LEAST_WINDOW = 32


class NearPart:
    """Exact attention of each block of queries to its own block, to the two beside it, and to the first tokens.

    Args:
        query, key, value: (batch, heads, length, dim).
        lengths: (batch,) number of real keys per row, which stand first; None when nothing is padded.
        window_size: tokens of a block.
        global_tokens: that many first keys are seen by every query.
        scale: what products of queries and keys are multiplied by.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor | None,
        *,
        window_size: int,
        global_tokens: int,
        scale: float,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.lengths, self.window_size, self.global_tokens, self.scale = lengths, window_size, global_tokens, scale
        self.real_lengths = row_lengths(lengths, query.shape[2], query.device)
        self.global_key, self.global_value = key[:, :, :global_tokens], value[:, :, :global_tokens]
        # (batch, global_tokens): of short rows they are not all there
        self.global_seen = torch.arange(global_tokens, device=query.device) < self.real_lengths[:, None]
        self.fused = window_size >= _LEAST_WINDOW and _can_fuse(query, key, value)
        # rows of one length are one batch: (rows, number of their real keys)
        self.rows = [(slice(None), query.shape[2])]
        if lengths is not None and self.fused:
            ends = self.real_lengths.expand(query.shape[0]).tolist()
            self.rows = [(slice(row, row + 1), real) for row, real in enumerate(ends)]

    def run(self, begin: int, end: int) -> list[Partial]:
        """For the queries of blocks begin .. end - 1: parts of (batch, heads, blocks, window_size, 1 or dim + 1)."""
        # the first tokens are among the near keys of some of these blocks
        early = (begin - 1) * self.window_size < self.global_tokens
        if not self.fused:
            return [self._gathered(begin, end, early)]
        parts = [self._fused(begin, end)]
        return [*parts, self._global(begin, end, early)] if self.global_tokens else parts

    def _queries(self, begin: int, end: int) -> Tensor:
        """Zeros after the end of the rows."""
        return between(self.query, begin * self.window_size, end * self.window_size, dim=2)

    def _gathered(self, begin: int, end: int, early: bool) -> Partial:
        """All keys of each block side by side."""
        seen = None
        # in between, all are seen
        if self.lengths is not None or early or (end + 1) * self.window_size > self.query.shape[2]:
            blocks = near_keys(self.real_lengths, end - begin, self.window_size, self.global_tokens, start=begin)
            seen = torch.cat((self.global_seen.unsqueeze(1).expand(*blocks.shape[:2], -1), blocks), dim=-1)
            # (batch, 1, blocks, 1, keys)
            seen = seen[:, None, :, None]

        def gather(x: Tensor, first: Tensor) -> Tensor:
            # (batch, blocks, keys, heads, dim) -> (batch, heads, blocks, keys, dim)
            blocks = near_tokens(x.transpose(1, 2), begin, end, self.window_size).permute(0, 3, 1, 2, 4)
            return torch.cat((first.unsqueeze(2).expand(-1, -1, end - begin, -1, -1), blocks), dim=3)

        keys, values = gather(self.key, self.global_key), gather(self.value, self.global_value)
        # (batch, heads, blocks, window, dim)
        queries = (self._queries(begin, end) * (self.scale * LOG2_E)).unflatten(2, (-1, self.window_size))
        return exact_part(queries @ keys.transpose(-1, -2), seen, with_one(values))

    def _global(self, begin: int, end: int, early: bool) -> Partial:
        """The first tokens alone, for blocks that do not have them among their neighbours."""
        seen = None
        if self.lengths is not None or early:
            block = torch.arange(begin, end, device=self.query.device)[:, None]
            away = torch.arange(self.global_tokens, device=self.query.device) // self.window_size - block
            # (batch, 1, blocks, 1, global_tokens)
            seen = (self.global_seen[:, None] & (away.abs() > 1))[:, None, :, None]
        logits = self._queries(begin, end) @ (self.global_key * (self.scale * LOG2_E)).transpose(-1, -2)
        return exact_part(logits.unflatten(2, (-1, self.window_size)), seen, with_one(self.global_value).unsqueeze(2))

    def _fused(self, begin: int, end: int) -> Partial:
        """The near keys alone, one block after the other."""
        batch, heads, length, dim = self.query.shape
        tokens, start = (end - begin) * self.window_size, begin * self.window_size
        # (batch, tokens, heads, dim + 1), as the kernel writes, seen with the heads first; no mass after the end
        total = self.query.new_zeros(batch, tokens, heads, dim + 1).transpose(1, 2)
        shift = self.query.new_full((batch, tokens, heads, 1), NEVER).transpose(1, 2)
        for row, real in self.rows:
            for first in range(start, start + tokens, self.window_size):
                last = min(first + self.window_size, length)
                keys = slice(max(first - self.window_size, 0), min(last + self.window_size, real))
                if keys.start >= keys.stop:
                    break
                queries, key, value = self.query[row, :, first:last], self.key[row, :, keys], self.value[row, :, keys]
                out, log_mass = _KERNEL(queries, key, value, scale=self.scale)
                place = slice(first - start, last - start)
                total[row, :, place, :-1] = out
                # the sums are divided by the mass already
                total[row, :, place, -1] = 1.0
                shift[row, :, place, 0] = log_mass
        # tokens back into blocks
        blocks = (-1, self.window_size)
        return Partial(shift.mul_(LOG2_E).unflatten(2, blocks), total.unflatten(2, blocks))


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
