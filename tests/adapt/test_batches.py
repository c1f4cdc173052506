"""Batches: cut, shuffled, padded, and a function of the step alone."""

import dataclasses
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_linattn.adapt import AdaptConfig, adapt, loop
from hf_linattn.adapt.batches import Example, Sequences, collate, tokenize
from hf_linattn.data.documents import DataConfig

from .runs import SHORT, killed_when, same_weights, write_documents


@pytest.mark.parametrize(
    ("settings", "fields", "digest"),
    [
        ({"task": "masked-lm", "task_steps": 20}, {}, "93b87c42c7470eeb"),
        ({"task": "masked-lm", "task_steps": 20}, {"streaming": True}, "e299437723a7a3ea"),
        ({"task": "sequence-classification", "task_steps": 20}, {"label_column": "kind"}, "82dee5da611d3664"),
        ({"micro_batch_size": 1, "seed": 3}, {"label_column": "kind"}, "61eb1c92c7326c41"),
    ],
)
def test_the_batches_of_a_run_stay_the_same(
    settings: dict[str, Any],
    fields: dict[str, Any],
    digest: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From version to version: a run that an earlier one began goes on with the batches that it had planned."""
    data = dataclasses.replace(write_documents(tmp_path / "data.jsonl", 40), **fields)
    rows: list[Any] = []
    collate = loop.collate

    def record(part: Any, *arguments: Any) -> Any:
        rows.append([dict(row) for row in part])
        return collate(part, *arguments)

    monkeypatch.setattr(loop, "collate", record)
    adapt(folder, tmp_path / "out", AdaptConfig(**{**SHORT, "shuffle_pool": 16, **settings}), data=data)
    assert len(rows) > 40 or "task" not in settings
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == digest


class Words:
    """A tokenizer whose tokens are numbers; without `truncation` it cuts nothing."""

    def __init__(self, truncation: bool = True) -> None:
        self.truncation = truncation

    def __call__(self, texts: Any, **kwargs: Any) -> dict[str, Any]:
        if isinstance(texts, str):
            return {"input_ids": [int(word) for word in texts.split()]}
        length = kwargs["max_length"] if self.truncation else None
        return {"input_ids": [[int(word) for word in text.split()][:length] for text in texts]}


def numbered(path: Path, documents: int = 9) -> DataConfig:
    """Documents of 30 to 70 words, each word of them another number."""
    chance, word = random.Random(1), 10_000
    with path.open("w") as file:
        for _ in range(documents):
            length = chance.randrange(30, 70)
            file.write(json.dumps({"text": " ".join(map(str, range(word, word + length)))}) + "\n")
            word += length
    return DataConfig(dataset=str(path))


@pytest.mark.parametrize("streaming", [False, True])
def test_batches_depend_on_the_step_alone(streaming: bool, tmp_path: Path) -> None:
    data = dataclasses.replace(numbered(tmp_path / "numbers.jsonl"), streaming=streaming)

    def fresh() -> Sequences:
        return Sequences(data=data, tokenizer=Words(truncation=False), length=12, pool=20, held_out=3)

    sequences, steps = fresh(), 40
    batches = [
        [row["input_ids"] for row in batch] for _, batch in zip(range(steps), sequences.batches(4), strict=False)
    ]
    for start in (1, 7, 25, 39):
        assert [row["input_ids"] for row in next(fresh().batches(4, start))] == batches[start]
    held_out = {tuple(row["input_ids"]) for row in sequences.evaluation()}
    used = [tuple(ids) for batch in batches for ids in batch]
    assert len(held_out) == 3 and not held_out & set(used)
    # every word is in one chunk and in no other, and chunks fill their sequences
    words = [word for ids in {*held_out, *used} for word in ids]
    assert len(words) == len(set(words)) > 300
    assert sum(len(ids) >= 11 for ids in set(used)) > 0.5 * len(set(used))
    # rows of like length meet: in characters, of words of five and the spaces between
    spread = [max(6 * len(ids) - 1 for ids in batch) - min(6 * len(ids) - 1 for ids in batch) for batch in batches]
    assert sum(spread) / steps < 25


def test_each_example_is_tokenized_once(tmp_path: Path) -> None:
    texts: list[str] = []

    class Counted(Words):
        def __call__(self, given: Any, **kwargs: Any) -> dict[str, Any]:
            if not isinstance(given, str):
                texts.extend(given)
            return super().__call__(given, **kwargs)

    sequences = Sequences(data=numbered(tmp_path / "numbers.jsonl"), tokenizer=Counted(), length=12)
    batches = sequences.batches(4)
    for _ in range(100):
        next(batches)
    assert len(texts) == len(set(texts)) > 30


def test_rows_are_padded_at_the_end() -> None:
    rows = tokenize(
        [Example("7 8 9", "b"), Example("7", "a")],
        Words(),
        2,
        {"a": 0, "b": 1},
    )
    batch = collate(rows, 1, torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[7, 8], [7, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert "attention_mask" not in collate(rows[:1], 1, torch.device("cpu"))
    tokens = collate(
        [{"input_ids": [5, 6], "labels": [5, -100]}, {"input_ids": [5], "labels": [5]}], 1, torch.device("cpu")
    )
    assert tokens["labels"].tolist() == [[5, -100], [5, -100]]
    with pytest.raises(ValueError, match="label 'b' is not one of 'a'"):
        tokenize([Example("7", "b")], Words(), 2, {"a": 0})


def recorded(folder: Path, output: Path, settings: dict[str, Any], data: DataConfig) -> list[list[list[int]]]:
    """The token ids of each batch and evaluation of a run."""
    rows: list[list[list[int]]] = []
    with pytest.MonkeyPatch.context() as patch:

        def record(part: Any, *arguments: Any) -> Any:
            rows.append([row["input_ids"] for row in part])
            return collate(part, *arguments)

        patch.setattr(loop, "collate", record)
        adapt(folder, output, AdaptConfig(**{**SHORT, **settings}), data=data)
    return rows


def test_some_sequences_get_keys_and_repeated_passages(folder: Path, data: DataConfig, tmp_path: Path) -> None:
    plain, some, every = (
        recorded(folder, tmp_path / str(share), {"retrieval_share": share}, data) for share in (0.0, 0.5, 1.0)
    )
    assert [[*map(len, batch)] for batch in plain] == [[*map(len, batch)] for batch in some]
    changed = [
        [a != b for a, b in zip(*pair, strict=True)]
        for found in (some, every)
        for pair in zip(plain, found, strict=True)
    ]
    half, whole = changed[: len(plain)], changed[len(plain) :]
    # sequences of training, 8 batches of 4, and none that is evaluated
    assert 8 <= sum(map(sum, half)) <= 24 and sum(map(sum, whole)) > 28
    assert sum(any(batch) for batch in whole) == 8


def test_a_run_with_planted_keys_goes_on_as_if_left_alone(folder: Path, data: DataConfig, tmp_path: Path) -> None:
    config = AdaptConfig(**{**SHORT, "retrieval_share": 0.5})
    adapt(folder, tmp_path / "whole", config, data=data)
    with killed_when(lambda target, state: target.name == "checkpoint" and state["progress"]["step"] == 2):
        adapt(folder, tmp_path / "killed", config, data=data)
    adapt(folder, tmp_path / "killed", config, data=data)
    assert same_weights(tmp_path / "whole", tmp_path / "killed")
    with pytest.raises(FileExistsError, match="retrieval_share"):
        adapt(folder, tmp_path / "killed", dataclasses.replace(config, retrieval_share=0.0), data=data)
