"""Batches: cut, shuffled, padded, and a function of the step alone."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hf_linattn.adapt import AdaptConfig, adapt, loop

from .runs import SHORT, write_documents


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
