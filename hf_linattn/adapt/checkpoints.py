"""Checkpoints of a run: whole or absent, and nothing in them that has to be unpickled.

    training/checkpoint/model.safetensors      all weights of the model
    training/checkpoint/optimizer.safetensors  the optimizer's tensors, as <name of the parameter>|<name>
    training/checkpoint/state.json             where the run stands

Sharded tensors are put together by all processes and written by the first one, so that a checkpoint can
be read by any number of processes.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..utils.files import replacing
from . import deepspeed_state

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # torch built without torch.distributed
    DTensor = distribute_tensor = None  # type: ignore[assignment,misc]

#: Folders in that of the run: the last checkpoint, the best evaluation, and the weights before NaN or Inf.
LAST, BEST, DIVERGED = "checkpoint", "best", "diverged"

_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass
class Progress:
    """Where a stage stands. `seconds` is the time spent in steps, of all starts together."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = -1
    # of the evaluations
    first_loss: float | None = None
    last_loss: float | None = None
    first_metrics: dict[str, float] = field(default_factory=dict)
    best_metrics: dict[str, float] = field(default_factory=dict)
    last_metrics: dict[str, float] = field(default_factory=dict)
    scaler: dict[str, float] = field(default_factory=dict)


@dataclass
class StageCheckpoints:
    """The checkpoints of one stage. What writes is called by the first process.

    Args:
        training: folder of the run.
        stage: index of the stage.
        data: digest of the documents; None of a stream.
        past: what the state has of earlier stages and starts, see `RunState`.
    """

    training: Path
    stage: int
    data: str | None
    past: dict[str, Any]

    def save(self, model: dict[str, Tensor], optimizer: dict[str, Tensor], progress: Progress) -> None:
        """The last checkpoint, which a killed run goes on from."""
        state = {"stage": self.stage, "progress": asdict(progress), "data": self.data}
        write(self.training / LAST, model, optimizer, state | self.past)

    def save_end(self, model: dict[str, Tensor], past: dict[str, Any]) -> None:
        """What the stage ends with: the checkpoint that the next one begins with."""
        write(self.training / LAST, model, None, {"stage": self.stage + 1, "progress": {}} | past)

    def save_best(self, model: dict[str, Tensor], progress: Progress) -> None:
        """The weights of the best evaluation so far."""
        write(self.training / BEST, model, None, {"stage": self.stage, "step": progress.step})

    def save_diverged(self, model: dict[str, Tensor], progress: Progress) -> None:
        """The weights before a step that gave NaN or Inf."""
        write(self.training / DIVERGED, model, None, {"stage": self.stage, "step": progress.step})

    def has_best(self, progress: Progress) -> bool:
        """Whether the best weights that are kept are those that `progress` knows.

        They are not where a run was killed after an evaluation that came after the last checkpoint.
        """
        kept = find(self.training / BEST)
        if kept is None:
            return False
        with readable(kept):
            return read_state(kept) == {"stage": self.stage, "step": progress.best_step}

    def read_best(self, progress: Progress) -> dict[str, Tensor]:
        """The weights of the best evaluation."""
        kept = find(self.training / BEST)
        assert kept is not None and self.has_best(progress)
        with readable(kept):
            return read_model(kept)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU; every process must ask for it."""
    if deepspeed_state.partitioned(tensor):
        return deepspeed_state.weights(tensor)
    if DTensor is not None and isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, each once."""
    buffers = set(model.state_dict())
    state = {name: whole(p) for name, p in model.named_parameters()}
    return state | {name: whole(b) for name, b in model.named_buffers() if name in buffers}


@torch.no_grad()
def load_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """The inverse of `model_state`.

    Raises:
        ValueError: the names are not those of the model.
    """
    buffers = set(model.state_dict())
    ours = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in buffers}
    if odd := sorted(set(ours) ^ set(state)):
        raise ValueError(f"The checkpoint does not fit the model: {', '.join(odd[:5])}.")
    for name, tensor in ours.items():
        _copy(tensor, state[name])


def optimizer_state(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """The tensors that the optimizer keeps for each parameter."""
    if any(map(deepspeed_state.partitioned, names)):
        return deepspeed_state.optimizer_state(optimizer, names)
    return {
        f"{name}|{key}": whole(value)
        for parameter, name in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], state: dict[str, Tensor]
) -> None:
    """The inverse of `optimizer_state`."""
    if any(map(deepspeed_state.partitioned, names)):
        deepspeed_state.load_optimizer_state(optimizer, names, state)
        return
    by_name = {name: parameter for parameter, name in names.items()}
    for key, value in state.items():
        name, _, kind = key.rpartition("|")
        parameter = by_name[name]
        if value.shape == parameter.shape and value.ndim:
            value = _like(parameter, value)
        # the number of steps stays on the CPU, where AdamW keeps it
        optimizer.state[parameter][kind] = value


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    if DTensor is not None and isinstance(tensor, DTensor):
        return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements)
    return value.to(tensor.device)


def _copy(target: Tensor, value: Tensor) -> None:
    target.copy_(_like(target, value))


def write(folder: Path, model: dict[str, Tensor], optimizer: dict[str, Tensor] | None, state: dict[str, Any]) -> None:
    """Write a checkpoint beside the one that is there, and then in its place. Called by the first process.

    Raises:
        OSError, SafetensorError: it cannot be written; the one that is there is intact.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _unfinished(folder):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = _aside(folder)
    with replacing(folder) as unfinished:
        unfinished.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in model.items()}, unfinished / _MODEL)
        if optimizer is not None:
            save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, unfinished / _OPTIMIZER)
        (unfinished / _STATE).write_text(json.dumps(state, indent=1) + "\n")
        for file in unfinished.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        # a folder cannot take another one's place at once: killed between the two, `find` takes the one aside
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def find(folder: Path) -> Path | None:
    """The folder itself, or the one that was moved aside for it when the run was killed, or None."""
    for candidate in (folder, _aside(folder)):
        if (candidate / _STATE).is_file():
            return candidate
    return None


def remove(folder: Path) -> None:
    """The checkpoint, and what a start that was killed left of it."""
    for candidate in (folder, _aside(folder), *_unfinished(folder)):
        shutil.rmtree(candidate, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-old")


def _unfinished(folder: Path) -> list[Path]:
    """What starts that were killed left of a checkpoint that they were writing."""
    return list(folder.parent.glob(f".{folder.name}.*"))


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Around reading a checkpoint: what is wrong with its files becomes one error that says what to do.

    Raises:
        ValueError: a file is missing or damaged.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"The checkpoint {str(folder)!r} is damaged ({type(error).__name__}: {error}). Remove it to train from "
            "the start."
        ) from error


def read_state(folder: Path) -> dict[str, Any]:
    """Where the run stood."""
    return json.loads((folder / _STATE).read_text())


def read_model(folder: Path) -> dict[str, Tensor]:
    """The weights."""
    return load_file(folder / _MODEL)


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """The optimizer's tensors, of a checkpoint within a stage; at its start there is a new optimizer."""
    return load_file(folder / _OPTIMIZER)
