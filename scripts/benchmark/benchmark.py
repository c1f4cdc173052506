"""How fast attention is, alone and in a model, beside softmax, the limit, and other packages and models.

    python scripts/benchmark.py --output model_cards/benchmark/cpu

writes JSON, Markdown tables and a plot, and prints the tables. The limit is the same model with attention that
returns its values; softmax is SDPA. In each round every row has its turn, so that what else the machine does hits
all of them; medians and the spread of the rounds are kept. Peak memory is measured in a fresh process for each
row, operations are counted once. What is measured is kept as it comes: the same command goes on where an
interrupted one ended. `--device cuda` runs the same on a GPU. What is slower than `--longest` seconds at a length
is left out at longer ones. A smoke test that takes a minute:

    python scripts/benchmark.py --output runs/smoke --lengths 512 1024 --layers 2 --repeats 2
"""

import argparse
import contextlib
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decoder_speed
import matplotlib
import torch
from benchmark_rows import CAUSAL_SOFTMAX, LIMIT, ROWS, SOFTMAX, Row, Shape
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from tqdm.auto import tqdm
from transformers.utils import logging

# the folder of this file, out of which all is imported: `evaluate.py` in it hides the library that the package uses
sys.path.pop(0)

from hf_linattn.utils.memory import PeakMemory

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_BY_NAME = {row.name: row for row in ROWS}
_MIB = 1024 * 1024
# torch knows how to count them, but not by these names
_CPU_SDPA: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
Cell = dict[str, Any]


def make(row: Row, what: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """The row's attention or model on the device, in eval mode."""
    torch.manual_seed(0)
    made: Any = (row.attention if what == "attention" else row.model)(shape)  # type: ignore[misc]
    return made.to(device=device, dtype=dtype).eval() if isinstance(made, nn.Module) else made


def inputs(what: str, shape: Shape, device: torch.device, dtype: torch.dtype, grad: bool) -> tuple[Tensor, ...]:
    """Queries, keys and values, heads after positions in memory, or input ids."""
    generator = torch.Generator(device).manual_seed(0)
    if what == "model":
        return (torch.randint(shape.vocabulary, (1, shape.length), generator=generator, device=device),)
    size = (3, 1, shape.length, shape.heads, shape.head_dim)
    tokens = torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)
    return tuple(x.transpose(1, 2).requires_grad_(grad) for x in tokens.unbind(0))


def once(made: Any, what: str, given: tuple[Tensor, ...], grad: bool) -> None:
    """One forward pass, or forward and backward."""
    with torch.set_grad_enabled(grad):
        out = made(*given) if what == "attention" else made(input_ids=given[0]).last_hidden_state
        if grad:
            out.float().sum().backward()
    leaves = [*given, *(made.parameters() if isinstance(made, nn.Module) else ())]
    for leaf in leaves:
        leaf.grad = None


def seconds_of(work: Callable[[], None], device: torch.device) -> float:
    """How long it takes, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def time_rows(rows: list[Row], what: str, shape: Shape, grad: bool, options: argparse.Namespace) -> dict[str, Cell]:
    """Seconds of each row in rounds in which all have their turn, and its operations; an error in place of them."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    given = inputs(what, shape, device, dtype, grad)
    work: dict[str, Callable[[], None]] = {}
    cells: dict[str, Cell] = {}
    for row in rows:
        try:
            made = make(row, what, shape, device, dtype)
            # the first time warms up, and is where operations are counted
            with FlopCounterMode(display=False, custom_mapping=_CPU_SDPA) as counter, contextlib.redirect_stdout(None):
                once(made, what, given, grad)
        # packages of others fail in their own ways, at lengths that are not theirs or for want of memory
        except Exception as error:
            cells[row.name] = {"failed": (str(error).splitlines() or [type(error).__name__])[0][:120]}
            continue
        work[row.name] = lambda made=made: once(made, what, given, grad)  # type: ignore[misc]
        cells[row.name] = {"seconds": [], "flops": counter.get_total_flops()}
    for _ in range(options.repeats):
        for name, run in work.items():
            # what is slow has fewer turns
            if sum(cells[name]["seconds"]) < options.budget:
                cells[name]["seconds"].append(seconds_of(run, device))
    gc.collect()
    return cells


def measure_memory(row: Row, what: str, shape: Shape, grad: bool, options: argparse.Namespace) -> int:
    """Run in a process of its own: peak memory in bytes of one pass, beyond the model and the input."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    made, given = make(row, what, shape, device, dtype), inputs(what, shape, device, dtype, grad)
    # a short pass first: what is set up once does not count
    short = Shape(min(shape.length, 256), shape.layers, shape.heads, shape.head_dim, shape.vocabulary)
    with contextlib.suppress(Exception):
        once(made, what, inputs(what, short, device, dtype, grad), grad)
    with PeakMemory(device) as memory:
        once(made, what, given, grad)
    return memory.bytes


def memory_in_new_process(row: Row, what: str, length: int, grad: bool, options: argparse.Namespace) -> int | None:
    """`measure_memory` in a fresh process; None where it did not fit."""
    call = [sys.executable, __file__, "--output", "unused", "--measure", row.name, "--what", what]
    call += ["--lengths", str(length), "--layers", str(options.layers), "--passes", "backward" if grad else "forward"]
    call += ["--device", options.device, "--dtype", options.dtype, "--memory", str(options.memory)]
    done = subprocess.run(call, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """`decoder_speed`'s measurement of a token of decoding, with its own settings."""
    settings = argparse.Namespace(
        settings=list(decoder_speed.SETTINGS),
        positions=[256, max(options.lengths)],
        max_length=max(options.lengths) + 8 * (options.repeats + 1),
        layers=options.layers,
        repeats=options.repeats,
        steps=8,
    )
    return {"positions": settings.positions, "cells": decoder_speed.decode(settings)}


def spread(cell: Cell) -> tuple[float, float, float]:
    """Median, least and largest of the seconds."""
    return statistics.median(cell["seconds"]), min(cell["seconds"]), max(cell["seconds"])


def _title(key: str, layers: int) -> str:
    what, way = key.split("/")
    passes = {"forward": "forward", "backward": "forward and backward"}[way]
    return f"attention alone, {passes}" if what == "attention" else f"model of {layers} layers, {passes}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def tables(report: dict[str, Any]) -> str:
    """Per group: times, times softmax is slower, times the limit, memory and operations, by length."""
    parts = []
    for key, by_length in report["groups"].items():
        title, lengths = _title(key, report["layers"]), sorted(by_length, key=int)
        names = [n for n in _BY_NAME if any(n in by_length[length] for length in lengths)]
        columns = [f"{int(length):,}" for length in lengths]

        def cells(name: str, form: Callable[[Cell, Cell, Cell], str], by_length: Any = by_length) -> list[str]:
            """One row of a table; `form` gets the cell, softmax's and the limit's."""
            found = []
            for length in sorted(by_length, key=int):
                group = by_length[length]
                cell = group.get(name, {})
                softmax = group.get(CAUSAL_SOFTMAX if _BY_NAME[name].causal else SOFTMAX, {})
                found.append(form(cell, softmax, group.get(LIMIT, {})) if cell.get("seconds") else "")
            return found

        for head, form in (
            ("ms, median (least to largest)", _milliseconds),
            ("times as fast as SDPA", _speed),
            ("times the limit's time", _over_limit),
            ("peak memory, MiB", _memory),
            ("GFLOP", _operations),
        ):
            if key.startswith("attention") and form is _over_limit:
                continue
            rows = [[name, *cells(name, form)] for name in names]
            rows = [row for row in rows if any(row[1:])]
            if rows:
                parts.append(_table([f"{title}: {head}", *columns], rows))
        if len(lengths) > 1 and (rows := _crossovers(by_length, names)):
            parts.append(_table([f"{title}: faster than SDPA from", "tokens"], rows))
    if report["decode"]:
        positions = report["decode"]["positions"]
        rows = [[n, *(f"{c['seconds'] * 1e3:.1f}" for c in cs)] for n, cs in report["decode"]["cells"].items()]
        head = [f"one token of decoding, {report['layers']} layers, ms"]
        parts.append(_table([*head, *(f"after {p:,}" for p in positions)], rows))
    return "\n\n".join(parts)


def crossover(by_length: dict[str, dict[str, Cell]], name: str) -> int | None:
    """From how many tokens on the row is faster than SDPA, None where it never is; between two lengths on log scales.

    The least length that was measured where it is faster at all of them.
    """
    softmax = CAUSAL_SOFTMAX if _BY_NAME[name].causal else SOFTMAX
    speeds: list[tuple[int, float]] = []
    for length in sorted(by_length, key=int):
        cells = [by_length[length].get(row, {}) for row in (softmax, name)]
        if all(cell.get("seconds") for cell in cells):
            speeds.append((int(length), math.log(spread(cells[0])[0] / spread(cells[1])[0])))
    if not speeds or speeds[-1][1] < 0:
        return None
    slower = [index for index, (_, speed) in enumerate(speeds) if speed < 0]
    if not slower:
        return speeds[0][0]
    (below, slow), (above, fast) = speeds[slower[-1] : slower[-1] + 2]
    return round(below * (above / below) ** (slow / (slow - fast)))


def _crossovers(by_length: dict[str, dict[str, Cell]], names: list[str]) -> list[list[str]]:
    rows = []
    for name in names:
        if name in (SOFTMAX, CAUSAL_SOFTMAX, LIMIT):
            continue
        softmax = CAUSAL_SOFTMAX if _BY_NAME[name].causal else SOFTMAX
        lengths = sorted(int(n) for n, group in by_length.items() if group.get(softmax, {}).get("seconds"))
        if not lengths:
            continue
        found = crossover(by_length, name)
        text = f"{found:,}" if found is not None else f"not up to {lengths[-1]:,}"
        text += " or less" if found == lengths[0] else ""
        rows.append([name, text])
    return rows


def _milliseconds(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return "{:,.1f} ({:,.1f} to {:,.1f})".format(*(1e3 * x for x in spread(cell)))


def _speed(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return f"{spread(softmax)[0] / spread(cell)[0]:.2f}" if softmax.get("seconds") and cell is not softmax else ""


def _over_limit(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return f"{spread(cell)[0] / spread(limit)[0]:.2f}" if limit.get("seconds") else ""


def _memory(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return f"{cell['peak_bytes'] / _MIB:,.0f}" if cell.get("peak_bytes") is not None else ""


def _operations(cell: Cell, softmax: Cell, limit: Cell) -> str:
    return f"{cell['flops'] / 1e9:,.1f}"


def notes(report: dict[str, Any]) -> list[str]:
    """What was measured, on what, and what was not."""
    said = [
        f"{report['machine']}, {report['threads']} threads, {report['device']}, {report['dtype']}, torch "
        f"{report['torch']}; batch 1, 12 heads of 64, random weights; medians of up to {report['repeats']} rounds.",
        "Attention alone: queries, keys and values as models lay them out. linformer and nystrom-attention are called "
        "with their projections to queries, keys, values and output replaced by nothing. Operations are matrix "
        "products as torch counts them, those of causal SDPA in full; what is none, such as FNet's Fourier transforms, "
        "is not in them.",
        "Causal rows are compared with causal SDPA.",
    ]
    if report["missing"]:
        said.append(f"Not installed, and not measured: {', '.join(report['missing'])}.")
    failed = {
        (name, cell["failed"])
        for by_length in report["groups"].values()
        for group in by_length.values()
        for name, cell in group.items()
        if "failed" in cell
    }
    return said + [f"{name}: {error}" for name, error in sorted(failed)]


def plot(report: dict[str, Any], path: Path) -> None:
    """Time by length, one panel per group."""
    groups = {key: by_length for key, by_length in report["groups"].items() if by_length}
    if not groups:
        return
    figure, panels = plt.subplots(1, len(groups), figsize=(7 * len(groups), 6), squeeze=False)
    for axes, (key, by_length) in zip(panels[0], groups.items(), strict=True):
        lengths = sorted(by_length, key=int)
        for index, name in enumerate(n for n in _BY_NAME if any(n in by_length[length] for length in lengths)):
            points = [(int(n), spread(c)) for n in lengths if (c := by_length[n].get(name, {})).get("seconds")]
            if not points:
                continue
            middle = [1e3 * s[0] for _, s in points]
            errors = [[1e3 * (s[0] - s[1]) for _, s in points], [1e3 * (s[2] - s[0]) for _, s in points]]
            style = "--" if _BY_NAME[name].causal else "-"
            color = plt.get_cmap("tab20")(index % 20)
            axes.errorbar([n for n, _ in points], middle, errors, label=name, ls=style, marker="o", ms=3, color=color)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=_title(key, report["layers"]))
        axes.set_xticks([int(n) for n in lengths], [f"{int(n):,}" for n in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def machine() -> str:
    """The processor's name, or the GPU's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def load(path: Path, described: dict[str, Any]) -> dict[str, Any]:
    """What an interrupted run left, or an empty report.

    Raises:
        SystemExit: the file is of a run with other settings.
    """
    empty: dict[str, Any] = {**described, "missing": [], "groups": {}, "decode": None}
    if not path.exists():
        return empty
    found: dict[str, Any] = json.loads(path.read_text())
    if different := [key for key in described if found.get(key) != described[key]]:
        raise SystemExit(f"{path} has other settings ({', '.join(different)}); choose another --output.")
    return found


def save(report: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)


def fast_enough(name: str, key: str, length: int, report: dict[str, Any], longest: float) -> bool:
    """Whether the row took less than `longest` seconds at every shorter length, or was not measured there."""
    shorter = (group.get(name, {}) for n, group in report["groups"].get(key, {}).items() if int(n) < length)
    return all(not cell.get("seconds") or spread(cell)[0] < longest for cell in shorter)


def run(options: argparse.Namespace, report: dict[str, Any], path: Path) -> None:
    """Measure what the report does not have yet, and keep it as it comes."""
    chosen = [_BY_NAME[name] for name in options.rows]
    report["missing"] = sorted({row.package for row in chosen if row.missing and row.package})
    for package in report["missing"]:
        print(f"{package} is not installed: left out.", file=sys.stderr)
    ways = [way for way in ("forward", "backward") if way in options.passes]
    groups = [(what, way, n) for what in options.what for way in ways for n in sorted(options.lengths)]
    for what, way, length in tqdm(groups, unit="group", mininterval=5):
        key, grad = f"{what}/{way}", way == "backward"
        group = report["groups"].setdefault(key, {}).setdefault(str(length), {})
        rows = [r for r in chosen if (r.attention if what == "attention" else r.model) is not None and not r.missing]
        rows = [r for r in rows if fast_enough(r.name, key, length, report, options.longest)]
        # rows of one group are timed together, or not at all
        if any(row.name not in group for row in rows):
            group.clear()
            group.update(time_rows(rows, what, Shape(length, options.layers), grad, options))
            save(report, path)
        for row in rows if length in options.memory_lengths else ():
            cell = group[row.name]
            if cell.get("seconds") and "peak_bytes" not in cell:
                cell["peak_bytes"] = memory_in_new_process(row, what, length, grad, options)
                save(report, path)
    if "decode" in options.passes and not report["decode"]:
        report["decode"] = decode(options)
        save(report, path)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="Path without ending of the files to write.")
    parser.add_argument("--rows", nargs="+", choices=list(_BY_NAME), default=list(_BY_NAME), help="Default: all.")
    both = ["attention", "model"]
    parser.add_argument("--what", nargs="+", choices=both, default=both, help="Default: both.")
    passes = ["forward", "backward", "decode"]
    parser.add_argument("--passes", nargs="+", choices=passes, default=["forward"], help="Default: forward.")
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="Tokens, up to 65536 where they fit.")
    parser.add_argument(
        "--memory-lengths", type=int, nargs="*", default=[], help="Lengths at which peak memory is measured too."
    )
    parser.add_argument("--layers", type=int, default=12, help="Layers of the model. Default: 12.")
    parser.add_argument("--repeats", type=int, default=7, help="Rounds. Default: 7.")
    parser.add_argument("--budget", type=float, default=15, help="Seconds after which a row has no more turns.")
    parser.add_argument("--longest", type=float, default=30, help="Seconds: see above. Default: 30.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda. Default: cpu.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--memory",
        type=float,
        default=decoder_speed.free_memory(),
        help="GiB to take at most on a CPU: rows that need more say so. Default: 85%% of what is free.",
    )
    parser.add_argument("--measure", choices=list(_BY_NAME), help=argparse.SUPPRESS)
    return parser


def main(call: list[str] | None = None) -> int:
    options = arguments().parse_args(call)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.device == "cpu":
        decoder_speed.limit_memory(options.memory)
    if options.measure:
        shape, grad = Shape(options.lengths[0], options.layers), options.passes == ["backward"]
        print(measure_memory(_BY_NAME[options.measure], options.what[0], shape, grad, options))
        return 0
    described = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "device": options.device,
        "dtype": options.dtype,
        "torch": torch.__version__,
        "layers": options.layers,
        "repeats": options.repeats,
    }
    path = options.output.with_suffix(".json")
    report = load(path, described)
    run(options, report, path)
    text = "\n\n".join([tables(report), "\n".join(f"* {note}" for note in notes(report))])
    options.output.with_suffix(".md").write_text(text + "\n")
    plot(report, options.output.with_suffix(".png"))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
