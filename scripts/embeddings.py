"""Mean-pooled embeddings of documents, as several of these scripts compare them."""

from typing import Any

import numpy as np
import torch


@torch.no_grad()
def embeddings(model: Any, documents: list[list[int]]) -> torch.Tensor:
    """Mean-pooled embedding of each document, given as token ids: (documents, dim), float64."""
    return torch.stack([model(torch.tensor([ids])).last_hidden_state[0].double().mean(0) for ids in documents])


def mean(cosines: np.ndarray) -> float:
    """The metric of a bootstrap over documents."""
    return float(np.mean(cosines))
