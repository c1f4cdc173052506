"""What reports have in common: the machine, tables, and files and pictures that are written whole."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers


def checkpoint_name(name_or_path: str | None) -> str:
    """What a report calls a checkpoint: its Hub id, or of a folder its name, not where it lies."""
    name = name_or_path or ""
    return Path(name).absolute().name if name and Path(name).is_dir() else name


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


def attention_text(settings: dict[str, Any]) -> str:
    """The settings of converted attention in a few words."""
    if settings["method"] == "layerwise":
        return "; ".join(f"layer {index}: {attention_text(its)}" for index, its in settings["by_layer"].items())
    parts = []
    if settings["window_size"]:
        parts.append(f"window {settings['window_size']}")
    if settings["global_tokens"]:
        parts.append(f"first {settings['global_tokens']} exact")
    if not settings["far"]:
        parts.append("nothing far")
    elif settings["method"] == "linformer":
        start = {"learned": "trainable, starts as segment means"}.get(settings["projection"], settings["projection"])
        parts.append(f"Linformer k={settings['projection_length']} ({start})")
    else:
        start = {"learned": "trainable, starts as FAVOR+"}.get(settings["feature_map"], settings["feature_map"])
        parts.append(f"Performer m={settings['num_features']} ({start})")
    if settings["layers"] is not None:
        parts.append(f"layers {', '.join(map(str, settings['layers']))}")
    return ", ".join(parts)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there when it is complete, and not before."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def interval_text(value: float, low: float | None, high: float | None, form: str = "{:.3f}") -> str:
    """A number and the interval in brackets, which is left out where it is None."""
    return form.format(value) + ("" if low is None else f" ({form.format(low)} to {form.format(high)})")


def error_bars(intervals: Sequence[tuple[float, float | None, float | None]]) -> list[list[float]]:
    """How far each interval (value, low, high) reaches below and above the value, as matplotlib wants it."""
    return [
        [0.0 if low is None else value - low for value, low, _ in intervals],
        [0.0 if high is None else high - value for value, _, high in intervals],
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure of matplotlib as a PNG that is there when it is complete, and close it."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=120, format="png")
    plt.close(figure)
    unfinished.replace(path)
    return path
