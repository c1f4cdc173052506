"""What initialisation from data is worth: the direct swap with and without calibration, on other documents.

    python scripts/experiments/calibrated_swap.py --calibration TEXTS.jsonl --texts topics NEWS.jsonl --output OUTPUT

Mean cosine of all-MiniLM-L6-v2's mean-pooled embedding to the original's, first 512 tokens. No weight of the model is
trained: features and projections are fitted to each layer's own softmax attention (`convert(calibration_texts=...)`).
"""

import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from common import embeddings, experiment_parser, mean, minilm_folder, texts_of, token_ids, write_report
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.evaluate.intervals import bootstrap_difference, bootstrap_interval
from hf_linattn.utils.figures import REFERENCE, draw_intervals, legend_below
from hf_linattn.utils.machine import machine, machine_text
from hf_linattn.utils.markdown import interval_text, table

JOINED: dict[str, Any] = {"window_size": 64, "global_tokens": 1, "exact_length": 0}
SETTINGS: dict[str, AttentionConfig] = {
    "Linformer, k=64": LinformerConfig(projection="learned", projection_length=64),
    "Linformer, k=128": LinformerConfig(projection="learned", projection_length=128),
    "Linformer, k=64, for each head": LinformerConfig(projection="learned", projection_length=64, sharing="none"),
    "Performer, m=64": PerformerConfig(num_features=64, feature_map="learned"),
    "Performer, m=128": PerformerConfig(num_features=128, feature_map="learned"),
    "window 64 + first token + 64 means": LinformerConfig(projection="learned", projection_length=64, **JOINED),
    "window 64 + first token + Performer, m=128": PerformerConfig(num_features=128, feature_map="learned", **JOINED),
}


def plot(rows: list[dict[str, Any]], names: list[str]) -> Figure:
    """How much nearer to softmax does calibration start? A panel for each kind of documents."""
    figure, panels = plt.subplots(1, len(names), figsize=(5.5 * len(names), 5), sharex=True, sharey=True, squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        series = {kind: [tuple(row[name][kind]) for row in rows] for kind in ("default", "calibrated")}
        draw_intervals(axes, [row["setting"] for row in rows], series, rows=True)
        axes.axvline(1, label="softmax", **REFERENCE)
        axes.set(title=name, xlabel="pooled cosine to the original (95%)")
    legend_below(panels[0][0], columns=3)
    return figure


def main() -> None:
    parser = experiment_parser(__doc__)
    parser.add_argument("--calibration", required=True, help="File or dataset of documents to calibrate on.")
    parser.add_argument("--calibration-documents", type=int, default=96, help="How many of them.")
    parser.add_argument("--texts", nargs="+", required=True, help="Files or datasets of documents to measure on.")
    parser.add_argument("--documents", type=int, default=24, help="How many of each.")
    parser.add_argument("--seeds", type=int, default=2, help="Seeds of random features.")
    options = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer, base = AutoTokenizer.from_pretrained(minilm_folder()), AutoModel.from_pretrained(minilm_folder()).eval()
    calibration = texts_of(options.calibration, options.calibration_documents)
    sets = token_ids(options.texts, tokenizer, 512, options.documents)
    target = {name: embeddings(base, documents) for name, documents in sets.items()}

    rows = []
    for setting, config in tqdm(SETTINGS.items(), desc="Settings", leave=False):
        cosines: dict[str, dict[str, list[np.ndarray]]] = {name: {"default": [], "calibrated": []} for name in sets}
        seconds = 0.0
        # without random features all seeds are the same
        for seed in range(options.seeds if isinstance(config, PerformerConfig) else 1):
            for kind in ("default", "calibrated"):
                begun = time.perf_counter()
                model = convert(
                    base, config, seed=seed, calibration_texts=calibration if kind == "calibrated" else None
                )
                seconds = time.perf_counter() - begun
                for name, documents in sets.items():
                    cosine = torch.cosine_similarity(embeddings(model, documents), target[name], dim=-1)
                    cosines[name][kind].append(cosine.numpy())
        row: dict[str, Any] = {"setting": setting, "seconds": seconds}
        for name, kinds in cosines.items():
            by_kind = {kind: [(values,) for values in by_seed] for kind, by_seed in kinds.items()}
            numbers = {kind: bootstrap_interval(mean, values) for kind, values in by_kind.items()}
            numbers["gain"] = bootstrap_difference(mean, by_kind["calibrated"], by_kind["default"])
            row[name] = {kind: [x.value, x.low, x.high] for kind, x in numbers.items()}
        rows.append(row)
    report = {
        "model": "all-MiniLM-L6-v2",
        "calibration": f"{len(calibration)} documents of {Path(options.calibration).name}, first 512 tokens",
        "documents": {name: len(documents) for name, documents in sets.items()},
        "seeds": options.seeds,
        "machine": machine(),
        "rows": rows,
    }
    head = ["swap", *(f"{name}: {part}" for name in sets for part in ("default", "calibrated", "gain"))]
    lines = [
        [
            row["setting"],
            *(
                text
                for name in sets
                for text in (
                    f"{row[name]['default'][0]:.3f}",
                    f"{row[name]['calibrated'][0]:.3f}",
                    interval_text(*row[name]["gain"], "{:+.3f}"),
                )
            ),
        ]
        for row in rows
    ]
    text = (
        f"Calibrated on {report['calibration']}; measured on "
        f"{', '.join(f'{count} of {name}' for name, count in report['documents'].items())}; {options.seeds} seeds of "
        f"random features; 95% intervals. On {machine_text(report['machine'])}.\n\n{table(head, lines)}\n"
    )
    write_report(options.output, report, text, plot(rows, list(sets)))


if __name__ == "__main__":
    main()
