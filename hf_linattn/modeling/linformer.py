"""Linformer attention (arXiv:2006.04768), alone or joined with exact attention to near keys.

    out_i = softmax over { q_i.k_j, j near i } and { q_i.(E k)_s + log c_s, s } of { v_j } and { (F v)_s }

where slot s stands for c_s tokens, all of them far from i, so that a far key that is repeated c_s times
is summarised without error.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import between, near_keys, near_mask, near_tokens, pieces, recomputed, row_lengths, with_neighbours
from .configuration_linattn import LinformerConfig
from .projections import FarSummaries, Projection, Segments, segment


def linformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Projection,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """Bidirectional Linformer attention in time and memory linear in the length.

    Args:
        query, key: (batch, heads, length, head_dim).
        value: (batch, heads, length, value_dim).
        projection: the layer's E and F.
        lengths: (batch,) number of real keys per row, which stand first; None when nothing is padded.
        window_size: block size of the exact part; 0 for none.
        global_tokens: that many first keys are exact for every query.
        near, far: False leaves that part of the formula out.
        scale: what products of queries and keys are multiplied by.

    Returns:
        (batch, heads, length, value_dim) in the dtype of `value`.
    """
    length, slots = query.shape[2], projection.slots
    # a block longer than the rows is the row
    window_size = min(window_size, length)
    real_lengths = row_lengths(lengths, length, query.device)
    segments = segment(real_lengths, length, slots, first=global_tokens, padded=lengths is not None)
    seen = torch.arange(length, device=query.device)[:global_tokens] < real_lengths[:, None]
    if window_size:
        return _in_runs(
            query, key, value, projection, segments, _log(seen), real_lengths, window_size, near, far, scale
        )

    # what all queries see: (batch, heads, keys, dim), and masks (batch, 1 or heads, keys)
    keys, values, masks = [], [], []
    if near and global_tokens:
        keys.append(key[:, :, :global_tokens])
        values.append(value[:, :, :global_tokens])
        masks.append(_log(seen)[:, None])
    if far:
        summaries = projection(key, value, segments)
        keys.append(summaries.key)
        values.append(summaries.value)
        masks.append(summaries.log_mass)
    return _softmax(query, torch.cat(keys, dim=2), torch.cat(values, dim=2), _joined(masks), scale)


def _in_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Projection,
    segments: Segments,
    first_mask: Tensor,
    real_lengths: Tensor,
    window: int,
    near: bool,
    far: bool,
    scale: float,
) -> Tensor:
    """With a window: what blocks of queries see differs, and is put together for a run of blocks at a time.

    Tensors are (batch, length, heads, dim) here, as models hold them in memory: neighbouring blocks are then one
    piece of memory, and so is the output of a run.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    length, first = query.shape[1], first_mask.shape[-1]
    runs = pieces(-(-length // window), window, query.device)
    sides: list[FarSummaries] = []
    if far:
        far_counts = segments.counts_by_block(window)
        # whole numbers: exact
        far_counts = far_counts.sum(1, keepdim=True) - with_neighbours(far_counts.unsqueeze(2)).sum(2)
        sides = [
            FarSummaries(projection, x, s, segments, far_counts, window) for x, s in ((key, "key"), (value, "value"))
        ]
        # (batch, blocks, 1 or heads, slots)
        log_mass = projection.log_mass(far_counts).unsqueeze(2)
        if projection.projection == "learned":
            log_mass = log_mass + projection.bias.float()

    def attend(begin: int, end: int) -> Tensor:
        # (batch, blocks, keys, heads, dim) and (batch, blocks, 1 or heads, keys)
        keys, values, masks = [], [], []
        if near and first:
            keys.append(key[:, None, :first].expand(-1, end - begin, -1, -1, -1))
            values.append(value[:, None, :first].expand(-1, end - begin, -1, -1, -1))
            masks.append(first_mask[:, None, None].expand(-1, end - begin, -1, -1))
        if far:
            for parts, side in zip((keys, values), sides, strict=True):
                parts.append(side.run(begin, end).to(key.dtype))
            masks.append(log_mass[:, begin:end])
        if near:
            keys.append(near_tokens(key, begin, end, window))
            values.append(near_tokens(value, begin, end, window))
            masks.append(_log(near_keys(real_lengths, end - begin, window, first, start=begin))[:, :, None])
        # blocks become rows of the batch: (batch * blocks, heads, window, dim)
        queries = between(query, begin * window, end * window, dim=1).unflatten(1, (-1, window)).flatten(0, 1)
        out = _softmax(
            queries.transpose(1, 2),
            torch.cat(keys, dim=2).flatten(0, 1).transpose(1, 2),
            torch.cat(values, dim=2).flatten(0, 1).transpose(1, 2),
            _joined(masks).expand(key.shape[0], -1, -1, -1).flatten(0, 1),
            scale,
        )
        # and rows of the batch become blocks again
        return out.transpose(1, 2).unflatten(0, (-1, end - begin))

    outputs = [recomputed(attend, length, *run) for run in runs]
    # (batch, blocks, window, heads, dim) -> (batch, length, heads, dim); after `cat`, which makes one piece of memory
    # of them whatever an exporter puts in the place of the softmax
    return torch.cat(outputs, dim=1).flatten(1, 2)[:, :length].transpose(1, 2)


def _softmax(query: Tensor, key: Tensor, value: Tensor, log_mass: Tensor, scale: float) -> Tensor:
    """Attention of (batch, heads, length, dim) to keys that stand for some mass, (batch or 1, heads or 1, keys)."""
    # -inf becomes finite, so that a row that sees nothing stays finite
    mask = log_mass.to(query.dtype).clamp_min(torch.finfo(query.dtype).min / 2).unsqueeze(-2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _log(seen: Tensor) -> Tensor:
    """Log of the mass of single keys: 0 for those that are seen, -inf for the others."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))


def _joined(parts: list[Tensor]) -> Tensor:
    """Masks of all parts, expanded to the same rows and heads, one after the other."""
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], dim=-1)


def linformer_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Projection,
    *,
    lengths: Tensor | None = None,
    window_size: int = 0,
    global_tokens: int = 0,
    near: bool = True,
    far: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """The same formula with every query's own summaries, (length, slots, length) weights in all.

    In the dtype of the inputs. Arguments as in `linformer_attention`.
    """
    length, slots = query.shape[2], projection.slots
    query = query * scale
    # a block longer than the rows is the row
    window_size = min(window_size, length)
    real_lengths = row_lengths(lengths, length, query.device)
    segments = segment(real_lengths, length, slots, first=global_tokens)
    is_near = near_mask(length, lengths, window_size, global_tokens, query.device)
    # (batch, query, key) and (batch, query, slot, key)
    is_far = segments.held[:, None] & ~is_near
    members = segments.members[:, None] & is_far[:, :, None]

    counts = members.sum(-1).to(query.dtype)
    if projection.projection == "gaussian":
        counts = (is_far.sum(-1, keepdim=True) / slots).expand_as(counts).to(query.dtype)
    log_mass = counts.log()[:, None]
    if projection.projection == "learned":
        log_mass = log_mass + projection.bias[:, None]
    far_keys = _reference_summaries(key, "key", projection, segments, is_far, members)
    far_values = _reference_summaries(value, "value", projection, segments, is_far, members)

    near_logits = (query @ key.transpose(-1, -2)).masked_fill(~is_near[:, None] | (not near), float("-inf"))
    far_logits = torch.einsum("bhid,bhisd->bhis", query, far_keys) + log_mass
    far_logits = far_logits.masked_fill(torch.tensor(not far), float("-inf"))
    weights = torch.cat((near_logits, far_logits), dim=-1).softmax(-1)
    return weights[..., :length] @ value + torch.einsum("bhis,bhisd->bhid", weights[..., length:], far_values)


def _reference_summaries(
    x: Tensor, side: str, projection: Projection, segments: Segments, is_far: Tensor, members: Tensor
) -> Tensor:
    """Keys or values x (batch, heads, length, dim) as each query sees them, (batch, heads, length, slots, dim)."""
    if projection.projection == "max":
        maxima = x[:, :, None, None].masked_fill(~members[:, None, ..., None], float("-inf")).amax(-2)
        return maxima.masked_fill(maxima == float("-inf"), 0.0)
    if projection.projection in ("mean", "conv"):
        if projection.projection == "conv":
            x = x * projection.kernel(side, segments).to(x.dtype)
        matrix = (members / members.sum(-1, keepdim=True).clamp_min(1))[:, None]
    elif projection.projection == "gaussian":
        matrix = projection.columns(side, segments.rank)[:, :, None] * is_far[:, None, :, None]
    else:
        deviation = projection.deviation(side, segments)[:, :, None] * is_far[:, None, :, None]
        matrix = (members / members.sum(-1, keepdim=True).clamp_min(1))[:, None] + deviation
    return matrix.to(x.dtype) @ x[:, :, None]


class LinformerAttention(nn.Module):
    """Linformer attention of one layer: the module that hangs under a converted attention module.

    `shared` is another layer's module whose E and F this layer uses (sharing="layers").
    """

    causal: ClassVar[bool] = False
    projection: Any

    def __init__(
        self,
        config: LinformerConfig,
        *,
        num_heads: int,
        head_dim: int,
        seed: int,
        shared: "LinformerAttention | None" = None,
    ) -> None:
        super().__init__()
        assert config.max_length is not None, "the conversion sets it, and the model class checks it"
        self.config = config
        # in a tuple, so that the other layer's parameters are not registered, or saved, a second time
        self._shared = (shared.projection,) if shared is not None else ()
        if shared is None:
            self.projection = self._make_projection(num_heads, head_dim, seed)

    def _make_projection(self, num_heads: int, head_dim: int, seed: int) -> Any:
        return Projection(
            projection=self.config.projection,
            sharing=self.config.sharing,
            slots=self.config.projection_length,
            max_length=self.config.max_length or 0,
            num_heads=num_heads,
            head_dim=head_dim,
            seed=seed,
        )

    @property
    def used_projection(self) -> Any:
        """E and F of this layer, or of the layer that it shares them with."""
        return self._shared[0] if self._shared else self.projection

    def reset_parameters(self) -> None:
        if not self._shared:
            self.projection.reset_parameters()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, *, scale: float = 1.0
    ) -> Tensor:
        """As `linformer_attention`, with the settings of the config."""
        return linformer_attention(
            query,
            key,
            value,
            self.used_projection,
            lengths=lengths,
            scale=scale,
            **self.config.joining(),
        )
