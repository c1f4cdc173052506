"""Performer attention (FAVOR+, arXiv:2009.14794), alone or joined with exact attention to near keys.

    out_i = (sum_{j near i} exp(q_i.k_j) v_j + phi(q_i) S_i) / (sum_{j near i} exp(q_i.k_j) + phi(q_i) z_i)

with S_i = sum_{j far from i} phi(k_j) v_j^T and z_i = sum_{j far from i} phi(k_j). Everything is computed
in float32, whatever the inputs: exponents of half-precision logits would be off by several per cent.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .blocks import far_sums, from_blocks, near_keys, near_mask, pieces, row_lengths, to_blocks, with_neighbours
from .configuration_linattn import PerformerConfig
from .feature_maps import FeatureMap, Features
from .feature_sums import SIGNED_MASS_FLOOR, add, bounded_features, expand, features_in_blocks, read, sum_up
from .joined_softmax import NEVER, exact_part, finite, join


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
) -> Tensor:
    """Bidirectional Performer attention in time and memory linear in the length.

    Args:
        query, key: (batch, heads, length, head_dim), multiplied by the square root of the softmax scale.
        value: (batch, heads, length, value_dim).
        feature_map: the layer's `FeatureMap`.
        lengths: (batch,) number of real keys per row, which stand first; None when nothing is padded.
        window_size: block size of the exact part; 0 for none.
        global_tokens: that many first keys are exact for every query.
        near, far: False leaves that part of the formula out.

    Returns:
        (batch, heads, length, value_dim) in the dtype of `value`.
    """
    length, dtype = query.shape[2], value.dtype
    query, key, value = query.float(), key.float(), value.float()
    real_lengths = row_lengths(lengths, length, query.device)
    position = torch.arange(length, device=query.device)
    # (batch, 1, length, 1)
    held = ((position >= global_tokens) & (position < real_lengths[:, None]))[:, None, :, None]
    value_and_one = F.pad(value, (0, 1), value=1.0)
    first_key, first_value = key[:, :, :global_tokens], value_and_one[:, :, :global_tokens]
    first_seen = (position[:global_tokens] < real_lengths[:, None])[:, None, None]

    if not window_size:
        runs = [slice(*run) for run in pieces(length, 1, query.device)]
        known: list[tuple[Tensor, Tensor]] = []
        for run in runs if far else ():
            keys = bounded_features(feature_map, key[:, :, run], "key")
            more = sum_up(keys, value_and_one[:, :, run], held[:, :, run])
            known = [add(*known[0], *more)] if known else [more]
        outputs = []
        for run in runs:
            parts = []
            if near and global_tokens:
                parts.append(exact_part(query[:, :, run] @ first_key.transpose(-1, -2), first_seen, first_value))
            if far:
                queries = bounded_features(feature_map, query[:, :, run], "query")
                parts.append(read(queries, *known[0], feature_map.signed))
            outputs.append(join(parts))
        return torch.cat(outputs, dim=2).to(dtype)

    query_blocks, key_blocks, value_blocks = (to_blocks(x, window_size) for x in (query, key, value_and_one))
    if far:
        keys = bounded_features(feature_map, key, "key")
        log_phi = keys.log_phi.masked_fill(~held, NEVER)
        # one shift for all blocks, whose sums are added up
        shift = log_phi.detach().amax(2, keepdim=True)
        phi = to_blocks(expand(Features(log_phi, keys.factor), -finite(shift)), window_size)
        # (batch, heads, blocks, features, value_dim + 1): S and z of all blocks that are far from a block
        sums, shift = far_sums(phi.transpose(-1, -2) @ value_blocks), shift.unsqueeze(2)
    outputs = []
    for begin, end in pieces(query_blocks.shape[2], window_size, query.device):
        block, parts = query_blocks[:, :, begin:end], []
        if near:
            logits = block @ with_neighbours(key_blocks, begin, end).transpose(-1, -2)
            seen = near_keys(real_lengths, end - begin, window_size, global_tokens, start=begin)
            parts.append(exact_part(logits, seen[:, None, :, None], with_neighbours(value_blocks, begin, end)))
        if near and global_tokens:
            # the first keys, seen from every block: (batch, heads, 1, global_tokens, dim)
            logits = block @ first_key.unsqueeze(2).transpose(-1, -2)
            parts.append(exact_part(logits, first_seen.unsqueeze(2), first_value.unsqueeze(2)))
        if far:
            # features have one row for each token: blocks joined, and cut again
            features = bounded_features(feature_map, block.flatten(2, 3), "query")
            features = features_in_blocks(features, window_size)
            parts.append(read(features, sums[:, :, begin:end], shift, feature_map.signed))
        outputs.append(join(parts))
    return from_blocks(torch.cat(outputs, dim=2), length).to(dtype)


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
) -> Tensor:
    """The same formula with the whole (length, length) matrix of weights, in the dtype of the inputs.

    No stabiliser: meant for float64 inputs of moderate size. Arguments as in `performer_attention`.
    """
    length = query.shape[2]
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
        largest = (query_features.log_phi + key_features.log_phi.transpose(-1, -2)).exp() * is_far[:, None]
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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
        """As `performer_attention`, with the settings of the config."""
        return performer_attention(
            query,
            key,
            value,
            self.feature_map,
            lengths=lengths,
            **self.config.joining(),
        )
