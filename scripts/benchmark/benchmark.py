"""How fast attention is, alone, in a model, in training and in decoding, and the memory that it takes.

    python scripts/benchmark/benchmark.py --output model_cards/benchmark/cpu

writes JSON, Markdown tables and a plot, and prints the tables: this package beside softmax (SDPA), the limit and other
packages and models. The limit is the same model with attention that returns its values. In each round every row has its
turn, so that what else the machine does hits all of them; medians and the spread of the rounds are kept. Peak memory is
measured in a fresh process for each row, operations are counted once. What is measured is kept as it comes: the same
command goes on where an interrupted one ended. `--device cuda` runs the same on a GPU. What is slower than `--longest`
seconds at a length is left out at longer ones.

    python scripts/benchmark/benchmark.py --output runs/against --against FOLDER

compares with another checkout of this repository, such as an older commit (`git worktree add FOLDER COMMIT`): a process
for each measurement, in turns. A smoke test, which takes seconds without the processes that measure memory:

    python scripts/benchmark/benchmark.py --output runs/smoke --quick --memory-lengths
"""

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from tqdm.auto import tqdm
from transformers.utils import logging

import against
from common import write_json, write_report
from hf_linattn.utils.machine import machine
from measure import limit_memory, seconds
from measure_row import ROOT, add_machine_options, measure_in_new_process
from rows import CAUSAL_SOFTMAX, LIMIT, ROWS, SOFTMAX, Row, Shape, row_named
from subjects import SUBJECTS, Subject, lengths_of, prepare
from tables import Cell, notes, plot, spread, tables

_DEFAULTS: dict[str, Any] = {"lengths": [512, 1024, 2048, 4096, 8192, 16384], "layers": 12, "repeats": 7}
_QUICK: dict[str, Any] = {"lengths": [1024], "layers": 2, "repeats": 3}
_QUICK_ROWS = [SOFTMAX, LIMIT, CAUSAL_SOFTMAX, "Linformer, k=256", "causal Linformer, k=256"]
# torch knows how to count them, but not by these names
_CPU_SDPA: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def time_rows(rows: list[Row], subject: Subject, shape: Shape, options: argparse.Namespace) -> dict[str, Cell]:
    """Seconds of each row in rounds in which all have their turn, and its operations; an error in place of them."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    turns: dict[str, Callable[[], None]] = {}
    cells: dict[str, Cell] = {}
    for row in rows:
        try:
            turn = prepare(row, subject, shape, device, dtype).turn
            # the first time warms up, and is where operations are counted
            with FlopCounterMode(display=False, custom_mapping=_CPU_SDPA) as counter, contextlib.redirect_stdout(None):
                turn()
        # packages of others fail in their own ways, at lengths that are not theirs or for want of memory
        except Exception as error:
            cells[row.name] = {"failed": (str(error).splitlines() or [type(error).__name__])[0][:120]}
            continue
        turns[row.name] = turn
        cells[row.name] = {"seconds": [], "flops": counter.get_total_flops() // subject.tokens}
    for _ in range(options.repeats):
        for name, turn in turns.items():
            # what is slow has fewer turns
            if sum(cells[name]["seconds"]) < options.budget:
                cells[name]["seconds"].append(seconds(turn, device) / subject.tokens)
    gc.collect()
    return cells


def load(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What an interrupted run left, or an empty report.

    Raises:
        SystemExit: the file is of a run with other settings.
    """
    if not path.exists():
        return {**settings, "missing": [], "configs": {}, "groups": {}}
    report: dict[str, Any] = json.loads(path.read_text())
    if different := [key for key in settings if report.get(key) != settings[key]]:
        raise SystemExit(f"{path} has other settings ({', '.join(different)}); choose another --output.")
    return {"configs": {}, **report}


def fast_enough(name: str, key: str, length: int, report: dict[str, Any], longest: float) -> bool:
    """Whether the row took less than `longest` seconds at every shorter length, or was not measured there."""
    shorter = (group.get(name, {}) for n, group in report["groups"].get(key, {}).items() if int(n) < length)
    return all(not cell.get("seconds") or spread(cell)[0] < longest for cell in shorter)


def run(rows: list[Row], options: argparse.Namespace, report: dict[str, Any], keep: Callable[[], None]) -> None:
    """Measure what the report does not have yet."""
    groups = [(name, n) for name in options.subjects for n in lengths_of(SUBJECTS[name], options.lengths)]
    for name, length in tqdm(groups, unit="group", mininterval=5):
        subject = SUBJECTS[name]
        group = report["groups"].setdefault(subject.key, {}).setdefault(str(length), {})
        chosen = [row for row in rows if subject.maker(row) is not None and not row.missing]
        chosen = [row for row in chosen if fast_enough(row.name, subject.key, length, report, options.longest)]
        # rows of one group are timed together, or not at all
        if any(row.name not in group for row in chosen):
            group.clear()
            group.update(time_rows(chosen, subject, Shape(length, options.layers), options))
            keep()
        if options.memory_lengths is not None and length not in options.memory_lengths:
            continue
        for row in chosen:
            cell = group[row.name]
            if cell.get("seconds") and "peak_bytes" not in cell:
                # None: it did not fit
                cell["peak_bytes"] = measure_in_new_process(row.name, name, length, options).get("peak_bytes")
                keep()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="Path without ending of the files to write.")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="Another checkout of this repository.")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, 2 layers, 3 rounds and the main rows only.")
    parser.add_argument(
        "--rows",
        nargs="+",
        type=row_named,
        help="Names of the tables, or calls such as 'PerformerConfig(num_features=64)', for a decoder with 'causal ' "
        "before it. Default: all; with --against those of this package.",
    )
    parser.add_argument(
        "--subjects",
        nargs="+",
        choices=SUBJECTS,
        default=["attention", "model", "training", "decoding"],
        help="training: forward and backward of attention alone. Default: all but model-training.",
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="Tokens, up to 65536 where they fit. Default: to 16384.")
    parser.add_argument(
        "--memory-lengths", type=int, nargs="*", help="Lengths at which peak memory is measured too. Default: all."
    )
    parser.add_argument("--repeats", type=int, help="Rounds. Default: 7, of --quick 3.")
    parser.add_argument("--budget", type=float, default=15, help="Seconds after which a row has no more turns.")
    parser.add_argument("--longest", type=float, default=30, help="Seconds: see above. Default: 30.")
    add_machine_options(parser)
    return parser


def rows_of(options: argparse.Namespace) -> list[Row]:
    """The rows that are measured."""
    if options.rows:
        return options.rows
    rows = [row_named(name) for name in _QUICK_ROWS] if options.quick else ROWS
    return rows if options.against is None else [row for row in rows if row.config is not None]


def main(call: list[str] | None = None) -> int:
    parser = arguments()
    options = parser.parse_args(call)
    for name, value in (_QUICK if options.quick else _DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.against is not None and not (options.against / "hf_linattn").is_dir():
        parser.error(f"--against={options.against} must be the folder of a checkout, with a folder hf_linattn in it.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.device == "cpu":
        limit_memory(options.memory)
    settings: dict[str, Any] = {
        "machine": machine()["device"],
        "threads": torch.get_num_threads(),
        "device": options.device,
        "dtype": options.dtype,
        "torch": torch.__version__,
        "layers": options.layers,
        "repeats": options.repeats,
    }
    path, rows = options.output.with_suffix(".json"), rows_of(options)
    report = load(path, settings)
    report["configs"] |= {row.name: row.config for row in rows if row.config is not None}
    report["missing"] = sorted({row.package for row in rows if row.missing and row.package})
    for package in report["missing"]:
        print(f"{package} is not installed: left out.", file=sys.stderr)

    def keep() -> None:
        write_json(path, report)

    if options.against is None:
        run(rows, options, report, keep)
        parts = [tables(report), "\n".join(f"* {note}" for note in notes(report))]
        write_report(options.output, report, "\n\n".join(parts), plot(report))
        return 0
    commits = {"this": against.commit_of(ROOT), "commit": against.commit_of(options.against)}
    kept = report.setdefault("against", {**commits, "groups": {}})
    if different := [key for key in commits if kept[key] != commits[key]]:
        raise SystemExit(f"{path} is of other commits ({', '.join(kept[key] for key in different)}).")
    against.measure([row for row in rows if not row.missing], options, report, keep)
    parts = [against.tables(report), "\n".join(f"* {note}" for note in [*against.notes(report), notes(report)[0]])]
    write_report(options.output, report, "\n\n".join(parts), None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
