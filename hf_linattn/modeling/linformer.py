"""Linformer attention (arXiv:2006.04768), alone or joined with exact attention to near keys.

    out_i = softmax over { q_i.k_j, j near i } and { q_i.(E k)_s + log c_s, s } of { v_j } and { (F v)_s }

where slot s stands for c_s tokens, all of them far from i, so that a far key that is repeated c_s times
is summarised without error.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import from_blocks, near_keys, near_mask, pieces, row_lengths, to_blocks, with_neighbours
from .configuration_linattn import LinformerConfig
from .projections import Projection, Segments, Summaries, segment


def _finite(log_mass: Tensor, dtype: torch.dtype) -> Tensor:
    """Log masses as an additive mask: -inf becomes finite, so that a row that sees nothing stays finite."""
    return log_mass.to(dtype).clamp_min(torch.finfo(dtype).min / 2)


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
) -> Tensor:
    """Bidirectional Linformer attention in time and memory linear in the length.

    Args:
        query, key: (batch, heads, length, head_dim), multiplied by the square root of the softmax scale.
        value: (batch, heads, length, value_dim).
        projection: the layer's E and F.
        lengths: (batch,) number of real keys per row, which stand first; None when nothing is padded.
        window_size: block size of the exact part; 0 for none.
        global_tokens: that many first keys are exact for every query.
        near, far: False leaves that part of the formula out.

    Returns:
        (batch, heads, length, value_dim) in the dtype of `value`.
    """
    batch, heads, length, _ = query.shape
    real_lengths = row_lengths(lengths, length, query.device)
    # without a window the whole sequence is one block, and no block is near it
    window = window_size or length
    query_blocks = to_blocks(query, window)
    blocks = query_blocks.shape[2]

    key_blocks, value_blocks = to_blocks(key, window), to_blocks(value, window)
    # what all blocks see, or each has: (batch, heads, 1 or blocks, keys, dim) and (batch, 1 or heads, ..., keys)
    keys, values, masks = [], [], []
    if near and global_tokens:
        keys.append(key[:, :, None, :global_tokens])
        values.append(value[:, :, None, :global_tokens])
        seen = torch.arange(length, device=query.device)[:global_tokens] < real_lengths[:, None]
        masks.append(_log(seen[:, None, None]))
    if far:
        segments = segment(real_lengths, length, projection.slots, first=global_tokens)
        if window_size:
            # means over the far part of a segment are sums over sums: float32, as elsewhere in the join
            summaries = projection(key.float(), value.float(), segments, window)
        else:
            # one block
            summaries = Summaries(*(x.unsqueeze(2) for x in projection(key, value, segments)))
        keys.append(summaries.key.to(key.dtype))
        values.append(summaries.value.to(value.dtype))
        masks.append(summaries.log_mass)

    outputs = []
    for begin, end in pieces(blocks, window):
        run_keys, run_values, run_masks = ([_of_run(x, begin, end) for x in xs] for xs in (keys, values, masks))
        if near and window_size:
            run_keys.append(with_neighbours(key_blocks, begin, end))
            run_values.append(with_neighbours(value_blocks, begin, end))
            run_masks.append(_log(near_keys(real_lengths, end - begin, window, global_tokens, start=begin)[:, None]))
        shape = (batch, heads, end - begin)
        # blocks become rows of the batch: (batch, heads * blocks, window, dim)
        out = F.scaled_dot_product_attention(
            query_blocks[:, :, begin:end].flatten(1, 2),
            _joined(run_keys, shape).flatten(1, 2),
            _joined(run_values, shape).flatten(1, 2),
            attn_mask=_finite(_joined(run_masks, shape), query.dtype).flatten(1, 2).unsqueeze(-2),
            scale=1.0,
        )
        # and rows of the batch become blocks again
        outputs.append(out.unflatten(1, (heads, end - begin)))
    return from_blocks(torch.cat(outputs, dim=2), length)


def _log(seen: Tensor) -> Tensor:
    """Log of the mass of single keys: 0 for those that are seen, -inf for the others."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))


def _of_run(part: Tensor, begin: int, end: int) -> Tensor:
    """The blocks `begin` .. `end` of what has one entry for each block; else what all blocks see."""
    return part if part.shape[2] == 1 else part[:, :, begin:end]


def _joined(parts: list[Tensor], shape: tuple[int, int, int]) -> Tensor:
    """Keys, values or masks of all parts for (batch, heads, blocks): every part is seen from every block."""
    parts = [part.expand(*shape, *part.shape[3:]) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


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
) -> Tensor:
    """The same formula with every query's own summaries, (length, slots, length) weights in all.

    In the dtype of the inputs. Arguments as in `linformer_attention`.
    """
    length, slots = query.shape[2], projection.slots
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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
        """As `linformer_attention`, with the settings of the config."""
        return linformer_attention(
            query,
            key,
            value,
            self.used_projection,
            lengths=lengths,
            **self.config.joining(),
        )
