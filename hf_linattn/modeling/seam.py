"""Where converted attention meets Transformers: one attention function and one mask function.

Every model with `_supports_attention_backend` looks both up by the name in `config._attn_implementation`.
The mask stays small. It is what `linattn_mask` returns:

    None                     nothing is padded
    (batch,) long            rows are padded at the end only; how many real tokens each has
    (batch, length) bool     True at real tokens, wherever they stand
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function

# One name per loaded copy of this code: a checkpoint pinned to older remote code keeps its own functions.
ATTENTION_NAME = f"linattn.{__package__}"


def linattn_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function: see the top of this file for what it returns.

    Raises:
        ValueError: the mask is not (batch, length), or the model asks for more than a padding mask.
    """
    if mask_function is not None and mask_function is not bidirectional_mask_function:
        raise ValueError(
            "A converted encoder takes padding masks only: causal, sliding-window and custom masks are not supported."
        )
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; a converted model takes (batch, length), "
            "since a mask per query and key would grow with the square of the length."
        )
    mask = attention_mask.bool()
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return mask
    # looked at once per forward pass, not once per layer
    if bool(mask.all()):
        return None
    if bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return mask.sum(-1)
    return mask


def linattn_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: the linear attention under `module`, or softmax where there is none.

    Args:
        query, key, value: (batch, heads, length, head_dim).
        attention_mask: as `linattn_mask` returns it.
        dropout: applied by softmax layers only; linear attention forms no probabilities to drop.

    Returns:
        (batch, length, heads, head_dim), and None for the probabilities.

    Raises:
        ValueError: the mask has one entry per query and key.
    """
    if attention_mask is not None and attention_mask.ndim > 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; a converted model takes (batch, length)."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    linear = getattr(module, "linattn", None)
    if linear is None:
        out = _softmax_attention(query, key, value, attention_mask, scaling, dropout)
    else:
        # half of the scale to each side: the methods then work with exp(q.k)
        out = _linear_attention(linear, query * scaling**0.5, key * scaling**0.5, value, attention_mask)
    # heads after positions, as Transformers' attention functions return them
    return out.transpose(1, 2).contiguous(), None


def _softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, dropout: float
) -> Tensor:
    """Layers that were not converted."""
    if mask is not None:
        if mask.ndim == 1:
            mask = torch.arange(key.shape[2], device=key.device) < mask[:, None]
        # a row without any key looks at all of them: finite, and nobody reads it
        mask = (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)


def _linear_attention(linear: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Rows are handed on with their real tokens first, so that blocks and segments do not depend on the padding."""
    # the methods choose their own precision, operation by operation
    with torch.autocast(device_type=query.device.type, enabled=False):
        key, value = key.to(query.dtype), value.to(query.dtype)
        if mask is None or mask.ndim == 1:
            return linear(query, key, value, mask)
        order = torch.argsort(~mask, dim=-1, stable=True)
        aligned = (_take(x, order) for x in (query, key, value))
        return _take(linear(*aligned, mask.sum(-1)), order.argsort(-1))


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x (batch, heads, length, dim) with each row's positions in the order (batch, length)."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    # indices on both sides of a slice put its dimension last: (batch, length, heads, dim), turned back
    return x[rows, :, order].transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, linattn_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, linattn_mask)
