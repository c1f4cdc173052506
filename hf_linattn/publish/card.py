"""The model card of a converted checkpoint: metadata for the Hub, and a text made from its config and a report."""

import dataclasses
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..conversion.checkpoint_files import sentence_kind
from ..data.presets import PRESETS
from ..modeling.configuration_linattn import AttentionConfig, LayerwiseConfig
from ..utils.digest import folder_digest
from ..utils.paths import command_without_paths, without_paths

#: What the card takes over from the base model's.
CARRIED = ("license", "license_name", "license_link", "language")
#: Folder of the repository that holds the report's plots.
PLOTS = "plots"
_TEMPLATE = Path(__file__).with_name("card_template.md")
_REPORT, _REPORT_VERSION = "report.json", 1
# Of a converted model all weights are there, and most are the base's: on the Hub's list (adapter, finetune, merge,
# quantized) that is a finetune, whether or not it was trained.
_RELATION = "finetune"

_PAPERS = {
    "linformer": ("Linformer", "https://arxiv.org/abs/2006.04768"),
    "performer": ("Performer", "https://arxiv.org/abs/2009.14794"),
}
# auto class of a head -> the Hub's tag for what it does; the Hub has none for the others
_PIPELINE_TAGS = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForCausalLM": "text-generation",
}
# the same for what sentence-transformers makes of a model
_SENTENCE_TAGS = {
    "SentenceTransformer": "sentence-similarity",
    "MultiVectorEncoder": "sentence-similarity",
    "SparseEncoder": "feature-extraction",
    "CrossEncoder": "text-ranking",
}
# metric of a task -> the Hub's name of it; it has none for the others
_HUB_METRICS = {
    "accuracy": "accuracy",
    "accuracy, unseen groups": "accuracy",
    "accuracy, other source": "accuracy",
    "macro F1": "f1",
    "perplexity": "perplexity",
    "exact match": "exact_match",
    "ROC AUC of the cosine": "roc_auc",
    "ROC AUC of a probe": "roc_auc",
}
_EXTENDED, _TRUNCATED, _CONVERTED = "extended", "truncated", "converted"


@dataclass(frozen=True)
class Table:
    """A table of the card: a caption, the names of the columns, and the rows as text."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def model_card(
    folder: str | Path,
    *,
    repo_id: str,
    revision: str = "main",
    base_model: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
    datasets: Container[str] = (),
) -> ModelCard:
    """The card of a converted checkpoint.

    Args:
        folder: the checkpoint; what is not in its config is not on the card.
        repo_id: owner and name on the Hub.
        revision: commit that the snippet loads.
        base_model: Hub id of the model that was converted; None where it is not on the Hub.
        metadata: of the base model's card: license, license_name, license_link, language.
        report: `read_report(...)` of an evaluation that this checkpoint was a column of.
        datasets: those of `named_datasets(...)` that the Hub has; results on others are in the text alone.

    Raises:
        ValueError: the report is not about this checkpoint, or no auto class loads its head.
    """
    folder = Path(folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = AttentionConfig.from_dict(values["linattn"])
    architecture, name = values["architectures"][0], repo_id.rpartition("/")[2]
    auto_class, sentence_class = _auto_class(values, architecture), sentence_kind(folder, architecture)
    pipeline_tag = _SENTENCE_TAGS.get(sentence_class or "") or _PIPELINE_TAGS.get(auto_class)
    training = without_paths(values.get("linattn_training") or {})
    methods = sorted({x.method for x in settings.layer_settings})
    evaluation = None if report is None else _Evaluation(report, values)
    results = [] if evaluation is None else list(evaluation.results(pipeline_tag, datasets))
    trained_on = [dataset for dataset in _training_sets(training) if dataset in datasets]
    data = ModelCardData(
        **dict(metadata or {}),
        datasets=trained_on or None,
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        base_model=base_model,
        base_model_relation=None if base_model is None else _RELATION,
        tags=[
            *("linear-attention", *methods, "long-context", "hf-linattn"),
            *(["sentence-transformers"] if sentence_class else []),
            *(["feature-extraction"] if sentence_class == "SentenceTransformer" else []),
        ],
        model_name=name,
        eval_results=[*results, *_training_results(training, pipeline_tag, datasets)] or None,
    )
    if data.eval_results is None:
        # a name is for the results: there is no index without any
        del data.model_name
    layers = values.get("num_hidden_layers") or values.get("n_layer") or values.get("n_layers")
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=name,
        repo_id=repo_id,
        revision=revision,
        methods=[_PAPERS[method] for method in methods],
        settings=_described(settings),
        max_length=settings.max_length,
        joined=settings.near and all(x.near and (x.window_size or x.global_tokens) for x in settings.layer_settings),
        layers=f"all {layers}" if settings.layers is None else f"{', '.join(map(str, settings.layers))} of {layers}",
        training=list(_flat({key: value for key, value in training.items() if key != "stages"})),
        stages=_stage_table(training),
        changed=_changed(folder, values),
        calibration=values.get("linattn_calibration"),
        architecture=architecture,
        auto_class=auto_class,
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        causal=auto_class == "AutoModelForCausalLM",
        choices=architecture.endswith("ForMultipleChoice"),
        sentence_class=sentence_class,
        evaluation=evaluation,
        plots=[] if report is None else [f"{PLOTS}/{path.name}" for path in plots_of(report["folder"])],
    )


def read_report(folder: str | Path) -> dict[str, Any]:
    """The report.json of an evaluation, with the folder that it lies in as `folder`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or was written by a newer version.
    """
    file = Path(folder) / _REPORT
    if not file.is_file():
        raise FileNotFoundError(f"report: there is no {_REPORT} in {str(folder)!r}.")
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        version = report["format_version"]
        missing = {"columns", "tasks"} - report.keys()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(file)!r} is damaged: {error!r}") from error
    if version > _REPORT_VERSION:
        raise ValueError(
            f"{str(file)!r}: format_version={version} is newer than what this hf-linattn reads ({_REPORT_VERSION}). "
            "Upgrade with `pip install -U hf-linattn`."
        )
    if missing:
        raise ValueError(f"{str(file)!r} is damaged: it has no {', '.join(sorted(missing))}.")
    return {**report, "folder": str(folder)}


def plots_of(report: str | Path) -> list[Path]:
    """The plots that lie beside a report."""
    return sorted(Path(report).glob("*.png"))


class _Evaluation:
    """What a report tells about one checkpoint, as the template reads it."""

    def __init__(self, report: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.columns = {column["name"]: column for column in report["columns"]}
        self.tasks, self.footprint = report["tasks"], report.get("footprint") or []
        self.commands = [command_without_paths(command) for command in report.get("commands") or []]
        self.created = report.get("created")
        self.base_length = (report.get("base") or {}).get("max_length", 0)
        self.machine = list(_flat(report.get("machine") or {}))
        training = values.get("linattn_training") or None
        same = [
            column
            for column in report["columns"]
            if column["kind"] == _CONVERTED and _same_attention(column.get("attention"), values["linattn"])
        ]
        own = [c for c in same if c["branches"] == "both" and (c.get("training") or None) == training]
        if not own:
            raise ValueError(
                f"report: {report['folder']!r} is not about this checkpoint: none of its columns "
                f"({', '.join(self.columns)}) has the checkpoint's attention settings and training."
            )
        self.own = own[0]["name"]
        #: the same conversion before its training, where the report has both
        self.swap = next(
            (c["name"] for c in same if training and c["branches"] == "both" and not c.get("training")), None
        )

    def _named(self, kind: str) -> str | None:
        return next((name for name, column in self.columns.items() if column["kind"] == kind), None)

    def results(self, pipeline_tag: str | None, datasets: Container[str]) -> Iterator[EvalResult]:
        """The checkpoint's own numbers, and those of the same conversion before training, as the Hub lists them."""
        for task in self.tasks:
            dataset = _dataset(task.get("data"))
            if pipeline_tag is None or dataset is None or dataset["type"] not in datasets:
                continue
            for cell in task["cells"]:
                if cell["column"] not in (self.own, self.swap):
                    continue
                which = "adapted" if self.columns[cell["column"]].get("training") else "direct swap, no training"
                for metric, numbers in cell["metrics"].items():
                    if numbers["value"] is None or metric not in _HUB_METRICS:
                        continue
                    yield EvalResult(
                        task_type=pipeline_tag,
                        task_name=task["name"],
                        **{f"dataset_{key}": value for key, value in dataset.items()},
                        metric_type=_HUB_METRICS[metric],
                        metric_name=f"{metric} at {cell['length']:,} tokens, {which}"
                        + _interval(numbers, "95% interval "),
                        metric_value=numbers["value"],
                        metric_args={
                            "length": cell["length"],
                            "documents": cell["documents"],
                            "low": numbers["low"],
                            "high": numbers["high"],
                        },
                    )

    def tables(self) -> Iterator[Table]:
        """One table per task and metric: a row for each column of the report, a column for each length."""
        for task in self.tasks:
            metrics = list(dict.fromkeys(metric for cell in task["cells"] for metric in cell["metrics"]))
            lengths = sorted({cell["length"] for cell in task["cells"]})
            cells = {(cell["column"], cell["length"]): cell for cell in task["cells"]}
            for metric in metrics:
                better = "higher" if task["higher_is_better"][metric] else "lower"
                documents = {cell["documents"] for cell in task["cells"]}
                yield Table(
                    f"{task['name']}, {metric} ({better} is better; {_range(documents)} documents)",
                    ["", *(f"{length:,}" for length in lengths)],
                    [
                        [self._label(name), *(_shown(cells.get((name, length)), metric) for length in lengths)]
                        for name in self.columns
                        if any((name, length) in cells for length in lengths)
                    ],
                )

    def worse(self) -> Iterator[str]:
        """Where the checkpoint is worse than softmax beyond what the documents leave open, or takes more."""
        for task in self.tasks:
            cells = {(cell["column"], cell["length"]): cell for cell in task["cells"]}
            for (column, length), cell in cells.items():
                if column != self.own:
                    continue
                for metric, numbers in cell["metrics"].items():
                    sign = 1 if task["higher_is_better"][metric] else -1
                    at = f"{task['name']}, {metric} at {length:,} tokens"
                    ends = [numbers.get("difference_low"), numbers.get("difference_high")]
                    if None not in ends and max(sign * end for end in ends) < 0:
                        low, high = map(_number, ends)
                        yield f"{at}: {_number(numbers['difference'])} against extended softmax ({low} to {high})"
                    cut = cells.get((self._named(_TRUNCATED) or "", length), {}).get("metrics", {}).get(metric)
                    # up to its own length, the base reads all there is, as the extended one does
                    if (
                        length > self.base_length
                        and cut
                        and None not in (cut["low"], cut["high"], numbers["low"], numbers["high"])
                        and min(sign * cut[end] for end in ("low", "high"))
                        > max(sign * numbers[end] for end in ("low", "high"))
                    ):
                        yield (
                            f"{at}: {_number(numbers['value'])}, where the base model gets {_number(cut['value'])} "
                            "from what it can read"
                        )
        for row, softmax in self._against_softmax():
            for name, unit in (("seconds", "time"), ("peak_bytes", "peak memory")):
                if row[name] > softmax[name] > 0:
                    yield f"{unit} at {row['length']:,} tokens: {row[name] / softmax[name]:.2f} times that of softmax"

    def footprint_table(self) -> Table | None:
        """Time and memory of the checkpoint and of softmax, by length; None where they were not measured."""
        shown = [self._named(_EXTENDED), self.own]
        rows = [row for row in self.footprint if row["column"] in shown]
        if not rows:
            return None
        return Table(
            "Time and peak memory of one forward pass",
            ["", "tokens", "seconds", "tokens per second", "peak MiB"],
            [
                [
                    self._label(row["column"]),
                    f"{row['length']:,}",
                    _number(row["seconds"]),
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['peak_bytes'] / 2**20:,.0f}",
                ]
                for row in sorted(rows, key=lambda row: (row["length"], shown.index(row["column"])))
            ],
        )

    def _against_softmax(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        softmax = {row["length"]: row for row in self.footprint if row["column"] == self._named(_EXTENDED)}
        for row in self.footprint:
            if row["column"] == self.own and row["length"] in softmax:
                yield row, softmax[row["length"]]

    def _label(self, column: str) -> str:
        return f"**{column}** (this model)" if column == self.own else column


def _auto_class(values: Mapping[str, Any], architecture: str) -> str:
    """The auto class that loads the head that was saved."""
    for auto_class, reference in values["auto_map"].items():
        if reference.endswith(f".{architecture}"):
            return auto_class
    raise ValueError(
        f"architectures={values['architectures']}: no auto class loads this head, so that nobody could load it by name."
    )


def _described(settings: AttentionConfig) -> list[tuple[str, str, str]]:
    """Name, value and description of every setting."""
    fields = [f for f in dataclasses.fields(settings) if f.name not in ("layers", "max_length", "by_layer")]
    described = [(f.name, str(getattr(settings, f.name)), f.metadata["help"]) for f in fields]
    if not isinstance(settings, LayerwiseConfig):
        return described
    # of each layer, what differs from the defaults and from the whole
    common = ("layers", "max_length", "seed")
    of_layers = [
        (
            f"layer {index}",
            ", ".join(
                [x.method]
                + [
                    f"{f.name}={getattr(x, f.name)}"
                    for f in dataclasses.fields(x)
                    if f.name not in common and getattr(x, f.name) != f.default
                ]
            ),
            "Settings of this layer; what is not named is as by default.",
        )
        for index, x in settings.by_layer.items()
    ]
    return [row for row in described if row[0] in ("near", "far", "seed")] + of_layers


def _flat(values: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested plain values as lines: a path of names, and what stands there."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _flat(value, f"{name}, {key}" if name else str(key).replace("_", " "))
    elif isinstance(values, list) and any(isinstance(value, Mapping) for value in values):
        for index, value in enumerate(values, start=1):
            yield from _flat(value, f"{name} {index}")
    elif values is not None:
        yield name, ", ".join(map(str, values)) if isinstance(values, list) else str(values)


def _same_attention(column: Mapping[str, Any] | None, linattn: Mapping[str, Any]) -> bool:
    """Whether a report's column has the checkpoint's settings; a column may stand for several seeds."""
    if not column:
        return False
    free = {"seed", "format_version"}
    return {k: v for k, v in column.items() if k not in free} == {k: v for k, v in linattn.items() if k not in free}


def named_datasets(folder: str | Path, report: Mapping[str, Any] | None = None) -> set[str]:
    """What may be Hub ids among the datasets that a checkpoint was trained and evaluated on."""
    values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    evaluated = [_dataset(task.get("data")) for task in (report or {}).get("tasks", [])]
    training = values.get("linattn_training") or {}
    return {*_training_sets(training), *_evaluation_sets(training), *(x["type"] for x in evaluated if x)}


def _dataset(data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Hub id, name, configuration and split of documents by their `DataConfig`; None where they are on no Hub."""
    if not data:
        return None
    preset = PRESETS.get(str(data.get("dataset")))
    given = {key: value for key, value in data.items() if value is not None}
    data = given if preset is None else {**preset.fields, **given, "dataset": preset.fields["dataset"]}
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(data.get("dataset"))):
        return None
    found = {"type": data["dataset"], "name": data["dataset"]}
    return found | {key: data[name] for key, name in (("config", "dataset_config"), ("split", "split")) if name in data}


def _training_sets(training: Mapping[str, Any]) -> list[str]:
    """Hub ids of the data of a training and of those before it."""
    records = []
    while training:
        records.append(_dataset(training.get("data")))
        training = training.get("earlier") or {}
    return sorted({record["type"] for record in records if record})


def _evaluation_sets(training: Mapping[str, Any]) -> list[str]:
    found = _dataset(training.get("eval_data"))
    return [found["type"]] if found else []


def _training_results(
    training: Mapping[str, Any], pipeline_tag: str | None, datasets: Container[str]
) -> Iterator[EvalResult]:
    """What the training's own evaluation measured of the task, on documents of their own and not held out of others."""
    dataset = _dataset(training.get("eval_data"))
    if pipeline_tag is None or dataset is None or dataset["type"] not in datasets:
        return
    for stage in training["stages"]:
        for metric, value in stage.get("eval_metrics", {}).items():
            if stage["stage"] == "task" and metric in _HUB_METRICS:
                yield EvalResult(
                    task_type=pipeline_tag,
                    **{f"dataset_{key}": value for key, value in dataset.items()},
                    metric_type=_HUB_METRICS[metric],
                    metric_name=f"{metric} of the evaluation in training",
                    metric_value=value,
                )


def _stage_table(training: Mapping[str, Any]) -> Table | None:
    """What each stage measured before its first step and with the weights that it ended with."""
    rows = []
    for stage in training.get("stages", []):
        steps = f"{stage['steps']:,}"
        if "eval_loss" not in stage:
            rows.append([stage["stage"], steps, "not evaluated", "", ""])
            continue
        before = {"loss": stage["eval_loss_before"], **stage.get("eval_metrics_before", {})}
        after = {"loss": stage["eval_loss"], **stage.get("eval_metrics", {})}
        for name in before:
            shown = [stage["stage"], steps] if name == "loss" else ["", ""]
            rows.append([*shown, name.replace("_", " "), _number(before[name]), _number(after.get(name, before[name]))])
    if not rows:
        return None
    return Table("Evaluation in training", ["stage", "steps", "metric", "before", "after"], rows)


def _changed(folder: Path, values: Mapping[str, Any]) -> bool | None:
    """Whether the weights are others than those that hf-linattn wrote; None where it left no digest of them."""
    digest = values.get("linattn_digest")
    return None if digest is None else folder_digest(folder) != digest


def _shown(cell: Mapping[str, Any] | None, metric: str) -> str:
    numbers = None if cell is None else cell["metrics"].get(metric)
    if numbers is None:
        return ""
    return "not defined" if numbers["value"] is None else f"{_number(numbers['value'])}{_interval(numbers)}"


def _interval(numbers: Mapping[str, Any], called: str = "") -> str:
    """The 95 % interval in brackets; nothing where it is not defined."""
    if numbers["low"] is None:
        return ""
    return f" ({called}{_number(numbers['low'])} to {_number(numbers['high'])})"


def _number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _range(values: set[int]) -> str:
    return f"{min(values):,}" if len(values) == 1 else f"{min(values):,} to {max(values):,}"
