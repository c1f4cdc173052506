"""k-means over the keys of a head: where prototypes start."""

import torch
from torch import Tensor

from ..modeling.far_clusters import nearest

#: Rounds of Lloyd's algorithm, and keys of a head that take part.
ROUNDS, MAX_KEYS = 10, 32_768


@torch.no_grad()
def cluster_centers(key: Tensor, count: int) -> Tensor:
    """Centers of `count` clusters of keys (heads, tokens, dim), found by k-means: (heads, count, dim).

    It starts from equally spaced keys. A cluster without members keeps its center.
    """
    step = -(-key.shape[1] // MAX_KEYS)
    key = key[:, ::step].float()
    tokens = key.shape[1]
    centers = key[:, torch.arange(count) * tokens // count]
    for _ in range(ROUNDS):
        slot = nearest(key.unsqueeze(0), centers)[0].squeeze(0)
        index = slot.unsqueeze(-1).expand_as(key)
        sums = torch.zeros_like(centers).scatter_add(1, index, key)
        counts = torch.zeros_like(centers[..., 0]).scatter_add(1, slot, torch.ones_like(key[..., 0]))
        centers = torch.where(counts[..., None] > 0, sums / counts[..., None].clamp_min(1), centers)
    return centers
