"""What the direct swap costs, with no training: pooled embeddings of a converted MiniLM beside the original's.

    python scripts/experiments/direct_swap.py --output model_cards/minilm-l6/direct-swap \
        --texts topics NEWS.jsonl --lengths 512 2048 4096 --calibration NOVELS.jsonl --passkeys 240

writes a table as JSON and Markdown and a plot, and prints the table. For each length, kind of text and setting: the
mean cosine of the pooled embedding to the original's, with a bootstrap interval over documents and seeds, and the rank
correlation of the similarities of all pairs. Beyond 512 tokens the original repeats its positions. `exact_length`
is 0: what is measured is linear attention at every length. Moments are matched on calibration texts, none of which
is measured. The passkey probe (accuracy of a linear probe on the first token's state, 512 tokens) is measured for the
settings that have a window. What is measured is kept as it comes: the same command goes on where an interrupted one
ended, and measures settings that are new.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from common import (
    earlier_report,
    embeddings,
    experiment_parser,
    keep_report,
    mean,
    minilm_folder,
    texts_of,
    token_ids,
    write_report,
)
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.conversion.positions import extend_positions
from hf_linattn.data import DataConfig
from hf_linattn.evaluate import CompareConfig, TaskConfig, compare
from hf_linattn.evaluate.intervals import bootstrap_interval
from hf_linattn.utils.figures import REFERENCE, draw_intervals, legend_below
from hf_linattn.utils.markdown import interval_text, table

JOINED = {"window_size": 64, "global_tokens": 1, "exact_length": 0}
MOMENTS = {"init": "moments", "exact_length": 0}
ROW_MOMENTS = {"init": "row_moments", "exact_length": 0}


def _means(length: int, **settings: Any) -> LinformerConfig:
    return LinformerConfig(projection_length=length, projection="mean", **settings)


def _clusters(length: int, **settings: Any) -> LinformerConfig:
    return LinformerConfig(projection_length=length, projection="cluster", **settings)


#: What is compared. Only random features differ from seed to seed.
SETTINGS: dict[str, AttentionConfig] = {
    "Linformer, 64 segment means": _means(64),
    "Linformer, 128 segment means": _means(128),
    "Linformer, 256 segment means": _means(256),
    "Linformer, 64 clusters": _clusters(64),
    "Linformer, 128 clusters": _clusters(128),
    "Linformer, 256 clusters": _clusters(256),
    "Linformer, 128 clusters, 2 rounds": _clusters(128, rounds=2),
    "Performer, FAVOR+, m=128": PerformerConfig(num_features=128),
    "Performer, moments, m=128": PerformerConfig(num_features=128, **MOMENTS),
    "Performer, moments, hyperbolic, m=128": PerformerConfig(num_features=128, feature_map="hyperbolic", **MOMENTS),
    "Performer, row moments, m=128": PerformerConfig(num_features=128, **ROW_MOMENTS),
    "Performer, row moments, hyperbolic, m=128": PerformerConfig(
        num_features=128, feature_map="hyperbolic", **ROW_MOMENTS
    ),
    "Performer, FAVOR+, m=256": PerformerConfig(num_features=256),
    "Performer, moments, m=256": PerformerConfig(num_features=256, **MOMENTS),
    "Performer, moments, hyperbolic, m=256": PerformerConfig(num_features=256, feature_map="hyperbolic", **MOMENTS),
    "Performer, row moments, m=256": PerformerConfig(num_features=256, **ROW_MOMENTS),
    "Performer, row moments, hyperbolic, m=256": PerformerConfig(
        num_features=256, feature_map="hyperbolic", **ROW_MOMENTS
    ),
    "window 64 + first token": LinformerConfig(far=False, **JOINED),
    "window 64 + first token + 64 segment means": _means(64, **JOINED),
    "window 64 + first token + 64 segment means, one direction": _means(64, global_queries=False, **JOINED),
    "window 64 + first token + 64 clusters": _clusters(64, **JOINED),
    "window 64 + first token + 64 clusters, one direction": _clusters(64, global_queries=False, **JOINED),
    "64 clusters of far tokens only (window off)": _clusters(64, near=False, **JOINED),
    "window 64 + first token + 128 clusters": _clusters(128, **JOINED),
    "window 64 + first token + 64 clusters + 128 selected tokens": _clusters(64, selected_tokens=128, **JOINED),
    "window 64 + first token + 128 clusters + 128 selected tokens": _clusters(128, selected_tokens=128, **JOINED),
    "window 64 + first token + FAVOR+, m=128": PerformerConfig(num_features=128, **JOINED),
    "window 64 + first token + moments, m=128": PerformerConfig(num_features=128, init="moments", **JOINED),
    "window 64 + first token + moments, hyperbolic, m=128": PerformerConfig(
        num_features=128, feature_map="hyperbolic", init="moments", **JOINED
    ),
    "window 64 + first token + row moments, m=128": PerformerConfig(num_features=128, init="row_moments", **JOINED),
    "window 64 + first token + row moments, hyperbolic, m=128": PerformerConfig(
        num_features=128, feature_map="hyperbolic", init="row_moments", **JOINED
    ),
}


@dataclass(frozen=True)
class Row:
    """One setting on one kind of text of one length; cosines are means over documents and seeds."""

    setting: str
    texts: str
    length: int
    documents: int
    seeds: int
    cosine: float
    low: float
    high: float
    rank_correlation: float


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's correlation of the two sets' cosine similarities between all pairs of documents."""
    pairs = np.triu_indices(len(first), k=1)
    ranks = [(x @ x.T)[pairs].argsort().argsort() for x in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def _normalized(model: Any, documents: list[list[int]]) -> np.ndarray:
    return torch.nn.functional.normalize(embeddings(model, documents), dim=-1).numpy()


def rows_of_length(
    length: int,
    documents: dict[str, list[list[int]]],
    base: Any,
    tokenizer: Any,
    calibration: list[str],
    seeds: int,
    names: list[str],
) -> Iterator[list[Row]]:
    """The settings of these names on documents (kind -> token ids) of one length."""
    original = {kind: _normalized(extend_positions(base, length), ids) for kind, ids in documents.items()}
    for name in tqdm(names, desc=f"{length} tokens", unit="setting"):
        config = SETTINGS[name]
        random = isinstance(config, PerformerConfig) and config.far
        found: dict[str, list[np.ndarray]] = {kind: [] for kind in documents}
        for seed in range(seeds if random else 1):
            texts = calibration if getattr(config, "init", "") == "moments" else None
            model = convert(
                base, config, seed=seed, max_length=max(length, 512), calibration_texts=texts, tokenizer=tokenizer
            )
            for kind, ids in documents.items():
                found[kind].append(_normalized(model, ids))
        rows = []
        for kind, outputs in found.items():
            cosines = [((original[kind] * output).sum(1),) for output in outputs]
            its = bootstrap_interval(mean, cosines)
            correlation = float(np.mean([rank_correlation(original[kind], output) for output in outputs]))
            rows.append(
                Row(name, kind, length, len(original[kind]), len(outputs), its.value, its.low, its.high, correlation)
            )
        yield rows


def passkeys(
    folder: str, examples: int, calibration: list[str], tokenizer: Any, names: list[str]
) -> dict[str, dict[str, float]]:
    """Accuracy of the passkey probe at 512 tokens of softmax and of these settings, with its interval."""
    base = AutoModel.from_pretrained(folder).eval()
    with TemporaryDirectory() as place:
        converted: dict[str, str] = {}
        for name in names:
            config = SETTINGS[name]
            texts = calibration if getattr(config, "init", "") == "moments" else None
            path = Path(place) / str(len(converted))
            convert(base, config, calibration_texts=texts, tokenizer=tokenizer).save_pretrained(path)
            tokenizer.save_pretrained(path)
            converted[name] = str(path)
        report = compare(
            folder,
            converted,
            "passkey-probe",
            Path(place) / "report",
            data=DataConfig(dataset="topics"),
            task_config=TaskConfig(lengths=[512], examples=examples),
            config=CompareConfig(branches=False, chunks=False),
        )
    return {cell["column"]: cell["metrics"]["accuracy"] for cell in report["tasks"][0]["cells"]}


def markdown(rows: list[Row], keys: dict[str, Any]) -> str:
    """A table for each length: a row per setting, a column per kind of text."""
    parts = []
    for length in sorted({row.length for row in rows}):
        kinds = list(dict.fromkeys(row.texts for row in rows if row.length == length))
        head = ["direct swap", *(f"{kind}, cosine" for kind in kinds), *(f"{kind}, rank corr." for kind in kinds)]
        body = []
        for name in SETTINGS:
            cells = [row for row in rows if row.length == length and row.setting == name]
            cosines = [interval_text(cell.cosine, cell.low, cell.high, "{:.3f}") for cell in cells]
            body.append([name, *cosines, *(f"{cell.rank_correlation:.2f}" for cell in cells)])
        parts.append(f"### {length} tokens\n\n{table(head, body)}")
    if keys:
        # softmax first
        order = [*(name for name in keys if name not in SETTINGS), *(name for name in SETTINGS if name in keys)]
        body = [[n, interval_text(keys[n]["value"], keys[n]["low"], keys[n]["high"], "{:.2f}")] for n in order]
        parts.append(f"### Passkey probe, 512 tokens (chance 0.10)\n\n{table(['model', 'accuracy'], body)}")
    return "\n\n".join(parts)


def plot(rows: list[Row]) -> Figure:
    """How near is the pooled embedding to the original's? A column per length; a row without and one with a window."""
    lengths, kinds = sorted({row.length for row in rows}), list(dict.fromkeys(row.texts for row in rows))
    parts = [[n for n, config in SETTINGS.items() if bool(config.window_size) == window] for window in (False, True)]
    figure, panels = plt.subplots(
        len(parts),
        len(lengths),
        sharex="row",
        sharey="row",
        squeeze=False,
        figsize=(4 + 3.4 * len(lengths), 0.38 * len(SETTINGS) + 2.4),
        height_ratios=[len(part) for part in parts],
    )
    for line, names in zip(panels, parts, strict=True):
        for axes, length in zip(line, lengths, strict=True):
            cells = {(r.setting, r.texts): (r.cosine, r.low, r.high) for r in rows if r.length == length}
            draw_intervals(axes, names, {kind: [cells.get((n, kind)) for n in names] for kind in kinds}, rows=True)
            axes.axvline(1, label="softmax", **REFERENCE)
    for axes, length in zip(panels[0], lengths, strict=True):
        axes.set_title(f"{length:,} tokens")
    for axes in panels[-1]:
        axes.set_xlabel("cosine of the pooled embedding")
    legend_below(panels[-1][len(lengths) // 2], columns=len(kinds) + 1)
    return figure


def main() -> int:
    parser = experiment_parser(__doc__)
    parser.add_argument(
        "--texts", nargs="+", default=["topics"], help="Files or datasets to measure on. Default: topics."
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[512], help="Tokens of each document. Default: 512.")
    parser.add_argument("--documents", nargs="+", type=int, default=[24, 8, 4], help="Documents at each length.")
    parser.add_argument(
        "--calibration", help="File of texts that moments are matched on. Default: Python's help texts."
    )
    parser.add_argument("--seeds", type=int, default=3, help="Seeds of random features. Default: 3.")
    parser.add_argument("--passkeys", type=int, default=0, help="Examples of the passkey probe. Default: none.")
    options = parser.parse_args()
    if len(options.documents) < len(options.lengths):
        parser.error(f"--documents has {len(options.documents)} numbers for {len(options.lengths)} lengths")
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    folder = minilm_folder()
    base, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    # more of a novel than is read need not be tokenized
    calibration = [text[:20_000] for text in texts_of(options.calibration or "topics", 32)]
    report: dict[str, Any] = {
        "model": "all-MiniLM-L6-v2",
        "texts": [Path(name).name for name in options.texts],
        "calibration": Path(options.calibration or "topics").name,
        "training": "none",
        "seeds": options.seeds,
        "torch": torch.__version__,
        "passkey_examples": options.passkeys,
    }
    earlier = earlier_report(options.output, report)
    rows = [Row(**row) for row in earlier.get("rows", []) if row["setting"] in SETTINGS]
    keys = report["passkey_probe"] = earlier.get("passkey_probe", {})
    for length, count in zip(options.lengths, options.documents, strict=False):
        documents = token_ids(options.texts, tokenizer, length, count)
        documents = {kind: [ids for ids in listed if len(ids) == length] for kind, listed in documents.items()}
        documents = {kind: listed for kind, listed in documents.items() if len(listed) >= 2}
        known = {row.setting for row in rows if row.length == length}
        names = [name for name in SETTINGS if name not in known]
        for new in rows_of_length(length, documents, base, tokenizer, calibration, options.seeds, names):
            rows += new
            keep_report(options.output, {**report, "rows": [asdict(row) for row in rows]})
    names = [name for name, config in SETTINGS.items() if config.window_size and config.near and name not in keys]
    if options.passkeys and names:
        keys |= passkeys(folder, options.passkeys, calibration, tokenizer, names)
    report["rows"] = [asdict(row) for row in rows]
    write_report(options.output, report, markdown(rows, keys), plot(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
