"""Fine-tune a classifier of long documents from softmax and from converted models, with the same budget for each.

    python scripts/experiments/finetuned_documents.py --dataset NEWS.jsonl \\
        --output model_cards/minilm-l6/hyperpartisan/report \\
        --converted "joined Linformer=runs/adapted-encoder/joined-linformer-{seed}"

all-MiniLM-L6-v2 that reads the first 512 tokens, the same with more positions, and each conversion: `{seed}` in a
folder's name stands for the seed of the run, so that every seed starts from a model that was adapted anew. Run number
s trains on all parts of the documents but the s-th and is tested on that; order of the documents and dropout are drawn
by seed s. The head is linear, on the mean of the last hidden states, normalised: this encoder's first token was never
trained to stand for a text. All train with `transformers.Trainer` for the same number of epochs at the same rates. What
is finished is kept in `--work`: the same command goes on where it was interrupted, and processes can share the runs
with `--columns`.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from transformers import (
    AutoModel,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
    set_seed,
)
from transformers.utils import logging

import hf_linattn  # noqa: F401  # converted checkpoints load with the auto classes
from common import experiment_parser, minilm_folder, write_report
from hf_linattn.conversion.positions import extend_positions
from hf_linattn.data.documents import DataConfig, load_documents
from hf_linattn.evaluate.intervals import bootstrap_difference, bootstrap_interval
from hf_linattn.evaluate.metrics import metric_function
from hf_linattn.evaluate.models import EXTENDED, TRUNCATED, load_tokenizer
from hf_linattn.evaluate.plots import slug
from hf_linattn.utils.figures import REFERENCE, draw_intervals, legend_below
from hf_linattn.utils.files import write_text
from hf_linattn.utils.machine import machine, machine_text
from hf_linattn.utils.markdown import interval_text, table

#: Parts of the documents, of which each run is tested on one.
FOLDS = 5


class Classifier(nn.Module):
    """An encoder and a linear head, which starts at zero, on the mean-pooled text of unit variance."""

    def __init__(self, column: str, folder: str, classes: int, length: int) -> None:
        super().__init__()
        # linear attention forms no probabilities to drop, so that nobody drops them
        encoder: Any = AutoModel.from_pretrained(folder, attention_probs_dropout_prob=0.0)
        self.encoder = extend_positions(encoder, length) if column == EXTENDED else encoder
        self.head = nn.Linear(encoder.config.hidden_size, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        """input_ids, attention_mask (batch, length), labels (batch,) -> loss () and logits (batch, classes)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()
        pooled = (hidden * attention_mask.unsqueeze(-1)).sum(1)
        logits = self.head(F.normalize(pooled, dim=-1) * pooled.shape[-1] ** 0.5)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def run(column: str, folder: str, seed: int, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Fine-tune and test one model, and keep what it predicted."""
    labels = [row["labels"] for row in rows]
    folds = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(labels, labels))
    train, test = folds[seed % FOLDS]
    length = 512 if column == TRUNCATED else options.length
    # the last token closes the document
    rows = [row | {"input_ids": row["input_ids"][: length - 1] + row["input_ids"][-1:]} for row in rows]
    tokenizer = load_tokenizer(str(minilm_folder()))
    work = options.work / "trainer" / f"{slug(column)}-{seed}"
    arguments = TrainingArguments(
        output_dir=str(work),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        seed=seed,
        bf16=options.mixed_precision == "bf16",
        train_sampling_strategy="group_by_length",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=20,
        use_cpu=options.cpu,
    )
    set_seed(seed)
    model = Classifier(column, folder, len(set(labels)), options.length)
    rates = (model.encoder, options.learning_rate), (model.head, options.head_learning_rate)
    optimizer = torch.optim.AdamW(
        [{"params": list(part.parameters()), "lr": rate} for part, rate in rates], weight_decay=0.01
    )
    steps = -(-len(train) // options.batch_size) * options.epochs
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[rows[i] for i in train],  # type: ignore[arg-type]
        data_collator=DataCollatorWithPadding(tokenizer),
        optimizers=(optimizer, get_linear_schedule_with_warmup(optimizer, steps // 10, steps)),
    )
    begun = time.process_time()
    trainer.train()
    cpu_seconds = time.process_time() - begun
    # in the order of the documents: Trainer groups those that it predicts, too
    trainer.args.train_sampling_strategy = "random"
    output: Any = trainer.predict([rows[i] for i in test])  # type: ignore[arg-type]
    assert output.label_ids.tolist() == [labels[i] for i in test]
    record = {
        "column": column,
        "seed": seed,
        "test": test.tolist(),
        "prediction": np.argmax(output.predictions, axis=-1).tolist(),
        "label": [labels[i] for i in test],
        "training_tokens": int(sum(len(rows[i]["input_ids"]) for i in train) * options.epochs),
        "steps": trainer.state.global_step,
        "last_loss": trainer.state.log_history[-1]["train_loss"],
        "cpu_seconds": cpu_seconds,
    }
    write_text(options.work / f"{slug(column)}-{seed}.json", json.dumps(record) + "\n")
    shutil.rmtree(work, ignore_errors=True)


def make_report(records: list[dict[str, Any]], columns: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Accuracy of each column over all documents that were tested, and its difference to softmax extended."""
    accuracy = metric_function("accuracy")

    def outcomes(column: str) -> dict[int, tuple[list[int], list[int]]]:
        return {r["seed"]: (r["prediction"], r["label"]) for r in records if r["column"] == column}

    def pooled(runs: dict[int, tuple[list[int], list[int]]], seeds: list[int]) -> list[tuple[list[int], list[int]]]:
        # every seed has its own documents, so that they are one sample
        return [([p for s in seeds for p in runs[s][0]], [x for s in seeds for x in runs[s][1]])]

    reference, rows = outcomes(EXTENDED), []
    for column in columns:
        runs = outcomes(column)
        seeds = sorted(runs)
        if not seeds:
            continue
        row: dict[str, Any] = {
            "column": column,
            "seeds": seeds,
            "documents": sum(len(runs[s][1]) for s in seeds),
            "accuracy": vars(bootstrap_interval(accuracy, pooled(runs, seeds))),
            "each": [float(np.mean(np.equal(*runs[s]))) for s in seeds],
            "cpu_minutes": [r["cpu_seconds"] / 60 for r in records if r["column"] == column],
            "training_tokens": [r["training_tokens"] for r in records if r["column"] == column],
        }
        both = [s for s in seeds if s in reference]
        if column != EXTENDED and both:
            row["difference"] = vars(bootstrap_difference(accuracy, pooled(runs, both), pooled(reference, both)))
        rows.append(row)
    some = next(iter(reference.values()))[1] if reference else records[0]["label"]
    guess = max(some.count(label) for label in set(some)) / len(some)
    return settings | {"machine": machine(), "guess": guess, "rows": rows, "runs": records}


def markdown(report: dict[str, Any]) -> str:
    """The table, and what it is of."""

    def text(interval: dict[str, Any] | None, sign: str = "") -> str:
        return "" if interval is None else interval_text(**interval, form=f"{{:{sign}.3f}}")

    lines = [
        [
            row["column"],
            text(row["accuracy"]),
            ", ".join(f"{x:.3f}" for x in row["each"]),
            text(row.get("difference"), "+"),
            f"{np.mean(row['training_tokens']) / 1e6:.2f}M",
            f"{np.mean(row['cpu_minutes']):.1f}",
        ]
        for row in report["rows"]
    ]
    head = ["", "accuracy", "each seed", f"minus {EXTENDED}", "training tokens", "CPU minutes a run"]
    caption = (
        f"{report['model']}, fine-tuned on {report['dataset']}: {report['documents']} documents, of which each run is "
        f"tested on one in {FOLDS} and trained on the others; first {report['length']} tokens (truncated: 512), "
        f"{report['epochs']} epochs in batches of {report['batch_size']}, learning rate {report['learning_rate']:g}, "
        f"of the head {report['head_learning_rate']:g}, weight decay 0.01, precision {report['precision']}. 95% "
        f"intervals over the tested documents of all seeds together, differences on the same documents. The larger "
        f"class alone gets {report['guess']:.3f}. On {machine_text(report['machine'])}."
    )
    return f"{caption}\n\n{table(head, lines)}\n"


def plot(report: dict[str, Any]) -> Figure:
    """Which model is right most often after fine-tuning? Accuracies with their intervals, and of each run."""
    rows = report["rows"]
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(rows) + 1.8))
    values = [tuple(row["accuracy"][key] for key in ("value", "low", "high")) for row in rows]
    draw_intervals(axes, [row["column"] for row in rows], {"all runs (95%)": values}, rows=True)
    for place, row in enumerate(rows):
        label = "each run" if place == 0 else None
        axes.plot(row["each"], [place + 0.25] * len(row["each"]), "|", color="0.3", markersize=8, label=label)
    axes.axvline(report["guess"], label="the larger class", **REFERENCE)
    axes.set_xlabel("accuracy")
    legend_below(axes, columns=3)
    return figure


def main() -> None:
    parser = experiment_parser(__doc__)
    parser.add_argument("--dataset", required=True, help="File or dataset with text and label.")
    parser.add_argument("--converted", nargs="*", default=[], metavar="NAME=FOLDER", help="With {seed} in FOLDER.")
    parser.add_argument("--columns", nargs="+", help="Train these only. Default: all.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="Default: 0 1 2.")
    parser.add_argument("--length", type=int, default=1024, help="Tokens of a document. Default: 1024.")
    parser.add_argument("--epochs", type=int, default=3, help="Default: 3.")
    parser.add_argument("--batch-size", type=int, default=8, help="Documents a step. Default: 8.")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="Of the encoder. Default: 5e-5.")
    parser.add_argument("--head-learning-rate", type=float, default=1e-3, help="Default: 1e-3.")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no", help="Of the training. Default: no.")
    parser.add_argument("--cpu", action="store_true", help="Not on a GPU.")
    parser.add_argument("--work", type=Path, default=Path("runs/finetuned-documents"), help="Folder of the runs.")
    options = parser.parse_args()
    logging.disable_progress_bar()
    options.work.mkdir(parents=True, exist_ok=True)
    folders = {TRUNCATED: str(minilm_folder()), EXTENDED: str(minilm_folder())}
    for given in options.converted:
        name, _, folder = given.partition("=")
        if not folder or name in folders:
            parser.error(f"--converted={given!r} must be NAME=FOLDER with a name that is not taken.")
        for seed in options.seeds:
            if not Path(of_seed := folder.replace("{seed}", str(seed))).is_dir():
                parser.error(f"--converted={given!r}: there is no folder {of_seed!r}.")
        folders[name] = folder
    if unknown := set(options.columns or ()) - set(folders):
        parser.error(f"--columns={sorted(unknown)} must be among {', '.join(map(repr, folders))}.")

    documents = load_documents(DataConfig(dataset=options.dataset, text_column="text", label_column="label")).documents
    tokenizer = load_tokenizer(str(minilm_folder()))
    names = sorted({str(document.label) for document in documents})
    ids = tokenizer([document.text for document in documents])["input_ids"]
    rows = [{"input_ids": x, "labels": names.index(str(d.label))} for x, d in zip(ids, documents, strict=True)]
    for seed in options.seeds:
        for column in options.columns or folders:
            if not (options.work / f"{slug(column)}-{seed}.json").exists():
                run(column, folders[column].replace("{seed}", str(seed)), seed, rows, options)
    records = [json.loads(path.read_text()) for path in sorted(options.work.glob("*.json"))]
    settings = {
        "model": "all-MiniLM-L6-v2",
        "dataset": Path(options.dataset).name,
        "documents": len(documents),
        "length": options.length,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "head_learning_rate": options.head_learning_rate,
        "precision": options.mixed_precision,
        "converted": {Path(folder).name: name for name, folder in folders.items() if name not in (TRUNCATED, EXTENDED)},
    }
    report = make_report(records, list(folders), settings)
    write_report(options.output, report, markdown(report), plot(report))


if __name__ == "__main__":
    main()
