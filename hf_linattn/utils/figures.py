"""Figures of reports. Matplotlib is optional: `pip install hf-linattn[plots]`."""

import importlib.util
from collections.abc import Mapping, Sequence
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


#: Styles of the series of a plot: colors of Okabe and Ito, which color-blind readers tell apart, and markers and lines
#: that differ in black and white too. A plot with more series needs another panel.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#009E73", "marker": "^", "linestyle": "-."},
    {"color": "#CC79A7", "marker": "D", "linestyle": ":"},
    {"color": "#E69F00", "marker": "v", "linestyle": (0, (6, 1, 1, 1, 1, 1))},
)
#: Style of softmax, with which the series are compared.
SOFTMAX: dict[str, Any] = {"color": "black", "marker": "X", "linestyle": "-"}
#: Style of a line at what a guess gets, or at where a conversion equals softmax.
REFERENCE: dict[str, Any] = {"color": "0.35", "linestyle": (0, (1, 2)), "linewidth": 1.5}

#: A value and the ends of its interval, where it has one.
Interval = tuple[float, float | None, float | None]


def error_bars(intervals: Sequence[Interval]) -> list[list[float]]:
    """How far each interval reaches below and above its value, as matplotlib takes it."""
    return [
        [0.0 if low is None else max(value - low, 0.0) for value, low, _ in intervals],
        [0.0 if high is None else max(high - value, 0.0) for value, _, high in intervals],
    ]


def panels_of(names: Sequence[str], most: int = len(STYLES)) -> list[list[str]]:
    """These names in panels of about the same size, none with more than `most` series."""
    count = max(-(-len(names) // most), 1)
    return [list(names[len(names) * i // count : len(names) * (i + 1) // count]) for i in range(count)]


def draw_intervals(
    axes: Any,
    places: Sequence[str],
    series: Mapping[str, Sequence[Interval | None]],
    styles: Sequence[Mapping[str, Any]] = STYLES,
    *,
    rows: bool = False,
) -> None:
    """Points with their intervals: a group for each place, and in it the series side by side.

    Args:
        axes: where to draw.
        places: names of the groups.
        series: name in the legend -> its value at each place, None where it has none.
        styles: of the series.
        rows: places go from top to bottom and values to the right, instead of places to the right and values up.
    """
    for index, (label, intervals) in enumerate(series.items()):
        shift = 0.6 * ((index + 0.5) / len(series) - 0.5)
        shown = [(place + shift, interval) for place, interval in enumerate(intervals) if interval is not None]
        where, values = [place for place, _ in shown], [interval[0] for _, interval in shown]
        errors = error_bars([interval for _, interval in shown])
        style = {**styles[index], "linestyle": "none", "markersize": 5, "capsize": 2, "elinewidth": 1, "label": label}
        axes.errorbar(*((values, where) if rows else (where, values)), **{"xerr" if rows else "yerr": errors}, **style)
    axis, limit = (axes.yaxis, axes.set_ylim) if rows else (axes.xaxis, axes.set_xlim)
    axis.set_ticks(range(len(places)), places)
    limit(*((len(places) - 0.5, -0.5) if rows else (-0.5, len(places) - 0.5)))
    axes.grid(axis="x" if rows else "y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def length_axis(axes: Any, lengths: Sequence[int], label: str = "tokens") -> None:
    """A logarithmic axis with a tick at each length."""
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(axes: Any, *, of: Any = None, columns: int = 1) -> None:
    """A legend below a panel and the labels of its axis, where it covers nothing; of another panel if given."""
    from matplotlib.transforms import ScaledTranslation

    inches = ScaledTranslation(0, -0.45, axes.figure.dpi_scale_trans)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "bbox_transform": axes.transAxes + inches}
    axes.legend(*(of or axes).get_legend_handles_labels(), **place, ncols=columns, fontsize=9, frameon=False)


def annotate(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Names at points, in this order; a name that would lie on an earlier one is left out."""
    axes.figure.canvas.draw()
    taken: list[tuple[float, float]] = []
    for name, point in points.items():
        x, y = axes.transData.transform(point)
        if all(abs(x - a) > 80 or abs(y - b) > 12 for a, b in taken):
            taken.append((x, y))
            axes.annotate(name, point, fontsize=8, xytext=(5, 4), textcoords="offset points")


def save_figure(figure: Any, path: Path) -> Path:
    """Write a Matplotlib figure as a PNG that is there when it is complete, close it, and return the path."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=120, format="png", bbox_inches="tight")
    plt.close(figure)
    return path
