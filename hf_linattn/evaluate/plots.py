"""The pictures of a report. Matplotlib is optional: `pip install hf-linattn[plots]`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..utils.figures import (
    REFERENCE,
    SOFTMAX,
    STYLES,
    Interval,
    draw_intervals,
    legend_below,
    length_axis,
    panels_of,
    save_figure,
)
from .models import CHUNKS, EXTENDED, TRUNCATED

# of the five series of a panel one is softmax
_CONVERSIONS = len(STYLES) - 1
_CHUNKS: dict[str, Any] = {"color": "0.5", "marker": "+", "linestyle": "-."}
_WIDTH = 5.0
_MIB = 1024 * 1024
#: start of a plot's name -> what it shows, for those who do not see it
ALT_TEXTS = {
    "quality": "each model by length, with 95% intervals",
    "parts": "each conversion with either part of its attention switched off",
    "position": "each model by position in the document",
    "footprint": "time and peak memory of each model by length",
    "fidelity": "relative error of attention by layer",
}


def draw_plots(report: dict[str, Any], folder: Path) -> list[Path]:
    """All pictures that a report has numbers for, written to `folder`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    conversions = [c["name"] for c in report["columns"] if c["kind"] == "converted" and c["branches"] == "both"]
    paths = []
    for task in report["tasks"]:
        name = slug(task["name"])
        measured = {cell["column"] for cell in task["cells"]}
        whole = [name for name in conversions if name in measured]
        paths.append(_quality(task, whole, folder / f"quality-{name}.png"))
        if hybrids := [name for name in whole if f"{name}, near only" in measured]:
            paths.append(_parts(task, hybrids, folder / f"parts-{name}.png"))
        if any("by_position" in cell for cell in task["cells"]):
            paths.append(_position(task, whole, folder / f"position-{name}.png"))
    if report["footprint"]:
        paths.append(_footprint(report, conversions, folder / "footprint.png"))
    if report["fidelity"]:
        paths.append(_fidelity(report, conversions, folder / "fidelity.png"))
    return paths


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def _subplots(rows: int, columns: int) -> tuple[Any, Any]:
    """A grid of panels, of which those of a row have the same scale, with room for a legend below."""
    import matplotlib.pyplot as plt

    size = (_WIDTH * columns + 1, 3.2 * rows + 1.8)
    return plt.subplots(rows, columns, figsize=size, sharex="all", sharey="row", squeeze=False)


def _intervals(task: dict[str, Any], column: str, metric: str) -> list[Interval | None]:
    """A metric of a column at each length, with its interval; None where it was not measured or is not defined."""
    cells = {cell["length"]: cell["metrics"][metric] for cell in task["cells"] if cell["column"] == column}
    numbers = [cells.get(length) for length in task["lengths"]]
    return [None if n is None or n["value"] is None else (n["value"], n["low"], n["high"]) for n in numbers]


def _draw_task(axes: Any, task: dict[str, Any], metric: str, columns: Sequence[str]) -> None:
    """Extended softmax and these columns at each length, and lines at the other softmax columns and a guess."""
    shown = {name: _intervals(task, name, metric) for name in (EXTENDED, *columns)}
    shown = {name: values for name, values in shown.items() if any(value is not None for value in values)}
    styles = [SOFTMAX] * (EXTENDED in shown) + list(STYLES)
    draw_intervals(axes, [f"{length:,}" for length in task["lengths"]], shown, styles)
    for name, line in ((TRUNCATED, "--"), (CHUNKS, "-.")):
        for place, interval in enumerate(_intervals(task, name, metric)):
            if interval is not None:
                label = name if place == 0 else None
                axes.hlines(interval[0], place - 0.4, place + 0.4, colors="0.5", linestyles=line, label=label)
    if (chance := task["chance"].get(metric)) is not None:
        axes.axhline(chance, label="a guess", **REFERENCE)


def _quality(task: dict[str, Any], conversions: Sequence[str], path: Path) -> Path:
    """How good is each model at each length? A row of panels for each metric."""
    metrics, groups = list(task["higher_is_better"]), panels_of(conversions, _CONVERSIONS)
    figure, panels = _subplots(len(metrics), len(groups))
    for row, metric in zip(panels, metrics, strict=True):
        for axes, names in zip(row, groups, strict=True):
            _draw_task(axes, task, metric, names)
        row[0].set_ylabel(f"{metric}\n({'higher' if task['higher_is_better'][metric] else 'lower'} is better)")
    for first, last in zip(panels[0], panels[-1], strict=True):
        last.set_xlabel("tokens")
        legend_below(last, of=first)
    figure.suptitle(task["name"])
    return save_figure(figure, path)


def _parts(task: dict[str, Any], conversions: Sequence[str], path: Path) -> Path:
    """What does each part of attention contribute? A panel for each conversion that has a near and a far part."""
    metric = next(iter(task["higher_is_better"]))
    figure, panels = _subplots(1, len(conversions))
    for axes, name in zip(panels[0], conversions, strict=True):
        _draw_task(axes, task, metric, [name, f"{name}, near only", f"{name}, far only"])
        axes.set_xlabel("tokens")
        legend_below(axes)
    panels[0][0].set_ylabel(f"{metric}\n({'higher' if task['higher_is_better'][metric] else 'lower'} is better)")
    figure.suptitle(task["name"])
    return save_figure(figure, path)


def _position(task: dict[str, Any], conversions: Sequence[str], path: Path) -> Path:
    """How does perplexity depend on the position in the document? At the greatest length."""
    longest = {cell["column"]: cell for cell in task["cells"] if cell["length"] == task["lengths"][-1]}
    groups = panels_of([name for name in conversions if name in longest], _CONVERSIONS)
    figure, panels = _subplots(1, len(groups))
    for axes, names in zip(panels[0], groups, strict=True):
        starts: set[int] = set()
        for name, style in [(EXTENDED, SOFTMAX), *zip(names, STYLES, strict=False)]:
            if name not in longest:
                continue
            # a logarithmic axis has no 0
            points = [(max(row["from"], 32), row["perplexity"]) for row in longest[name]["by_position"]]
            starts |= {place for place, _ in points}
            axes.plot(*zip(*points, strict=True), label=name, markersize=4, **style)
        length_axis(axes, sorted(starts), "position of the predicted token, from")
        legend_below(axes)
    panels[0][0].set(ylabel="perplexity\n(lower is better)", yscale="log")
    figure.suptitle(task["name"])
    return save_figure(figure, path)


def _footprint(report: dict[str, Any], conversions: Sequence[str], path: Path) -> Path:
    """What do time and memory cost at each length? A circle where a conversion overtakes softmax."""
    import numpy as np

    from .report import crossovers

    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for measured in report["footprint"]:
        rows.setdefault(measured["column"], {})[measured["length"]] = measured
    lengths = sorted({length for by_length in rows.values() for length in by_length})
    overtakes = crossovers(report)
    softmax = [(EXTENDED, SOFTMAX)] + [(CHUNKS, _CHUNKS)] * (CHUNKS in rows)
    groups = panels_of([name for name in conversions if name in rows], len(STYLES) - len(softmax))
    figure, panels = _subplots(2, len(groups))
    for column, names in enumerate(groups):
        for axes, key, scale in ((panels[0][column], "seconds", 1), (panels[1][column], "peak_bytes", _MIB)):
            for name, style in [*softmax, *zip(names, STYLES, strict=False)]:
                points = [(n, max(row[key] / scale, 1e-3)) for n, row in sorted(rows.get(name, {}).items())]
                if points:
                    axes.plot(*zip(*points, strict=True), label=name, markersize=4, **style)
            length_axis(axes, lengths)
            axes.set_yscale("log")
        for name, style in zip(names, STYLES, strict=False):
            length = overtakes.get(name)
            if length is not None and length > lengths[0]:
                known, seconds = zip(*((n, row["seconds"]) for n, row in sorted(rows[EXTENDED].items())), strict=True)
                crossing = np.exp(np.interp(np.log(length), np.log(known), np.log(seconds)))
                panels[0][column].plot(length, crossing, "o", markersize=11, fillstyle="none", color=style["color"])
        panels[0][column].set_title("circles: from here on faster than softmax", fontsize=9)
        panels[0][column].set_xlabel("")
        legend_below(panels[1][column])
    panels[0][0].set_ylabel("seconds per forward pass")
    panels[1][0].set_ylabel("peak memory beyond the model, MiB")
    return save_figure(figure, path)


def _fidelity(report: dict[str, Any], conversions: Sequence[str], path: Path) -> Path:
    """Which layers differ most from softmax?"""
    measured = [name for name in conversions if any(row["column"] == name for row in report["fidelity"])]
    groups = panels_of(measured)
    figure, panels = _subplots(1, len(groups))
    for axes, names in zip(panels[0], groups, strict=True):
        for name, style in zip(names, STYLES, strict=False):
            rows = [row for row in report["fidelity"] if row["column"] == name]
            axes.plot([r["layer"] for r in rows], [r["relative_error"] for r in rows], label=name, **style)
        axes.set(xlabel="layer", ylim=(0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        legend_below(axes)
    panels[0][0].set_ylabel("relative error of the attention output")
    return save_figure(figure, path)
