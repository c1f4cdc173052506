"""`hf-linattn evaluate`: compare a checkpoint with its conversions."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from accelerate import PartialState

from ..data.documents import DataConfig
from ..evaluate import TASKS, CompareConfig, TaskConfig, compare
from ..evaluate.report import task_tables, written_text
from .options import add_option_groups, taken

MAIN = ("task", "converted", "dataset", "lengths", "truncate", "output")


@dataclass(kw_only=True)
class EvaluateOptions:
    """Options of `hf-linattn evaluate` beside those of the data, the task and the comparison."""

    task: str = field(metadata={"help": "What is measured.", "choices": tuple(TASKS)})
    output: str = field(
        metadata={"help": "Folder of the report. What is finished there is kept, and more tasks are added to it."}
    )
    converted: list[str] | None = field(
        default=None,
        metadata={
            "help": "NAME=FOLDER of converted checkpoints or PEFT adapters, Hub ids too; the same name again for "
            "another seed. Default: softmax alone."
        },
    )
    dataset: str | None = field(default=None, metadata=DataConfig.__dataclass_fields__["dataset"].metadata)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", metavar="ID_OR_FOLDER", help="Hub id or folder of the softmax checkpoint.")
    parts = {"report": EvaluateOptions, "data": DataConfig, "task": TaskConfig, "comparison": CompareConfig}
    add_option_groups(parser, MAIN, parts)
    kept = "what is finished is kept, and the same command goes on from there"
    parser.set_defaults(interrupted=kept, command_line="")


def run(given: dict[str, Any]) -> None:
    """Compare, and print the tables of the task."""
    options = taken(given, EvaluateOptions)
    converted: dict[str, list[str]] = {}
    for pair in options.converted or []:
        name, _, folder = pair.partition("=")
        if not folder:
            raise ValueError(f"--converted {pair!r} must be NAME=FOLDER.")
        converted.setdefault(name, []).append(folder)
    selection = {f.name: given.pop(f.name) for f in dataclasses.fields(DataConfig) if f.name in given}
    if selection and options.dataset is None:
        raise ValueError(f"--{next(iter(selection)).replace('_', '-')} needs --dataset.")
    report = compare(
        given.pop("model"),
        converted,
        options.task,
        options.output,
        data=None if options.dataset is None else DataConfig(dataset=options.dataset, **selection),
        task_config=taken(given, TaskConfig),
        config=taken(given, CompareConfig),
        command=given.pop("command_line"),
    )
    if PartialState().is_main_process:
        name = report["tasks"][-1]["name"]
        print("\n\n".join(text for task in report["tasks"] if task["name"] == name for text in task_tables(task)))
        print(f"\n{written_text(options.output)}")
