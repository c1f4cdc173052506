"""Linformer's projections of a decoder (arXiv:2006.04768, equation 7): each slot holds one segment of the row.

The projections of the paper mix all positions, so no row of E k could be used before the sequence ends. Here slot s
holds segment s of the row alone: with G = global_tokens and g = ceil(max_length / projection_length), the tokens of
rank G + s g .. G + (s + 1) g - 1. Ranks count the tokens of a row, padding is not counted.
"""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .projections import PROJECTIONS

# Of segments shorter than this a product of matrices takes longer than sums.
_LEAST_PRODUCT = 16


class CausalProjection(nn.Module):
    """E and F of one layer, or, with sharing="layers", of all: how a segment of `segment_length` tokens is summarized.

    Args:
        projection: `mean`; `learned` (per slot, E[s, t] = (1 + D[s, t]) / g for the t-th token of the
            segment, with D and a bias on the slot's log mass trained, both 0 at the start); `conv` (a
            weight per token of the segment and channel, the same for all slots, 1 at the start);
            `max` (largest entry per channel).
        sharing: `none` one E and F per head; `heads` one E and F for all heads; `key_value` one E = F
            for all heads; `layers` likewise, and the same for all layers.
        slots: Linformer's k.
        max_length: longest row.

    Raises:
        ValueError: `projection` cannot be causal, or does not exist.
    """

    def __init__(
        self, *, projection: str, sharing: str, slots: int, max_length: int, num_heads: int, head_dim: int
    ) -> None:
        super().__init__()
        if projection == "gaussian":
            raise ValueError(
                "projection='gaussian' cannot be causal: each of its slots mixes all tokens of a document with random "
                "signs, so that no slot is finished, or has a known mass, before the document ends. "
                "Use learned, mean, max or conv."
            )
        if projection not in PROJECTIONS:
            raise ValueError(f"projection={projection!r} is not one of learned, mean, max, conv.")
        self.projection, self.sharing, self.slots, self.max_length = projection, sharing, slots, max_length
        self.segment_length = math.ceil(max_length / slots)
        heads = num_heads if sharing == "none" else 1
        self.sides = ("key",) if sharing in ("key_value", "layers") else ("key", "value")
        for side in self.sides:
            if projection == "learned":
                self.register_parameter(f"{side}_weight", nn.Parameter(torch.empty(heads, slots, self.segment_length)))
            elif projection == "conv":
                self.register_parameter(
                    f"{side}_weight", nn.Parameter(torch.empty(heads, self.segment_length, head_dim))
                )
        if projection == "learned":
            self.bias = nn.Parameter(torch.empty(heads, slots))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill whatever was not loaded from a checkpoint; nothing on the meta device."""
        if any(parameter.is_meta for parameter in self.parameters()):
            return
        for side in self.sides:
            if self.projection == "learned":
                init.zeros_(getattr(self, f"{side}_weight"))
            elif self.projection == "conv":
                init.ones_(getattr(self, f"{side}_weight"))
        if self.projection == "learned":
            init.zeros_(self.bias)

    def log_mass(self, like: Tensor) -> Tensor:
        """Log of what each slot stands for once its segment has ended, (heads or 1, slots), of the dtype of `like`."""
        log_length = like.new_full((1, self.slots), math.log(self.segment_length))
        return log_length + self.bias.to(like.dtype) if self.projection == "learned" else log_length

    def summarize(self, x: Tensor, side: str, slot: Tensor) -> Tensor:
        """Summaries of whole segments x (batch, heads, segments, segment_length, dim): (batch, heads, segments, dim).

        slot: (batch or 1, segments), of each segment.
        """
        if self.projection == "max":
            return x.amax(3)
        if self.projection == "mean":
            return x.mean(3)
        weight = getattr(self, f"{side if side in self.sides else 'key'}_weight").to(x.dtype)
        if self.projection == "conv":
            return (x * weight.unsqueeze(1)).mean(3)
        # (heads or 1, batch or 1, segments, segment_length) -> (batch or 1, heads or 1, ...)
        weight = ((1 + weight[:, slot]) / self.segment_length).transpose(0, 1)
        if self.segment_length < _LEAST_PRODUCT:
            return (x * weight.unsqueeze(-1)).sum(3)
        return (weight.unsqueeze(3) @ x).squeeze(3)

    def extra_repr(self) -> str:
        return (
            f"projection={self.projection!r}, sharing={self.sharing!r}, slots={self.slots}, "
            f"segment_length={self.segment_length}"
        )
