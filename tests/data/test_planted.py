"""Rows with a planted key or a repeated passage."""

import random

import pytest

from hf_linattn.data.planted import DIGITS, WORDING, Planter
from hf_linattn.data.synthetic import SyntheticConfig, Wording, make_examples
from hf_linattn.data.vocabulary import Vocabulary

BYTES = Vocabulary.from_bytes()
SPECIAL = (1, 2)
# no passage of it comes twice
TEXT = BYTES.encode("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=300)))
ROW = [SPECIAL[0], *TEXT, SPECIAL[1]]


class Bytes:
    """A tokenizer whose tokens are bytes."""

    all_special_ids = SPECIAL

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        return {"input_ids": BYTES.encode(text)}

    def __len__(self) -> int:
        return BYTES.size


def text_of(ids: list[int]) -> str:
    return bytes(i - 3 for i in ids if i not in SPECIAL).decode()


def test_a_row_keeps_its_length_and_special_tokens_and_depends_on_the_seed() -> None:
    planter = Planter(Bytes())
    for seed in map(str, range(20)):
        row = planter.plant(ROW, seed)
        assert len(row) == len(ROW) and (row[0], row[-1]) == SPECIAL and row != ROW
        assert row == Planter(Bytes()).plant(ROW, seed)
    assert len({tuple(planter.plant(ROW, str(seed))) for seed in range(20)}) > 15


def test_half_of_the_rows_ask_for_a_key_and_half_repeat_a_passage() -> None:
    rows = [text_of(Planter(Bytes()).plant(ROW, str(seed))) for seed in range(100)]
    keys = [row for row in rows if WORDING.question in row]
    assert 35 <= len(keys) <= 65
    for row in rows:
        if row in keys:
            key = row[-DIGITS:]
            assert key.isdecimal() and row.endswith(f"{WORDING.question} {key}")
            assert f"{WORDING.before} {key}{WORDING.after}" in row
        else:
            # a quarter of it, once more at its end
            assert row[:225] == text_of(TEXT)[:225] and row[225:] in row[:225]


@pytest.mark.parametrize("length", [0, 3, 7])
def test_a_very_short_row_stays_as_it_is(length: int) -> None:
    row = [SPECIAL[0], *TEXT[:length], SPECIAL[1]]
    assert all(Planter(Bytes()).plant(row, str(seed)) == row for seed in range(5))


def test_a_row_without_room_for_a_key_repeats_a_passage() -> None:
    row = TEXT[:40]
    assert all(Planter(Bytes()).plant(row, str(seed))[30:] != row[30:] for seed in range(9))


def test_the_task_asks_with_other_words() -> None:
    config = SyntheticConfig(task="passkey", length=300, count=1)
    (example,) = make_examples(config, BYTES, ["a dark and stormy night " * 9])
    assert Wording().question in text_of(example.input_ids)
    assert WORDING.question not in text_of(example.input_ids) and config.digits != DIGITS
