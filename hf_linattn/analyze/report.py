"""What an analysis found, as a folder: analysis.json, suggestion.json, report.md, report.html and plots."""

import json
from pathlib import Path
from typing import Any

from ..conversion.flops import quadratic_parts
from ..utils.figures import files_text, has_matplotlib
from ..utils.files import write_text
from ..utils.html import html_page
from ..utils.labels import attention_text
from ..utils.machine import machine, machine_text
from ..utils.markdown import table
from .analysis import Analysis, Candidate
from .plots import ALT_TEXTS, draw_plots
from .retrieval import ranked_heads
from .spectra import SHARES, LayerStatistics
from .suggest import BUDGETS, Suggestion, described

# Heads of the table of retrieval scores.
_HEADS = 10


def write_report(
    analysis: Analysis, folder: str | Path, *, suggestion: Suggestion | None = None, command: str = ""
) -> Path:
    """Write the files, each whole, and the plots where matplotlib is installed.

    Args:
        folder: is made if it is not there; what an earlier analysis left is replaced.
        suggestion: marked in the plots, and written as suggestion.json for `hf-linattn convert --config`.
        command: what made it.

    Returns:
        The path of report.md.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "analysis.json", json.dumps(analysis.to_dict()) + "\n")
    if suggestion is not None:
        write_text(folder / "suggestion.json", json.dumps(suggestion.to_dict(), indent=1) + "\n")
    plots = draw_plots(analysis, folder, suggestion) if has_matplotlib() else []
    text = markdown(analysis, suggestion, plots, command=command)
    write_text(folder / "report.md", text)
    write_text(folder / "report.html", html_page(text, folder))
    return folder / "report.md"


def written_text(folder: str | Path, suggestion: Suggestion | None) -> str:
    """What `write_report` has written, in one line."""
    data = "analysis.json" if suggestion is None else "analysis.json, suggestion.json"
    return files_text(folder, data, plots=has_matplotlib())


def markdown(analysis: Analysis, suggestion: Suggestion | None, plots: list[Path], *, command: str = "") -> str:
    """The report as text."""
    made = f"Made on {machine_text(machine())}" + (f" by\n\n```bash\n{command}\n```" if command else ".")
    parts = [
        f"# Attention of {analysis.model or analysis.model_type}",
        f"{analysis.layers} layers, {analysis.heads} heads of {analysis.head_dim}; {analysis.documents} "
        f"document{'s' * (analysis.documents != 1)} of up to {analysis.length:,} tokens. {made}",
        "## Layers",
        *([left_out_text(analysis)] if analysis.left_out else []),
        "How many singular values hold "
        + ", ".join(f"{share:.0%}" for share in SHARES)
        + f" of the energy of q k^T (at most {analysis.head_dim}, the head's size) and of its softmax (first "
        f"{min(analysis.config.spectrum_length, analysis.length):,} tokens); entropy in nats; weight on the first "
        "token and on keys less than so many tokens away; norms of queries and keys with the softmax scale in them; "
        f"m is the number of FAVOR+ features for a relative error of {analysis.config.feature_error:g} of exp(q.k) "
        "(Lemma 2). Means over heads, and the range over heads of the ranks at 90%.",
        layer_table(analysis),
        "## Candidates",
        f"Without training: the loss of the whole model ({analysis.measure}) with a setting in all layers and the sum "
        "of what it loses in each layer alone; relative error of the layers' outputs; and what the model takes of "
        "softmax's time and operations, and its largest attention layer of memory.",
        candidate_table(analysis),
    ]
    if analysis.retrieval:
        parts += [
            "## Retrieval heads",
            "The share of a head's attention that goes from where a planted key is asked for to the key, mean over "
            f"{analysis.config.retrieval_texts} passkey texts of {analysis.length:,} tokens; even attention gives "
            f"{1 / analysis.length:.2g}. The {_HEADS} largest, and what part of the sum over all heads they have "
            "together with those before.",
            retrieval_table(analysis),
        ]
    if suggestion is not None:
        parts += ["## Suggestion", suggestion_text(analysis, suggestion)]
    parts += [f"![{ALT_TEXTS.get(path.stem, path.stem)}]({path.name})" for path in plots]
    return "\n\n".join(parts) + "\n"


def left_out_text(analysis: Analysis) -> str:
    """Which layers were not analyzed."""
    named = ", ".join(map(str, analysis.left_out))
    return f"Left out, because they have a sliding window and stay as they are: layers {named}."


def layer_table(analysis: Analysis) -> str:
    """One row for each layer."""
    sizes = analysis.config.window_sizes
    head = ["layer", "rank of q k^T", "rank of softmax", "90%, by head", "entropy", "first token"]
    head += [f"within {size}" for size in sizes] + ["norm of q", "norm of k", "log10 m"]
    return table(head, [_layer_row(layer) for layer in analysis.statistics])


def _layer_row(layer: LayerStatistics) -> list[str]:
    heads = layer.heads

    def mean(values: Any) -> float:
        listed = list(values)
        return sum(listed) / len(listed)

    def ranks(name: str) -> str:
        return " / ".join(f"{mean(getattr(head, name)[index] for head in heads):.0f}" for index in range(len(SHARES)))

    at_least = [head.attention_rank[0] for head in heads]
    return [
        str(layer.layer),
        ranks("logit_rank"),
        ranks("attention_rank"),
        f"{min(at_least):.0f} to {max(at_least):.0f}",
        f"{mean(head.entropy for head in heads):.2f}",
        f"{mean(head.first_mass for head in heads):.2f}",
        *(f"{mean(h.window_mass[index] for h in heads):.2f}" for index in range(len(heads[0].window_mass))),
        f"{mean(head.query_norm for head in heads):.2f}",
        f"{mean(head.key_norm for head in heads):.2f}",
        f"{mean(head.log10_features for head in heads):.1f}",
    ]


def retrieval_table(analysis: Analysis) -> str:
    """One row for each of the heads with the largest retrieval scores."""
    ranked = ranked_heads(analysis.retrieval)
    total, so_far, rows = sum(score for score, _, _ in ranked), 0.0, []
    for score, layer, head in ranked[:_HEADS]:
        so_far += score
        rows.append([str(analysis.indices[layer]), str(head), f"{score:.3f}", f"{so_far / max(total, 1e-12):.2f}"])
    return table(["layer", "head", "score", "part of all"], rows)


def candidate_table(analysis: Analysis) -> str:
    """One row for each setting, in all layers."""
    rows = []
    for candidate in analysis.candidates:
        cost = described(analysis, (candidate.name,) * analysis.layers)
        errors = layer_errors(candidate)
        rows.append(
            [
                candidate.name,
                f"{candidate.uniform_loss:.4g}",
                f"{sum(candidate.loss):.4g}",
                f"{min(errors):.2f} to {max(errors):.2f}",
                *(f"{getattr(cost, unit):.2f}" for unit in BUDGETS),
            ]
        )
    return table(["setting", "loss", "sum of layers alone", "error of layers", *BUDGETS], rows)


def layer_errors(candidate: Candidate) -> list[float]:
    """Relative error of each layer: root mean square over its heads."""
    return [(sum(x * x for x in heads) / len(heads)) ** 0.5 for heads in candidate.errors]


def suggestion_text(analysis: Analysis, suggestion: Suggestion) -> str:
    """The settings of each layer, and what is expected of them."""
    by_layer = suggestion.config.by_layer
    rows = [
        [str(layer), name or "softmax", attention_text(by_layer[layer].to_dict()) if name else ""]
        for layer, name in zip(analysis.indices, suggestion.names, strict=True)
    ]
    expected = ", ".join(f"{getattr(suggestion, unit):.2f} of {unit}" for unit in BUDGETS)
    quadratic = quadratic_parts(suggestion.config, analysis.layers + len(analysis.left_out))
    grows = f" The cost grows with n * n: {'; '.join(quadratic)}." if quadratic else ""
    how = "Measured in the whole model" if suggestion.measured else "Expected from single layers"
    return (
        f"{how}, without training: a loss of {suggestion.expected_loss:.4g} ({analysis.measure}), and relative to "
        f"softmax {expected}.{grows}\n\n{table(['layer', 'candidate', 'settings'], rows)}\n\n"
        "`hf-linattn convert MODEL --config suggestion.json --output DIR` makes it."
    )
