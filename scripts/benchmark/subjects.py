"""What is measured of a row: attention alone, a whole model, a training step of attention, a token of decoding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decoding import caches, step
from rows import Row, Shape

# Tokens of decoding in one turn: a single one is too short to time.
_TOKENS = 8
# Tokens of a short pass, after which nothing is set up any more.
_SHORT = 256
# Tokens of room in decoding. The same at every position: a decoder's summaries depend on it.
_ROOM = 32_768


@dataclass(frozen=True)
class Subject:
    """One thing that is measured.

    Attributes:
        key: its name in the JSON file.
        title: its name in the tables; `{layers}` stands for the number of layers.
        made: what of a row it needs.
        backward: whether a turn is forward and backward.
        tokens: how many tokens a turn decodes, by which its time is divided; 1 where nothing is decoded.
    """

    key: str
    title: str
    made: Literal["attention", "model", "decoder"]
    backward: bool = False
    tokens: int = 1

    def maker(self, row: Row) -> Callable[[Shape], Any] | None:
        return getattr(row, self.made)


@dataclass(frozen=True)
class Work:
    """A turn, and what to do once before the first turn is measured."""

    turn: Callable[[], None]
    warm_up: Callable[[], None]


SUBJECTS = {
    "attention": Subject("attention/forward", "attention alone, forward", "attention"),
    "model": Subject("model/forward", "model of {layers} layers, forward", "model"),
    "training": Subject("attention/backward", "attention alone, forward and backward", "attention", backward=True),
    "model-training": Subject(
        "model/backward", "model of {layers} layers, forward and backward", "model", backward=True
    ),
    "decoding": Subject(
        "decoder/token", "one token of decoding, {layers} layers, after so many", "decoder", tokens=_TOKENS
    ),
}
BY_KEY = {subject.key: subject for subject in SUBJECTS.values()}


def lengths_of(subject: Subject, lengths: list[int]) -> list[int]:
    """The lengths at which a subject is measured, in rising order; of decoding a short one and the longest."""
    return sorted({256, max(lengths)} if subject.made == "decoder" else set(lengths))


def prepare(row: Row, subject: Subject, shape: Shape, device: torch.device, dtype: torch.dtype) -> Work:
    """Make the row for the shape on the device, in eval mode."""
    torch.manual_seed(0)
    maker = subject.maker(row)
    assert maker is not None, f"{row.name} has no {subject.made}"
    room = max(_ROOM, 2 * shape.length) if subject.made == "decoder" else shape.length
    made = maker(replace(shape, length=room))
    if isinstance(made, nn.Module):
        made = made.to(device=device, dtype=dtype).eval()
    if subject.made == "decoder":
        return _decoding(made, row.config is None, shape, device)
    passes = []
    for length in (shape.length, min(shape.length, _SHORT)):
        inputs = _inputs(subject, replace(shape, length=length), device, dtype)
        passes.append(lambda inputs=inputs: _pass(made, subject, inputs))
    return Work(*passes)


@lru_cache(maxsize=2)  # all rows have the same
def _inputs(subject: Subject, shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values, heads after positions in memory, or input ids."""
    generator = torch.Generator(device).manual_seed(0)
    if subject.made == "model":
        return (torch.randint(shape.vocabulary, (1, shape.length), generator=generator, device=device),)
    size = (3, 1, shape.length, shape.heads, shape.head_dim)
    tokens = torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)
    return tuple(x.transpose(1, 2).requires_grad_(subject.backward) for x in tokens.unbind(0))


def _pass(made: Any, subject: Subject, inputs: tuple[Tensor, ...]) -> None:
    """One forward pass, or forward and backward."""
    with torch.set_grad_enabled(subject.backward):
        out = made(*inputs) if subject.made == "attention" else made(input_ids=inputs[0]).last_hidden_state
        if subject.backward:
            out.float().sum().backward()
    for leaf in [*inputs, *(made.parameters() if isinstance(made, nn.Module) else ())]:
        leaf.grad = None


def _decoding(model: Any, softmax: bool, shape: Shape, device: torch.device) -> Work:
    """Turns go on from each other: each reads the tokens after those of the last."""
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(shape.vocabulary, (1, shape.length), generator=generator, device=device)
    (cache,) = caches(model, [shape.length], ids, softmax)

    @torch.no_grad()
    def turn() -> None:
        for index in range(_TOKENS):
            step(model, ids[:, index : index + 1], cache)

    return Work(turn, turn)
