"""Floating-point operations of matrix products: of softmax and of converted attention, and of linear layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..modeling.architectures import ARCHITECTURES
from ..modeling.configuration_linattn import AttentionConfig, LinAttnConfig
from ..modeling.modeling_linattn import head_dim, linear_attention, sliding_layers
from ..utils.hooks import hooked


def softmax_flops(config: Any, length: int, window: int | None = None) -> float:
    """Operations of one softmax layer: q.k and weights times v, two for a multiply-add; half of it if causal.

    With a sliding window, a token sees `window` keys on each side that it sees.
    """
    causal = ARCHITECTURES[config.base_model_type].causal
    seen = length / 2 if causal else length
    if window is not None:
        seen = min(seen, window if causal else 2 * window)
    return 4.0 * length * seen * config.num_attention_heads * head_dim(config)


def base_flops(config: LinAttnConfig, length: int) -> float:
    """Operations of all layers as they were before the conversion."""
    sliding = len(sliding_layers(config))
    full = config.num_hidden_layers - sliding
    return full * softmax_flops(config, length) + (
        sliding * softmax_flops(config, length, config.sliding_window) if sliding else 0.0
    )


def linear_flops(settings: AttentionConfig, config: LinAttnConfig, length: int, softmax_heads: int = 0) -> float:
    """Operations of one converted layer, counted while it runs on tensors without storage.

    Those of its heads that stay softmax are counted as such.
    """
    # heads cost the same each
    share = softmax_heads / config.num_attention_heads
    settings = dataclasses.replace(settings, softmax_heads=None)
    with torch.device("meta"), torch.no_grad():
        module = linear_attention(settings, config, 0)
        x: Tensor = torch.empty(1, config.num_attention_heads, length, head_dim(config))
        with FlopCounterMode(display=False) as counter:
            module(x, x, x)
    return (1 - share) * counter.get_total_flops() + (share and share * softmax_flops(config, length))


def attention_flops(config: LinAttnConfig, length: int) -> float:
    """Operations of all attention layers of a document of `length` tokens, converted or not."""
    attention, sliding = config.attention, len(sliding_layers(config))
    layers = [_plain(attention.of_layer(index)) for index in range(config.num_hidden_layers)]
    heads = [len(attention.heads_of_layer(index)) for index in range(config.num_hidden_layers)]
    # layers of the same settings cost the same
    kinds = list(zip(layers, heads, strict=True))
    converted = sum(
        kinds.count((settings, softmax_heads)) * linear_flops(settings, config, length, softmax_heads)
        for settings, softmax_heads in _distinct(kinds)
        if settings is not None
    )
    unconverted = (layers.count(None) - sliding) * softmax_flops(config, length)
    return converted + unconverted + (sliding and sliding * softmax_flops(config, length, config.sliding_window))


def quadratic_parts(settings: AttentionConfig, layers: int) -> list[str]:
    """What of converted layers still costs operations in proportion to n * n, n tokens being read; each once."""
    of_layers = [settings.of_layer(index) for index in range(layers)]
    per_slot = dict.fromkeys(getattr(x, "tokens_per_slot", None) for x in of_layers)
    parts = [f"n / {tokens} slots for each of n tokens (tokens_per_slot)" for tokens in per_slot if tokens]
    if heads := sum(map(len, (settings.softmax_heads or {}).values())):
        parts.append(f"{heads} head{'s' * (heads > 1)} with all n tokens (softmax_heads)")
    return parts


def _plain(settings: AttentionConfig | None) -> AttentionConfig | None:
    return None if settings is None else dataclasses.replace(settings, softmax_heads=None)


def _distinct(kinds: list[tuple[AttentionConfig | None, int]]) -> list[tuple[AttentionConfig | None, int]]:
    return [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]


def crossover(config: LinAttnConfig, longest: int) -> int | None:
    """The first length where the linear operations are fewer, found by halving: they grow by whole blocks."""

    def fewer(length: int) -> bool:
        return attention_flops(config, length) < base_flops(config, length)

    low, high = 1, longest
    if not fewer(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fewer(middle) else (middle + 1, high)
    return low


def linear_layers_flops(model: nn.Module, run: Callable[[], Any]) -> float:
    """Operations of the matrix products with weights in a forward pass of `model`."""
    total = 0.0

    def count(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal total
        total += 2.0 * args[0].numel() // args[0].shape[-1] * module.get_parameter("weight").numel()

    # Conv1D is GPT-2's linear layer
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    with hooked(module.register_forward_hook(count) for module in layers):
        run()
    return total
