"""What a decoder keeps of the tokens that came: which tokens they are, row by row."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from hf_linattn.modeling.far_part import FarPart, Settings
from hf_linattn.modeling.state import State, empty_state

pytestmark = pytest.mark.core

# per row, how many tokens come in each of three chunks of up to 5
CHUNKS = [[5, 5, 5], [1, 1, 1], [3, 0, 5], [0, 2, 4]]
ROWS, WINDOW = 4, 2


class Part(FarPart):
    """A far part that forgets what becomes far."""

    def initial_state(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return ()


def numbered(begin: Tensor, count: int = 5) -> Tensor:
    """Tokens of each row whose numbers go on from `begin`, (rows, 1, count, 1)."""
    return (begin[:, None] + torch.arange(count)).float()[:, None, :, None]


def empty(global_tokens: int) -> tuple[State, Settings]:
    key, settings = numbered(torch.ones(ROWS)), Settings(window_size=WINDOW, global_tokens=global_tokens)
    return empty_state(key, key, Part(), settings), settings


def seen_keys(state: State) -> list[list[int]]:
    """Of each row, the numbers of the keys that the next token sees."""
    visible = (state.log_mass[:, 0, 0] > state.absent).tolist()
    keys = state.key[:, 0, :, 0].long().tolist()
    return [[key for key, is_seen in zip(*row, strict=True) if is_seen] for row in zip(keys, visible, strict=True)]


def expected_keys(count: int, global_tokens: int) -> list[int]:
    """Numbers from 1 on: the first ones, and the block before that of the next token, and what there is of that."""
    begin = max((count // WINDOW - 1) * WINDOW, 0)
    first = list(range(1, min(count, global_tokens) + 1))
    return first + list(range(max(begin, global_tokens) + 1, count + 1))


@pytest.mark.parametrize("from_start", [False, True])
@pytest.mark.parametrize("global_tokens", [0, 1, 3, 7])
def test_a_state_has_the_first_and_the_last_tokens_of_each_row(global_tokens: int, from_start: bool) -> None:
    state, settings = empty(global_tokens)
    seen = torch.zeros(ROWS, dtype=torch.long)
    for lengths in torch.tensor(CHUNKS).T:
        key = numbered(seen + 1)
        state = state.advance(key, -key, lengths, from_start=from_start).settle(Part(), (), settings)
        seen, from_start = seen + lengths, False
        assert torch.equal(state.seen, seen)
        found = [sorted(row) for row in seen_keys(state)]
        assert found == [expected_keys(count, global_tokens) for count in seen.tolist()]
        visible = (state.log_mass > state.absent)[:, :, 0, :, None]
        assert torch.equal(state.value * visible, -state.key * visible)


@pytest.mark.parametrize("global_tokens", [0, 1, 3, 7])
def test_a_token_is_written_where_it_belongs(global_tokens: int) -> None:
    """Row by row, and not in rows that have none."""
    state, settings = empty(global_tokens)
    seen = torch.zeros(ROWS, dtype=torch.long)
    for index in range(12):
        # None of the first row's tokens is padding, and every other one of the last row's
        lengths = torch.tensor([1, int(index % 3 > 0), int(index > 4), index % 2])
        addresses = [x.data_ptr() for x in state.tensors()]
        key = numbered(seen + 1, 1)
        state.write(key, -key, lengths > 0)
        found = [sorted(row) for row in seen_keys(state)]
        for row, (count, new) in enumerate(zip(seen.tolist(), lengths.tolist(), strict=True)):
            # what the query sees: its own block, up to itself, and the one before
            expected = expected_keys(count, global_tokens)
            assert found[row] == ([*expected, count + 1] if new else expected)
        state.seen += lengths
        state.renew(Part(), (), settings)
        seen = seen + lengths
        assert [sorted(row) for row in seen_keys(state)] == [expected_keys(n, global_tokens) for n in seen.tolist()]
        assert [x.data_ptr() for x in state.tensors()] == addresses


@pytest.mark.parametrize("make", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_shares_nothing(make) -> None:
    state, _ = empty(1)
    state.quiet_steps = 3
    twin = make(state)
    assert twin.quiet_steps == 3
    for ours, theirs in zip(state.tensors(), twin.tensors(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()


def test_a_state_that_a_graph_of_gradients_may_need_is_copied() -> None:
    state, _ = empty(1)
    assert state.writable() is not state
    with torch.no_grad():
        assert state.writable() is state
        state.key.requires_grad_()
        assert state.writable() is not state
    with torch.inference_mode():
        state, _ = empty(1)
        assert state.writable() is state
    with torch.no_grad():
        assert not state.writable().key.is_inference()


def test_map_reaches_every_tensor() -> None:
    state = State(1, 2, *torch.arange(4.0).view(4, 1), (torch.tensor([4.0]), torch.tensor([5.0])), 6)
    mapped = state.map(lambda x: x + 1)
    assert [x.item() for x in mapped.tensors()] == [1, 2, 3, 4, 5, 6]
    assert (mapped.global_tokens, mapped.near_length, mapped.quiet_steps) == (1, 2, 6)
