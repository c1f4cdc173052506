"""What attention costs before and after a conversion, counted, not timed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..modeling.architectures import ARCHITECTURES
from ..modeling.configuration_linattn import AttentionConfig, LinAttnConfig
from ..modeling.modeling_linattn import LinAttnPreTrainedModel, head_dim, linear_attention, sliding_layers


@dataclass(frozen=True, kw_only=True)
class ConversionSummary:
    """What a conversion did.

    Attributes:
        layers: how many attention modules the model has; `converted` of them are linear.
        parameters_added: parameters and fixed features that the base model does not have.
        max_length: longest document in tokens.
        rotary: positions are rotary: there was no table to extend.
        flops, softmax_flops: floating-point operations of all attention layers per token of a document of
            `max_length` tokens, converted and as softmax: matrix products only, projections to q, k, v and
            out left out, since they stay the same.
        crossover: length in tokens from which on operations are fewer than with softmax; None if that is more
            than `max_length`.
    """

    layers: int
    converted: int
    parameters_added: int
    max_length: int
    rotary: bool
    flops: float
    softmax_flops: float
    crossover: int | None

    def _comparison(self) -> str:
        ratio = self.softmax_flops / self.flops
        return f"{ratio:.1f} times fewer" if ratio >= 1 else f"{1 / ratio:.1f} times MORE"

    def __str__(self) -> str:
        crossover = (
            f"nowhere up to {self.max_length:,} tokens"
            if self.crossover is None
            else f"from {self.crossover:,} tokens on"
        )
        return "\n".join(
            (
                f"layers converted        {self.converted} of {self.layers}",
                f"parameters added        {self.parameters_added:,}",
                f"positions               {self.max_length:,}{', rotary: no table to extend' if self.rotary else ''}",
                f"attention per token     {self.flops / 1e6:,.2f} MFLOP at {self.max_length:,} tokens, with softmax "
                f"{self.softmax_flops / 1e6:,.2f} MFLOP: {self._comparison()}",
                f"fewer operations        {crossover} (counted in matrix products; time also depends on the machine)",
            )
        )


def summarize(model: LinAttnPreTrainedModel) -> ConversionSummary:
    """Count what the conversion of `model` added and what it saves."""
    config, settings = model.config, model.config.attention
    layers = config.num_hidden_layers
    converted = layers if settings.layers is None else len(settings.layers)
    length = settings.max_length
    assert length is not None, "checked when the model was made"

    return ConversionSummary(
        layers=layers,
        converted=converted,
        parameters_added=sum(
            tensor.numel() for name, tensor in model.state_dict().items() if ".linattn." in name and tensor.dim()
        ),
        max_length=length,
        rotary=ARCHITECTURES[config.base_model_type].position_table is None,
        flops=attention_flops(config, length) / length,
        softmax_flops=_base_flops(config, length) / length,
        crossover=_crossover(config, length),
    )


def softmax_flops(config: Any, length: int, window: int | None = None) -> float:
    """Operations of one softmax layer: q.k and weights times v, two for a multiply-add; half of it if causal.

    With a sliding window, a token sees `window` keys on each side that it sees.
    """
    causal = ARCHITECTURES[config.base_model_type].causal
    seen = length / 2 if causal else length
    if window is not None:
        seen = min(seen, window if causal else 2 * window)
    return 4.0 * length * seen * config.num_attention_heads * head_dim(config)


def _base_flops(config: LinAttnConfig, length: int) -> float:
    """Operations of all layers as they were before the conversion."""
    sliding = len(sliding_layers(config))
    full = config.num_hidden_layers - sliding
    return full * softmax_flops(config, length) + (
        sliding * softmax_flops(config, length, config.sliding_window) if sliding else 0.0
    )


def linear_flops(settings: AttentionConfig, config: LinAttnConfig, length: int) -> float:
    """Operations of one converted layer, counted while it runs on tensors without storage."""
    with torch.device("meta"), torch.no_grad():
        module = linear_attention(settings, config, 0)
        x: Tensor = torch.empty(1, config.num_attention_heads, length, head_dim(config))
        with FlopCounterMode(display=False) as counter:
            module(x, x, x)
    return counter.get_total_flops()


def attention_flops(config: LinAttnConfig, length: int) -> float:
    """Operations of all attention layers of a document of `length` tokens, converted or not."""
    attention, sliding = config.attention, len(sliding_layers(config))
    layers = [attention.of_layer(index) for index in range(config.num_hidden_layers)]
    # layers of the same settings cost the same
    converted = sum(
        layers.count(settings) * linear_flops(settings, config, length)
        for settings in _distinct(layers)
        if settings is not None
    )
    unconverted = (layers.count(None) - sliding) * softmax_flops(config, length)
    return converted + unconverted + (sliding and sliding * softmax_flops(config, length, config.sliding_window))


def _distinct(layers: list[AttentionConfig | None]) -> list[AttentionConfig | None]:
    return [settings for index, settings in enumerate(layers) if settings not in layers[:index]]


def _crossover(config: LinAttnConfig, longest: int) -> int | None:
    """The first length where the linear operations are fewer, found by halving: they grow by whole blocks."""

    def fewer(length: int) -> bool:
        return attention_flops(config, length) < _base_flops(config, length)

    low, high = 1, longest
    if not fewer(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fewer(middle) else (middle + 1, high)
    return low
