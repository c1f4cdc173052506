"""Figures of reports. Matplotlib is optional: `pip install hf-linattn[plots]`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import replacing


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
