"""Softmax attention where linear attention will stand, so that its queries, keys and values can be watched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..modeling.architectures import ARCHITECTURES
from ..modeling.attention_interface import ATTENTION_NAME
from ..modeling.modeling_linattn import self_attentions
from ..utils.hooks import hooked


class SoftmaxAttention(nn.Module):
    """Softmax attention in the place of a linear one, called as that is."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

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
        length, mask, is_causal = query.shape[2], None, self.is_causal
        if lengths is not None:
            position = torch.arange(length, device=query.device)
            # (batch, 1, 1 or length, length)
            mask = (position < lengths[:, None])[:, None, None]
            if is_causal:
                mask, is_causal = mask & (position <= position[:, None]), False
            # a query without any key looks at all of them: finite, and nobody reads it
            mask = mask | ~mask.any(-1, keepdim=True)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)


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


@contextmanager
def watch_attention(model: PreTrainedModel, visit: Callable[[AttentionCall], Tensor | None]) -> Iterator[None]:
    """While this lasts, `visit` is called with each self-attention of the softmax model `model` as it runs.

    What `visit` returns, if anything, goes on through the model in the place of the softmax output.

    Raises:
        ValueError: the architecture is not supported.
    """
    if model.config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type={model.config.model_type!r} is not supported. Supported are: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
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
                attention.linattn = SoftmaxAttention(is_causal=architecture.causal)
                handles.append(attention.linattn.register_forward_hook(hook, with_kwargs=True))
            yield
    finally:
        for attention in attentions:
            if hasattr(attention, "linattn"):
                del attention.linattn
        model.set_attn_implementation(implementation)
