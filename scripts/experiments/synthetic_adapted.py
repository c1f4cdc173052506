"""Whether the far part can learn a copy that the window does not reach: a small decoder, converted and adapted.

    python scripts/experiments/synthetic_adapted.py --output model_cards/synthetic/adapted

trains a softmax decoder to copy random tokens (as scripts/synthetic_tasks.py does), converts it, adapts each
conversion by attention transfer and next tokens, with and without window dropout, and counts the answer tokens that
are right with both parts, and with either switched off. What is finished is kept in `--work`: the same command goes
on where it was interrupted.
"""

import json
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from common import experiment_parser, write_report
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert_checkpoint
from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.data.documents import DataConfig
from hf_linattn.data.synthetic import Example, make_examples
from hf_linattn.evaluate.intervals import Interval, bootstrap_difference, bootstrap_interval
from hf_linattn.evaluate.metrics import metric_function
from hf_linattn.evaluate.tasks.synthetic import score
from hf_linattn.utils.figures import REFERENCE, draw_intervals, legend_below
from hf_linattn.utils.files import write_text
from hf_linattn.utils.markdown import interval_text
from synthetic_tasks import PLANS, TEST_SEED, TRAIN_SEED, Plan, train

_PLAN = PLANS["copy"]
# An example and the last token of its answer, which is no input of the test but must be one label in training; and
# some more, so that segments are of 4.
_MAX_LENGTH = _PLAN.config.length + 8
_JOINED = {"window_size": _PLAN.window_size, "global_tokens": 1}
#: What is adapted: by the name of the far part.
FORMS: dict[str, AttentionConfig] = {
    "Performer, m=64": PerformerConfig(num_features=64, feature_map="learned", **_JOINED),
    "summaries of 4": LinformerConfig(projection="conv", sharing="none", projection_length=_MAX_LENGTH // 4, **_JOINED),
}
TRAINING = AdaptConfig(
    transfer_steps=100,
    distil_steps=0,
    task="causal-lm",
    task_steps=600,
    sequence_length=_PLAN.config.length + 1,
    batch_size=16,
    learning_rate=1e-3,
    query_key_lr=1e-3,
    feature_lr=1e-2,
    transfer_projection_lr=1e-2,
    projection_lr=1e-2,
    eval_sequences=16,
    eval_steps=1000,
    log_steps=50,
    checkpoint_steps=200,
    keep_best=False,
)
#: Share of steps with the window off.
DROPOUTS = (0.0, 0.5)
BRANCHES = {"both": (True, True), "far part off": (True, False), "window off": (False, True)}
_RESAMPLES = 10_000


def _word(token: int) -> str:
    # all of one width, so that every document is one sequence
    return f"t{token:03d}"


def make_base(plan: Plan, folder: Path) -> None:
    """Train the softmax decoder, and write it with a tokenizer that has a word for each of its tokens."""
    model = train(plan, None, "copy")
    words = {_word(token): token for token in range(plan.vocabulary.size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_word(0)).save_pretrained(folder)
    # last: with its config.json the folder is complete
    model.save_pretrained(folder)


def documents(plan: Plan, count: int) -> str:
    """Training examples as lines of JSON: all tokens of each, its answer among them."""
    examples = make_examples(replace(plan.config, count=count, seed=TRAIN_SEED), plan.vocabulary)
    texts = (" ".join(map(_word, [*example.input_ids, example.labels[-1]])) for example in examples)
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def accuracies(model: Any, examples: list[Example]) -> list[float]:
    """The share of each example's answer tokens that are right."""
    outcomes = score(model, examples, batch_size=50, progress=False)
    return [outcome.correct / outcome.answers for outcome in outcomes]


def by_branch(model: Any, examples: list[Example]) -> dict[str, list[float]]:
    """`accuracies` with both parts, and with either off."""
    result = {}
    for name, (near, far) in BRANCHES.items():
        model.set_branches(near=near, far=far)
        result[name] = accuracies(model, examples)
    return result


def rows_of(cells: dict[str, list[dict[str, list[float]]]]) -> list[dict[str, Any]]:
    """setting -> accuracies by branch of each seed, as means with intervals, and what the far part adds."""
    mean = metric_function("mean")
    rows = []
    for setting, seeds in cells.items():
        row: dict[str, Any] = {"setting": setting, "seeds": len(seeds), "accuracy": {}}
        for branch in seeds[0]:
            outcomes = [(seed[branch],) for seed in seeds]
            row["accuracy"][branch] = vars(bootstrap_interval(mean, outcomes, resamples=_RESAMPLES))
        if "far part off" in seeds[0]:
            both, near = ([(seed[branch],) for seed in seeds] for branch in ("both", "far part off"))
            row["far_adds"] = vars(bootstrap_difference(mean, both, near, resamples=_RESAMPLES))
        row["by_seed"] = [{branch: sum(values) / len(values) for branch, values in seed.items()} for seed in seeds]
        rows.append(row)
    return rows


def _cell(values: dict[str, float] | None) -> str:
    return "" if values is None else interval_text(**values)


def markdown(report: dict[str, Any]) -> str:
    """The rows as a table, and what they are of."""
    lines = [
        "| answer tokens right | both parts | far part off | window off | far part adds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        cells = [*(_cell(row["accuracy"].get(branch)) for branch in BRANCHES), _cell(row.get("far_adds"))]
        lines.append(f"| {row['setting']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"* {note}" for note in report["notes"])])


def plot(rows: list[dict[str, Any]], guess: float) -> Figure:
    """Which part of attention copies? A panel for each part that is switched off."""
    figure, panels = plt.subplots(1, len(BRANCHES), figsize=(13, 0.45 * len(rows) + 2), sharex=True, sharey=True)
    softmax, converted = rows[0], rows[1:]
    for axes, branch in zip(panels, BRANCHES, strict=True):
        cells = [row["accuracy"].get(branch) for row in converted]
        values = [None if cell is None else astuple(Interval(**cell)) for cell in cells]
        draw_intervals(axes, [row["setting"] for row in converted], {"converted (95%)": values}, rows=True)
        axes.axvline(softmax["accuracy"]["both"]["value"], label=softmax["setting"], **REFERENCE)
        axes.axvline(guess, label="a guess", **{**REFERENCE, "linestyle": "--"})
        axes.set(title=branch, xlim=(-0.03, 1.05))
    panels[1].set_xlabel("answer tokens right")
    legend_below(panels[1], columns=3)
    return figure


def main() -> int:
    parser = experiment_parser(__doc__, "Folder of the report.")
    parser.add_argument("--work", type=Path, default=Path("runs/synthetic-adapted"), help="Folder of all that is made.")
    parser.add_argument("--count", type=int, default=200, help="Examples of the test. Default: 200.")
    parser.add_argument("--seeds", type=int, default=2, help="Seeds of features and of the order of data. Default: 2.")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    work, plan = options.work, _PLAN
    work.mkdir(parents=True, exist_ok=True)
    base, data = work / "base", work / "train.jsonl"
    if not (base / "config.json").exists():
        make_base(plan, base)
    if not data.exists():
        steps = max(TRAINING.transfer_steps, TRAINING.task_steps)
        write_text(data, documents(plan, TRAINING.batch_size * (steps + 1)))
    examples = make_examples(replace(plan.config, count=options.count, seed=TEST_SEED), plan.vocabulary)

    softmax = AutoModelForCausalLM.from_pretrained(base).eval()
    cells: dict[str, list[dict[str, list[float]]]] = {
        "softmax, trained for the task": [{"both": accuracies(softmax, examples)}]
    }
    records = []
    for form, attention in FORMS.items():
        for dropout in (None, *DROPOUTS):
            setting = f"window {attention.window_size} + first token + {form}, " + (
                "direct swap" if dropout is None else f"adapted, window dropout {dropout:g}"
            )
            cells[setting] = []
            # nothing of a direct swap with summaries is random
            for seed in range(1 if dropout is None and attention.method == "linformer" else options.seeds):
                name = f"{attention.method}-{seed}"
                swap, adapted = work / name, work / f"{name}-{dropout}"
                if not swap.exists():
                    convert_checkpoint(
                        base, swap, attention, seed=seed, max_length=_MAX_LENGTH, auto_class="AutoModelForCausalLM"
                    )
                kept = work / f"{adapted.name}.json"
                if not kept.exists():
                    if dropout is None:
                        model: Any = AutoModelForCausalLM.from_pretrained(swap).eval()
                    else:
                        config = replace(TRAINING, window_dropout=dropout, seed=seed)
                        start = time.process_time()
                        model = adapt(swap, adapted, config, data=DataConfig(dataset=str(data)), base=base)
                    cell = {"accuracy": by_branch(model, examples)}
                    if dropout is not None:
                        cell |= {"cpu_seconds": round(time.process_time() - start)}
                        cell |= {"training": model.config.linattn_training}
                    write_text(kept, json.dumps(cell) + "\n")
                cell = json.loads(kept.read_text())
                cells[setting].append(cell["accuracy"])
                if dropout is not None:
                    records.append({"setting": setting, "seed": seed, "cpu_seconds": cell["cpu_seconds"]})
                    training = cell["training"]

    count, back = (plan.config.length - 1) // 2, (plan.config.length + 1) // 2
    notes = [
        f"Copy: {count} random tokens of {len(plan.vocabulary.symbols)}, a separator, and the same tokens again, "
        f"{plan.config.length} in all; {options.count} examples that were not trained on. What is to be copied stands "
        f"about {back} tokens back; the window reaches {2 * plan.window_size - 1}. A guess is right "
        f"in {1 / len(plan.vocabulary.symbols):.3f}.",
        f"Llama, {plan.layers} layers of {plan.hidden_size}, both converted. Softmax: {plan.steps} steps of "
        f"{plan.batch_tokens:,} tokens, from nothing. Adapted, each column alike: {TRAINING.transfer_steps} steps of "
        f"attention transfer and {TRAINING.task_steps} of next tokens, {training['tokens']:,} tokens; "
        f"{min(r['cpu_seconds'] for r in records)} to {max(r['cpu_seconds'] for r in records)} CPU seconds, float32.",
        "Summaries: segments of 4 tokens, weighed per head, channel and place (conv). Window dropout: share of steps "
        "with the window off.",
        f"Seeds of features and of the order of the data: {options.seeds}. In brackets: 95% interval, bootstrap over "
        "examples and seeds. Far part adds: both parts less far part off, on the same examples.",
    ]
    report = {
        "settings": vars(plan.config) | {"count": options.count, "seed": TEST_SEED},
        "forms": {form: attention.to_dict() for form, attention in FORMS.items()},
        "training": training,
        "runs": records,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": rows_of(cells),
        "notes": notes,
    }
    write_report(
        options.output / "report", report, markdown(report), plot(report["rows"], 1 / len(plan.vocabulary.symbols))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
