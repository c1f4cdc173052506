"""Linformer's projections of a decoder (arXiv:2006.04768, equation 7): each slot holds one segment of the row.

The projections of the paper mix all positions, so no row of E k could be used before the sequence ends. Here slot s
holds segment s of the row alone: with G = global_tokens and g = ceil(max_length / projection_length), the tokens of
rank G + s g .. G + (s + 1) g - 1. Ranks count the tokens of a row, padding is not counted.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .projections import PROJECTIONS


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

    def _weight(self, side: str, slot: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor | float:
        """Weight of each token in its summary: (rows, tokens) -> (rows, heads or 1, tokens, 1 or dim)."""
        if self.projection == "mean":
            return 1 / self.segment_length
        weight = getattr(self, f"{side if side in self.sides else 'key'}_weight").to(dtype)
        if self.projection == "conv":
            return weight[:, place].transpose(0, 1) / self.segment_length
        # (heads, rows, tokens) -> (rows, heads, tokens, 1)
        return (1 + weight[:, slot, place].transpose(0, 1).unsqueeze(-1)) / self.segment_length

    def summarize(self, x: Tensor, side: str, lengths: Tensor | None = None, first: int = 0) -> Tensor:
        """Summaries of the segments of whole rows (batch, heads, length, dim): (batch, heads, segments, dim).

        The last one may be open. `lengths` (batch,): how many tokens are valid; `first`: tokens before segment 0.
        """
        if lengths is not None:
            valid = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
            x = x.masked_fill(~valid[:, None, :, None], self._none)
        x = x[:, :, first:]
        x = F.pad(x, (0, 0, 0, -x.shape[2] % self.segment_length), value=self._none)
        if self.projection == "max":
            # split the length into segments
            maxima = x.unflatten(2, (-1, self.segment_length)).amax(3)
            return maxima.masked_fill(maxima == self._none, 0.0)
        rank = torch.arange(x.shape[2], device=x.device)[None]
        weight = self._weight(side, rank // self.segment_length, rank % self.segment_length, x.dtype)
        return (x * weight).unflatten(2, (-1, self.segment_length)).sum(3)

    def add(self, summaries: Tensor, x: Tensor, side: str, rank: Tensor, valid: Tensor) -> Tensor:
        """`summaries` (batch, heads, slots, dim) with new tokens x (batch, heads, length, dim) added to their segments.

        rank: (batch, length), counted from the first token of segment 0; valid: (batch, length) bool, tokens to add.
        """
        slot, place = rank // self.segment_length, rank % self.segment_length
        valid = valid & (slot < self.slots) & (rank >= 0)
        if self.projection == "max":
            # a slot whose segment has not begun holds nothing yet
            begun = torch.arange(self.slots, device=x.device) * self.segment_length < rank[:, :1]
            summaries = summaries.masked_fill(~begun[:, None, :, None], self._none)
        else:
            known_slot, known_place = slot.clamp(0, self.slots - 1), place.clamp_min(0)
            x = x * self._weight(side, known_slot, known_place, x.dtype)
        x = x.masked_fill(~valid[:, None, :, None], self._none)
        index = slot.clamp(0, self.slots - 1)[:, None, :, None].expand(x.shape)
        summaries = summaries.scatter_reduce(2, index, x, "amax" if self.projection == "max" else "sum")
        return summaries.masked_fill(summaries == self._none, 0.0) if self.projection == "max" else summaries

    @property
    def _none(self) -> float:
        """What an absent token contributes."""
        return float("-inf") if self.projection == "max" else 0.0

    def extra_repr(self) -> str:
        return (
            f"projection={self.projection!r}, sharing={self.sharing!r}, slots={self.slots}, "
            f"segment_length={self.segment_length}"
        )
