"""What a decoder's attention keeps of the tokens that came: a state whose size does not depend on their number."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import at


class State(NamedTuple):
    """All that later tokens need of a row's first `seen` tokens. The first dimension of each tensor is the batch.

    seen: (batch,) long.
    global_key, global_value: (batch, heads, global_tokens, dim), the first keys and values.
    near_key, near_value: (batch, heads, near_length, dim), the last keys and values, the newest last.
    far: the state of the far part.
    """

    seen: Tensor
    global_key: Tensor
    global_value: Tensor
    near_key: Tensor
    near_value: Tensor
    far: tuple[Tensor, ...]

    def map(self, function: Any) -> "State":
        """The state with `function` applied to each tensor."""
        own = (self.seen, self.global_key, self.global_value, self.near_key, self.near_value)
        return State(*map(function, own), tuple(map(function, self.far)))  # type: ignore[call-arg]

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the state."""
        return (self.seen, self.global_key, self.global_value, self.near_key, self.near_value, *self.far)

    def advance(self, key: Tensor, value: Tensor, lengths: Tensor | None, *, from_start: bool) -> "State":
        """The state once new keys and values (batch, heads, tokens, dim) came, `lengths` (batch,) of them valid.

        But for `far`, which is as before.
        """
        tokens = key.shape[2] if lengths is None else lengths
        first = self.global_key.shape[2]
        old_key, old_value = (None, None) if from_start else (self.global_key, self.global_value)
        return State(
            self.seen + tokens,
            first_tokens(old_key, key, first, self.seen),
            first_tokens(old_value, value, first, self.seen),
            newest_tokens(self.near_key, key, lengths),
            newest_tokens(self.near_value, value, lengths),
            self.far,
        )


def empty_state(key: Tensor, value: Tensor, *, global_tokens: int, near_length: int, far: tuple[Tensor, ...]) -> State:
    """The state before the first token, for keys and values like these (batch, heads, any length, dim)."""

    def tokens(like: Tensor, count: int) -> Tensor:
        return like.new_zeros(*like.shape[:2], count, like.shape[-1])

    return State(
        torch.zeros(key.shape[0], dtype=torch.long, device=key.device),
        tokens(key, global_tokens),
        tokens(value, global_tokens),
        tokens(key, near_length),
        tokens(value, near_length),
        far,
    )


def first_tokens(old: Tensor | None, new: Tensor, count: int, seen: Tensor) -> Tensor:
    """The first `count` tokens of each row, (batch, heads, count, dim), once `new` came after `old` ones, if any."""
    if not count:
        # a copy: a view would keep all tokens in memory as long as the state lives
        return new[:, :, :0].clone()
    if old is None:
        return F.pad(new[:, :, :count], (0, 0, 0, max(count - new.shape[2], 0)))
    rank = torch.arange(count, device=new.device)
    return at(torch.cat((old, new), dim=2), torch.where(rank < seen[:, None], rank, count + rank - seen[:, None]))


def last_tokens(tokens: Tensor, count: int, lengths: Tensor | None, new: int) -> Tensor:
    """The last `count` valid tokens of each row; `tokens` are `count` older ones and `new` more, `lengths` valid."""
    if not count:
        return tokens[:, :, :0].clone()
    if lengths is None:
        return tokens[:, :, new:]
    return at(tokens, lengths[:, None] + torch.arange(count, device=tokens.device))


def newest_tokens(old: Tensor, new: Tensor, lengths: Tensor | None) -> Tensor:
    """The last valid tokens of each row, as many as `old` has, once `new` came after them, `lengths` of them valid."""
    count, length = old.shape[2], new.shape[2]
    if lengths is None and length >= count:
        # a copy: a view would keep all tokens in memory as long as the state lives
        return new[:, :, length - count :].clone()
    return last_tokens(torch.cat((old, new), dim=2), count, lengths, length)
