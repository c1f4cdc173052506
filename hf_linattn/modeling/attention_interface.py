"""Where converted attention meets Transformers: one attention function and one mask function.

Every model with `_supports_attention_backend` looks both up by the name in `config._attn_implementation`.
The mask stays small. It is what `linattn_mask` returns, over all tokens that the layers have seen:

    None                     nothing is padded, or nothing that a layer has to know of
    (batch,) long            rows are padded at the end only; how many valid tokens each has
    (batch, length) bool     True at valid tokens, wherever they stand
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from .cache import LinAttnCacheLayer, cache_layer

# One name per loaded copy of this code: a checkpoint pinned to older remote code keeps its own functions.
ATTENTION_NAME = f"linattn.{__package__}"
# The keyword by which a decoder's body hands its cache down to the attention function: see `modeling_linattn`.
CACHE_KEYWORD = "linattn_cache"


def _codes(mask_function: Any) -> list[Any]:
    """The code of a mask function, and of those that Transformers' `and_masks` or `or_masks` has combined in it."""
    cells = getattr(mask_function, "__closure__", None) or ()
    parts = cells[0].cell_contents if cells else ()
    functions = [mask_function, *(parts if isinstance(parts, tuple) else ())]
    return [getattr(function, "__code__", None) for function in functions]


#: of masks with a sliding window of any size; the layers know the size, and get it with each call
_SLIDING = [
    _codes(make(1)) for make in (sliding_window_causal_mask_function, sliding_window_bidirectional_mask_function)
]


def linattn_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    kv_offset: int = 0,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function: see the top of this file for what it returns.

    Raises:
        ValueError: the mask is not (batch, length), or the model asks for more than a padding mask.
    """
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
    # while tracing, Transformers asks for a mask of packed sequences whether there are any or not
    plain = mask_function in (None, bidirectional_mask_function, causal_mask_function)
    if not tracing and not plain and _codes(mask_function) not in _SLIDING:
        raise ValueError(
            "A converted model takes padding masks only: custom masks and several documents packed "
            "into one row (position_ids that start again) are not supported. Give each document a row of its own."
        )
    if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
        raise ValueError(
            "This export would fix what depends on each text, such as how many blocks it has, and be wrong for others. "
            "Use torch.onnx.export(..., dynamo=True)."
        )
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; a converted model takes (batch, length), "
            "since a mask per query and key would grow with the square of the length."
        )
    # of tokens that left a sliding window, the cache has no keys
    mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if tracing:
        return mask
    # looked at once per forward pass, not once per layer
    if bool(mask.all()):
        return None
    if q_length == kv_length:
        return mask.sum(-1) if bool((mask[:, 1:] <= mask[:, :-1]).all()) else mask
    # what is padded among earlier tokens only softmax layers need to know
    settings = getattr(kwargs.get("config"), "linattn", {"layers": ()})
    return None if settings.get("layers") is None and bool(mask[:, -q_length:].all()) else mask


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
        query: (batch, heads, length, head_dim).
        key, value: the same, or with fewer heads that several query heads share.
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
    if groups := query.shape[1] // key.shape[1] - 1:
        # (batch, key heads, ...) -> (batch, heads, ...): each for the query heads that share it
        key, value = (x.repeat_interleave(groups + 1, dim=1) for x in (key, value))
    linear = getattr(module, "linattn", None)
    if linear is None:
        causal = getattr(module, "is_causal", False)
        window = kwargs.get("sliding_window")
        out = softmax_attention(
            query, key, value, attention_mask, scaling, dropout=dropout, causal=causal, window=window
        )
    else:
        dtype = value.dtype
        if getattr(module, "reorder_and_upcast_attn", False):
            query, key, value = query.float(), key.float(), value.float()
        cache = cache_layer(kwargs.get(CACHE_KEYWORD), module)
        out = _linear_attention(linear, query, key, value, attention_mask, scaling, cache).to(dtype)
    # heads after positions, as Transformers' attention functions return them
    return out.transpose(1, 2).contiguous(), None


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    *,
    dropout: float = 0.0,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Layers that were not converted, and cross-attention: same shape as the query.

    Args:
        query, key, value: (batch, heads, length, dim).
        mask: as `linattn_mask` returns it.
        scaling: factor of the logits.
        dropout: probability, of attention weights.
        causal: whether a token sees itself and earlier ones only.
        window: of a sliding window, how far apart tokens do not see each other.
    """
    length, seen = query.shape[2], key.shape[2]
    causal = causal and length > 1
    if mask is not None:
        if mask.ndim == 1:
            mask = torch.arange(seen, device=key.device) < mask[:, None]
        mask = mask[:, None, None, :]
    if window is not None and window < seen:
        if length == seen and length > 2 * window:
            return _attention_in_blocks(query, key, value, mask, scaling, dropout, causal, window)
        near = _near(torch.arange(seen - length, seen, device=key.device), seen, causal, window)
        mask, causal = near if mask is None else mask & near, False
    elif causal and (mask is not None or length != seen):
        position = torch.arange(seen, device=key.device)
        earlier = position <= position[seen - length :, None]
        mask, causal = earlier if mask is None else mask & earlier, False
    nothing = None
    if mask is not None:
        # a query without any key looks at all of them, which is finite, and its output is dropped: a decoder reads it
        # in cross-attention to a row of padding
        nothing = ~mask.any(-1, keepdim=True)
        mask = mask | nothing
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling
    )
    return out if nothing is None else out.masked_fill(nothing, 0.0)


def _near(position: Tensor, seen: int, causal: bool, window: int) -> Tensor:
    """(queries, keys) bool: which of `seen` keys are in the sliding window of queries at these positions."""
    distance = position[:, None] - torch.arange(seen, device=position.device)
    return (distance < window) & (distance >= 0 if causal else distance > -window)


def _attention_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    causal: bool,
    window: int,
) -> Tensor:
    """A sliding window over a long row: each block of `window` queries with the block before, and after if not causal.

    Memory and time grow linearly with the length.
    """
    batch, length = query.shape[0], query.shape[2]
    blocks, after = -(-length // window), 0 if causal else window
    end = blocks * window - length
    span = 2 * window + after

    def queries(x: Tensor) -> Tensor:
        # (batch, heads, length, dim) -> (batch * blocks, heads, window, dim)
        x = F.pad(x, (0, 0, 0, end)).unflatten(2, (blocks, window))
        return x.transpose(1, 2).flatten(0, 1)

    def keys(x: Tensor) -> Tensor:
        # (batch, heads, length, dim) -> (batch * blocks, heads, span, dim)
        x = F.pad(x, (0, 0, window, end + after)).unfold(2, span, window)
        return x.permute(0, 2, 1, 4, 3).flatten(0, 1)

    real = torch.ones(1, length, dtype=torch.bool, device=key.device) if mask is None else mask[:, 0, 0]
    real = F.pad(real, (window, end + after)).unfold(1, span, window)
    near = _near(torch.arange(window, 2 * window, device=key.device), span, causal, window)
    # (batch or 1, blocks, window, span)
    seen = near & real[:, :, None, :]
    seen = (seen | ~seen.any(-1, keepdim=True)).expand(batch, -1, -1, -1).flatten(0, 1)
    out = F.scaled_dot_product_attention(
        queries(query), keys(key), keys(value), attn_mask=seen[:, None], dropout_p=dropout, scale=scaling
    )
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _linear_attention(
    linear: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    cache: LinAttnCacheLayer | None,
) -> Tensor:
    """Rows are handed on with their valid tokens first, so that blocks and segments do not depend on the padding."""
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{key.shape[2]} keys for {query.shape[2]} queries: a converted layer attends to the tokens that it is "
            "given, and to earlier ones through the state in a cache that the model itself made or prepared."
        )
    if torch.jit.is_tracing() and not torch.compiler.is_compiling():
        _check_trace(linear)
    # the methods choose their own precision, operation by operation
    with torch.autocast(device_type=query.device.type, enabled=False):
        key, value = key.to(query.dtype), value.to(query.dtype)
        if mask is None or mask.ndim == 1:
            return linear(query, key, value, mask, cache, scale=scaling)
        # of a mask over all tokens so far, the new ones
        mask = mask[:, -query.shape[2] :]
        # where each token goes, valid ones first and all in their order; a stable sort, which ONNX does not have
        valid = mask.cumsum(-1)
        rank = torch.where(mask, valid, valid[:, -1:] + (~mask).cumsum(-1)) - 1
        position = torch.arange(rank.shape[-1], device=rank.device).expand_as(rank)
        order = torch.zeros_like(rank).scatter(-1, rank, position)
        aligned = (_take(x, order) for x in (query, key, value))
        return _take(linear(*aligned, valid[:, -1], cache, scale=scaling), rank)


def _check_trace(linear: Any) -> None:
    """Whether a trace of a layer is right for inputs of other lengths than the traced one.

    Raises:
        ValueError: it is not; the message names the reason.
    """
    config = linear.config
    if linear.causal:
        reason = "how a decoder cuts a text into blocks"
    elif config.window_size:
        reason = f"how many blocks window_size={config.window_size} makes of a text"
    elif config.exact_length:
        reason = f"which rows exact_length={config.exact_length} makes exact"
    elif getattr(config, "tokens_per_slot", None):
        reason = f"how many slots tokens_per_slot={config.tokens_per_slot} makes of a text"
    else:
        return
    raise ValueError(
        f"torch.jit.trace would fix {reason}, and fail or be wrong for texts of other lengths. Use torch.compile, or "
        "torch.export and torch.onnx.export(..., dynamo=True); an encoder without window_size, exact_length and "
        "tokens_per_slot can be traced."
    )


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x (batch, heads, length, dim) with each row's positions in the order (batch, length)."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    # indices on both sides of a slice put its dimension last: (batch, length, heads, dim), turned back
    return x[rows, :, order].transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, linattn_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, linattn_mask)
