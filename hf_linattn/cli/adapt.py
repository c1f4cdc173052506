"""`hf-linattn adapt`: train a converted checkpoint."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from accelerate import PartialState

from ..adapt import AdaptConfig, adapt
from ..data.documents import DataConfig
from .options import add_options, taken


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
    add_options(parser, AdaptOptions)
    add_options(parser.add_argument_group("data"), DataConfig)
    add_options(parser.add_argument_group("training"), AdaptConfig)
    kept = "the same command goes on from the last checkpoint that there is"
    parser.set_defaults(interrupted=kept)


def run(given: dict[str, Any]) -> None:
    """Train, and tell for how long."""
    options, data = taken(given, AdaptOptions), taken(given, DataConfig)
    eval_data = None
    if options.eval_split is not None and options.eval_dataset is None:
        raise ValueError(f"--eval-split {options.eval_split!r} needs an --eval-dataset.")
    if options.eval_dataset is not None:
        eval_data = dataclasses.replace(data, dataset=options.eval_dataset, split=options.eval_split)
    config = taken(given, AdaptConfig)
    model = adapt(given["model"], options.output, config, data=data, eval_data=eval_data, base=options.base)
    if PartialState().is_main_process:
        record = model.config.linattn_training
        processes = PartialState().num_processes
        told = f"{record['steps']} steps, {record['tokens']:,} tokens, {processes} process{'es' * (processes > 1)}"
        print(f"{given['model']} -> {options.output} ({told})")
        for stage in record["stages"]:
            if "eval_loss" in stage:
                before, after = stage["eval_loss_before"], stage["eval_loss"]
                print(f"{stage['stage']}: loss of the evaluation {before:.4g} -> {after:.4g}")
