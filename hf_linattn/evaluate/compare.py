"""The comparison: every model at every length on one task, cell by cell, each kept as soon as it is finished."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import tqdm

from ..conversion.positions import POSITION_EXTENSIONS
from ..data.documents import DataConfig
from ..modeling.validation import check_bool, check_choice, check_integer
from ..utils.files import write_text
from ..utils.machine import machine
from .fidelity import fidelity
from .footprint import footprint
from .intervals import Interval, bootstrap_difference, bootstrap_interval
from .models import EXTENDED, TRUNCATED, ComparedModel, Source, base_length, compared_models, load_tokenizer
from .report import describe_base, merge_report, write_report
from .runner import Runner
from .tasks import TASKS, TaskConfig
from .tasks.base import DocumentTask, Metric, Outcomes, Task
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
    chunks: bool = field(
        default=True,
        metadata={
            "help": "Tasks on embeddings: also show softmax over chunks of its own length, their embeddings averaged."
        },
    )
    batch_tokens: int = field(default=8192, metadata={"help": "Most tokens of one batch, padding included."})
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Data type of all models' weights. Default: the checkpoints'.",
            "choices": ("float32", "float16", "bfloat16"),
        },
    )
    position_extension: str = field(
        default="repeat",
        metadata={
            "help": "How positions of extended softmax get their embeddings; as the conversions did.",
            "choices": POSITION_EXTENSIONS,
        },
    )
    resamples: int = field(default=1000, metadata={"help": "Resamples of the bootstrap behind the intervals."})
    footprint: bool = field(
        default=True, metadata={"help": "Measure time and peak memory of each model, in fresh processes."}
    )
    fidelity_documents: int = field(
        default=0, metadata={"help": "Measure how near each layer stays to softmax, on this many documents; 0: none."}
    )
    fidelity_length: int | None = field(
        default=None, metadata={"help": "Tokens of those documents. Default: the least of the lengths."}
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name, minimum in {"batch_tokens": 1, "resamples": 1, "fidelity_documents": 0}.items():
            check_integer(owner, name, getattr(self, name), minimum)
        check_integer(owner, "fidelity_length", self.fidelity_length, 1, optional=True)
        for name in ("branches", "chunks", "footprint"):
            check_bool(owner, name, getattr(self, name))
        for name in ("dtype", "position_extension"):
            if getattr(self, name) is not None:
                check_choice(owner, name, getattr(self, name), self.__dataclass_fields__[name].metadata["choices"])


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

    The models are softmax truncated to the checkpoint's own length, softmax over chunks of that length (in tasks on
    embeddings), softmax extended, the conversions, and each hybrid with either branch switched off. Finished cells are
    kept in `output_dir`: an interrupted comparison goes on where it was, and one with more models, lengths or tasks
    adds to the report that is there.

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
    check_choice("compare", "task", task, TASKS)
    # on a machine without accelerators several processes are found only if they are told to use the CPU
    PartialState(cpu=not torch.accelerator.is_available())
    base, output = str(base), Path(output_dir)
    task_config, config = task_config or TaskConfig(), config or CompareConfig()
    chunks = config.chunks and TASKS[task].reads_embeddings
    models = compared_models(base, converted, branches=config.branches, chunks=chunks)
    # errors of the data come before any model is loaded
    job = TASKS[task](task_config, data, load_tokenizer(base))
    comparison = _Comparison(base, output, job, task_config, config)
    if config.fidelity_documents:
        comparison.check_fidelity()

    cells = [(compared, length) for compared in _by_need(models) for length in task_config.lengths]
    outcomes = comparison.all_outcomes(cells)
    new: dict[str, Any] = {
        "command": command,
        "machine": machine(),
        "base": describe_base(base, base_length(base)),
        "columns": [compared.describe(base) for compared in models],
        "tasks": [_summary(job, config, task_config, models, outcomes)],
        "footprint": [],
        "fidelity": [],
    }
    try:
        comparison.measure_footprints(cells, new["footprint"])
        comparison.measure_fidelity(models, new["fidelity"])
    except BaseException:
        # the quality is measured: the report has it, and what there is of the rest. Other processes may wait elsewhere
        if PartialState().is_main_process:
            write_report(merge_report(output / "report.json", new), output)
        raise
    PartialState().wait_for_everyone()
    report = merge_report(output / "report.json", new)
    if PartialState().is_main_process:
        write_report(report, output)
    return report


class _Comparison:
    """What stays the same from cell to cell: the task, the runners, and the folder in which cells are kept."""

    def __init__(self, base: str, output: Path, job: Task, task_config: TaskConfig, config: CompareConfig) -> None:
        self.base, self.output, self.job, self.config, self.task_config = base, output, job, config, task_config
        self._runners: dict[tuple[str, int], Runner] = {}
        self._softmax = {compared.name: compared for compared in compared_models(base, {})}

    def runner(self, compared: ComparedModel, seed: int) -> Runner:
        """The runner of a model and seed, made once."""
        key = (compared.name, seed)
        if key not in self._runners:
            self._runners[key] = Runner(
                compared,
                self.base,
                seed=seed,
                auto_class=self.job.auto_class,
                max_length=self.task_config.lengths[-1],
                batch_tokens=self.config.batch_tokens,
                pad_token_id=self.job.tokenizer.pad_token_id,
                special_tokens=self.job.special_ids,
                folder=self.output / "embeddings",
                position_extension=self.config.position_extension,
                dtype=self.config.dtype,
            )
        return self._runners[key]

    def unload_but(self, compared: ComparedModel | None) -> None:
        """Give back the memory of all models but one."""
        for (name, _), runner in self._runners.items():
            if compared is None or name != compared.name:
                runner.unload()

    def all_outcomes(self, cells: Sequence[tuple[ComparedModel, int]]) -> dict[tuple[str, int], list[Outcomes]]:
        """The outcomes of each model, by its name, at each length: one for each seed."""
        outcomes = {}
        for compared, length in tqdm(cells, desc=self.config.name or self.job.name, unit="cell"):
            seeds = range(len(compared.sources))
            outcomes[compared.name, length] = [self.cell(compared, length, seed) for seed in seeds]
            self.unload_but(compared)
        self.unload_but(None)
        return outcomes

    def measure_footprints(self, cells: Sequence[tuple[ComparedModel, int]], rows: list[dict[str, Any]]) -> None:
        """Add time and memory of each whole model at each length to `rows`, if they are asked for."""
        measured = [cell for cell in cells if self.config.footprint and cell[0].branches == "both"]
        for cell in tqdm(measured, desc="time and memory", disable=not measured):
            if row := self.footprint(*cell):
                rows.append(row)

    def measure_fidelity(self, models: Sequence[ComparedModel], rows: list[dict[str, Any]]) -> None:
        """Add how near each layer of each conversion stays to softmax to `rows`, if that is asked for."""
        if self.config.fidelity_documents:
            for compared in models:
                rows += self.fidelity(compared)

    def cell(self, compared: ComparedModel, length: int, seed: int) -> Outcomes:
        """The outcomes of one model at one length, computed or as they were kept."""
        runner = self.runner(compared, seed)
        reference = self.runner(self._softmax[EXTENDED], 0)
        key = [runner.key, reference.key, self.job.fingerprint(), length]
        return self._kept(
            f"{self.config.name or self.job.name}", compared, f"{length}-{seed}", key,
            lambda: self.job.outcomes(runner, reference, length),
        )  # fmt: skip

    def footprint(self, compared: ComparedModel, length: int) -> dict[str, Any]:
        """Time and memory of one model at one length."""
        options: dict[str, Any] = {
            "auto_class": self.job.auto_class,
            "max_length": self.task_config.lengths[-1],
            "position_extension": self.config.position_extension,
            "dtype": self.config.dtype,
        }
        if compared.has_own_length:
            options["max_length"] = base_length(self.base)
            if compared.name == TRUNCATED and length > options["max_length"]:
                return {}

        def measure() -> dict[str, Any]:
            # the other processes wait, and do not disturb it
            result = asdict(footprint(compared, self.base, length, **options)) if PartialState().is_main_process else {}
            PartialState().wait_for_everyone()
            return result

        key = [self.runner(compared, 0).key, machine(), length]
        return self._kept("footprint", compared, f"{length}-{self.job.auto_class}", key, measure)

    def check_fidelity(self) -> None:
        if not isinstance(self.job, DocumentTask):
            raise ValueError(f"fidelity_documents={self.config.fidelity_documents}: task={self.job.name!r} has none.")

    def fidelity(self, compared: ComparedModel) -> list[dict[str, Any]]:
        """How near each layer of a model stays to softmax; nothing for softmax itself."""
        if compared.kind != "converted" or compared.branches != "both":
            return []
        assert isinstance(self.job, DocumentTask)
        length = self.config.fidelity_length or self.task_config.lengths[0]
        documents = self.job.at_length(length, None)[: self.config.fidelity_documents]
        base, runner = self.runner(self._softmax[EXTENDED], 0), self.runner(compared, 0)

        def measure() -> list[dict[str, Any]]:
            rows = fidelity(base.model, runner.model, documents)
            return [{"column": compared.name, "length": length, **asdict(row)} for row in rows]

        key = [base.key, runner.key, documents]
        rows = self._kept("fidelity", compared, str(length), key, measure)
        runner.unload()
        return rows

    def _kept(self, kind: str, compared: ComparedModel, name: str, key: Any, compute: Any) -> Any:
        """A result that was kept with the same key, or else a new one, which is then kept."""
        path = self.output / "cells" / _slug(kind) / f"{_slug(compared.name)}-{name}.json"
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        # all processes look before one of them may write
        kept = json.loads(path.read_text()) if path.is_file() else {}
        PartialState().wait_for_everyone()
        if kept.get("key") == digest:
            return kept["result"]
        result = compute()
        text = json.dumps({"key": digest, "result": result}, default=_plain)
        if PartialState().is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        PartialState().wait_for_everyone()
        # as it will be read the next time
        return json.loads(text)["result"]


def _by_need(models: list[ComparedModel]) -> list[ComparedModel]:
    """Extended softmax first: other models are compared with it."""
    return sorted(models, key=lambda compared: compared.name != EXTENDED)


def _summary(
    job: Task,
    config: CompareConfig,
    task_config: TaskConfig,
    models: list[ComparedModel],
    outcomes: dict[tuple[str, int], list[Outcomes]],
) -> dict[str, Any]:
    """One task of the report: metrics with their intervals."""
    metrics = job.metrics()
    cells = []
    for compared in models:
        for length in task_config.lengths:
            mine, softmax = outcomes[compared.name, length], outcomes[EXTENDED, length]
            cells.append(
                {
                    "column": compared.name,
                    "length": length,
                    "documents": len(mine[0][metrics[0].reads[0]]),
                    "cut": job.cut(length),
                    "metrics": {
                        m.name: _numbers(m, mine, None if compared.name == EXTENDED else softmax, config.resamples)
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
    """The metric by its module of `evaluate`, mean over seeds; the bootstrap around it by the fast function."""
    arrays = [metric.arrays(outcomes) for outcomes in mine]
    value = fmean(map(metric.compute, mine))
    interval = bootstrap_interval(metric.function, arrays, resamples=resamples)
    difference, difference_value = Interval(nan, None, None), nan
    if softmax is not None:
        others = [metric.arrays(outcomes) for outcomes in softmax]
        difference_value = value - fmean(map(metric.compute, softmax))
        difference = bootstrap_difference(metric.function, arrays, others, resamples=resamples)
    return {
        "value": _defined(value),
        "low": interval.low,
        "high": interval.high,
        "difference": _defined(difference_value),
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
