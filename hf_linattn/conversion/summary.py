"""What attention costs before and after a conversion, counted, not timed."""

from dataclasses import dataclass

from ..modeling.architectures import ARCHITECTURES
from ..modeling.modeling_linattn import LinAttnPreTrainedModel
from .flops import attention_flops, base_flops, crossover, quadratic_parts


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
        quadratic: what of the converted layers costs operations in proportion to n * n, n tokens being read.
    """

    layers: int
    converted: int
    parameters_added: int
    max_length: int
    rotary: bool
    flops: float
    softmax_flops: float
    crossover: int | None
    quadratic: tuple[str, ...] = ()

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
                *(f"grows with n * n        {part}" for part in self.quadratic),
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
        softmax_flops=base_flops(config, length) / length,
        crossover=crossover(config, length),
        quadratic=tuple(quadratic_parts(settings, layers)),
    )
