"""Performer attention (FAVOR+, arXiv:2009.14794), alone or joined with exact attention to near keys.

    out_i = (sum_{j near i} exp(q_i.k_j) v_j + phi(q_i) S_i) / (sum_{j near i} exp(q_i.k_j) + phi(q_i) z_i)

with S_i = sum_{j far from i} phi(k_j) v_j^T and z_i = sum_{j far from i} phi(k_j). Everything is computed
in float32, whatever the inputs: exponents of half-precision logits would be off by several per cent.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .blocks import far_sums, from_blocks, near_keys, near_mask, row_lengths, to_blocks, with_neighbours
from .configuration_linattn import PerformerConfig
from .feature_maps import FeatureMap, Features
from .joined_softmax import NEVER, Partial, exact_part, finite, join

# Least share of the largest possible mass that a map with negative features is taken to have: such an
# estimate can come out as zero or below, and this bounds the output by 1,000 times the largest value.
_SIGNED_MASS_FLOOR = 1e-3


def _expand(features: Features, shift: Tensor) -> Tensor:
    """phi * exp(shift) from its two parts, the shift applied inside the exponent."""
    phi = (features.log_phi + shift).exp()
    return phi if features.factor is None else phi * features.factor


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
    is_far = (position >= global_tokens) & (position < real_lengths[:, None])

    key_features = feature_map(key, "key")
    log_phi = key_features.log_phi
    if lengths is not None or global_tokens:
        log_phi = log_phi.masked_fill(~is_far[:, None, :, None], NEVER)
    # Largest exponent of each feature over the keys: taken out here and given back to the queries, it
    # cancels exactly, and leaves every feature a key that counts as one. Nothing can overflow, and no
    # query finds all features underflown. (A row without far keys has -inf: any finite number will do.)
    key_shift = finite(log_phi.detach().amax(dim=2, keepdim=True))
    phi_key = _expand(Features(log_phi, key_features.factor), -key_shift)

    query_features = feature_map(query, "query")
    query_shift = (query_features.log_phi + key_shift).detach().amax(dim=-1, keepdim=True)
    phi_query = _expand(query_features, key_shift - query_shift)

    # without a window the whole sequence is one block, and no block is near it
    window = window_size or length
    # one product gives S and z: the values carry a column of ones
    value_and_one = torch.cat((value, torch.ones_like(value[..., :1])), dim=-1)
    query_blocks, value_blocks = to_blocks(query, window), to_blocks(value_and_one, window)

    parts = []  # of each query's softmax: exact ones, and the estimate
    if near and window_size:
        logits = query_blocks @ with_neighbours(to_blocks(key, window)).transpose(-1, -2)
        seen = near_keys(real_lengths, query_blocks.shape[2], window, global_tokens)
        parts.append(exact_part(logits, seen[:, None, :, None], with_neighbours(value_blocks)))
    if near and global_tokens:
        # the first keys, seen from every block: (batch, heads, 1, global_tokens, dim)
        logits = query_blocks @ key[:, :, None, :global_tokens].transpose(-1, -2)
        seen = position[:global_tokens] < real_lengths[:, None]
        parts.append(exact_part(logits, seen[:, None, None, None], value_and_one[:, :, None, :global_tokens]))
    if far:
        per_block = to_blocks(phi_key, window).transpose(-1, -2) @ value_blocks
        # (batch, heads, blocks, features, value_dim + 1): S and z of all blocks that are far from a block
        sums = far_sums(per_block) if window_size else per_block
        summary = to_blocks(phi_query, window) @ sums
        if feature_map.signed:
            # reached where query and key are equal: one per direction, times the common factor
            largest = (log_phi - key_shift).exp() * (phi_key.shape[-1] / 2)
            per_block = to_blocks(largest, window).sum(-2, keepdim=True)
            largest = far_sums(per_block) if window_size else per_block
            mass = torch.maximum(summary[..., -1:], _SIGNED_MASS_FLOOR * largest)
            summary = torch.cat((summary[..., :-1], mass), dim=-1)
        parts.append(Partial(to_blocks(query_shift, window), summary))
    return from_blocks(join(parts), length).to(dtype)


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
    phi_query = _expand(query_features, query.new_zeros(()))
    phi_key = _expand(key_features, key.new_zeros(()))
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
        far_mass = torch.maximum(far_mass, _SIGNED_MASS_FLOOR * largest)
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
            window_size=self.config.window_size,
            global_tokens=self.config.global_tokens,
            near=self.config.near,
            far=self.config.far,
        )
