"""Does a suggestion by layer beat one setting in all layers, at the same cost, on documents it was not chosen on?

    python scripts/experiments/suggested_settings.py --analysis FOLDER --texts topics --output OUTPUT [--model FOLDER]

For every setting of an analysis (`hf-linattn analyze`): the mean cosine of the mean-pooled embedding to the original's
with this setting in all layers, and with what is suggested for at most its cost. Nothing is trained.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from common import embeddings, experiment_parser, mean, minilm_folder, texts_of, write_report
from hf_linattn import AttentionConfig, convert
from hf_linattn.analyze import Analysis, Check, suggest
from hf_linattn.analyze.analysis import tokenized
from hf_linattn.analyze.suggest import described
from hf_linattn.conversion.positions import extend_positions
from hf_linattn.evaluate.intervals import bootstrap_difference, bootstrap_interval
from hf_linattn.utils.figures import REFERENCE, STYLES, annotate, legend_below
from hf_linattn.utils.machine import machine, machine_text
from hf_linattn.utils.markdown import interval_text, table


def plot(rows: list[dict[str, Any]], unit: str) -> Figure:
    """Do settings by layer keep more at the same cost than one setting in all layers?"""
    figure, axes = plt.subplots(figsize=(8, 5.5))
    points = {row["setting"]: (row["cost"], row["cosine"]) for row in rows}
    chosen = sorted((row["suggested_cost"], row["suggested_cosine"]) for row in rows if "suggested_cosine" in row)
    axes.plot(*zip(*points.values(), strict=True), label="one setting in all layers", **STYLES[0] | {"linestyle": ""})
    axes.plot(*zip(*chosen, strict=True), label="suggested, by layer", **STYLES[1])
    axes.axhline(1, label="softmax, at cost 1", **REFERENCE)
    axes.set(xlabel=f"{unit} of the model, softmax = 1", ylabel="pooled cosine to the original")
    axes.margins(x=0.12)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    annotate(axes, dict(sorted(points.items(), key=lambda item: -item[1][1])))
    legend_below(axes, columns=3)
    return figure


def main() -> None:
    parser = experiment_parser(__doc__)
    parser.add_argument("--analysis", type=Path, required=True, help="Folder of hf-linattn analyze.")
    parser.add_argument(
        "--chosen-on", help="File or dataset of the analysis: the most promising choices are measured on it."
    )
    parser.add_argument("--texts", nargs="+", required=True, help="Files or datasets of documents to measure on.")
    parser.add_argument("--documents", type=int, default=12, help="The longest so many of each.")
    parser.add_argument("--unit", choices=("operations", "time"), default="operations", help="What the cost is.")
    parser.add_argument("--model", help="Folder of the sentence encoder. Default: all-MiniLM-L6-v2.")
    options = parser.parse_args()
    logging.disable_progress_bar()
    analysis, model = Analysis.load(options.analysis), options.model or minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(model)
    documents: list[list[int]] = []
    for texts in options.texts:
        documents += tokenized(texts_of(texts), tokenizer, analysis.length, options.documents)
    base = AutoModel.from_pretrained(model).eval()
    target = embeddings(extend_positions(base, analysis.length), documents)
    known: dict[str, np.ndarray] = {}
    check = None
    if options.chosen_on is not None:
        check = Check(base, texts_of(options.chosen_on), analysis, tokenizer=tokenizer)

    def cosines(settings: AttentionConfig) -> np.ndarray:
        key = json.dumps(settings.to_dict())
        if key not in known:
            converted = convert(base, settings, max_length=max(analysis.length, base.config.max_position_embeddings))
            # what is measured is linear attention, at every length
            with converted.branches(exact=False):
                found = embeddings(converted, documents)
            known[key] = torch.cosine_similarity(found, target, dim=-1).numpy()
        return known[key]

    rows = []
    for candidate in tqdm(analysis.candidates, desc="Settings", leave=False):
        cost = getattr(described(analysis, (candidate.name,) * analysis.layers), options.unit)
        uniform = cosines(candidate.settings)
        row: dict[str, Any] = {"setting": candidate.name, "cost": cost, "cosine": float(uniform.mean())}
        row["expected"] = 1 - candidate.uniform_loss
        if cost < 1:
            suggestion = suggest(analysis, **{options.unit: cost * (1 + 1e-9)}, check=check)
            ours = cosines(suggestion.config)
            apart = bootstrap_difference(mean, [(ours,)], [(uniform,)])
            row |= {
                "suggested": list(suggestion.names),
                "suggested_cost": getattr(suggestion, options.unit),
                "suggested_cosine": float(ours.mean()),
                "suggested_expected": 1 - suggestion.expected_loss,
                "difference": [apart.value, apart.low, apart.high],
            }
        interval = bootstrap_interval(mean, [(uniform,)])
        row["interval"] = [interval.low, interval.high]
        rows.append(row)
    rows.sort(key=lambda row: row["cost"])
    report = {
        "length": analysis.length,
        "documents": len(documents),
        "texts": [Path(texts).name for texts in options.texts],
        "unit": options.unit,
        "machine": machine(),
        "rows": rows,
    }
    measured = [options.unit, "cosine"]
    head = ["setting in all layers", *measured, "suggested at most at this cost", *measured, "gain"]
    lines = [
        [
            row["setting"],
            f"{row['cost']:.3f}",
            interval_text(row["cosine"], *row["interval"], "{:.4f}"),
            *(
                [
                    ", ".join(name or "softmax" for name in row["suggested"]),
                    f"{row['suggested_cost']:.3f}",
                    f"{row['suggested_cosine']:.4f} (expected {row['suggested_expected']:.4f})",
                    interval_text(*row["difference"], "{:+.4f}"),
                ]
                if "suggested" in row
                else ["no setting is cheaper than softmax", "", "", ""]
            ),
        ]
        for row in rows
    ]
    text = (
        f"{len(documents)} documents of at most {analysis.length:,} tokens ({', '.join(report['texts'])}), no "
        f"training, cost relative to softmax, 95% intervals over documents. On {machine_text(report['machine'])}.\n\n"
        f"{table(head, lines)}\n"
    )
    write_report(options.output, report, text, plot(rows, options.unit))


if __name__ == "__main__":
    main()
