"""Mean-pooled embeddings of documents, as several of these scripts compare them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch


def token_ids(texts: list[str], tokenizer: Any, length: int, count: int) -> dict[str, list[list[int]]]:
    """Of each file or dataset `count` documents, cut to `length` tokens, by its name without folder and ending."""
    # here and not above: the folder of this file has a script that hides the library `evaluate`, which these import
    from hf_linattn.analyze.analysis import tokenized
    from hf_linattn.data.documents import DataConfig, load_documents

    sets = {}
    for name in texts:
        documents = [document.text for document in load_documents(DataConfig(dataset=name)).documents]
        sets[Path(name).name.partition(".")[0]] = tokenized(documents, tokenizer, length, count)
    return sets


@torch.no_grad()
def embeddings(model: Any, documents: list[list[int]]) -> torch.Tensor:
    """Mean-pooled embedding of each document, given as token ids: (documents, dim), float64."""
    return torch.stack([model(torch.tensor([ids])).last_hidden_state[0].double().mean(0) for ids in documents])


def mean(cosines: np.ndarray) -> float:
    """The metric of a bootstrap over documents."""
    return float(np.mean(cosines))
