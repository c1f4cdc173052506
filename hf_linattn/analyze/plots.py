"""The pictures of an analysis. Matplotlib is optional: `pip install hf-linattn[plots]`."""

from pathlib import Path
from typing import Any

from ..utils.figures import REFERENCE, STYLES, annotate, legend_below, save_figure
from .analysis import Analysis
from .suggest import Suggestion, described

# Singular values below this share of the first one are rounding.
_SMALLEST = 1e-6
# How many settings' errors are drawn side by side.
_MAPS = 4


#: name of a plot -> what it shows, for those who do not see it
ALT_TEXTS = {
    "spectrum": "singular values of the attention matrix by layer, largest first",
    "energy": "share of the energy in the leading singular values by layer",
    "errors": "relative error of each setting by layer",
    "retrieval": "retrieval score of each head",
    "quality-cost": "loss of each setting against what it costs, relative to softmax",
}


def draw_plots(analysis: Analysis, folder: Path, suggestion: Suggestion | None = None) -> list[Path]:
    """Spectra, energy, errors by layer and head, and quality against cost, written to `folder`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    return [
        _curves(analysis, "spectrum", folder / "spectrum.png"),
        _curves(analysis, "energy", folder / "energy.png"),
        _errors(analysis, folder / "errors.png"),
        *([_retrieval(analysis, folder / "retrieval.png")] if analysis.retrieval else []),
        _quality(analysis, suggestion, folder / "quality-cost.png"),
    ]


def _curves(analysis: Analysis, kind: str, path: Path) -> Path:
    """Singular values, or the energy that the first of them hold: a line for some layers, mean over heads."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    # from the first layer to the last
    steps = min(len(STYLES), analysis.layers)
    layers = [analysis.statistics[round(i * (analysis.layers - 1) / max(steps - 1, 1))] for i in range(steps)]
    for axes, name, title in zip(panels, ("logit", "attention"), ("q k^T", "softmax(q k^T)"), strict=True):
        for layer, style in zip(layers, STYLES, strict=False):
            values = getattr(layer, f"{name}_{kind}")
            shown = [(i, value) for i, value in enumerate(values, start=1) if kind == "energy" or value > _SMALLEST]
            # few enough markers to tell them apart
            every = sorted({round(len(shown) ** (i / 8)) - 1 for i in range(9)})
            label = f"layer {layer.layer}"
            axes.plot(*zip(*shown, strict=True), label=label, markevery=every, markersize=5, **style)
        axes.axvline(analysis.head_dim, label="size of a head", **REFERENCE)
        axes.set(xscale="log", title=title, xlabel="singular value, by size")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if kind == "spectrum":
        panels[0].set_yscale("log")
    panels[0].set_ylabel("relative to the first" if kind == "spectrum" else "share of the energy up to it")
    panels[0].legend(fontsize=9, loc="lower left" if kind == "spectrum" else "lower right")
    return save_figure(figure, path)


def _errors(analysis: Analysis, path: Path) -> Path:
    """Relative error of the output by layer and head, of the settings that lose least, most and in between."""
    import matplotlib.pyplot as plt

    ranked = sorted(analysis.candidates, key=lambda candidate: candidate.uniform_loss)
    steps = min(_MAPS, len(ranked))
    chosen = [ranked[round(i * (len(ranked) - 1) / max(steps - 1, 1))] for i in range(steps)]
    figure, panels = plt.subplots(1, steps, figsize=(3.2 * steps, 0.25 * analysis.layers + 2.2), squeeze=False)
    image: Any = None
    for axes, candidate in zip(panels[0], chosen, strict=True):
        image = axes.imshow(candidate.errors, vmin=0, vmax=1, cmap="magma_r", aspect="auto")
        axes.set_title(candidate.name, fontsize=9)
        axes.set_xlabel("head")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0][0].set_ylabel("layer")
    if analysis.left_out:
        for axes in panels[0]:
            _label_layers(axes, analysis)
    figure.colorbar(image, ax=panels[0][-1], label="relative error")
    return save_figure(figure, path)


def _label_layers(axes: Any, analysis: Analysis) -> None:
    """Rows of a map have the layers' indices in the model."""
    every = max(analysis.layers // 12, 1)
    axes.set_yticks(range(0, analysis.layers, every), [str(layer) for layer in analysis.indices[::every]])


def _retrieval(analysis: Analysis, path: Path) -> Path:
    """Retrieval score by layer and head."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(0.3 * analysis.heads + 2.5, 0.25 * analysis.layers + 2.2))
    image = axes.imshow(analysis.retrieval, vmin=0, cmap="magma_r", aspect="auto")
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    _label_layers(axes, analysis)
    axes.set_xticks(range(0, analysis.heads, max(analysis.heads // 12, 1)))
    figure.colorbar(image, ax=axes, label="share of attention on the planted token")
    return save_figure(figure, path)


def _quality(analysis: Analysis, suggestion: Suggestion | None, path: Path) -> Path:
    """Loss against time and operations, of every setting in all layers, and of the suggestion."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    for axes, unit in zip(panels, ("time", "operations"), strict=True):
        points = {}
        for candidate in analysis.candidates:
            cost = described(analysis, (candidate.name,) * analysis.layers)
            # next to nothing is drawn at the edge
            points[candidate.name] = (getattr(cost, unit), max(candidate.uniform_loss, 1e-6))
        best = {n for n, (x, y) in points.items() if not any(a <= x and b < y for a, b in points.values())}
        others = [point for name, point in points.items() if name not in best]
        if others:
            axes.plot(
                *zip(*others, strict=True), "o", color="0.6", ms=4, label="another costs as little and loses less"
            )
        style = {**STYLES[0], "linestyle": "none"}
        axes.plot(*zip(*(points[name] for name in best), strict=True), label="one setting in all layers", **style)
        if suggestion is not None:
            found = (getattr(suggestion, unit), max(suggestion.expected_loss, 1e-6))
            style = {**STYLES[1], "linestyle": "none", "marker": "*", "markersize": 14}
            axes.plot(*found, label="suggestion (expected)", **style)
        axes.axvline(1.0, label="softmax", **REFERENCE)
        # room for the last names
        axes.margins(x=0.15, y=0.1)
        axes.set(yscale="log", xlabel=f"{unit} of the model, softmax = 1, at {analysis.length:,} tokens")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        annotate(axes, {name: points[name] for name in sorted(best, key=lambda name: points[name][1])})
    panels[0].set_ylabel(analysis.measure)
    legend_below(panels[0])
    return save_figure(figure, path)
