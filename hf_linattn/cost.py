"""What attention costs before and after a conversion, counted, not timed."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .modeling.configuration_linattn import LinAttnConfig
from .modeling.modeling_linattn import LinAttnPreTrainedModel, linear_attention

# No conversion that pays at all pays only beyond this.
_LONGEST_CROSSOVER = 1 << 17


@dataclass(frozen=True, kw_only=True)
class ConversionSummary:
    """What a conversion did.

    Attributes:
        layers: how many attention modules the model has; `converted` of them are linear.
        parameters_added: parameters and fixed features that the base model does not have.
        max_length: longest document in tokens.
        flops, softmax_flops: floating-point operations of all attention layers per token of a document of
            `max_length` tokens, converted and as softmax: matrix products only, projections to q, k, v and
            out left out, since they stay the same.
        crossover: length in tokens from which on `flops` are fewer than `softmax_flops`; None if never.
    """

    layers: int
    converted: int
    parameters_added: int
    max_length: int
    flops: float
    softmax_flops: float
    crossover: int | None

    def __str__(self) -> str:
        crossover = "never" if self.crossover is None else f"from {self.crossover:,} tokens on"
        return "\n".join(
            (
                f"layers converted        {self.converted} of {self.layers}",
                f"parameters added        {self.parameters_added:,}",
                f"attention per token     {self.flops / 1e6:,.2f} MFLOP at {self.max_length:,} tokens; softmax "
                f"{self.softmax_flops / 1e6:,.2f} MFLOP ({self.softmax_flops / self.flops:.1f} times as much)",
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

    def total(n: int) -> float:
        softmax = _softmax_flops(config, n)
        return (converted * _linear_flops(config, n) + (layers - converted) * softmax) / n

    return ConversionSummary(
        layers=layers,
        converted=converted,
        parameters_added=sum(
            tensor.numel() for name, tensor in model.state_dict().items() if ".linattn." in name and tensor.dim()
        ),
        max_length=length,
        flops=total(length),
        softmax_flops=layers * _softmax_flops(config, length) / length,
        crossover=_crossover(config),
    )


def _softmax_flops(config: LinAttnConfig, length: int) -> float:
    """q.k and weights times v, two operations for a multiply-add, all heads of one layer."""
    return 4.0 * length * length * config.hidden_size


def _linear_flops(config: LinAttnConfig, length: int) -> float:
    """Operations of one converted layer, counted while it runs on tensors without storage."""
    head_dim = config.hidden_size // config.num_attention_heads
    with torch.device("meta"), torch.no_grad():
        module = linear_attention(config.attention, config, 0)
        x: Tensor = torch.empty(1, config.num_attention_heads, length, head_dim)
        with FlopCounterMode(display=False) as counter:
            module(x, x, x, None)
    return counter.get_total_flops()


def _crossover(config: LinAttnConfig) -> int | None:
    # the linear cost grows by whole blocks: the first length where it is lower is found by halving
    low, high = 1, _LONGEST_CROSSOVER
    if _linear_flops(config, high) >= _softmax_flops(config, high):
        return None
    while low < high:
        middle = (low + high) // 2
        if _linear_flops(config, middle) < _softmax_flops(config, middle):
            high = middle
        else:
            low = middle + 1
    return low
