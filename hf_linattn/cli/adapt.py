"""`hf-linattn adapt`: train a converted checkpoint."""

import argparse
import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from accelerate import PartialState

from ..adapt import AdaptConfig, adapt
from ..adapt.result import advice, nothing_learned
from ..data.documents import DataConfig
from .options import add_option_groups, taken

MAIN = ("dataset", "output", "transfer_steps", "distil_steps", "task", "task_steps", "label_column", "learning_rate")
#: What `--help` says first.
START = """\
where to start:
  with a window and a first token  --transfer-steps 0 --learning-rate 1e-5 --query-key-lr 1e-4
  without                          the defaults: attention transfer, then distillation
  a classifier                     --transfer-steps 0 --distil-steps 0 --task sequence-classification
                                   --label-column COLUMN --task-steps 500
exit status 3: the training ended, and nothing was learned"""
#: Exit status of a run that ended, and whose result is no better than what it began with.
NOTHING_LEARNED = 3


@dataclass(kw_only=True)
class AdaptOptions:
    """Options of `hf-linattn adapt` beside those of the data and the training."""

    output: str = field(
        metadata={"help": "Folder of the result and, while it goes on, of the run, which the same command continues."}
    )
    base: str | None = field(
        default=None,
        metadata={
            "help": "Softmax model that was converted. Default: the weights of the model itself; needed where these "
            "have been trained since they were converted."
        },
    )
    eval_dataset: str | None = field(
        default=None,
        metadata={"help": "Documents to evaluate on, as --dataset. Default: held out of the training data."},
    )
    eval_split: str | None = field(default=None, metadata={"help": "Split of these. Default: the only one."})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", metavar="ID_OR_FOLDER", help="Hub id or folder of the converted checkpoint.")
    add_option_groups(parser, MAIN, {"run": AdaptOptions, "data": DataConfig, "training": AdaptConfig})
    kept = "the same command continues from the last saved checkpoint, or from the start if none was saved"
    parser.set_defaults(interrupted=kept)


def run(given: dict[str, Any]) -> int:
    """Train, and tell what came of it. Returns the exit status."""
    options, data = taken(given, AdaptOptions), taken(given, DataConfig)
    eval_data = None
    if options.eval_split is not None and options.eval_dataset is None:
        raise ValueError(f"--eval-split {options.eval_split!r} needs an --eval-dataset.")
    if options.eval_dataset is not None:
        eval_data = dataclasses.replace(data, dataset=options.eval_dataset, split=options.eval_split)
    config = taken(given, AdaptConfig)
    model = adapt(given["model"], options.output, config, data=data, eval_data=eval_data, base=options.base)
    record = model.config.linattn_training
    if PartialState().is_main_process:
        processes = PartialState().num_processes
        told = f"{record['steps']} steps, {record['tokens']:,} tokens, {processes} process{'es' * (processes > 1)}"
        print(f"{given['model']} -> {options.output} ({told})")
        print("\n".join(closing_lines(record, options.output)))
    return status(record)


def closing_lines(record: dict[str, Any], output: str) -> list[str]:
    """What each stage's evaluation measured before and after, and what to do where nothing was learned."""
    told = []
    for stage in record["stages"]:
        name = stage["stage"]
        if "eval_loss" not in stage:
            told.append(f"{name}: not evaluated")
            continue
        before = {"loss": stage["eval_loss_before"], **stage.get("eval_metrics_before", {})}
        after = {"loss": stage["eval_loss"], **stage.get("eval_metrics", {})}
        numbers = [f"{key.replace('_', ' ')} {before[key]:.4g} -> {after[key]:.4g}" for key in before if key in after]
        told.append(f"{name}: evaluation, {', '.join(numbers)}")
        if nothing_learned(stage):
            last = (
                f" The loss was {stage['eval_loss_last']:.4g} after the last step." if "eval_loss_last" in stage else ""
            )
            kept = "those that the stage began with" if stage["chosen_step"] == 0 else "those of the last step"
            told.append(f"{name}: nothing was learned. The weights are {kept}.{last}")
            told.append(f"{name}: {_as_options(advice(name, record['config']))}")
    if status(record):
        told.append(f"Write the next try to another folder than {output}, which holds this result.")
    return told


def _as_options(text: str) -> str:
    """A text with the names of settings as options."""
    names = sorted((f.name for f in dataclasses.fields(AdaptConfig) if "_" in f.name), key=len, reverse=True)
    return re.sub(rf"\b({'|'.join(names)})\b", lambda match: f"--{match[0].replace('_', '-')}", text)


def status(record: dict[str, Any]) -> int:
    """0, or `NOTHING_LEARNED` where the task, or without a task every stage, ended no better than it began."""
    stages = [stage for stage in record["stages"] if stage["stage"] == "task"] or record["stages"]
    return NOTHING_LEARNED if all(map(nothing_learned, stages)) else 0
