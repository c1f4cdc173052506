"""What a decoder of GPT-2's size costs: a token of decoding, its state, and a training step, softmax beside the rest.

    python scripts/benchmark/decoder_speed.py --output model_cards/gpt2-size/decode-and-train

writes JSON, Markdown tables and a plot, and prints the tables. Weights are random: nothing here depends on
them. Softmax is SDPA; its cache is Transformers' `DynamicCache`, filled with random keys and values, which
cost as much as computed ones. A training step is forward and backward of the language-modelling loss, each
setting in a fresh process. A smoke test that takes a minute:

    python scripts/benchmark/decoder_speed.py --output runs/smoke --layers 2 --positions 64 256 --max-length 1024 \\
        --repeats 2 --steps 2 --train-length 256
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.utils import logging

from common import write_report
from decoding import caches, state_bytes, step
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.utils.figures import SOFTMAX, STYLES, legend_below, length_axis
from measure import GIB, MIB, free_memory, limit_memory, process_peak

#: What is compared. None is softmax.
SETTINGS: dict[str, AttentionConfig | None] = {
    "softmax (SDPA)": None,
    "Linformer, k=256": LinformerConfig(projection="learned", projection_length=256),
    "Performer, m=256": PerformerConfig(num_features=256),
    "window 64 + Linformer, k=256": LinformerConfig(projection="learned", projection_length=256, window_size=64),
    "window 64 + Performer, m=64": PerformerConfig(num_features=64, window_size=64),
}


def load(name: str, length: int, layers: int) -> PreTrainedModel:
    """A model of GPT-2's size with random weights, room for `length` tokens, and the attention of one setting."""
    torch.manual_seed(0)
    config = SETTINGS[name]
    # no dropout: with it, SDPA on a CPU forms the whole matrix of probabilities
    options: dict[str, Any] = {"n_layer": layers, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    if config is None:
        return GPT2LMHeadModel(GPT2Config(n_positions=max(length, 1024), **options)).eval()
    return convert(GPT2LMHeadModel(GPT2Config(**options)), config, max_length=max(length, 1024))


@torch.no_grad()
def decode(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Seconds per token and bytes of state, by setting and position: medians of repeats that take turns."""
    names, positions = options.settings, sorted(options.positions)
    total = positions[-1] + (options.repeats + 1) * options.steps
    if total > options.max_length:
        raise SystemExit(f"--positions: {total:,} tokens in all are more than --max-length {options.max_length:,}.")
    ids = torch.randint(GPT2Config().vocab_size, (1, total), generator=torch.Generator().manual_seed(0))
    runs = []
    for name in tqdm(names, desc="Reading the prompt", unit="setting"):
        model = load(name, options.max_length, options.layers)
        for position, cache in zip(positions, caches(model, positions, ids, SETTINGS[name] is None), strict=True):
            runs.append((model, name, position, cache, state_bytes(cache), []))
    # the first round warms up; within a round each setting and position has its turn
    for turn in tqdm(range(options.repeats + 1), desc="Decoding", unit="round"):
        for model, _, position, cache, _, seconds in runs:
            begin = position + turn * options.steps
            start = time.perf_counter()
            for index in range(begin, begin + options.steps):
                step(model, ids[:, index : index + 1], cache)
            if turn:
                seconds.append((time.perf_counter() - start) / options.steps)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _, name, position, _, size, seconds in runs:
        median = statistics.median(seconds)
        results[name].append({"position": position, "seconds": median, "repeats": seconds, "state_bytes": size})
    return results


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run in a process of its own: seconds of each training step, and the largest memory of the process."""
    length = options.train_length
    model = load(name, length, options.layers).train()
    if options.checkpointing == ["with"]:
        model.gradient_checkpointing_enable()
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    short = ids[:, : min(256, length)]
    model(input_ids=short, labels=short, use_cache=False).loss.backward()
    seconds = []
    for _ in range(options.train_repeats):
        model.zero_grad()
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "repeats": seconds, "peak_bytes": process_peak()}


def train_in_new_process(name: str, checkpointing: str, options: argparse.Namespace) -> dict[str, Any]:
    """`train` in a fresh process, so that nothing that came before counts; what does not fit is said to."""
    call = [sys.executable, __file__, "--output", "unused", "--train", name, "--layers", str(options.layers)]
    call += ["--train-length", str(options.train_length), "--train-repeats", str(options.train_repeats)]
    call += ["--checkpointing", checkpointing, "--memory", str(options.memory)]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode == -signal.SIGKILL or "allocate memory" in done.stderr:
        return {"failed": f"over {options.memory:.0f} GiB"}
    raise SystemExit(done.stderr)


def decode_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """A row per setting: milliseconds and state at each position, and the last beside the first."""
    positions = [cell["position"] for cell in next(iter(results.values()))]
    ratio = f"{positions[-1]:,} : {positions[0]:,}"
    head = [f"ms at {position:,}" for position in positions] + [f"time, {ratio}"]
    head += [f"state at {position:,}, MiB" for position in positions] + [f"state, {ratio}"]
    lines = [f"| one token of decoding | {' | '.join(head)} |", "| --- |" + " --- |" * len(head)]
    for name, cells in results.items():
        row = [f"{cell['seconds'] * 1e3:.1f}" for cell in cells] + [f"{_growth(cells, 'seconds'):.2f}"]
        row += [f"{cell['state_bytes'] / MIB:.2f}" for cell in cells] + [f"{_growth(cells, 'state_bytes'):.2f}"]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def _growth(cells: list[dict[str, Any]], key: str) -> float:
    return cells[-1][key] / cells[0][key]


def train_table(results: dict[str, dict[str, dict[str, Any]]], length: int) -> str:
    """A row per setting: time and peak memory of a training step, without and with gradient checkpointing."""
    ways = list(next(iter(results.values())))
    columns = ("seconds", "softmax takes", "peak GiB")
    head = [column if way == "without" else f"checkpointing: {column}" for way in ways for column in columns]
    lines = [f"| training step of {length:,} tokens | {' | '.join(head)} |", "| --- |" + " --- |" * len(head)]
    softmax = next((cells for name, cells in results.items() if SETTINGS[name] is None), {})
    for name, cells in results.items():
        row = []
        for way in ways:
            cell, base = cells[way], softmax.get(way, {}).get("seconds")
            if "failed" in cell:
                row += ["", "", cell["failed"]]
                continue
            times = f"{base / cell['seconds']:.2f} times" if base and SETTINGS[name] is not None else ""
            row += [f"{cell['seconds']:.1f}", times, f"{cell['peak_bytes'] / GIB:.2f}"]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def plot(report: dict[str, Any]) -> Figure:
    """Decoding time and state by position, and time and memory of a training step."""
    names, decoding, training = report["settings"], report["decode"] or {}, report["train"] or {}
    rows = [draw for draw, results in ((_plot_decoding, decoding), (_plot_training, training)) if results]
    figure, panels = plt.subplots(len(rows), 2, figsize=(12, 4.8 * len(rows)), squeeze=False)
    styles = dict(zip(sorted(names, key=lambda name: SETTINGS[name] is not None), (SOFTMAX, *STYLES), strict=False))
    for draw, axes in zip(rows, panels, strict=True):
        draw(report, styles, axes)
    return figure


def _plot_decoding(report: dict[str, Any], styles: dict[str, dict[str, Any]], panels: Any) -> None:
    for axes, key, scale, label in (
        (panels[0], "seconds", 1e3, "decoding, ms per token"),
        (panels[1], "state_bytes", 1 / MIB, "state, MiB"),
    ):
        for name, cells in report["decode"].items():
            values = [cell[key] * scale for cell in cells]
            axes.plot([cell["position"] for cell in cells], values, label=name, **styles[name])
        length_axis(axes, report["positions"], "position")
        axes.set(yscale="log", ylabel=label)
    legend_below(panels[0])


def _plot_training(report: dict[str, Any], styles: dict[str, dict[str, Any]], panels: Any) -> None:
    training = report["train"]
    rows = list(training)[::-1]
    ways = list(training[rows[0]])
    for axes, key, scale, label in (
        (panels[0], "seconds", 1, f"training step of {report['train_length']:,} tokens, seconds"),
        (panels[1], "peak_bytes", 1 / GIB, "its peak memory (whole process), GiB"),
    ):
        for index, way in enumerate(ways):
            places = [row + 0.4 * (len(ways) / 2 - index - 0.5) for row in range(len(rows))]
            values = [training[name][way].get(key, 0) * scale for name in rows]
            hatch = "//" if way == "with" and len(ways) > 1 else ""
            bars = axes.barh(
                places, values, 0.38, color=[styles[name]["color"] for name in rows], alpha=0.8, hatch=hatch
            )
            labels = [f"{value:.1f}" if value else training[rows[i]][way]["failed"] for i, value in enumerate(values)]
            axes.bar_label(bars, labels, padding=3, fontsize=8)
        axes.set_yticks(range(len(rows)), rows)
        axes.margins(x=0.15)
        axes.set_xlabel(label + (" (hatched: with checkpointing)" if len(ways) > 1 else ""))
        axes.spines[["top", "right"]].set_visible(False)


def notes(options: argparse.Namespace) -> list[str]:
    """What was measured, in words."""
    made = [
        f"GPT-2's size ({options.layers} layers of 768, 12 heads), random weights, float32, batch 1, no dropout; "
        f"CPU, threads: {torch.get_num_threads()}."
    ]
    if not options.no_decode:
        made.append(
            f"Decoding: room for {options.max_length:,} tokens; language-modelling head included; medians of "
            f"{options.repeats} repeats of {options.steps} tokens, in which settings and positions take turns. "
            "Softmax's DynamicCache copies its keys and values at each token, as it does in generate()."
        )
    if not options.no_train:
        made.append(
            "Training: forward and backward of the language-modelling loss, "
            f"{' and '.join(options.checkpointing)} gradient checkpointing of each layer; median of "
            f"{options.train_repeats} steps, in a fresh process that may take {options.memory:.1f} GiB. Peak memory is "
            "that of the whole process: weights, gradients and the logits over 50,257 tokens too, which are the same "
            "for all."
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="Path without ending of the files to write.")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="Default: all.")
    parser.add_argument("--layers", type=int, default=12, help="Layers of the model. Default: 12.")
    parser.add_argument("--positions", type=int, nargs="+", default=[256, 16384], help="Default: 256 16384.")
    parser.add_argument("--max-length", type=int, default=32768, help="Tokens of room in decoding. Default: 32768.")
    parser.add_argument("--repeats", type=int, default=9, help="Repeats of decoding. Default: 9.")
    parser.add_argument("--steps", type=int, default=8, help="Tokens of each repeat. Default: 8.")
    parser.add_argument("--train-length", type=int, default=8192, help="Tokens of a training step. Default: 8192.")
    parser.add_argument("--train-repeats", type=int, default=1, help="Training steps. Default: 1.")
    parser.add_argument(
        "--checkpointing",
        nargs="+",
        choices=("without", "with"),
        default=["without", "with"],
        help="Whether to train with gradient checkpointing, which needs less memory. Default: both ways.",
    )
    parser.add_argument(
        "--memory",
        type=float,
        default=free_memory(),
        help="GiB that a training step may take; what takes more is not measured. Default: 85%% of what is free.",
    )
    parser.add_argument("--no-decode", action="store_true", help="Leave out the decoding.")
    parser.add_argument("--no-train", action="store_true", help="Leave out the training step.")
    parser.add_argument("--train", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.train:
        limit_memory(options.memory)
        print(json.dumps(train(options.train, options)))
        return 0

    trained: dict[str, dict[str, dict[str, Any]]] | None = None
    if not options.no_train:
        trained = {name: {} for name in options.settings}
        for name, way in tqdm([(n, w) for n in options.settings for w in options.checkpointing], desc="Training"):
            trained[name][way] = train_in_new_process(name, way, options)
    decoded = None if options.no_decode else decode(options)
    report = {
        "model": f"GPT-2's size, {options.layers} layers, random weights",
        "settings": options.settings,
        "positions": sorted(options.positions),
        "max_length": options.max_length,
        "train_length": options.train_length,
        "train_memory_gib": options.memory,
        "batch": 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "decode": decoded,
        "train": trained,
    }
    parts = [decode_table(decoded)] if decoded else []
    parts += [train_table(trained, options.train_length)] if trained else []
    text = "\n\n".join([*parts, "\n".join(f"* {note}" for note in notes(options))])
    write_report(options.output, report, text, plot(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
