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
        slot = nearest(key.unsqueeze(0), centers).squeeze(0)
        index = slot.unsqueeze(-1).expand_as(key)
        sums = torch.zeros_like(centers).scatter_add(1, index, key)
        counts = torch.zeros_like(centers[..., 0]).scatter_add(1, slot, torch.ones_like(key[..., 0]))
        centers = torch.where(counts[..., None] > 0, sums / counts[..., None].clamp_min(1), centers)
    return centers


@torch.no_grad()
def logit_variances(query: Tensor, key: Tensor, centers: Tensor) -> Tensor:
    """Variance over each cluster's members of the logit q.k, a mean over the queries: (heads, count).

    Args:
        query: (heads, tokens, dim), times the softmax scale.
        key: (heads, tokens, dim).
        centers: (heads, count, dim).
    """
    query, key = query.float(), key.float()
    moment = query.transpose(-1, -2) @ query / query.shape[1]
    slot = nearest(key.unsqueeze(0), centers).squeeze(0)
    offset = key - centers.gather(1, slot.unsqueeze(-1).expand_as(key))
    square = ((offset @ moment) * offset).sum(-1)
    sums, counts = torch.zeros_like(centers[..., 0]), torch.zeros_like(centers[..., 0])
    sums.scatter_add_(1, slot, square)
    counts.scatter_add_(1, slot, torch.ones_like(square))
    return sums / counts.clamp_min(1)
