"""The machine that numbers were measured on."""

import os
import platform
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": accelerate.PartialState().num_processes,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine_text(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    return (
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, "
        f"transformers {machine['transformers']}"
    )
