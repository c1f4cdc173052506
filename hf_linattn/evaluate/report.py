"""The report of comparisons: report.json, report.md and plots in one folder, for someone who was not there."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from math import exp, log
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ..utils.figures import files_text, has_matplotlib
from ..utils.files import write_text
from ..utils.html import html_page
from ..utils.labels import attention_text, checkpoint_name
from ..utils.machine import machine_text
from ..utils.markdown import interval_text, table
from .models import CHUNKS, EXTENDED, TRUNCATED
from .plots import ALT_TEXTS, draw_plots, slug

FORMAT_VERSION = 1
_MIB = 1024 * 1024


def describe_base(base: str, length: int) -> dict[str, Any]:
    """What the report tells about the softmax checkpoint; of a folder its name, not where it lies."""
    config = AutoConfig.from_pretrained(base)
    return {
        "name": checkpoint_name(base),
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "max_length": length,
    }


def load_report(path: Path) -> dict[str, Any]:
    """A report that was written before.

    Raises:
        ValueError: the file is no report, or of a newer version.
    """
    try:
        report = json.loads(path.read_text())
        version = report["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is not a report of hf-linattn evaluate: {error}") from error
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{str(path)!r}: format_version={version} is newer than what this hf-linattn reads ({FORMAT_VERSION}). "
            "Upgrade with `pip install -U hf-linattn`."
        )
    return report


def merge_report(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    """`new` together with what an earlier comparison left in the folder; of the same thing the new one counts.

    Raises:
        ValueError: the earlier report is of another base checkpoint, or no report.
    """
    old = load_report(path) if path.is_file() else {}
    if old and old["base"] != new["base"]:
        raise ValueError(
            f"{str(path)!r} is about {old['base']['name']!r} and not {new['base']['name']!r}; write to another folder."
        )

    def joined(key: str, identity: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        rows = {identity(row): row for row in old.get(key, [])}
        return list((rows | {identity(row): row for row in new[key]}).values())

    commands = old.get("commands", [])
    if new["command"] and new["command"] not in commands:
        commands = [*commands, new["command"]]
    return {
        "format_version": FORMAT_VERSION,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commands": commands,
        "machine": new["machine"],
        "base": new["base"],
        "columns": joined("columns", lambda row: row["name"]),
        "tasks": [_with_earlier_cells(task, old.get("tasks", [])) for task in joined("tasks", lambda row: row["name"])],
        "footprint": joined("footprint", lambda row: (row["column"], row["length"])),
        "fidelity": joined("fidelity", lambda row: (row["column"], row["length"], row["layer"])),
    }


def _with_earlier_cells(task: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """A task with the columns and lengths that an earlier comparison measured on the same documents in the same way."""
    same = [e for e in earlier if all(e[key] == task[key] for key in ("name", "task", "data", "settings"))]
    cells = {(cell["column"], cell["length"]): cell for part in (*same, task) for cell in part["cells"]}
    lengths = sorted({length for _, length in cells})
    return {**task, "lengths": lengths, "cells": list(cells.values())}


def write_report(report: dict[str, Any], folder: Path) -> None:
    """report.json, report.md, report.html and, where matplotlib is installed, the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(report, folder) if has_matplotlib() else []
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    text = markdown(report, plots) + "\n"
    write_text(folder / "report.md", text)
    write_text(folder / "report.html", html_page(text, folder))


def written_text(folder: str | Path) -> str:
    """What `write_report` has written, in one line; without matplotlib, what installs it."""
    return files_text(folder, "report.json", plots=has_matplotlib())


def markdown(report: dict[str, Any], plots: Sequence[Path] = ()) -> str:
    """The whole report as a page."""
    base = report["base"]
    pictures = {path.stem: path.name for path in plots}
    parts = [
        f"# {base['name']}: softmax and linear attention",
        f"{base['name']} ({base['model_type']}, {base['layers']} layers, {base['max_length']:,} tokens) beside its "
        "conversions to linear attention.",
        column_table(report),
    ]
    for task in report["tasks"]:
        parts += [f"## {task['name']}", task_text(task), *(table for table in task_tables(task))]
        for kind in ("quality", "parts", "position"):
            if picture := pictures.get(f"{kind}-{slug(task['name'])}"):
                parts.append(f"![{task['name']}: {ALT_TEXTS[kind]}]({picture})")
    if report["footprint"]:
        parts += ["## Time and memory", footprint_text(report), *footprint_tables(report)]
        if "footprint" in pictures:
            parts.append(f"![{ALT_TEXTS['footprint']}]({pictures['footprint']})")
    if report["fidelity"]:
        parts += ["## How near each layer stays to softmax", FIDELITY_TEXT, fidelity_table(report)]
        if "fidelity" in pictures:
            parts.append(f"![{ALT_TEXTS['fidelity']}]({pictures['fidelity']})")
    optional = {"footprint": "time and memory", "fidelity": "error by layer"}
    if missing := [name for rows, name in optional.items() if not report[rows]]:
        parts.append(f"Not measured: {', '.join(missing)}.")
    parts += ["## How it was made", made_text(report)]
    return "\n\n".join(parts)


def column_table(report: dict[str, Any]) -> str:
    """What the columns are."""
    rows = []
    for column in report["columns"]:
        if column["kind"] == "truncated":
            what = f"the checkpoint as it is; it reads the first {report['base']['max_length']:,} tokens"
        elif column["kind"] == "chunks":
            what = (
                f"the checkpoint as it is, over chunks of {report['base']['max_length']:,} tokens; their embeddings "
                "averaged by tokens"
            )
        elif column["kind"] == "extended":
            what = "the checkpoint with more positions, as the conversions have them; it reads everything"
        else:
            what = attention_text(column["attention"])
            if column["branches"] != "both":
                off = {"near": "far", "far": "near"}[column["branches"]]
                what += f"; the {off} part switched off"
        trained = "" if column["kind"] != "converted" else training_text(column["training"])
        rows.append([column["name"], what, trained, str(column["seeds"])])
    return table(["model", "attention", "training after the swap", "seeds"], rows)


def training_text(training: dict[str, Any] | None) -> str:
    """What a conversion was trained on, as its config records it."""
    if not training:
        return "none (direct swap)"
    stages = ", ".join(f"{stage['stage']} {stage['steps']} steps" for stage in training["stages"])
    adapters = training["config"].get("lora_rank")
    return (
        f"{stages} on {training['data']['dataset']}: {training['tokens']:,} tokens, {training['seconds'] / 60:.0f} "
        f"minutes{f', LoRA of rank {adapters}' if adapters else ''}"
    )


def task_text(task: dict[str, Any]) -> str:
    """Data, settings, and what was cut."""
    told = [" ".join(line.strip() for line in task["about"].split("\n") if line.strip())]
    if task["chance"]:
        guesses = ", ".join(f"{value:.3f} ({name})" for name, value in task["chance"].items())
        told.append(f"A guess gets {guesses}.")
    for title, values in (("Data", task["data"]), ("Settings", task["settings"])):
        shown = {k.replace("_", " "): v for k, v in values.items() if v not in (None, False)}
        told.append(f"{title}: " + ", ".join(f"{k} {v}" for k, v in shown.items()) + ".")
    cut = {cell["length"]: cell["cut"] for cell in task["cells"] if cell["cut"]}
    if cut:
        told.append("Longer documents were cut: " + ", ".join(f"{n} at {length:,}" for length, n in cut.items()) + ".")
    told.append(
        "In brackets the 95 % bootstrap interval over documents (and seeds where there are several; folds stay as they "
        "are); in each second table the difference to softmax extended on the same documents. Of many comparisons some "
        "intervals miss 0 by chance."
    )
    return " ".join(told)


def task_tables(task: dict[str, Any]) -> list[str]:
    """For each metric its values by length, and its differences to extended softmax."""
    cells = {(cell["column"], cell["length"]): cell["metrics"] for cell in task["cells"]}
    columns = list(dict.fromkeys(cell["column"] for cell in task["cells"]))
    lengths = [f"{length:,}" for length in task["lengths"]]
    tables = []
    for name, higher in task["higher_is_better"].items():
        better = "higher is better" if higher else "lower is better"
        for prefix, head in (("", f"{name} ({better}), by tokens"), ("difference", f"{name}: minus softmax extended")):
            rows = []
            for column in columns:
                numbers = [cells.get((column, length)) for length in task["lengths"]]
                if prefix and column == EXTENDED:
                    continue
                rows.append([column, *("" if n is None else _with_interval(n[name], prefix) for n in numbers)])
            if rows:
                tables.append(table([head, *lengths], rows))
    return tables


def _with_interval(numbers: dict[str, Any], prefix: str) -> str:
    names = ("difference", "difference_low", "difference_high") if prefix else ("value", "low", "high")
    value, low, high = (numbers[name] for name in names)
    if value is None:
        return "not defined"
    form = "{:+.3f}" if prefix else "{:.3f}"
    if max(abs(x) for x in (value, low or 0, high or 0)) >= 100:
        form = form.replace(".3f", ",.0f")
    return interval_text(value, low, high, form)


def footprint_text(report: dict[str, Any]) -> str:
    """Where the conversions become faster than softmax, and the machine."""
    told = [
        "One forward pass of one document, each in a fresh process: median time, and peak memory beyond the model, on "
        f"{machine_text(report['machine'])}."
    ]
    for column, length in crossovers(report).items():
        told.append(
            f"{column} is slower than softmax extended at every length measured."
            if length is None
            else f"{column} is faster than softmax extended from about {length:,.0f} tokens on."
        )
    return " ".join(told)


def crossovers(report: dict[str, Any]) -> dict[str, float | None]:
    """The length from which each conversion is faster than extended softmax; None if it is at no measured length.

    Between two lengths the ratio of the times is read off a straight line on logarithmic axes.
    """
    seconds: dict[str, dict[int, float]] = {}
    for row in report["footprint"]:
        seconds.setdefault(row["column"], {})[row["length"]] = row["seconds"]
    softmax = seconds.pop(EXTENDED, {})
    for name in (TRUNCATED, CHUNKS):
        seconds.pop(name, None)
    result: dict[str, float | None] = {}
    for column, times in seconds.items():
        ratios = [(n, log(times[n] / softmax[n])) for n in sorted(times) if n in softmax]
        if not ratios:
            continue
        result[column] = None
        for index in reversed(range(len(ratios))):
            length, ratio = ratios[index]
            if ratio < 0:
                result[column] = float(length)
                continue
            if index + 1 < len(ratios):
                longer, below = ratios[index + 1]
                share = ratio / (ratio - below)
                result[column] = exp(log(length) + share * (log(longer) - log(length)))
            break
    return result


def footprint_tables(report: dict[str, Any]) -> list[str]:
    """Seconds, tokens per second and memory by length."""
    rows = {(row["column"], row["length"]): row for row in report["footprint"]}
    lengths = sorted({row["length"] for row in report["footprint"]})
    columns = list(dict.fromkeys(row["column"] for row in report["footprint"]))
    tables = []
    kinds: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("seconds, by tokens", lambda row: f"{row['seconds']:.3f}"),
        ("tokens per second", lambda row: f"{row['tokens_per_second']:,.0f}"),
        ("peak memory beyond the model, MiB", lambda row: f"{row['peak_bytes'] / _MIB:,.0f}"),
    ]
    for title, form in kinds:
        body = [
            [column, *(form(rows[column, n]) if (column, n) in rows else "" for n in lengths)] for column in columns
        ]
        tables.append(table([title, *(f"{n:,}" for n in lengths)], body))
    return tables


FIDELITY_TEXT = (
    "Each layer of the conversion on the inputs that the softmax model gives it. Relative error: of the attention "
    "output, as a share of its size; of that, what comes from adding up in another order is told apart. Agreement: how "
    "often the most attended token is the same. Near mass: the share of softmax attention on tokens that the "
    "conversion sees exactly."
)


def fidelity_table(report: dict[str, Any]) -> str:
    """One row per column and layer."""
    numbers = [name for name in report["fidelity"][0] if name not in ("column", "length", "layer")]
    scalars = [name for name in numbers if isinstance(report["fidelity"][0][name], (int, float))]
    rows = [
        [row["column"], f"{row['length']:,}", str(row["layer"]), *(f"{row[name]:.3g}" for name in scalars)]
        for row in report["fidelity"]
    ]
    return table(["model", "tokens", "layer", *(name.replace("_", " ") for name in scalars)], rows)


def made_text(report: dict[str, Any]) -> str:
    """Commands, machine, date."""
    lines = [f"{report['created']}, on {machine_text(report['machine'])}."]
    if report["commands"]:
        lines.append("```bash\n" + "\n".join(report["commands"]) + "\n```")
    return "\n\n".join(lines)


def card_section(report: dict[str, Any], column: str) -> str:
    """What a model card tells of one column: its numbers beside softmax, as Markdown.

    Raises:
        ValueError: the report has no such column.
    """
    names = [c["name"] for c in report["columns"]]
    if column not in names:
        raise ValueError(f"column={column!r} is not in the report; it has {', '.join(map(repr, names))}.")
    shown = {column, TRUNCATED, CHUNKS, EXTENDED, f"{column}, near only", f"{column}, far only"}

    def only(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
        return [row for row in rows if row[key] in shown]

    tasks = [{**task, "cells": only(task["cells"], "column")} for task in report["tasks"]]
    tasks = [task for task in tasks if any(cell["column"] == column for cell in task["cells"])]
    part = {**report, "footprint": only(report["footprint"], "column")}
    parts = [text for task in tasks for text in (f"### {task['name']}", task_text(task), *task_tables(task))]
    if part["footprint"]:
        parts += ["### Time and memory", footprint_text(part), *footprint_tables(part)]
    return "\n\n".join(parts)
