"""Short runs on tiny models, and what they leave behind."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert_checkpoint
from hf_linattn.adapt import checkpoints
from hf_linattn.data.documents import DataConfig

from ..helpers import save_tokenizer, tiny_model

LEARNED = PerformerConfig(num_features=16, feature_map="learned", window_size=4)
PROJECTED = LinformerConfig(projection="learned", projection_length=8)
SHORT: dict[str, Any] = {
    "transfer_steps": 4,
    "distil_steps": 4,
    "sequence_length": 32,
    "batch_size": 4,
    "eval_sequences": 4,
    "eval_steps": 2,
    "checkpoint_steps": 2,
    "log_steps": 1,
}
#: Stages long enough to be killed in.
SETTINGS = {**SHORT, "transfer_steps": 6, "distil_steps": 6}


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def _is_checkpoint(target: Path, state: dict[str, Any]) -> bool:
    return target.name == "checkpoint"


@contextmanager
def killed_when(written: Callable[[Path, dict[str, Any]], bool] = _is_checkpoint) -> Iterator[None]:
    """What is run in it must end as soon as such a checkpoint is there. Default: the first one."""
    original = checkpoints.write

    def write(target: Path, weights: Any, moments: Any, state: dict[str, Any]) -> None:
        original(target, weights, moments, state)
        if written(target, state):
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoints, "write", write)
        yield


def write_documents(path: Path, count: int = 24) -> DataConfig:
    """Documents of 10 to 60 words of the tiny tokenizer; the label says which half of the words they are from."""
    chance = random.Random(0)
    with path.open("w") as file:
        for index in range(count):
            begin = 5 + 45 * (index % 2)
            words = [f"w{chance.randrange(begin, begin + 45)}" for _ in range(chance.randrange(10, 60))]
            file.write(json.dumps({"text": " ".join(words), "kind": ["low", "high"][index % 2]}) + "\n")
    return DataConfig(dataset=str(path))


def converted_folder(
    folder: Path, config: AttentionConfig = LEARNED, family: str = "bert", auto: str = "AutoModel"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder / "base")
    tiny_model(family, auto).save_pretrained(folder / "base")
    convert_checkpoint(folder / "base", folder / "converted", config)
    return folder / "converted"


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "training" / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[tuple[str, int, float]]:
    return [(row["stage"], row["step"], row["loss"]) for row in lines(output) if "loss" in row]


def same_weights(first: Path, second: Path) -> bool:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (first, second))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
