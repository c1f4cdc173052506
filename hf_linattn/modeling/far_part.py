"""What a method does with the keys that are far: the interface of its far part.

A far part answers in one of two ways, and `LinearAttention` merges either with the keys that are near:

* `FarKeys`: a few keys, each with the logarithm of the mass that it stands for. They join the near keys in one call of
  `scaled_dot_product_attention`.
* `FarSums`: sums over the values and over the mass. They are merged with the near part by their mass.

A far part of an encoder has `FarKeys.summarize` and `summarize_by_block`, or `FarSums.reader`. A far part of a decoder
has the other methods of its class. Decoders keep a `State` whose size does not depend on how many tokens came.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn


class Settings(NamedTuple):
    """How near and far are merged: the fields of `AttentionConfig`, and the softmax scale of the layer."""

    window_size: int = 0
    global_tokens: int = 0
    near: bool = True
    far: bool = True
    scale: float = 1.0
    global_queries: bool = False
    exact_length: int = 0


class Rows(NamedTuple):
    """Which tokens of a batch are valid. Valid tokens stand first.

    lengths: (batch,) valid tokens per row; None where nothing is padded.
    length: tokens per row, padding included.
    first: so many first tokens are global, and no far part holds them.
    device: of the tensors.
    """

    lengths: Tensor | None
    length: int
    first: int
    device: torch.device

    @property
    def valid_lengths(self) -> Tensor:
        """(batch,) or, without padding, (1,): valid tokens per row."""
        if self.lengths is None:
            return torch.full((1,), self.length, device=self.device, dtype=torch.long)
        return self.lengths

    @property
    def far_tokens(self) -> Tensor:
        """(batch or 1, length) bool: the valid tokens that are not global."""
        position = torch.arange(self.length, device=self.device)
        return (position >= self.first) & (position < self.valid_lengths[:, None])

    @property
    def global_tokens(self) -> Tensor:
        """(batch or 1, first) bool: which of the global tokens are valid."""
        return torch.arange(self.first, device=self.device) < self.valid_lengths[:, None]


class Slots(NamedTuple):
    """Keys that stand for several tokens, the values to be read there, and the log of what each stands for.

    For all queries alike: key, value (batch, heads, slots, dim); log_mass (batch, heads or 1, slots), -inf for a slot
    that stands for nothing. For blocks of queries, see what returns them.
    """

    key: Tensor
    value: Tensor
    log_mass: Tensor


def side_by_side(masks: Any) -> Tensor:
    """The log masses of several `Slots`, expanded to the same rows and heads, one after the other."""
    shape = torch.broadcast_shapes(*(mask.shape[:-1] for mask in masks))
    return torch.cat([mask.expand(*shape, -1) for mask in masks], dim=-1)


class Chunk(NamedTuple):
    """Queries of a decoder, whole blocks of them, and the tokens that become far meanwhile.

    query: (batch, heads, blocks * block, dim).
    ranks: (rows, blocks, block) of the queries; one row where all rows are alike.
    key, value: (batch, heads, blocks * block, dim), of tokens `window_size` ranks earlier; none where none become far.
    becomes_far: (rows, blocks * block) bool: which of these tokens there are, and become far. None for all.
    end: rank after the last query, where that is the same for all rows; else None.
    """

    query: Tensor
    ranks: Tensor
    key: Tensor
    value: Tensor
    becomes_far: Tensor | None
    settings: Settings
    end: int | None


class FarPart:
    """Base of `FarKeys` and `FarSums`.

    Attributes:
        modules: name -> module that holds parameters. `LinearAttention` registers them under these names, which are
            the names in checkpoints.

    Args of every far part's `__init__`: `config` (the settings of the layer), and by keyword `num_heads`, `head_dim`,
    and `seed`.
    """

    modules: dict[str, nn.Module]
    #: whether a decoder's state changes when tokens become far, and not only when they arrive
    absorbs: ClassVar[bool] = True
    #: least number of queries of a decoder that share one list of keys, or one read of the sums
    least_block: ClassVar[int] = 1
    #: how many keys a decoder's far part has at most
    num_slots: int = 0

    def reset_parameters(self) -> None:
        """Fill whatever was not loaded from a checkpoint."""
        for module in self.modules.values():
            module.reset_parameters()  # type: ignore[operator]

    # decoders

    def of_text(self, dtype: torch.dtype) -> "FarPart | None":
        """The part as its tensors are now, for all of one text in this dtype, where more is made of them; else None."""
        return None

    def unit(self, window: int) -> int:
        """Ranks that form a block: which of two blocks a query is in decides what is far. 0: there are no blocks."""
        return window

    def reach(self, window: int, first: int) -> int:
        """How many tokens before a block of queries may be near one of them."""
        return window

    def near_length(self, window: int, first: int) -> int:
        """How many of the last tokens may be near the last one, itself included."""
        return 2 * window

    def block_size(self, window: int) -> int:
        """How many queries share one list of keys, or one read of the sums; a multiple of the window."""
        return window * -(-self.least_block // window) if window else self.least_block

    def near_start(self, rank: Tensor, window: int, first: int) -> Tensor:
        """Rank of the first near key of queries of these ranks: that of the block before the query's."""
        return (rank // window - 1) * window if window else rank + 1

    def leaving(self, window: int) -> int:
        """How many tokens become far at once, step by step; 0: a token is far at once."""
        return self.unit(window)

    def quiet_steps(self, seen: Tensor, window: int, first: int) -> Tensor:
        """In how many more steps, once so many tokens came, tokens become far: at the end of a block."""
        unit = self.unit(window)
        return unit - seen % unit

    def initial_state(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The far part's state before the first token, for keys and values like these (batch, heads, ..., dim)."""
        raise NotImplementedError

    def absorb(
        self, state: tuple[Tensor, ...], key: Tensor, value: Tensor, valid: Tensor | None, before: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        """The state after keys and values (batch, heads, tokens, dim) became far. May be written over.

        valid: (rows, tokens) bool, which of these tokens there are; None for all.
        before: (rows,) how many far tokens came before.
        """
        raise NotImplementedError

    def load(self, state: tuple[Tensor, ...], slots: Slots) -> tuple[Tensor, ...]:
        """What `chunk` and `absorb` take, of the far part's state as a `State` has it, and the slots beside it."""
        return state

    def save(self, state: tuple[Tensor, ...], count: Tensor) -> tuple[tuple[Tensor, ...], Slots | None]:
        """The inverse: what a `State` has, and the slots that the next token sees, `count` (rows,) tokens being far.

        Returns:
            the state; key and value (batch, heads, num_slots, dim) and log_mass (rows, heads or 1, num_slots), or None.
        """
        return state, None


class FarKeys(FarPart):
    """A far part that answers with keys."""

    #: whether a decoder's state keeps the far tokens, of which a query reads some: `read_tokens`
    reads_tokens: ClassVar[bool] = False

    def summarize(self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> Slots:
        """Encoders without a window: what stands for all far tokens of (batch, heads, length, dim)."""
        raise NotImplementedError

    def summarize_by_block(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, window: int, scale: float
    ) -> Any:
        """Encoders with a window: an object whose `chunk(begin, end)` gives the `Slots` of these blocks of queries.

        Here tokens stand before heads. query, key, value: (batch, length, heads, dim); of the slots (batch, blocks,
        slots, heads, dim); log_mass: (batch, blocks, heads or 1, slots).
        """
        raise NotImplementedError

    def chunk(self, state: tuple[Tensor, ...], chunk: Chunk) -> tuple[Slots, tuple[Tensor, ...]]:
        """Decoders: the slots that blocks of queries see, and the state after them.

        Returns:
            key, value (batch, blocks or 1, heads, slots, dim); log_mass (rows, blocks, heads or 1, block or 1, slots).
        """
        raise NotImplementedError

    def read_tokens(self, query: Tensor, state: tuple[Tensor, ...], slots: Slots, scale: float) -> Slots:
        """Decoders: what one query (batch, heads, 1, dim) sees in place of the slots (batch, heads, slots, dim)."""
        raise NotImplementedError


class FarSums(FarPart):
    """A far part that answers with sums."""

    def reader(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Rows,
        window: int,
        chunks: list[tuple[int, int]],
        scale: float,
    ) -> Any:
        """Encoders: an object that has `start()` and `read(index of a chunk, queries, carry, alone)`."""
        raise NotImplementedError

    def read(self, query: Tensor, state: tuple[Tensor, ...], scale: float, alone: bool) -> Any:
        """Decoders: what queries (batch, heads, tokens, dim) read of a state, a `Partial`."""
        raise NotImplementedError

    def chunk(self, state: tuple[Tensor, ...], chunk: Chunk, *, alone: bool) -> tuple[Any, tuple[Tensor, ...]]:
        """Decoders: what queries read of earlier keys, a `Partial`, and the state after them.

        alone: there is no near part, so that the scale of a query cancels.
        """
        raise NotImplementedError
