"""What adaptation wins back in an encoder: all-MiniLM-L6-v2, converted, adapted, and measured on other documents.

    python scripts/experiments/english_texts.py --output texts.jsonl --pieces 300 --characters 9000 \\
        --novels NOVELS.jsonl.gz
    python scripts/experiments/adapted_encoder.py --train texts.jsonl --texts topics NEWS.jsonl \\
        --output model_cards/minilm-l6/adapted/512-tokens

Mean cosine of the mean-pooled embedding to the original's, first 512 tokens: of the direct swap, of the adapted model,
and of the joined forms with the far part switched off. Pure forms start calibrated and learn the attention of each
layer first (`transfer`), the joined ones go to `distil` at once. Every form and seed is a run of its own, kept in
`--work` with its checkpoint: the same command goes on where it was interrupted. The report keeps the runs that it has
and takes those that are there, so that they can be made one by one, or shared by processes, with `--forms` and
`--seeds`.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from common import embeddings, experiment_parser, mean, minilm_folder, texts_of, token_ids, write_report
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.data.documents import DataConfig
from hf_linattn.evaluate.intervals import bootstrap_interval
from hf_linattn.utils.figures import REFERENCE, draw_intervals, legend_below
from hf_linattn.utils.files import write_text
from hf_linattn.utils.machine import machine, machine_text
from hf_linattn.utils.markdown import interval_text, table

#: Longest document of the models that come out, and length of what they are trained and measured on.
MAX_LENGTH, LENGTH = 4096, 512
CALIBRATION_DOCUMENTS = 96
_JOINED: dict[str, Any] = {"window_size": 64, "global_tokens": 1, "exact_length": 0}
TRAINING = AdaptConfig(sequence_length=LENGTH, eval_steps=10_000, checkpoint_steps=50, keep_best=False)


@dataclass(frozen=True)
class Form:
    """What is converted to, and how it is trained."""

    name: str
    attention: AttentionConfig
    training: AdaptConfig

    @property
    def joined(self) -> bool:
        """Whether it has an exact part."""
        return bool(self.attention.window_size)


# a good start needs small steps, except for projections, which bear larger ones beside a window than alone
_FINE = replace(TRAINING, transfer_steps=0, batch_size=2, learning_rate=1e-5, query_key_lr=1e-4, projection_lr=1e-3)
#: The steps are about what two cores do in 20 minutes.
FORMS = {
    "joined-linformer": Form(
        "window 64 + first token + 64 summaries",
        LinformerConfig(projection="learned", projection_length=64, **_JOINED),
        replace(_FINE, distil_steps=1600),
    ),
    "joined-performer": Form(
        "window 64 + first token + Performer, m=128",
        PerformerConfig(num_features=128, feature_map="learned", **_JOINED),
        replace(_FINE, distil_steps=1200),
    ),
    "performer": Form(
        "Performer, m=128",
        PerformerConfig(num_features=128, feature_map="learned"),
        replace(TRAINING, transfer_steps=300, distil_steps=900),
    ),
    "linformer": Form(
        "Linformer, k=128",
        LinformerConfig(projection="learned", projection_length=128),
        replace(TRAINING, transfer_steps=400, distil_steps=2200, batch_size=2),
    ),
}


def run(slug: str, seed: int, options: argparse.Namespace, base: PreTrainedModel, tokenizer: Any, sets: Any) -> None:
    """Convert, adapt, measure and keep one form and seed."""
    form, folder = FORMS[slug], options.work / f"{slug}-{seed}"
    target = {name: embeddings(base, documents) for name, documents in sets.items()}

    def cosines(model: PreTrainedModel) -> dict[str, list[float]]:
        adapted = {name: embeddings(model, documents) for name, documents in sets.items()}
        return {name: torch.cosine_similarity(adapted[name], target[name], dim=-1).tolist() for name in sets}

    texts = None
    if not form.joined or isinstance(form.attention, PerformerConfig):
        texts = texts_of(options.train, CALIBRATION_DOCUMENTS)
    begun = time.process_time()
    model: Any = convert(
        base, form.attention, max_length=MAX_LENGTH, seed=seed, calibration_texts=texts, tokenizer=tokenizer
    )
    swap = cosines(model)
    measuring = time.process_time()
    config = replace(form.training, seed=seed, mixed_precision=options.mixed_precision)
    if options.distil_steps is not None:
        config = replace(config, distil_steps=options.distil_steps)
    model = adapt(model, folder, config, data=DataConfig(dataset=options.train), base=base, tokenizer=tokenizer)
    cpu_seconds = time.process_time() - measuring
    result = {"swap": swap, "adapted": cosines(model)}
    if form.joined:
        model.set_branches(far=False)
        result["far off"] = cosines(model)
    record = {
        "form": slug,
        "seed": seed,
        "calibrated": texts is not None,
        "train": Path(options.train).name,
        "precision": options.mixed_precision,
        "machine": machine(),
        "training": model.config.linattn_training["stages"],
        "cpu_seconds": cpu_seconds,
        "conversion_cpu_seconds": measuring - begun,
        "cosines": result,
    }
    write_text(folder.with_suffix(".json"), json.dumps(record) + "\n")


def rows_of(records: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """One row for each form: its runs together, with intervals over documents and seeds."""
    rows = []
    for slug, form in FORMS.items():
        runs = sorted((r for r in records if r["form"] == slug), key=lambda r: r["seed"])
        if not runs:
            continue
        row: dict[str, Any] = {
            "setting": form.name,
            "seeds": [r["seed"] for r in runs],
            "calibrated": runs[0]["calibrated"],
            "stages": [
                {"stage": s["stage"], "steps": s["steps"], "tokens": [r["training"][i]["tokens"] for r in runs]}
                for i, s in enumerate(runs[0]["training"])
            ],
            "cpu_minutes": [r["cpu_seconds"] / 60 for r in runs],
        }
        for kind in runs[0]["cosines"]:
            row[kind] = {}
            for name in names:
                interval = bootstrap_interval(mean, [(np.array(r["cosines"][kind][name]),) for r in runs])
                each = [float(np.mean(r["cosines"][kind][name])) for r in runs]
                row[kind][name] = {"mean": [interval.value, interval.low, interval.high], "seeds": each}
        rows.append(row)
    return rows


def where(records: list[dict[str, Any]]) -> str:
    """Which runs were trained on which texts and machine, and in which precision."""
    runs: dict[str, list[str]] = {}
    for record in records:
        precision = {"no": "float32", "bf16": "bfloat16 with float32 weights"}[record["precision"]]
        place = f"{record['train']} on {machine_text(record['machine'])}, in {precision}"
        runs.setdefault(place, []).append(f"{record['form']} seed {record['seed']}")
    return " ".join(f"Trained on {place}: {', '.join(which)}." for place, which in runs.items())


def markdown(report: dict[str, Any]) -> str:
    """The table, and what it is of."""
    names = list(report["documents"])
    kinds = {"swap": "direct swap", "adapted": "adapted", "far off": "adapted, far part off"}
    head = ["", "training", "CPU minutes", *(f"{name}: {kind}" for name in names for kind in kinds.values())]
    lines = []
    for row in report["rows"]:
        training = ", ".join(f"{s['steps']} {s['stage']}" for s in row["stages"])
        tokens = sum(np.mean(s["tokens"]) for s in row["stages"])
        title = row["setting"] + (", calibrated" if row["calibrated"] else "")
        cells = [title, f"{training}, {tokens / 1e6:.2f}M tokens", f"{np.mean(row['cpu_minutes']):.0f}"]
        for name in names:
            for kind in kinds:
                if kind not in row:
                    cells.append("")
                    continue
                value, low, high = row[kind][name]["mean"]
                seeds = row[kind][name]["seeds"]
                each = f"; seeds {', '.join(f'{x:.3f}' for x in seeds)}" if kind == "adapted" else ""
                cells.append(interval_text(value, low, high) + each)
        lines.append(cells)
    measured = ", ".join(f"{count} of {name}" for name, count in report["documents"].items())
    caption = (
        f"all-MiniLM-L6-v2, converted with max_length={MAX_LENGTH}; mean cosine of the pooled embedding to the "
        f"original's, first {LENGTH} tokens, on {measured}; 95% intervals over documents and seeds. "
        f"{where(report['runs'])}"
    )
    return f"{caption}\n\n{table(head, lines)}\n"


def plot(report: dict[str, Any]) -> Figure:
    """How near to softmax is each form before and after adaptation? A panel for each kind of documents."""
    rows, names = report["rows"], list(report["documents"])
    figure, panels = plt.subplots(
        1, len(names), figsize=(5.5 * len(names), 0.7 * len(rows) + 2), sharex=True, sharey=True, squeeze=False
    )
    kinds = {"swap": "direct swap", "adapted": "adapted", "far off": "adapted, far part off"}
    for axes, name in zip(panels[0], names, strict=True):
        series = {
            label: [tuple(row[kind][name]["mean"]) if kind in row else None for row in rows]
            for kind, label in kinds.items()
        }
        draw_intervals(axes, [row["setting"] for row in rows], series, rows=True)
        axes.axvline(1, label="softmax", **REFERENCE)
        axes.set(title=name, xlabel="pooled cosine to the original (95%)")
    legend_below(panels[0][0], columns=4)
    return figure


def main() -> None:
    parser = experiment_parser(__doc__)
    parser.add_argument("--train", required=True, help="File or dataset of documents to train on.")
    parser.add_argument("--texts", nargs="+", required=True, help="Files or datasets of documents to measure on.")
    parser.add_argument("--documents", type=int, default=24, help="How many of each. Default: 24.")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="Default: all.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="Default: 0 1 2.")
    parser.add_argument("--distil-steps", type=int, help="Steps of distillation. Default: of each form its own.")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no", help="Of the training. Default: no.")
    parser.add_argument("--work", type=Path, default=Path("runs/adapted-encoder"), help="Folder of the runs.")
    options = parser.parse_args()
    logging.disable_progress_bar()
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer, base = AutoTokenizer.from_pretrained(minilm_folder()), AutoModel.from_pretrained(minilm_folder()).eval()
    sets = token_ids(options.texts, tokenizer, LENGTH, options.documents)
    for seed in options.seeds:
        for slug in options.forms:
            if not (options.work / f"{slug}-{seed}.json").exists():
                run(slug, seed, options, base, tokenizer, sets)
    path = options.output.with_suffix(".json")
    kept = json.loads(path.read_text())["runs"] if path.exists() else []
    finished = [json.loads(record.read_text()) for record in options.work.glob("*.json")]
    # what was run now or lies in the folder, in place of what the report had of the same form and seed
    runs = {(record["form"], record["seed"]): record for record in [*kept, *finished]}
    records = [runs[key] for key in sorted(runs)]
    report = {
        "model": "all-MiniLM-L6-v2",
        "documents": {name: len(documents) for name, documents in sets.items()},
        "rows": rows_of(records, list(sets)),
        "runs": records,
    }
    write_report(options.output, report, markdown(report), plot(report))


if __name__ == "__main__":
    main()
