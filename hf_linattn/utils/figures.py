"""Figures of reports. Matplotlib is optional: `pip install hf-linattn[plots]`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import replacing


def has_matplotlib() -> bool:
    """Whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def files_text(folder: str | Path, data: str, *, plots: bool) -> str:
    """What a report has written, in one line: pages, a file of data, and plots or what installs what draws them."""
    if plots:
        return f"Written: {folder}/report.md, report.html, {data} and plots."
    return f"Written: {folder}/report.md, report.html and {data}; for plots: pip install 'hf-linattn[plots]'."


def error_bars(intervals: Sequence[tuple[float, float | None, float | None]]) -> list[list[float]]:
    """How far each interval (value, low, high) reaches below and above the value, as matplotlib wants it."""
    return [
        [0.0 if low is None else value - low for value, low, _ in intervals],
        [0.0 if high is None else high - value for value, _, high in intervals],
    ]


def save_figure(figure: Any, path: Path) -> Path:
    """Write a Matplotlib figure as a PNG that is there when it is complete, close it, and return the path."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=120, format="png")
    plt.close(figure)
    return path
