"""Softmax attention where linear attention will stand, so that its queries, keys and values can be watched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..modeling.architectures import ARCHITECTURES
from ..modeling.attention_interface import ATTENTION_NAME, softmax_attention
from ..modeling.modeling_linattn import check_attention, self_attentions, sliding_window
from ..utils.hooks import hooked


class SoftmaxAttention(nn.Module):
    """Softmax attention in the place of a linear one, called as that is.

    Args:
        is_causal: whether a token sees itself and earlier ones only.
        window: of a layer with a sliding window, how far apart tokens do not see each other.
    """

    def __init__(self, *, is_causal: bool, window: int | None = None) -> None:
        super().__init__()
        self.is_causal, self.window = is_causal, window

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor | None = None,
        cache: None = None,
        *,
        scale: float = 1.0,
    ) -> Tensor:
        """softmax(scale q k^T) v of (batch, heads, length, head_dim), `lengths` of a row valid; same shape.

        It has no state: `cache` is None.
        """
        return softmax_attention(query, key, value, lengths, scale, causal=self.is_causal, window=self.window)


class AttentionCall:
    """One softmax attention of a forward pass, as `watch_attention` hands it on.

    Attributes:
        layer: index of the layer, from 0.
        query, key: (batch, heads, length, head_dim), multiplied by the square root of the softmax scale; keys and
            values that several query heads share are repeated.
        value, output: (batch, heads, length, head_dim).
        lengths: (batch,) number of valid tokens per row, which stand first; None where nothing is padded.
        root: the square root of the layer's own scale.
    """

    def __init__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor | None,
        output: Tensor,
        root: float = 1.0,
    ) -> None:
        self.layer, self.query, self.key, self.value = layer, query, key, value
        self.lengths, self.output, self.root = lengths, output, root

    def of_heads(self, heads: list[int]) -> "AttentionCall":
        """The same of some heads."""
        query, key, value, output = (x[:, heads] for x in (self.query, self.key, self.value, self.output))
        return AttentionCall(self.layer, query, key, value, self.lengths, output, self.root)


@contextmanager
def watch_attention(model: PreTrainedModel, visit: Callable[[AttentionCall], Tensor | None]) -> Iterator[None]:
    """While this lasts, `visit` is called with each self-attention of the softmax model `model` as it runs.

    What `visit` returns, if anything, goes on through the model in the place of the softmax output.

    Raises:
        ValueError: the architecture is not supported, or its attention is no plain softmax.
    """
    if model.config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type={model.config.model_type!r} is not supported. Supported are: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    check_attention(model.config)
    architecture = ARCHITECTURES[model.config.model_type]
    implementation = model.config._attn_implementation
    # of calls, not of modules: one module may serve several layers
    layers = count()

    def restart(module: nn.Module, args: Any) -> None:
        nonlocal layers
        layers = count()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        query, key, value, lengths = args[:4]
        # half of the scale to each side
        root = kwargs["scale"] ** 0.5
        return visit(AttentionCall(next(layers), query * root, key * root, value, lengths, output, root))

    attentions: list[Any] = [attention for _, attention in self_attentions(model, architecture)]
    try:
        with hooked([model.base_model.register_forward_pre_hook(restart)]) as handles:
            model.set_attn_implementation(ATTENTION_NAME)
            for attention in attentions:
                window = sliding_window(attention)
                attention.linattn = SoftmaxAttention(is_causal=architecture.causal, window=window)
                handles.append(attention.linattn.register_forward_hook(hook, with_kwargs=True))
            yield
    finally:
        for attention in attentions:
            if hasattr(attention, "linattn"):
                del attention.linattn
        model.set_attn_implementation(implementation)
