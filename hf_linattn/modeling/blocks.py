"""Rows of tokens, and rows cut into blocks: what is near a query, and sums over all that is far from it.

Shapes: a *row* is one document of a batch; its keys stand left-aligned, `lengths[row]` of them valid.
`window` is the block size w and `blocks` = ceil(length / w). A key is *near* a query when it lies in
the query's block or in one of its two neighbors; every other key is *far*.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Tokens that are worked on at a time: on a CPU few enough that what is made of them stays in the cache, and that
# the allocator gives the same memory again; elsewhere enough to fill the device.
_CPU_CHUNK, _CHUNK = 512, 8192
# Rows of so many tokens trade time for memory in training, where all queries of a layer have more elements than
# `_KEPT`. What the backward pass needs takes 20 to 50 times their memory: up to 0.8 GiB per layer in float32.
_LONG, _KEPT = 2048, 2**22


def to_blocks(x: Tensor, window: int) -> Tensor:
    """(batch, heads, length, dim) -> (batch, heads, blocks, window, dim), zeros after the end."""
    padding = -x.shape[2] % window
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    # split the length into blocks of `window` positions
    return x.unflatten(2, (-1, window))


def from_blocks(x: Tensor, length: int) -> Tensor:
    """(batch, heads, blocks, window, dim) -> (batch, heads, length, dim), the inverse of `to_blocks`."""
    # join blocks and positions back into one length
    return x.flatten(2, 3)[:, :, :length]


def with_neighbors(x: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
    """(..., blocks, window, dim) -> (..., end - begin, 3 * window, dim): the previous block, the block, the next."""
    end = x.shape[-3] if end is None else end
    # zeros where there is no block before the first or after the last
    missing = (0, 0, 0, 0, max(1 - begin, 0), max(end + 1 - x.shape[-3], 0))
    padded = F.pad(x[..., max(begin - 1, 0) : end + 1, :, :], missing)
    return torch.cat((padded[..., :-2, :, :], padded[..., 1:-1, :, :], padded[..., 2:, :, :]), dim=-2)


def chunk_size(device: torch.device) -> int:
    """How many tokens are worked on at a time."""
    if torch.jit.is_tracing():
        # all of them: a trace has as many chunks for every length
        return 1 << 30
    return _CPU_CHUNK if device.type == "cpu" else _CHUNK


def chunks(blocks: int, window: int, device: torch.device) -> list[tuple[int, int]]:
    """Chunks of whole blocks, (begin, end), of some tokens each: what is large in one chunk then stays in the cache."""
    step = max(chunk_size(device) // window, 1)
    # counted first: torch.compile then makes a graph for a number of chunks, and not one for each number of blocks
    count = -(-blocks // step)
    return [(index * step, min((index + 1) * step, blocks)) for index in range(count)]


def is_large(query: Tensor, length: int) -> bool:
    """Whether what the backward pass needs of these queries, in rows of this length, is too much to be kept."""
    return length >= _LONG and query.numel() > _KEPT


def recomputed(function: Callable[..., Any], large: bool, *arguments: Any) -> Any:
    """function(*arguments); in training, if `large`, what it needs for the backward pass is computed again then.

    Features, logits and running sums take an order of magnitude more memory than queries, keys and values.
    """
    if not large or not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def concatenate(parts: Iterable[Tensor], tokens: int) -> Tensor:
    """torch.cat of parts (batch, some of the tokens, ...) as they come, (batch, tokens, ...).

    Without gradients each is written where it belongs and forgotten: kept until the end, they would all take fresh
    memory, which costs as much as what is computed.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat(list(parts), dim=1)
    whole, begin = None, 0
    for part in parts:
        if whole is None:
            whole = part.new_empty(part.shape[0], tokens, *part.shape[2:])
        end = begin + part.shape[1]
        whole[:, begin:end] = part
        begin = end
    assert whole is not None and begin == tokens
    return whole


def near_keys(lengths: Tensor, blocks: int, window: int, first: int, start: int = 0) -> Tensor:
    """Which of the keys that `with_neighbors` gathers are valid keys, shape (batch, blocks, 3 * window), bool.

    `start` is the first of the blocks. Keys before position `first` are left out: they are the global
    tokens, which every query sees anyway.
    """
    begin = (torch.arange(start, start + blocks, device=lengths.device) - 1) * window
    # position of each gathered key: (blocks, 3 * window)
    position = begin[:, None] + torch.arange(3 * window, device=lengths.device)
    return (position >= first) & (position < lengths[:, None, None])


def far_maxima(per_block: Tensor) -> Tensor:
    """Largest entries of all blocks that are not near: (..., blocks, rows, dim), same shape out; -inf where none is."""
    blocks = per_block.unbind(-3)
    nothing = torch.full_like(blocks[0], float("-inf"))
    before = [nothing, nothing, *accumulate(blocks[:-2], torch.maximum)]
    after = [nothing, nothing, *accumulate(reversed(blocks[2:]), torch.maximum)]
    pairs = zip(before, reversed(after[: len(blocks)]), strict=False)
    return torch.stack([torch.maximum(*pair) for pair in pairs], dim=-3)


def running_sums(first: Tensor, steps: list[Tensor], dim: int) -> Tensor:
    """first, first + steps[0], first + steps[0] + steps[1], ..., side by side in a new dimension `dim`."""
    if first.device.type != "cpu":
        return torch.stack([first, *steps], dim=dim).cumsum(dim)
    # one addition after the other: several times faster on a CPU
    return torch.stack(list(accumulate(steps, initial=first)), dim=dim)


class FarDifferences:
    """sum over far tokens j of weights[:, j] x[j] for each block of queries: those of all tokens minus the near ones.

    What rounding leaves is of the size of the sum over all tokens. That does no harm where the sums are used as they
    are, and would where they are divided by how much is far (`feature_sums.SumsByBlock`).

    Args:
        weights: (batch or 1, heads or 1, rows, length).
        x: (batch, length, heads, dim), of any dtype; sums are float32.
        window: tokens of a block.
    """

    def __init__(self, weights: Tensor, x: Tensor, window: int) -> None:
        self.weights, self.x, self.window = weights, x, window
        self.products: Tensor | None = None
        if weights.shape[2] <= window:
            # the products of all blocks take no more memory than x
            self.products = self._products(0, -(-x.shape[1] // window))
            self.total = self.products.sum(1, keepdim=True)
        else:
            # all tokens as one block: (batch, 1, rows, heads, dim)
            self.total = _products(weights.unsqueeze(3), x.unsqueeze(1))

    def chunk(self, begin: int, end: int) -> Tensor:
        """The sums for the blocks begin .. end - 1: (batch, end - begin, rows, heads, dim)."""
        # of the blocks begin - 1 .. end, zeros where there is none
        if self.products is None:
            products = self._products(begin - 1, end + 1)
        else:
            products = between(self.products, begin - 1, end + 1, dim=1)
        return (self.total - products[:, :-2]).sub_(products[:, 1:-1]).sub_(products[:, 2:])

    def _products(self, begin: int, end: int) -> Tensor:
        """Sums over each of the blocks begin .. end - 1."""
        low, high = begin * self.window, end * self.window
        return _products(
            between(self.weights, low, high, dim=-1).unflatten(-1, (-1, self.window)),
            between(self.x, low, high, dim=1).unflatten(1, (-1, self.window)),
        )


def _products(weights: Tensor, x: Tensor) -> Tensor:
    """weights (batch or 1, heads or 1, rows, blocks, window) and x (batch, blocks, window, heads, dim), per block.

    Returns (batch, blocks, rows, heads, dim), float32.
    """
    x = x.float()
    if weights.shape[1] == 1:
        # one matrix for all heads, whose columns stand side by side
        products = weights[:, 0].transpose(1, 2) @ x.flatten(3)
        return products.unflatten(3, x.shape[3:])
    # (batch, blocks, heads, rows, window) @ (batch, blocks, heads, window, dim), then rows before heads
    return (weights.permute(0, 3, 1, 2, 4) @ x.transpose(2, 3)).transpose(2, 3)


def between(x: Tensor, begin: int, end: int, dim: int) -> Tensor:
    """Positions begin .. end - 1 of a dimension, zeros for those that x does not have; a copy only then."""
    length = x.shape[dim]
    part = x.narrow(dim, max(begin, 0), min(end, length) - max(begin, 0))
    if begin >= 0 and end <= length:
        return part
    trailing = -dim - 1 if dim < 0 else x.ndim - dim - 1
    return F.pad(part, (0, 0) * trailing + (max(-begin, 0), max(end - length, 0)))


def near_tokens(x: Tensor, begin: int, end: int, window: int) -> Tensor:
    """Blocks begin .. end - 1 with their neighbors, (batch, blocks, 3 * window, heads, dim), a view.

    x is (batch, length, heads, dim); zeros where there is no block before the first or after the last.
    """
    blocks = between(x, (begin - 1) * window, (end + 1) * window, dim=1).unfold(1, 3 * window, window)
    return blocks.permute(0, 1, 4, 2, 3)


def spaced_positions(lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions of at most `count` tokens at equally spaced ranks, and which of them there are: (rows, count) each.

    All tokens of a row that has no more. There are always as many positions, so that no bit depends on padding.
    """
    rank = torch.arange(count, device=lengths.device)
    lengths = lengths[:, None]
    return torch.where(lengths > count, rank * lengths // count, rank), rank < lengths


def at(x: Tensor, index: Tensor) -> Tensor:
    """x (batch, heads, length, dim) at the positions (batch or 1, positions) of each row, those outside clamped."""
    index = index.clamp(0, x.shape[2] - 1)
    if index.shape[0] == 1:
        return x.index_select(2, index[0])
    # one index for all heads and dimensions: (batch, 1, positions, 1)
    return x.take_along_dim(index[:, None, :, None], dim=2)


def after_end(out: Tensor, lengths: Tensor | None) -> Tensor:
    """Zeros in place of the outputs (batch, heads, length, dim) of padding."""
    if lengths is None:
        return out
    padding = torch.arange(out.shape[2], device=out.device) >= lengths[:, None]
    return out.masked_fill(padding[:, None, :, None], 0.0)
