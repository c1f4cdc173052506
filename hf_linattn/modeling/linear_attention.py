"""Linear attention of one layer: exact attention to near keys, merged with the far part of a method.

    out_i = (sum_{j near i} exp(q_i.k_j) v_j + far numerator_i) / (sum_{j near i} exp(q_i.k_j) + far mass_i)

Encoders: near are the keys of the query's block of `window_size` tokens and of the two beside it. Decoders: those of
the query's block and of the one before it, up to the query; positions are ranks, which count the valid tokens of a row.
In both, the first `global_tokens` keys are near every (later) query. Heads that stay softmax (`softmax_heads`) see all
keys exactly. All else is for the far part (`far_part`), which answers with keys (one softmax over all) or with sums
(merged by their mass).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .cache import LinAttnCacheLayer
from .decoder_attention import attend_causally
from .encoder_attention import attend
from .far_part import Settings
from .methods import METHODS
from .softmax_heads import HeadSplit
from .state import State


class LinearAttention(nn.Module):
    """The module `linattn` that hangs under a converted attention module.

    Args:
        config: settings of the layer, a config of one of `METHODS`.
        causal: a decoder's.
        seed: of random features and fixed projections.
        shared: another layer's module whose far part this layer uses (sharing="layers").
        softmax_heads: heads that stay softmax.
        group_size: how many neighboring heads of queries share a head of keys and values.
    """

    training_forwards: Tensor

    def __init__(
        self,
        config: Any,
        *,
        num_heads: int,
        head_dim: int,
        causal: bool,
        seed: int,
        shared: "LinearAttention | None" = None,
        softmax_heads: Sequence[int] = (),
        group_size: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.causal, self.owns_far_part = config, causal, shared is None
        # switches: see `LinAttnPreTrainedModel.branches`
        self.near, self.far, self.exact = config.near, config.far, True
        self.split = HeadSplit(softmax_heads, num_heads=num_heads, group_size=group_size) if softmax_heads else None
        num_heads -= len(softmax_heads)
        method = METHODS[config.method]
        make: Any = method.decoder if causal else method.encoder
        if shared is None:
            self.far_part: Any = make(config, num_heads=num_heads, head_dim=head_dim, seed=seed)
            # under the names that checkpoints have
            for name, module in self.far_part.modules.items():
                self.add_module(name, module)
        else:
            self.far_part = shared.far_part
        if getattr(config, "redraw_interval", None) is not None:
            # saved with the weights, so that a resumed run draws at the same steps
            self.register_buffer("training_forwards", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        """Fill whatever was not loaded from a checkpoint."""
        if self.owns_far_part:
            self.far_part.reset_parameters()
        if "training_forwards" in self._buffers and not self.training_forwards.is_meta:
            init.zeros_(self.training_forwards)

    def redraw(self) -> None:
        """Draw random directions anew, where there are any."""
        for module in self.far_part.modules.values():
            if hasattr(module, "redraw"):
                module.redraw()

    def count_training_forward(self) -> None:
        """Called before each forward pass of the model in training: draws new directions every `redraw_interval`."""
        interval = getattr(self.config, "redraw_interval", None)
        if not interval:
            return
        forwards = int(self.training_forwards)
        if forwards and forwards % interval == 0:
            self.redraw()
        self.training_forwards += 1

    def settings(self, scale: float = 1.0) -> Settings:
        """How near and far are merged, for this softmax scale."""
        config = self.config
        return Settings(
            window_size=config.window_size,
            global_tokens=config.global_tokens,
            near=self.near,
            far=self.far,
            scale=scale,
            global_queries=config.global_queries,
            # an ablation is of linear attention
            exact_length=(config.exact_length or 0) if self.exact and self.near and self.far else 0,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor | None = None,
        cache: LinAttnCacheLayer | None = None,
        *,
        scale: float = 1.0,
    ) -> Tensor:
        """Attention in time and memory linear in the length, but for heads that stay softmax.

        Args:
            query, key: (batch, heads, length, head_dim).
            value: (batch, heads, length, value_dim).
            lengths: (batch,) number of valid tokens per row, which stand first; None when nothing is padded.
            cache: of a decoder, holds the state of earlier tokens and takes the new one. None: there are none.
            scale: what products of queries and keys are multiplied by.

        Returns:
            (batch, heads, length, value_dim) in the dtype of `value`. In a decoder zeros for padding and for queries
            that see no key.
        """
        offloaded = [module for module in self.far_part.modules.values() if hasattr(module, "_hf_hook")]
        with _loaded(offloaded) if offloaded else nullcontext():
            state: Any = None if cache is None else cache.state
            settings = self.settings(scale)
            attend_heads = partial(self._attend, keep=cache is not None)
            if self.split is None:
                out, state = attend_heads(query, key, value, lengths, state, settings)
            else:
                out, state = self.split.attend(
                    attend_heads, query, key, value, lengths, state, settings, causal=self.causal
                )
            if cache is not None:
                cache.state = state
            return out

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor | None,
        state: State | None,
        settings: Settings,
        *,
        keep: bool,
    ) -> tuple[Tensor, State | None]:
        """Linear attention of the heads that are given, and the state after it of a decoder, if that is to be kept."""
        if self.causal:
            return attend_causally(query, key, value, self.far_part, state, lengths, settings, keep=keep)
        return attend(query, key, value, self.far_part, lengths, settings), None


@contextmanager
def _loaded(modules: list[Any]) -> Iterator[None]:
    """While this lasts, weights that Accelerate keeps on the disk or another device are where they are used.

    Its hook loads them for each call of a module, and a far part reads their tensors without one.
    """
    wrapped = [module.forward for module in modules]
    for module in modules:
        module._hf_hook.pre_forward(module)
        # a call in between would take them away
        module.forward = module._old_forward
    try:
        yield
    finally:
        for module, forward in zip(modules, wrapped, strict=True):
            module.forward = forward
            module._hf_hook.post_forward(module, None)
