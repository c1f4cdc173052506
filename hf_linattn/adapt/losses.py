"""Losses and metrics of two models' outputs, one number per sequence of a batch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def real_tokens(attention_mask: Tensor | None, like: Tensor) -> Tensor:
    """(batch, length) of ones at real tokens, in the dtype and on the device of `like` (batch, length, ...)."""
    if attention_mask is None:
        return like.new_ones(like.shape[:2])
    return attention_mask.to(like)


def relative_error(prediction: Tensor, target: Tensor, real: Tensor) -> Tensor:
    """|prediction - target|^2 / |target|^2 of (batch, length, ...), over the real tokens of each row: (batch,)."""
    prediction, target = prediction.float(), target.float()
    error, size = ((x.square().flatten(2).sum(-1) * real).sum(-1) for x in (prediction - target, target))
    return error / size.clamp_min(torch.finfo(torch.float32).tiny)


def mean_cosine(prediction: Tensor, target: Tensor, real: Tensor) -> Tensor:
    """Cosine of all features of a token, (batch, length, ...), averaged over the real tokens of each row: (batch,)."""
    cosine = F.cosine_similarity(prediction.float().flatten(2), target.float().flatten(2), dim=-1)
    return (cosine * real).sum(-1) / real.sum(-1).clamp_min(1)


def pooled(states: Tensor, real: Tensor, pooling: str) -> Tensor:
    """Embeddings (batch, dim) from hidden states (batch, length, dim); pooling is "mean" or "cls"."""
    states = states.float()
    if pooling == "cls":
        return states[:, 0]
    return (states * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp_min(1)


def divergence(prediction: Tensor, target: Tensor, real: Tensor, temperature: float) -> Tensor:
    """KL(target | prediction) of the next token, mean over the real tokens of each row: (batch,).

    Multiplied by the temperature's square, so that its gradient does not depend on it (Hinton et al. 2015,
    arXiv:1503.02531, section 2).

    Args:
        prediction: logits (batch, length, vocabulary).
        target: logits of the teacher, of the same shape.
        real: (batch, length) of ones at real tokens.
        temperature: divides the logits of both.
    """
    log_prediction, log_target = ((x.float() / temperature).log_softmax(-1) for x in (prediction, target))
    per_token = (log_target.exp() * (log_target - log_prediction)).sum(-1)
    return temperature**2 * (per_token * real).sum(-1) / real.sum(-1).clamp_min(1)
