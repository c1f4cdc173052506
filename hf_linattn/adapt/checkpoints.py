"""Checkpoints of a run: whole or absent, and nothing in them that has to be unpickled.

    training/checkpoint/model.safetensors      all weights of the model
    training/checkpoint/optimizer.safetensors  the optimizer's tensors, as <name of the parameter>|<name>
    training/checkpoint/state.json             where the run stands

Sharded tensors are put together by all processes and written by the first one, so that a checkpoint can
be read by any number of processes.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from . import deepspeed_state

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # torch built without torch.distributed
    DTensor = distribute_tensor = None  # type: ignore[assignment,misc]

_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"


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
    """Write a checkpoint beside the one that is there, and then in its place. Called by the first process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished, aside = folder.with_name(f".{folder.name}-new"), folder.with_name(f".{folder.name}-old")
    for leftover in (unfinished, aside):
        if leftover is unfinished or folder.exists():
            shutil.rmtree(leftover, ignore_errors=True)
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
        folder.rename(aside)
    unfinished.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def find(folder: Path) -> Path | None:
    """The folder itself, or the one that was moved aside for it when the run was killed, or None."""
    for candidate in (folder, folder.with_name(f".{folder.name}-old")):
        if (candidate / _STATE).is_file():
            return candidate
    return None


def remove(folder: Path) -> None:
    """The checkpoint, and what a start that was killed left of it."""
    for candidate in (folder, *(folder.with_name(f".{folder.name}-{kind}") for kind in ("new", "old"))):
        shutil.rmtree(candidate, ignore_errors=True)


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
