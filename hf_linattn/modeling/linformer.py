"""Linformer attention (arXiv:2006.04768), alone or joined with exact attention to near keys.

    out_i = softmax over { q_i.k_j, j near i } and { q_i.(E k)_s + log c_s, s } of { v_j } and { (F v)_s }

where slot s stands for c_s tokens, all of them far from i, so that a far key that is repeated c_s times
is summarised without error.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import from_blocks, near_keys, near_mask, row_lengths, to_blocks, with_neighbours
from .configuration_linattn import LinformerConfig
from .projections import Projection, segment


def _masked(log_mass: Tensor, dtype: torch.dtype) -> Tensor:
    """Log masses as an additive mask: -inf becomes finite, so that a row that sees nothing stays finite."""
    return log_mass.clamp_min(torch.finfo(dtype).min / 2).to(dtype)


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

    keys, values, masks = [], [], []  # each (batch, heads, blocks, keys, dim); masks (batch, heads, blocks, keys)
    if near and window_size:
        keys.append(with_neighbours(to_blocks(key, window)))
        values.append(with_neighbours(to_blocks(value, window)))
        masks.append(near_keys(real_lengths, blocks, window, global_tokens)[:, None])
    if near and global_tokens:
        keys.append(key[:, :, None, :global_tokens])
        values.append(value[:, :, None, :global_tokens])
        seen = torch.arange(length, device=query.device)[:global_tokens] < real_lengths[:, None]
        masks.append(seen[:, None, None])
    masks = [torch.zeros(m.shape, device=m.device).masked_fill(~m, float("-inf")) for m in masks]
    if far:
        segments = segment(real_lengths, length, projection.slots, first=global_tokens)
        if window_size:
            # means over the far part of a segment are sums over sums: float32, as elsewhere in the join
            summaries = projection(key.float(), value.float(), segments, window)
            keys.append(summaries.key.to(key.dtype))
            values.append(summaries.value.to(value.dtype))
            masks.append(summaries.log_mass)
        else:
            summaries = projection(key, value, segments)
            # one block: (batch, heads, 1, slots, dim)
            keys.append(summaries.key.unsqueeze(2))
            values.append(summaries.value.unsqueeze(2))
            masks.append(summaries.log_mass.unsqueeze(2))

    def joined(parts: list[Tensor]) -> Tensor:
        # every part is seen from every block of every row
        parts = [part.expand(batch, heads, blocks, *part.shape[3:]) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

    # blocks become rows of the batch: (batch, heads * blocks, window, dim)
    out = F.scaled_dot_product_attention(
        query_blocks.flatten(1, 2),
        joined(keys).flatten(1, 2),
        joined(values).flatten(1, 2),
        attn_mask=_masked(joined(masks), query.dtype).flatten(1, 2).unsqueeze(-2),
        scale=1.0,
    )
    # and rows of the batch become blocks again
    return from_blocks(out.unflatten(1, (heads, blocks)), length)


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
    """The same formula, one query at a time with the whole rows of E and F. Arguments as in `linformer_attention`."""
    batch, length = query.shape[0], query.shape[2]
    counts = row_lengths(lengths, length, query.device).expand(batch)
    is_near = near_mask(length, counts, window_size, global_tokens, query.device)
    slots = projection.slots
    rows = []
    for b in range(batch):
        real = int(counts[b])
        total = max(real - global_tokens, 1)
        outputs = []
        for i in range(length):
            seen = is_near[b, i]
            far_tokens = [j for j in range(global_tokens, real) if not seen[j]]
            logits = [query[b, :, i, None] @ key[b, :, seen].transpose(-1, -2)] if near else []
            taken = [value[b, :, seen]] if near else []
            if far:
                for s in range(slots):
                    members = [j for j in far_tokens if (j - global_tokens) * slots // total == s]
                    held = far_tokens if projection.projection == "gaussian" else members
                    if not held:
                        continue
                    mass = torch.tensor(len(held) / (slots if held is far_tokens else 1), dtype=query.dtype).log()
                    if projection.projection == "learned":
                        mass = mass + projection.bias[:, s, None, None]
                    summary_key = _reference_summary(
                        projection, "key", key[b], s, members, far_tokens, global_tokens, total
                    )
                    summary_value = _reference_summary(
                        projection, "value", value[b], s, members, far_tokens, global_tokens, total
                    )
                    logits.append(query[b, :, i, None] @ summary_key.transpose(-1, -2) + mass)
                    taken.append(summary_value)
            outputs.append(torch.cat(logits, -1).softmax(-1) @ torch.cat(taken, 1))
        rows.append(torch.cat(outputs, 1))
    return torch.stack(rows)


def _reference_summary(
    projection: Projection,
    side: str,
    x: Tensor,
    slot: int,
    members: list[int],
    tokens: list[int],
    first: int,
    total: int,
) -> Tensor:
    """One slot's projected key or value, (heads, 1, dim), from x (heads, length, dim)."""
    if projection.projection == "max":
        return x[:, members].amax(1, keepdim=True)
    if projection.projection == "mean":
        return x[:, members].mean(1, keepdim=True)
    weight = getattr(projection, f"{side if side in projection.sides else 'key'}_weight").to(x.dtype)
    if projection.projection == "conv":
        taps = [(j - first) * projection.slots % total * weight.shape[1] // total for j in members]
        return (x[:, members] * weight[:, taps]).mean(1, keepdim=True)
    if projection.projection == "gaussian":
        return weight[:, slot, None, [j - first for j in tokens]] @ x[:, tokens]
    column = [
        min((2 * (j - first) + 1) * projection.max_length // (2 * total), projection.max_length - 1) for j in tokens
    ]
    deviation = projection.slots / total * weight[:, slot, None, column] @ x[:, tokens]
    return x[:, members].mean(1, keepdim=True) + deviation


class LinformerAttention(nn.Module):
    """Linformer attention of one layer: the module that hangs under a converted attention module.

    `shared` is another layer's module whose E and F this layer uses (sharing="layers").
    """

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
        self.config = config
        # in a tuple, so that the other layer's parameters are not registered, or saved, a second time
        self._shared = (shared.projection,) if shared is not None else ()
        if shared is None:
            self.projection = Projection(
                projection=config.projection,
                sharing=config.sharing,
                slots=config.projection_length,
                max_length=config.max_length,
                num_heads=num_heads,
                head_dim=head_dim,
                seed=seed,
            )

    def reset_parameters(self) -> None:
        if not self._shared:
            self.projection.reset_parameters()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
        """As `linformer_attention`, with the settings of the config."""
        return linformer_attention(
            query,
            key,
            value,
            self._shared[0] if self._shared else self.projection,
            lengths=lengths,
            window_size=self.config.window_size,
            global_tokens=self.config.global_tokens,
            near=self.config.near,
            far=self.config.far,
        )
