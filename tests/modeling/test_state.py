"""What a decoder keeps of the tokens that came: which tokens they are, row by row."""

import pytest
import torch
from torch import Tensor

from hf_linattn.modeling.state import State, empty_state, first_tokens, last_tokens, newest_tokens

pytestmark = pytest.mark.core

# per row, how many tokens come in each of three chunks of up to 5
CHUNKS = [[5, 5, 5], [1, 1, 1], [3, 0, 5], [0, 2, 4]]
ROWS = 4


def numbered(begin: Tensor) -> Tensor:
    """A chunk of 5 tokens per row whose numbers go on from `begin`, (rows, 1, 5, 1)."""
    return (begin[:, None] + torch.arange(5)).float()[:, None, :, None]


def kept(tokens: Tensor) -> list[list[int]]:
    return tokens[:, 0, :, 0].long().tolist()


def states(global_tokens: int, near_length: int) -> tuple[State, Tensor]:
    """The state after all chunks, whose keys are their numbers from 1 on, and the number of tokens per row."""
    seen = torch.zeros(ROWS, dtype=torch.long)
    key = numbered(seen + 1)
    state = empty_state(key, key, global_tokens=global_tokens, near_length=near_length, far=())
    for lengths in torch.tensor(CHUNKS).T:
        key = numbered(seen + 1)
        state = state.advance(key, -key, lengths, from_start=False)
        seen = seen + lengths
    return state, seen


@pytest.mark.parametrize("near_length", [0, 1, 4, 20])
@pytest.mark.parametrize("global_tokens", [0, 1, 4])
def test_a_state_has_the_first_and_the_last_tokens_of_each_row(global_tokens: int, near_length: int) -> None:
    state, seen = states(global_tokens, near_length)
    assert torch.equal(state.seen, seen)
    for row, count in enumerate(seen.tolist()):
        numbers = list(range(1, count + 1))
        first = numbers[:global_tokens]
        assert kept(state.global_key)[row][: len(first)] == first
        assert kept(state.near_key)[row] == ([0] * near_length + numbers)[count:]
    assert torch.equal(state.near_value, -state.near_key)
    assert torch.equal(state.global_value, -state.global_key)


@pytest.mark.parametrize("near_length", [0, 2, 9])
@pytest.mark.parametrize("global_tokens", [0, 3, 7])
@pytest.mark.parametrize("lengths", [None, [5, 1, 3, 0]], ids=["full", "padded"])
def test_the_start_may_be_told_apart_from_an_empty_state(
    global_tokens: int, near_length: int, lengths: list[int] | None
) -> None:
    key = numbered(torch.ones(ROWS, dtype=torch.long))
    empty = empty_state(key, key, global_tokens=global_tokens, near_length=near_length, far=())
    given = None if lengths is None else torch.tensor(lengths)
    start, later = (empty.advance(key, key, given, from_start=from_start) for from_start in (True, False))
    assert torch.equal(start.near_key, later.near_key)
    for row, count in enumerate([5] * ROWS if lengths is None else lengths):
        exists = min(count, global_tokens)
        assert kept(start.global_key)[row][:exists] == kept(later.global_key)[row][:exists]


def test_none_of_the_tokens_is_no_view_of_all_of_them() -> None:
    key = numbered(torch.ones(ROWS, dtype=torch.long))
    seen = torch.zeros(ROWS, dtype=torch.long)
    for nothing in (
        first_tokens(None, key, 0, seen),
        last_tokens(key, 0, None, 5),
        last_tokens(key, 0, seen, 5),
        newest_tokens(key[:, :, :0], key, None),
        newest_tokens(key[:, :, :0], key, seen),
    ):
        assert nothing.shape == (ROWS, 1, 0, 1)
        assert nothing.untyped_storage().nbytes() == 0


def test_map_reaches_every_tensor() -> None:
    state = State(*torch.arange(5.0).view(5, 1), (torch.tensor([5.0]), torch.tensor([6.0])))
    assert [x.item() for x in state.map(lambda x: x + 1).tensors()] == [1, 2, 3, 4, 5, 6, 7]
