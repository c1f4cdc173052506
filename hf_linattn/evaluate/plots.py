"""The pictures of a report. Matplotlib is optional: `pip install hf-linattn[plots]`."""

from pathlib import Path
from typing import Any

from ..utils.figures import save_figure

_STYLES: dict[str, dict[str, Any]] = {
    "truncated": {"color": "0.6", "linestyle": "--"},
    "chunks": {"color": "0.4", "linestyle": (0, (5, 2, 1, 2))},
    "extended": {"color": "0.2", "linestyle": "-"},
}
_BRANCH_STYLES = {"both": "-", "near": ":", "far": "-."}


def draw_plots(report: dict[str, Any], folder: Path) -> list[Path]:
    """All pictures that a report has numbers for, written to `folder`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    styles = _line_styles(report)
    paths = []
    for task in report["tasks"]:
        name = slug(task["name"])
        paths.append(_quality(task, styles, folder / f"quality-{name}.png"))
        if any("by_position" in cell for cell in task["cells"]):
            paths.append(_position(task, styles, folder / f"position-{name}.png"))
    if report["footprint"]:
        paths.append(_footprint(report, styles, folder / "footprint.png"))
    if report["fidelity"]:
        paths.append(_fidelity(report, styles, folder / "fidelity.png"))
    return paths


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def _line_styles(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One color for each conversion; its branches alone in the same color, dotted."""
    styles: dict[str, dict[str, Any]] = {}
    colors: dict[str, str] = {}
    for column in report["columns"]:
        if column["kind"] != "converted":
            styles[column["name"]] = _STYLES[column["kind"]]
            continue
        whole = column["name"].removesuffix(", near only").removesuffix(", far only")
        color = colors.setdefault(whole, f"C{len(colors)}")
        styles[column["name"]] = {"color": color, "linestyle": _BRANCH_STYLES[column["branches"]]}
    return styles


def _length_axis(axes: Any, lengths: list[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.grid(alpha=0.3)


def _quality(task: dict[str, Any], styles: dict[str, dict[str, Any]], path: Path) -> Path:
    """One panel for each metric, by length; intervals of whole models only, so that they can be told apart."""
    import matplotlib.pyplot as plt

    metrics = list(task["higher_is_better"])
    figure, panels = plt.subplots(1, len(metrics), figsize=(5 * len(metrics) + 3, 4.5), squeeze=False)
    names = list(dict.fromkeys(cell["column"] for cell in task["cells"]))
    for axes, metric in zip(panels[0], metrics, strict=True):
        for index, name in enumerate(names):
            cells = [cell for cell in task["cells"] if cell["column"] == name]
            numbers = [cell["metrics"][metric] for cell in cells]
            values = [float("nan") if n["value"] is None else n["value"] for n in numbers]
            if name.endswith((", near only", ", far only")):
                # marked, so that a single length shows too
                lengths = [cell["length"] for cell in cells]
                axes.plot(lengths, values, marker="x", ms=4, label=name, alpha=0.7, **styles[name])
                continue
            # an interval that is not defined is drawn as none
            low = [0 if n["low"] is None else max(n["value"] - n["low"], 0) for n in numbers]
            high = [0 if n["high"] is None else max(n["high"] - n["value"], 0) for n in numbers]
            # a little beside each other
            positions = [cell["length"] * 1.008 ** (index - len(names) / 2) for cell in cells]
            axes.errorbar(positions, values, yerr=[low, high], marker="o", ms=3, capsize=2, label=name, **styles[name])
        if (chance := task.get("chance", {}).get(metric)) is not None:
            axes.axhline(chance, color="0.7", linewidth=1, label="guess")
        _length_axis(axes, task["lengths"])
        axes.set_title(f"{metric} ({'higher' if task['higher_is_better'][metric] else 'lower'} is better)", fontsize=10)
    figure.suptitle(task["name"])
    panels[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save_figure(figure, path)


def _position(task: dict[str, Any], styles: dict[str, dict[str, Any]], path: Path) -> Path:
    """Perplexity by position in the document, at the greatest length."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    starts: set[int] = set()
    for cell in task["cells"]:
        if cell["length"] != task["lengths"][-1]:
            continue
        # a logarithmic axis has no 0
        positions = [max(row["from"], 32) for row in cell["by_position"]]
        starts |= set(positions)
        values = [row["perplexity"] for row in cell["by_position"]]
        axes.plot(positions, values, marker="o", markersize=3, label=cell["column"], **styles[cell["column"]])
    _length_axis(axes, sorted(starts))
    axes.set(xlabel="position of the predicted token, from", ylabel="perplexity", yscale="log", title=task["name"])
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save_figure(figure, path)


def _footprint(report: dict[str, Any], styles: dict[str, dict[str, Any]], path: Path) -> Path:
    """Seconds and memory by length; a dot where a conversion overtakes softmax."""
    import matplotlib.pyplot as plt
    import numpy as np

    from .models import EXTENDED
    from .report import crossovers

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    lengths = sorted({row["length"] for row in report["footprint"]})
    names = list(dict.fromkeys(row["column"] for row in report["footprint"]))
    for axes, key, scale, label in zip(
        panels,
        ("seconds", "peak_bytes"),
        (1, 1024 * 1024),
        ("seconds per forward pass", "peak memory beyond the model, MiB"),
        strict=True,
    ):
        for name in names:
            rows = sorted((r for r in report["footprint"] if r["column"] == name), key=lambda r: r["length"])
            values = [max(r[key] / scale, 1e-3) for r in rows]
            axes.plot([r["length"] for r in rows], values, marker="o", markersize=3, label=name, **styles[name])
        _length_axis(axes, lengths)
        axes.set_yscale("log")
        axes.set_ylabel(label)
    softmax = sorted((r["length"], r["seconds"]) for r in report["footprint"] if r["column"] == EXTENDED)
    for name, length in crossovers(report).items():
        if length is not None and length > lengths[0]:
            known, seconds = zip(*softmax, strict=True)
            crossing = np.exp(np.interp(np.log(length), np.log(known), np.log(seconds)))
            panels[0].plot(length, crossing, marker="o", markersize=9, fillstyle="none", color=styles[name]["color"])
    panels[0].set_title("circles: from here on faster than softmax", fontsize=9)
    panels[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save_figure(figure, path)


def _fidelity(report: dict[str, Any], styles: dict[str, dict[str, Any]], path: Path) -> Path:
    """Error and cosine of the attention output by layer."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    for axes, key, label in zip(
        panels,
        ("relative_error", "cosine"),
        ("relative error of the attention output", "cosine to softmax"),
        strict=True,
    ):
        for name in dict.fromkeys(row["column"] for row in report["fidelity"]):
            rows = [row for row in report["fidelity"] if row["column"] == name]
            axes.plot([r["layer"] for r in rows], [r[key] for r in rows], marker="o", label=name, **styles[name])
        axes.set(xlabel="layer", ylabel=label)
        axes.grid(alpha=0.3)
    panels[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save_figure(figure, path)
