"""This checkout beside another one, in turns: a process for each measurement, one of each checkout after the other."""

import argparse
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_linattn.utils.markdown import table
from measure import MIB
from measure_row import ROOT, measure_in_new_process
from rows import Row
from subjects import SUBJECTS, lengths_of
from tables import title_of

# Timed turns of each process.
_TURNS = 3
Cell = dict[str, Any]


def commit_of(folder: Path) -> str:
    """The commit that is checked out in a folder, marked where files differ from it; "unknown" without git."""
    call = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    done = subprocess.run(call, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def measure(rows: list[Row], options: argparse.Namespace, report: dict[str, Any], keep: Callable[[], None]) -> None:
    """Fill report["against"]["groups"] with what it does not have yet: seconds and peak bytes of both checkouts."""
    groups: dict[str, Any] = report["against"]["groups"]
    cells = [
        (name, subject, length, row)
        for name, subject in ((name, SUBJECTS[name]) for name in options.subjects)
        for length in lengths_of(subject, options.lengths)
        for row in rows
        if subject.maker(row) is not None
    ]
    for name, subject, length, row in tqdm(cells, unit="row", mininterval=5):
        group = groups.setdefault(subject.key, {}).setdefault(str(length), {})
        if row.name not in group:
            group[row.name] = _in_turns(row, name, length, options)
            keep()


def _in_turns(row: Row, subject: str, length: int, options: argparse.Namespace) -> Cell:
    cell: Cell = {side: {"seconds": [], "peak_bytes": []} for side in ("this", "other")}
    folders = {"this": ROOT, "other": options.against}
    for _ in range(options.repeats):
        for side, folder in folders.items():
            measured = measure_in_new_process(row.name, subject, length, options, _TURNS, folder)
            if "failed" in measured:
                return {"failed": f"{side}: {measured['failed']}"}
            cell[side]["seconds"] += measured["seconds"]
            cell[side]["peak_bytes"].append(measured["peak_bytes"])
    return cell


def ratio(cell: Cell, key: str) -> float | None:
    """What this checkout takes relative to the other; None where the other's is zero."""
    this, other = (_taken(cell[side], key) for side in ("this", "other"))
    return this / other if other else None


def _taken(side: dict[str, list[float]], key: str) -> float:
    """The median of seconds; of memory the least, as the allocator can only add to what is needed."""
    return (statistics.median if key == "seconds" else min)(side[key])


def tables(report: dict[str, Any]) -> str:
    """Per group: time and peak memory of both, and their ratio."""
    other = report["against"]["commit"]
    return "\n\n".join(
        table(
            [
                f"{title_of(key, report['layers'])}, {int(length):,} tokens",
                f"ms at {other}",
                "ms now",
                "now : then",
                f"peak MiB at {other}",
                "peak MiB now",
                "now : then",
            ],
            [[name, *_texts(cell)] for name, cell in group.items()],
        )
        for key, by_length in report["against"]["groups"].items()
        for length, group in by_length.items()
    )


def _texts(cell: Cell) -> list[str]:
    if "failed" in cell:
        return [cell["failed"], *[""] * 5]
    texts = []
    for key, unit in (("seconds", 1e-3), ("peak_bytes", MIB)):
        texts += [f"{_taken(cell[side], key) / unit:,.1f}" for side in ("other", "this")]
        quotient = ratio(cell, key)
        texts.append("" if quotient is None else f"{quotient:.2f}")
    return texts


def notes(report: dict[str, Any]) -> list[str]:
    """What was measured, in words."""
    against = report["against"]
    return [
        f"Commit {against['this']} (now) beside {against['commit']} (then). Each measurement is a process, in turns: "
        f"{report['repeats']} of each checkout, of {_TURNS} timed turns; medians of time, the least of memory."
    ]
