"""What a decoder's attention keeps of the tokens that came: a state whose size does not depend on their number.

All keys that a new token is compared with lie side by side in one tensor, so that a step is one call of attention and
moves nothing: a token of rank r stands in column r, if it is one of the `global_tokens` first ones, and else in column
global_tokens + r % near_length, in place of one that is far by then. After these exact columns come the slots of the
far part, where it has any. Which columns the next token sees, `log_mass` says.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .blocks import at
from .far_part import FarPart, Settings, Slots


@dataclass
class State:
    """All that later tokens need of a row's first `seen` tokens. The first dimension of each tensor is the batch.

    A step, one new token per row, writes into these tensors.

    Attributes:
        global_tokens, near_length: how many columns the first tokens have, and the last ones.
        seen: (batch,) long.
        key, value: (batch, heads, columns, dim).
        log_mass: (batch, heads or 1, 1, columns), log of what each column stands for; `absent` for nothing.
        far: the rest of the far part's state.
        quiet_steps: after so many steps, at the earliest, tokens of some row become far; 0 if not known.
        part: the far part as the text began with it, where that is another object: see `FarPart.of_text`.
    """

    global_tokens: int
    near_length: int
    seen: Tensor
    key: Tensor
    value: Tensor
    log_mass: Tensor
    far: tuple[Tensor, ...]
    quiet_steps: int = 0
    part: FarPart | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "State":
        """The state with `function` applied to each tensor."""
        seen, key, value, log_mass, *far = map(function, self.tensors())
        return replace(self, seen=seen, key=key, value=value, log_mass=log_mass, far=tuple(far))

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the state."""
        return (self.seen, self.key, self.value, self.log_mass, *self.far)

    @property
    def exact(self) -> int:
        """How many columns hold single tokens."""
        return self.global_tokens + self.near_length

    @property
    def slots(self) -> Slots:
        """The columns of the far part."""
        return Slots(self.key[:, :, self.exact :], self.value[:, :, self.exact :], self.log_mass[:, :, 0, self.exact :])

    @property
    def absent(self) -> float:
        """A log mass that adds nothing, and is finite, so that a row that sees nothing stays finite."""
        return torch.finfo(self.log_mass.dtype).min / 2

    def writable(self) -> "State":
        """The state, or a copy of it where a graph of gradients may need its tensors as they are."""
        fixed = torch.is_grad_enabled() or self.key.requires_grad
        if not torch.compiler.is_compiling():
            # outside of inference mode, its tensors cannot be written
            fixed = fixed or (self.key.is_inference() and not torch.is_inference_mode_enabled())
        return self.map(torch.clone) if fixed else self

    def near_tokens(self, x: Tensor, rank: Tensor) -> Tensor:
        """Of `key` or `value` the near tokens of these ranks (rows, tokens): (batch, heads, tokens, dim)."""
        return at(x, self.global_tokens + rank % max(self.near_length, 1))

    def advance(self, key: Tensor, value: Tensor, lengths: Tensor | None, *, from_start: bool) -> "State":
        """The state with new keys and values (batch, heads, tokens, dim), without what is far: see `settle`.

        lengths: (batch,) how many of them are valid.
        """
        # without padding one row of indices is that of all rows
        rows = slice(1) if from_start and lengths is None else slice(None)
        seen, before = self.seen + (key.shape[2] if lengths is None else lengths), self.seen[rows, None]
        rank, column = self._ranks(seen[rows]), torch.arange(self.exact, device=seen.device)
        index = rank if from_start else torch.where(rank < before, column, self.exact + rank - before)

        def exact_columns(old: Tensor, new: Tensor) -> Tensor:
            return at(new if from_start else torch.cat((old[:, :, : self.exact], new), dim=2), index)

        key, value = exact_columns(self.key, key), exact_columns(self.value, value)
        return replace(self, seen=seen, key=key, value=value, quiet_steps=0)

    def settle(self, part: FarPart, far: tuple[Tensor, ...], settings: Settings) -> "State":
        """The state with what the next token sees, and the far part's state and slots."""
        exact_mass, far, slots = self._next(part, far, settings)
        if slots is None:
            return replace(self, log_mass=exact_mass, far=far)
        key = torch.cat((self.key[:, :, : self.exact], slots.key), dim=2)
        value = torch.cat((self.value[:, :, : self.exact], slots.value), dim=2)
        log_mass = torch.cat(
            [x.expand(*key.shape[:2], 1, -1) for x in (exact_mass, slots.log_mass.unsqueeze(2))], dim=3
        )
        return replace(self, key=key, value=value, log_mass=log_mass, far=far)

    def renew(self, part: FarPart, far: tuple[Tensor, ...], settings: Settings) -> None:
        """The same in place."""
        exact_mass, self.far, slots = self._next(part, far, settings)
        self.log_mass[..., : self.exact] = exact_mass
        if slots is not None:
            for x, new in zip(self.slots, slots, strict=True):
                x.copy_(new)

    def _next(
        self, part: FarPart, far: tuple[Tensor, ...], settings: Settings
    ) -> tuple[Tensor, tuple[Tensor, ...], Slots | None]:
        first = self.global_tokens
        begins = part.near_start(self.seen, settings.window_size, first).clamp_min(first)
        rank = self._ranks(self.seen)
        is_near = (rank >= begins[:, None]) & (rank < self.seen[:, None])
        # the first tokens are always near
        is_near[:, :first] = rank[:, :first] < self.seen[:, None]
        exact_mass = self.key.new_zeros(is_near.shape).masked_fill_(~is_near, self.absent)[:, None, None]
        far, slots = part.save(far, begins - first)
        if slots is None:
            return exact_mass, far, None
        slots = Slots(*(x.to(self.key.dtype) for x in slots))
        return exact_mass, far, slots._replace(log_mass=slots.log_mass.clamp_min(self.absent))

    def write(self, key: Tensor, value: Tensor, new: Tensor | None) -> None:
        """Put keys and values (batch, heads, 1, dim) in their columns, but for rows where `new` (batch,) is False."""
        first = self.global_tokens
        if self.near_length:
            column = first + self.seen % self.near_length
            column = torch.where(self.seen < first, self.seen, column) if first else column
        elif first:
            column, is_first = self.seen.clamp_max(first - 1), self.seen < first
            new = is_first if new is None else is_first & new
        else:
            return
        row = torch.arange(len(column), device=column.device)
        # indices on both sides of a slice put their dimension first: (batch, heads, dim or 1)
        for x, token in (
            (self.key, key[:, :, 0]),
            (self.value, value[:, :, 0]),
            (self.log_mass.transpose(2, 3), self.log_mass.new_zeros(())),
        ):
            x[row, :, column] = token if new is None else token.where(new[:, None, None], x[row, :, column])

    def _ranks(self, seen: Tensor) -> Tensor:
        """Rank of the token in each exact column once so many came: (rows, exact); `seen` or more, or < 0, for none."""
        last = seen[:, None] - 1
        near = last - (last - torch.arange(self.near_length, device=seen.device)) % max(self.near_length, 1)
        first = torch.arange(self.global_tokens, device=seen.device)
        return torch.cat((first.expand(seen.shape[0], -1), near), dim=1)


def empty_state(key: Tensor, value: Tensor, part: FarPart, settings: Settings) -> State:
    """The state before the first token, for keys and values like these (batch, heads, any length, dim)."""
    batch, heads = key.shape[:2]
    of_text = part.of_text(key.dtype)
    part = of_text or part
    first, near_length = settings.global_tokens, part.near_length(settings.window_size, settings.global_tokens)
    columns = first + near_length + part.num_slots
    log_mass = key.new_full((batch, heads if part.num_slots else 1, 1, columns), torch.finfo(key.dtype).min / 2)
    seen = torch.zeros(batch, dtype=torch.long, device=key.device)
    key, value = (x.new_zeros(batch, heads, columns, x.shape[-1]) for x in (key, value))
    return State(first, near_length, seen, key, value, log_mass, part.initial_state(key, value), part=of_text)


@dataclass
class SplitState:
    """The state of a layer some heads of which stay softmax. The first dimension of each tensor is the batch.

    Attributes:
        linear: of the other heads.
        key, value: (batch, heads, tokens, dim) of all tokens, for heads of keys that some softmax head reads.
        valid: (batch, tokens) bool, False for padding.
    """

    linear: State
    key: Tensor
    value: Tensor
    valid: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "SplitState":
        """The state with `function` applied to each tensor."""
        return SplitState(self.linear.map(function), *map(function, (self.key, self.value, self.valid)))

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the state."""
        return (*self.linear.tensors(), self.key, self.value, self.valid)

    @property
    def seen(self) -> Tensor:
        """(batch,) long: how many valid tokens came."""
        return self.linear.seen
