"""Performer attention (FAVOR+, arXiv:2009.14794), alone or joined with exact attention to near keys.

    out_i = (sum_{j near i} exp(q_i.k_j) v_j + phi(q_i) S_i) / (sum_{j near i} exp(q_i.k_j) + phi(q_i) z_i)

with S_i = sum_{j far from i} phi(k_j) v_j^T and z_i = sum_{j far from i} phi(k_j). Everything is computed
in float32, whatever the inputs: exponents of half-precision logits would be off by several per cent.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .blocks import between, near_mask, pieces, put_together, recomputed, row_lengths, to_blocks
from .configuration_linattn import PerformerConfig
from .feature_maps import FeatureMap
from .feature_sums import (
    SIGNED_MASS_FLOOR,
    FarSums,
    add,
    bounded_features,
    expand,
    features_in_blocks,
    read,
    sum_up,
)
from .merge import LOG2_E, Partial, exact_part, join, with_one
from .near_part import NearPart


def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """Bidirectional Performer attention in time and memory linear in the length.

    Args:
        query, key: (batch, heads, length, head_dim).
        value: (batch, heads, length, value_dim).
        feature_map: the layer's `FeatureMap`.
        lengths: (batch,) number of real keys per row, which stand first; None when nothing is padded.
        window_size: block size of the exact part; 0 for none.
        global_tokens: that many first keys are exact for every query.
        near, far: False leaves that part of the formula out.
        scale: what products of queries and keys are multiplied by.

    Returns:
        (batch, heads, length, value_dim) in the dtype of `value`.
    """
    length, dtype = query.shape[2], value.dtype
    # a block longer than the rows is the row, and there are no more first tokens than tokens
    window_size, global_tokens = min(window_size, length), min(global_tokens, length)
    query, key, value = query.float(), key.float(), value.float()
    real_lengths = row_lengths(lengths, length, query.device)
    position = torch.arange(length, device=query.device)
    # (batch, 1, length, 1)
    held = ((position >= global_tokens) & (position < real_lengths[:, None]))[:, None, :, None]
    all_held = lengths is None and not global_tokens

    if not window_size:
        first_key, first_value = key[:, :, :global_tokens], with_one(value[:, :, :global_tokens])
        first_seen = (position[:global_tokens] < real_lengths[:, None])[:, None, None]
        runs = pieces(length, 1, query.device)

        def sums_of(begin: int, end: int) -> tuple[Tensor, Tensor]:
            features = bounded_features(feature_map, key[:, :, begin:end], "key", scale=scale)
            return sum_up(features, with_one(value[:, :, begin:end]), None if all_held else held[:, :, begin:end])

        def attend_to_all(begin: int, end: int, known: tuple[Tensor, Tensor] | None) -> Tensor:
            queries = query[:, :, begin:end]
            parts: list[Partial] = []
            if near and global_tokens:
                parts.append(
                    exact_part((queries * (scale * LOG2_E)) @ first_key.transpose(-1, -2), first_seen, first_value)
                )
            if known is not None:
                features = bounded_features(feature_map, queries, "query", scale=scale, alone=not parts)
                parts.append(read(features, *known, feature_map.signed))
            # (batch, heads, tokens, dim) -> (batch, tokens, heads, dim), as models hold them in memory
            return join(parts).transpose(1, 2)

        known = None
        if far:
            sums = (recomputed(sums_of, length, *run) for run in runs)
            known = reduce(lambda sums, more: add(*sums, *more), sums)
        pieces_of_all = (recomputed(attend_to_all, length, *run, known) for run in runs)
        return put_together(pieces_of_all, length).transpose(1, 2).to(dtype)

    runs = pieces(-(-length // window_size), window_size, query.device)

    def sums_of_blocks(begin: int, end: int) -> tuple[Tensor, Tensor]:
        tokens = slice(begin * window_size, min(end * window_size, length))
        features = bounded_features(feature_map, key[:, :, tokens], "key", scale=scale)
        whole = lengths is None and tokens.start >= global_tokens and end * window_size <= length
        return sum_up(
            features_in_blocks(features, window_size),
            to_blocks(with_one(value[:, :, tokens]), window_size),
            None if whole else to_blocks(held[:, :, tokens], window_size),
        )

    far_sums = FarSums([recomputed(sums_of_blocks, length, *run) for run in runs]) if far else None
    settings: dict[str, Any] = {"window_size": window_size, "global_tokens": global_tokens, "scale": scale}
    near_part = NearPart(query, key, value, lengths, **settings) if near else None

    def attend(index: int, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        begin, end = runs[index]
        parts = [] if near_part is None else near_part.run(begin, end)
        if far_sums is not None and before is not None:
            queries = between(query, begin * window_size, end * window_size, dim=2)
            features = features_in_blocks(bounded_features(feature_map, queries, "query", scale=scale), window_size)
            sums, before = far_sums.run(index, before)
            parts.append(read(features, sums, far_sums.shift, feature_map.signed))
        # (batch, heads, blocks, window, dim) -> (batch, blocks, window, heads, dim)
        return join(parts).permute(0, 2, 3, 1, 4), before

    def outputs() -> Iterator[Tensor]:
        before = far_sums.start() if far_sums is not None else None
        for index in range(len(runs)):
            out, before = recomputed(attend, length, index, before)
            yield out

    # blocks become tokens again
    return put_together(outputs(), runs[-1][1]).flatten(1, 2)[:, :length].transpose(1, 2).to(dtype)


def performer_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """The same formula with the whole (length, length) matrix of weights, in the dtype of the inputs.

    No stabiliser: meant for float64 inputs of moderate size. Arguments as in `performer_attention`.
    """
    length = query.shape[2]
    query, key = query * scale**0.5, key * scale**0.5
    query_features, key_features = feature_map(query, "query"), feature_map(key, "key")
    phi_query = expand(query_features, query.new_zeros(()))
    phi_key = expand(key_features, key.new_zeros(()))
    position = torch.arange(length, device=query.device)
    real = position < row_lengths(lengths, length, query.device)[:, None]
    is_near = near_mask(length, lengths, window_size, global_tokens, query.device)
    is_far = real[:, None, :] & ~is_near
    exact = (query @ key.transpose(-1, -2)).exp() * is_near[:, None]
    estimate = (phi_query @ phi_key.transpose(-1, -2)) * is_far[:, None]
    far_mass = estimate.sum(-1, keepdim=True)
    if feature_map.signed:
        largest = (query_features.log2_phi + key_features.log2_phi.transpose(-1, -2)).exp2() * is_far[:, None]
        largest = largest.sum(-1, keepdim=True) * (phi_key.shape[-1] / 2)
        far_mass = torch.maximum(far_mass, SIGNED_MASS_FLOOR * largest)
    weights = exact * float(near) + estimate * float(far)
    return weights @ value / (exact.sum(-1, keepdim=True) * float(near) + far_mass * float(far))


class PerformerAttention(nn.Module):
    """Performer attention of one layer: the module that hangs under a converted attention module."""

    causal: ClassVar[bool] = False
    training_forwards: Tensor

    def __init__(self, config: PerformerConfig, *, num_heads: int, head_dim: int, seed: int) -> None:
        super().__init__()
        self.config = config
        self.feature_map = FeatureMap(
            feature_map=config.feature_map,
            num_heads=num_heads,
            head_dim=head_dim,
            num_features=config.num_features,
            orthogonal=config.orthogonal,
            seed=seed,
        )
        if config.redraw_interval is not None:
            # saved with the weights, so that a resumed run draws at the same steps
            self.register_buffer("training_forwards", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        self.feature_map.reset_parameters()
        if "training_forwards" in self._buffers and not self.training_forwards.is_meta:
            init.zeros_(self.training_forwards)

    def count_training_forward(self) -> None:
        """Called before each forward pass of the model in training: draws new directions every `redraw_interval`."""
        forwards, interval = int(self.training_forwards), self.config.redraw_interval
        if interval and forwards and forwards % interval == 0:
            self.feature_map.redraw()
        self.training_forwards += 1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, *, scale: float = 1.0
    ) -> Tensor:
        """As `performer_attention`, with the settings of the config."""
        return performer_attention(
            query,
            key,
            value,
            self.feature_map,
            lengths=lengths,
            scale=scale,
            **self.config.joining(),
        )
