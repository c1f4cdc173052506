"""Sums over all earlier keys by the kernels of flash-linear-attention: on a CUDA device, where it is installed.

Sums on the scale of a running maximum per feature, M_i = max_{j <= i} log2 phi(k_j), are gated linear attention (Yang
et al. 2024, arXiv:2312.06635, section 4.1),

    S_i = diag(2 ** (M_(i-1) - M_i)) S_(i-1) + (phi(k_i) 2 ** -M_i) [v_i, 1]^T,

whose gates are at most 1 and whose keys at most 1. The kernels work in float32 with products as the device has them
(TF32, say). What they compute, `far_performer` computes without them.
"""

import importlib.util
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .feature_maps import Features
from .feature_sums import expand, expand_to_one
from .merge import NEVER, Partial, finite, masked


@cache
def _installed() -> bool:
    return importlib.util.find_spec("fla") is not None and importlib.util.find_spec("triton") is not None


def kernels_for(x: Tensor, dtype: torch.dtype, signed: bool) -> bool:
    """Whether the kernels can be used: not for features that may be negative, whose mass needs a floor."""
    return x.is_cuda and dtype == torch.float32 and not signed and _installed()


def _gated_linear_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    # not above: it compiles kernels, and most have no use for them; and in `try`, or trust_remote_code demands it
    try:
        from fla.ops.gla import chunk_gla
    except ImportError as error:
        raise ImportError("flash-linear-attention is installed without fla.ops.gla.chunk_gla.") from error
    return chunk_gla(*args, **kwargs)


def gated_part(
    query: Features, key: Features, value_and_one: Tensor, valid: Tensor | None, sums: Tensor, shift: Tensor
) -> tuple[Partial, Tensor, Tensor]:
    """What queries read of all keys up to their own, and the sums after the last.

    Args:
        query, key: features (batch, heads, length, M or 1). They may be written over.
        value_and_one: (batch, heads, length, value_dim + 1).
        valid: (batch, length) bool, which keys exist. None for all.
        sums, shift: of earlier keys, (batch, heads, M, value_dim + 1) and (batch, heads, 1, M or 1).
    """
    log2_key = key.log2_phi if valid is None else masked(key.log2_phi, ~valid[:, None, :, None])
    # before the first token and after each: (batch, heads, length + 1, M or 1)
    shifts = torch.cat((shift, log2_key.detach()), dim=2).cummax(2).values
    before, after = shifts[:, :, :-1], finite(shifts[:, :, 1:])
    # natural logs; where nothing came before there is nothing to keep, and any gate will do
    gate = ((before - after) * math.log(2)).masked_fill(before == NEVER, 0.0)
    phi_key = expand(Features(log2_key, key.factor), -after)
    phi_query, read_shift = expand_to_one(query, after)

    def tokens_first(x: Tensor) -> Tensor:
        # heads and positions change places: (batch, length, heads, dim)
        return x.transpose(1, 2).contiguous()

    total, sums = _gated_linear_attention(
        tokens_first(phi_query),
        tokens_first(phi_key),
        tokens_first(value_and_one),
        tokens_first(gate.expand_as(phi_key)),
        scale=1.0,
        initial_state=sums.contiguous(),
        output_final_state=True,
    )
    none = shifts[:, :, 1:, :1] == NEVER
    return Partial(read_shift.masked_fill(none, NEVER), total.transpose(1, 2)), sums, shifts[:, :, -1:].clone()
