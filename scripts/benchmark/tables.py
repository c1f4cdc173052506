"""The tables, notes and plot of a report of the benchmark."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from hf_linattn.utils.figures import REFERENCE, STYLES, legend_below, length_axis, panels_of
from hf_linattn.utils.figures import SOFTMAX as SOFTMAX_STYLE
from hf_linattn.utils.markdown import table
from measure import MIB
from rows import BY_NAME, CAUSAL_SOFTMAX, LIMIT, SOFTMAX, row_named
from subjects import BY_KEY

Cell = dict[str, Any]


def reference(name: str) -> str:
    """The row of softmax that a row is compared with."""
    return CAUSAL_SOFTMAX if row_named(name).causal else SOFTMAX


def names_of(by_length: dict[str, dict[str, Cell]]) -> list[str]:
    """The rows of a group, in the order of the list, those of other configs last."""
    names = list(dict.fromkeys(name for group in by_length.values() for name in group))
    order = list(BY_NAME)
    return sorted(names, key=lambda name: order.index(name) if name in BY_NAME else len(order))


def spread(cell: Cell) -> tuple[float, float, float]:
    """Median, least and largest of the seconds."""
    return statistics.median(cell["seconds"]), min(cell["seconds"]), max(cell["seconds"])


def title_of(key: str, layers: int) -> str:
    return BY_KEY[key].title.format(layers=layers)


def tables(report: dict[str, Any]) -> str:
    """Per group: times, times softmax is slower, times the limit, memory and operations, by length."""
    parts = []
    for key, by_length in report["groups"].items():
        title, lengths, names = title_of(key, report["layers"]), sorted(by_length, key=int), names_of(by_length)
        columns = [f"{int(length):,}" for length in lengths]

        def cells(name: str, form: Callable[[Cell, Cell, Cell], str], by_length: Any = by_length) -> list[str]:
            """One row of a table; `form` gets the cell, softmax's and the limit's."""
            texts = []
            for length in sorted(by_length, key=int):
                group = by_length[length]
                cell = group.get(name, {})
                softmax = group.get(reference(name), {})
                texts.append(form(cell, softmax, group.get(LIMIT, {})) if cell.get("seconds") else "")
            return texts

        for head, form in (
            ("ms, median (least to largest)", _milliseconds),
            ("times as fast as SDPA", _speed),
            ("times the limit's time", _over_limit),
            ("peak memory, MiB", _memory),
            ("GFLOP", _operations),
        ):
            if BY_KEY[key].made != "model" and form is _over_limit:
                continue
            rows = [[name, *cells(name, form)] for name in names]
            rows = [row for row in rows if any(row[1:])]
            if rows:
                parts.append(table([f"{title}: {head}", *columns], rows))
        if len(lengths) > 1 and (rows := _crossovers(by_length, names)):
            parts.append(table([f"{title}: faster than SDPA from", "tokens"], rows))
    return "\n\n".join(parts)


def crossover(by_length: dict[str, dict[str, Cell]], name: str) -> int | None:
    """From how many tokens on the row is faster than SDPA, None where it never is; between two lengths on log scales.

    The least length that was measured where it is faster at all of them.
    """
    softmax = reference(name)
    speeds: list[tuple[int, float]] = []
    for length in sorted(by_length, key=int):
        cells = [by_length[length].get(row, {}) for row in (softmax, name)]
        if all(cell.get("seconds") for cell in cells):
            speeds.append((int(length), math.log(spread(cells[0])[0] / spread(cells[1])[0])))
    if not speeds or speeds[-1][1] < 0:
        return None
    slower = [index for index, (_, speed) in enumerate(speeds) if speed < 0]
    if not slower:
        return speeds[0][0]
    (below, slow), (above, fast) = speeds[slower[-1] : slower[-1] + 2]
    return round(below * (above / below) ** (slow / (slow - fast)))


def _crossovers(by_length: dict[str, dict[str, Cell]], names: list[str]) -> list[list[str]]:
    rows = []
    for name in names:
        if name in (SOFTMAX, CAUSAL_SOFTMAX, LIMIT):
            continue
        softmax = reference(name)
        lengths = sorted(int(n) for n, group in by_length.items() if group.get(softmax, {}).get("seconds"))
        if not lengths:
            continue
        tokens = crossover(by_length, name)
        text = f"{tokens:,}" if tokens is not None else f"not up to {lengths[-1]:,}"
        text += " or less" if tokens == lengths[0] else ""
        rows.append([name, text])
    return rows


def _milliseconds(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return "{:,.1f} ({:,.1f} to {:,.1f})".format(*(1e3 * x for x in spread(cell)))


def _speed(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return f"{spread(softmax)[0] / spread(cell)[0]:.2f}" if softmax.get("seconds") and cell is not softmax else ""


def _over_limit(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return f"{spread(cell)[0] / spread(limit)[0]:.2f}" if limit.get("seconds") else ""


def _memory(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return f"{cell['peak_bytes'] / MIB:,.0f}" if cell.get("peak_bytes") is not None else ""


def _operations(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return f"{cell['flops'] / 1e9:,.1f}"


def notes(report: dict[str, Any]) -> list[str]:
    """What was measured, on what, and what was not."""
    said = [
        f"{report['machine']}, {report['threads']} threads, {report['device']}, {report['dtype']}, torch "
        f"{report['torch']}; batch 1, 12 heads of 64, random weights; medians of up to {report['repeats']} rounds.",
        "Attention alone: queries, keys and values as models lay them out. linformer and nystrom-attention are called "
        "with their projections to queries, keys, values and output replaced by nothing. Operations are matrix "
        "products as torch counts them, those of causal SDPA in full; what is none, such as FNet's Fourier transforms, "
        "is not in them.",
        "Causal rows are compared with causal SDPA. Peak memory: of one turn in a fresh process, beyond the model and "
        "its input.",
    ]
    if report["missing"]:
        said.append(f"Not installed, and not measured: {', '.join(report['missing'])}.")
    failed = {
        (name, cell["failed"])
        for by_length in report["groups"].values()
        for group in by_length.values()
        for name, cell in group.items()
        if "failed" in cell
    }
    return said + [f"{name}: {error}" for name, error in sorted(failed)]


def _kind(name: str) -> str:
    """The panel of a row."""
    row = row_named(name)
    if row.config is None:
        return "other packages and models"
    return "decoders" if row.causal else "with a window" if "window_size" in row.config else "without a window"


def plot(report: dict[str, Any]) -> Figure | None:
    """How much faster than softmax is each row, and from which length on? A row of panels for each group.

    Of whole models, how close they come to the limit.
    """
    kinds: dict[str, list[tuple[str, list[str]]]] = {}
    for key, by_length in report["groups"].items():
        by_kind: dict[str, list[str]] = {}
        for name in names_of(by_length):
            if name not in (SOFTMAX, CAUSAL_SOFTMAX, LIMIT):
                by_kind.setdefault(_kind(name), []).append(name)
        if by_kind:
            kinds[key] = [(kind, part) for kind, names in by_kind.items() for part in panels_of(names)]
    if not kinds:
        return None
    size = (len(kinds), max(map(len, kinds.values())))
    figure, panels = plt.subplots(*size, figsize=(4.8 * size[1], 5.2 * size[0]), sharey="row", squeeze=False)
    for row, (key, parts) in zip(panels, kinds.items(), strict=True):
        by_length = report["groups"][key]
        lengths = sorted(map(int, by_length))
        model = BY_KEY[key].made == "model"

        def points(name: str, by_length: Any = by_length, model: bool = model) -> list[tuple[int, float]]:
            """Time over the limit's, or how many times as fast as softmax, by length."""
            found = []
            for length, group in sorted((int(n), group) for n, group in by_length.items()):
                cell, other = group.get(name, {}), group.get(LIMIT if model else reference(name), {})
                if cell.get("seconds") and other.get("seconds"):
                    ratio = spread(cell)[0] / spread(other)[0]
                    found.append((length, ratio if model else 1 / ratio))
            return found

        for axes, (kind, names) in zip(row, parts, strict=False):
            if model and (softmax := points(SOFTMAX)):
                axes.plot(*zip(*softmax, strict=True), label=SOFTMAX, **SOFTMAX_STYLE)
            for name, style in zip(names, STYLES, strict=False):
                if shown := points(name):
                    axes.plot(*zip(*shown, strict=True), label=name, **style)
            axes.axhline(1, label="the limit" if model else reference(names[0]), **REFERENCE)
            axes.set(title=kind, yscale="log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
            length_axis(axes, lengths)
            legend_below(axes)
        for axes in row[len(parts) :]:
            axes.set_visible(False)
        title = title_of(key, report["layers"])
        row[0].set_ylabel(f"{title}\n{'times the limit' if model else 'times as fast as SDPA'}")
    return figure
