"""The tables, notes and plot of a report of the benchmark."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

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


def plot(report: dict[str, Any]) -> Figure | None:
    """Time by length, one panel per group."""
    groups = {key: by_length for key, by_length in report["groups"].items() if by_length}
    if not groups:
        return None
    figure, panels = plt.subplots(1, len(groups), figsize=(7 * len(groups), 6), squeeze=False)
    for axes, (key, by_length) in zip(panels[0], groups.items(), strict=True):
        lengths = sorted(by_length, key=int)
        for index, name in enumerate(names_of(by_length)):
            points = [(int(n), spread(c)) for n in lengths if (c := by_length[n].get(name, {})).get("seconds")]
            if not points:
                continue
            middle = [1e3 * s[0] for _, s in points]
            errors = [[1e3 * (s[0] - s[1]) for _, s in points], [1e3 * (s[2] - s[0]) for _, s in points]]
            style = "--" if row_named(name).causal else "-"
            color = plt.get_cmap("tab20")(index % 20)
            axes.errorbar([n for n, _ in points], middle, errors, label=name, ls=style, marker="o", ms=3, color=color)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=title_of(key, report["layers"]))
        axes.set_xticks([int(n) for n in lengths], [f"{int(n):,}" for n in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure
