"""What the swap alone costs, with no training: pooled embeddings of a converted MiniLM beside the original's.

    python scripts/experiments/direct_swap.py --output model_cards/minilm-l6/direct-swap

writes a table as JSON and Markdown and a plot, and prints the table.
"""

import sys
from dataclasses import asdict, dataclass

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from common import experiment_parser, minilm_folder, topic_documents, write_report
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert

MEANS = {"projection": "mean"}
JOINED = {"window_size": 64, "global_tokens": 1}
#: What is compared. Linformer by segment means has nothing random: one seed is enough.
SETTINGS: dict[str, AttentionConfig] = {
    "FAVOR+, m=64": PerformerConfig(num_features=64),
    "FAVOR+, m=256": PerformerConfig(num_features=256),
    "Linformer by segment means, k=64": LinformerConfig(projection_length=64, **MEANS),
    "Linformer by segment means, k=128": LinformerConfig(projection_length=128, **MEANS),
    "window 32 + first token": LinformerConfig(window_size=32, global_tokens=1, far=False),
    "window 32 + first token + 64 segment means": LinformerConfig(
        projection_length=64, window_size=32, global_tokens=1, **MEANS
    ),
    "window 64 + first token": LinformerConfig(**JOINED, far=False),
    "window 64 + first token + 64 segment means": LinformerConfig(projection_length=64, **MEANS, **JOINED),
    "64 segment means of far tokens only (window off)": LinformerConfig(
        projection_length=64, **MEANS, **JOINED, near=False
    ),
    "window 64 + FAVOR+, m=256": PerformerConfig(num_features=256, window_size=64),
    "window 64 + first token + FAVOR+, m=256": PerformerConfig(num_features=256, **JOINED),
    "window 64 + first token + hyperbolic, m=256": PerformerConfig(
        num_features=256, feature_map="hyperbolic", **JOINED
    ),
    "FAVOR+ of far tokens only, m=256 (window off)": PerformerConfig(num_features=256, **JOINED, near=False),
}


@dataclass(frozen=True)
class Row:
    """One setting: means over documents and seeds, and the spread of the cosine over seeds."""

    setting: str
    cosine: float
    cosine_min: float
    cosine_max: float
    rank_correlation: float


@torch.no_grad()
def pooled(model: PreTrainedModel, documents: Tensor) -> Tensor:
    """Mean-pooled, normalised embeddings (documents, dim) of documents (documents, length) without padding."""
    states = [model(input_ids=batch).last_hidden_state.mean(1) for batch in documents.split(8)]
    return F.normalize(torch.cat(states), dim=-1)


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's correlation of the two sets' cosine similarities between all pairs of documents."""
    pairs = torch.triu_indices(len(first), len(first), offset=1)
    ranks = [(x @ x.T)[pairs[0], pairs[1]].argsort().argsort().double() for x in (first, second)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()


def measure(name: str, config: AttentionConfig, base: PreTrainedModel, documents: Tensor, seeds: int) -> Row:
    """Compare one setting with the base model."""
    original = pooled(base, documents)
    random = isinstance(config, PerformerConfig) and config.far
    embeddings = [pooled(convert(base, config, seed=seed), documents) for seed in range(seeds if random else 1)]
    cosines = [(original * embedding).sum(-1).mean().item() for embedding in embeddings]
    correlations = [rank_correlation(original, embedding) for embedding in embeddings]
    mean = sum(cosines) / len(cosines)
    return Row(name, mean, min(cosines), max(cosines), sum(correlations) / len(correlations))


def markdown(rows: list[Row]) -> str:
    """The rows as a table; a range where there were several seeds."""
    lines = ["| swap | cosine | over seeds | rank corr. |", "| --- | --- | --- | --- |"]
    for row in rows:
        spread = "" if row.cosine_min == row.cosine_max else f"{row.cosine_min:.3f} to {row.cosine_max:.3f}"
        lines.append(f"| {row.setting} | {row.cosine:.3f} | {spread} | {row.rank_correlation:.2f} |")
    return "\n".join(lines)


def plot(rows: list[Row]) -> Figure:
    """A bar per setting, with the range over seeds."""
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.2))
    rows = rows[::-1]
    cosines = [row.cosine for row in rows]
    spread = [[row.cosine - row.cosine_min for row in rows], [row.cosine_max - row.cosine for row in rows]]
    axes.barh([row.setting for row in rows], cosines, xerr=spread, color="#4c72b0", ecolor="black", capsize=3)
    for position, cosine in enumerate(cosines):
        axes.text(0.01, position, f"{cosine:.3f}", va="center", color="white", fontsize=9)
    axes.set_xlim(0, 1)
    axes.set_xlabel("cosine of the pooled embedding to the original's (no training)")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> int:
    parser = experiment_parser(__doc__)
    parser.add_argument("--documents", type=int, default=24, help="Number of documents. Default: 24.")
    parser.add_argument("--length", type=int, default=512, help="Tokens of each. Default: 512.")
    parser.add_argument("--seeds", type=int, default=3, help="Seeds of random features. Default: 3.")
    options = parser.parse_args()
    logging.disable_progress_bar()

    folder = minilm_folder()
    base = AutoModel.from_pretrained(folder).eval()
    documents = torch.tensor(topic_documents(AutoTokenizer.from_pretrained(folder), options.documents, options.length))
    rows = [measure(*item, base, documents, options.seeds) for item in tqdm(SETTINGS.items(), unit="setting")]

    report = {
        "model": "all-MiniLM-L6-v2",
        "data": f"the {options.documents} longest topics of pydoc_data, first {options.length} tokens",
        "training": "none",
        "seeds": options.seeds,
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    write_report(options.output, report, markdown(rows), plot(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
