"""The comparison: every column at every length on one task, cell by cell, each kept as soon as it is finished."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, isnan
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import tqdm

from ..data.documents import DataConfig
from ..utils.reports import machine
from .fidelity import fidelity
from .footprint import footprint
from .intervals import Interval, bootstrap_difference, bootstrap_interval
from .models import EXTENDED, TRUNCATED, Column, Source, base_length, load_tokenizer, make_columns
from .report import describe_base, merge_report, write_report
from .runner import Runner
from .tasks import TASKS
from .tasks.base import DocumentTask, Metric, Outcomes, Task, TaskConfig
from .tasks.language_modeling import POSITION_EDGES


@dataclass(kw_only=True)
class CompareConfig:
    """Options of a comparison beside those of its task.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """

    name: str | None = field(
        default=None,
        metadata={"help": "What the report calls this task and its data. Default: the task's own name."},
    )
    branches: bool = field(
        default=True, metadata={"help": "Also show each hybrid with either of its branches switched off."}
    )
    batch_tokens: int = field(default=8192, metadata={"help": "Most tokens of one batch, padding included."})
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Data type of all columns' weights. Default: the checkpoints'.",
            "choices": ("float32", "float16", "bfloat16"),
        },
    )
    position_extension: str = field(
        default="repeat",
        metadata={
            "help": "How positions of extended softmax get their embeddings; as the conversions did.",
            "choices": ("repeat", "interpolate"),
        },
    )
    resamples: int = field(default=1000, metadata={"help": "Resamples of the bootstrap behind the intervals."})
    footprint: bool = field(
        default=True, metadata={"help": "Measure time and peak memory of each column, in fresh processes."}
    )
    fidelity_documents: int = field(
        default=0, metadata={"help": "Measure how near each layer stays to softmax, on this many documents; 0: none."}
    )
    fidelity_length: int | None = field(
        default=None, metadata={"help": "Tokens of those documents. Default: the least of the lengths."}
    )

    def __post_init__(self) -> None:
        for name, least in {"batch_tokens": 1, "resamples": 1, "fidelity_documents": 0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")


def compare(
    base: str | Path,
    converted: Mapping[str, Source | Sequence[Source]],
    task: str,
    output_dir: str | Path,
    *,
    data: DataConfig | None = None,
    task_config: TaskConfig | None = None,
    config: CompareConfig | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Compare a checkpoint with its conversions on one task, and write the report.

    The columns are softmax truncated to the checkpoint's own length, softmax extended, the conversions, and each
    hybrid with either branch switched off. Finished cells are kept in `output_dir`: an interrupted comparison goes
    on where it was, and one with more columns, lengths or tasks adds to the report that is there.

    Args:
        base: id or folder of the softmax checkpoint.
        converted: name -> folder or Hub id of a converted checkpoint, folder of a PEFT adapter, or settings to
            convert the base with here and now; or a list of such, one for each seed.
        task: one of `TASKS`.
        output_dir: folder of the report.
        data: the documents; tasks that are generated need none.
        task_config: options of the task.
        config: options of the comparison.
        command: what the report says it was made with.

    Returns:
        The report, as in report.json.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not one of {', '.join(map(repr, TASKS))}.")
    # on a machine without accelerators several processes are found only if they are told to use the CPU
    PartialState(cpu=not torch.accelerator.is_available())
    base, output = str(base), Path(output_dir)
    task_config, config = task_config or TaskConfig(), config or CompareConfig()
    columns = make_columns(base, converted, branches=config.branches)
    # errors of the data come before any model is loaded
    job = TASKS[task](task_config, data, load_tokenizer(base))
    comparison = _Comparison(base, output, job, task_config, config)
    if config.fidelity_documents:
        comparison.check_fidelity()

    cells = [(column, length) for column in _by_need(columns) for length in task_config.lengths]
    outcomes: dict[tuple[str, int], list[Outcomes]] = {}
    for column, length in tqdm(cells, desc=config.name or task, unit="cell"):
        outcomes[column.name, length] = [comparison.cell(column, length, seed) for seed in range(len(column.sources))]
        comparison.unload_but(column)
    comparison.unload_but(None)
    measured = [(column, length) for column, length in cells if config.footprint and column.branches == "both"]
    footprints = [comparison.footprint(*cell) for cell in tqdm(measured, desc="time and memory", disable=not measured)]
    fidelities = [row for c in columns if config.fidelity_documents for row in comparison.fidelity(c)]

    PartialState().wait_for_everyone()
    report = merge_report(
        output / "report.json",
        {
            "command": command,
            "machine": machine(),
            "base": describe_base(base, base_length(base)),
            "columns": [column.describe(base) for column in columns],
            "tasks": [_summary(job, config, task_config, columns, outcomes)],
            "footprint": [row for row in footprints if row],
            "fidelity": fidelities,
        },
    )
    if PartialState().is_main_process:
        write_report(report, output)
    return report


class _Comparison:
    """What stays the same from cell to cell: the task, the runners, and the folder in which cells are kept."""

    def __init__(self, base: str, output: Path, job: Task, task_config: TaskConfig, config: CompareConfig) -> None:
        self.base, self.output, self.job, self.config, self.task_config = base, output, job, config, task_config
        self._runners: dict[tuple[str, int], Runner] = {}
        self._columns = {column.name: column for column in make_columns(base, {})}

    def runner(self, column: Column, seed: int) -> Runner:
        """The runner of a column and seed, made once."""
        key = (column.name, seed)
        if key not in self._runners:
            self._runners[key] = Runner(
                column,
                self.base,
                seed=seed,
                auto_class=self.job.auto_class,
                max_length=self.task_config.lengths[-1],
                batch_tokens=self.config.batch_tokens,
                pad_token_id=self.job.tokenizer.pad_token_id,
                folder=self.output / "embeddings",
                position_extension=self.config.position_extension,
                dtype=self.config.dtype,
            )
        return self._runners[key]

    def unload_but(self, column: Column | None) -> None:
        """Give back the memory of all models but one column's."""
        for (name, _), runner in self._runners.items():
            if column is None or name != column.name:
                runner.unload()

    def cell(self, column: Column, length: int, seed: int) -> Outcomes:
        """The outcomes of one column at one length, computed or as they were kept."""
        runner = self.runner(column, seed)
        reference = self.runner(self._columns[EXTENDED], 0)
        key = [runner.key, reference.key, self.job.fingerprint(), length]
        return self._kept(
            f"{self.config.name or self.job.name}", column, f"{length}-{seed}", key,
            lambda: self.job.outcomes(runner, reference, length),
        )  # fmt: skip

    def footprint(self, column: Column, length: int) -> dict[str, Any]:
        """Time and memory of one column at one length."""
        options: dict[str, Any] = {
            "auto_class": self.job.auto_class,
            "max_length": self.task_config.lengths[-1],
            "position_extension": self.config.position_extension,
            "dtype": self.config.dtype,
        }
        if column.name == TRUNCATED:
            if length > base_length(self.base):
                return {}
            options["max_length"] = base_length(self.base)

        def measure() -> dict[str, Any]:
            # the other processes wait, and do not disturb it
            result = asdict(footprint(column, self.base, length, **options)) if PartialState().is_main_process else {}
            PartialState().wait_for_everyone()
            return result

        key = [self.runner(column, 0).key, machine(), length]
        return self._kept("footprint", column, f"{length}-{self.job.auto_class}", key, measure)

    def check_fidelity(self) -> None:
        if not isinstance(self.job, DocumentTask):
            raise ValueError(f"fidelity_documents={self.config.fidelity_documents}: task={self.job.name!r} has none.")

    def fidelity(self, column: Column) -> list[dict[str, Any]]:
        """How near each layer of a column stays to softmax; nothing for softmax itself."""
        if column.kind != "converted" or column.branches != "both":
            return []
        assert isinstance(self.job, DocumentTask)
        length = self.config.fidelity_length or self.task_config.lengths[0]
        documents = self.job.at_length(length, None)[: self.config.fidelity_documents]
        base, runner = self.runner(self._columns[EXTENDED], 0), self.runner(column, 0)

        def measure() -> list[dict[str, Any]]:
            rows = fidelity(base.model, runner.model, documents)
            return [{"column": column.name, "length": length, **asdict(row)} for row in rows]

        key = [base.key, runner.key, documents]
        rows = self._kept("fidelity", column, str(length), key, measure)
        runner.unload()
        return rows

    def _kept(self, kind: str, column: Column, name: str, key: Any, compute: Any) -> Any:
        """A result that was kept with the same key, or else a new one, which is then kept."""
        path = self.output / "cells" / _slug(kind) / f"{_slug(column.name)}-{name}.json"
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        # all processes look before one of them may write
        kept = json.loads(path.read_text()) if path.is_file() else {}
        PartialState().wait_for_everyone()
        if kept.get("key") == digest:
            return kept["result"]
        result = compute()
        if PartialState().is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}.tmp")
            unfinished.write_text(json.dumps({"key": digest, "result": result}, default=_plain))
            os.replace(unfinished, path)
        PartialState().wait_for_everyone()
        # as it will be read the next time
        return json.loads(json.dumps(result, default=_plain))


def _by_need(columns: list[Column]) -> list[Column]:
    """Extended softmax first: other columns are compared with it."""
    return sorted(columns, key=lambda column: column.name != EXTENDED)


def _summary(
    job: Task,
    config: CompareConfig,
    task_config: TaskConfig,
    columns: list[Column],
    outcomes: dict[tuple[str, int], list[Outcomes]],
) -> dict[str, Any]:
    """One task of the report: metrics with their intervals."""
    metrics = job.metrics()
    cells = []
    for column in columns:
        for length in task_config.lengths:
            mine, softmax = outcomes[column.name, length], outcomes[EXTENDED, length]
            cells.append(
                {
                    "column": column.name,
                    "length": length,
                    "documents": len(mine[0][metrics[0].reads[0]]),
                    "cut": job.cut(length),
                    "metrics": {
                        m.name: _numbers(m, mine, None if column.name == EXTENDED else softmax, config.resamples)
                        for m in metrics
                    },
                }
            )
            if "nll_by_position" in mine[0]:
                cells[-1]["by_position"] = _by_position(mine)
    return {
        "name": config.name or job.name,
        "task": job.name,
        "metric": metrics[0].name,
        "higher_is_better": {m.name: m.higher_is_better for m in metrics},
        "chance": {m.name: m.guess for m in metrics if m.guess is not None},
        "about": job.__doc__,
        "data": {**({} if job.data is None else asdict(job.data)), **job.documents()},
        "settings": job.settings() | {"resamples": config.resamples},
        "lengths": task_config.lengths,
        "cells": cells,
    }


def _numbers(metric: Metric, mine: list[Outcomes], softmax: list[Outcomes] | None, resamples: int) -> dict[str, Any]:
    arrays = [[outcomes[name] for name in metric.reads] for outcomes in mine]
    interval = bootstrap_interval(metric.function, arrays, resamples=resamples)
    difference = Interval(float("nan"), None, None)
    if softmax is not None:
        others = [[outcomes[name] for name in metric.reads] for outcomes in softmax]
        difference = bootstrap_difference(metric.function, arrays, others, resamples=resamples)
    return {
        "value": _defined(interval.value),
        "low": interval.low,
        "high": interval.high,
        "difference": _defined(difference.value),
        "difference_low": difference.low,
        "difference_high": difference.high,
    }


def _defined(value: float) -> float | None:
    """None for a metric that is not defined on these documents: JSON has no NaN."""
    return None if isnan(value) else value


def _by_position(outcomes: list[Outcomes]) -> list[dict[str, Any]]:
    """Perplexity of the tokens between each two edges, over all documents and seeds."""
    rows = []
    for index, edge in enumerate(POSITION_EDGES[:-1]):
        nll = sum(row[index] for o in outcomes for row in o["nll_by_position"])
        tokens = sum(row[index] for o in outcomes for row in o["tokens_by_position"])
        if tokens:
            rows.append({"from": edge, "perplexity": exp(nll / tokens), "tokens": tokens})
    return rows


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    return value.item()


def _slug(name: str) -> str:
    """A file name; names that differ in other characters only are told apart by a digest."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
