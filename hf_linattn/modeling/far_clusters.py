"""Linformer's far part by content: slot s holds the mean key, the mean value and the log count of a cluster of keys.

    a(j) = argmin_s (k_j - c_s)^T M (k_j - c_s) = argmax_s (k_j^T M c_s - c_s^T M c_s / 2)
    members of slot s: the far keys with a(j) = s

Keys of a pretrained model are clustered, where Transformer-VQ (Lingle 2024, arXiv:2309.16354) quantizes keys in
training; clustered attention (Vyas et al. 2020, arXiv:2007.04825) clusters queries, and MuSe (arXiv:2509.10406) both.
A far key that is repeated is summarized without error. Gradients go through the means; assignments have none. Of equal
scores the first counts.

In an encoder M = E[q q^T] over the row's queries: keys are near each other where the logits of the row's queries are.
Half of the landmarks c_s are the keys at equally spaced ranks of the row, the other half the keys that are farthest
from these. They are moved to the mean of their members `rounds` times (Lloyd's algorithm). Or they are `prototypes`,
which are fixed, and M = 1. A decoder has prototypes: its state is the count and the sums of keys and values of each.
Prototypes start as random vectors; calibration makes them the centers of k-means over keys of the model.

A slot's mass is sum_j exp(q.k_j), which is more than count * exp(q.mean): to second order by the factor exp(var / 2),
with var the variance of the members' logits. Beside near keys, whose mass is exact, slots would weigh too little. So
their log mass is log count + `SPREAD` * var / 2, with var the mean over the row's queries, tr(M Cov(members)); a
decoder has one from calibration for each prototype. Without a window all slots err alike, and nothing is added.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .blocks import at, between, chunk_size
from .far_part import FarKeys, Rows, Slots

#: Share of the second-order term of a slot's log mass that is added to it: of 0, 0.5 and 1, 0.5 is best at 512 tokens
#: and 1 at 2,048 and 4,096.
SPREAD = 0.75
#: The most that is added: the second order says nothing of larger spreads, and half precision has no room for them.
MOST_SPREAD = 8.0
# Ranks that form a block of a decoder without a window: the keys of the query's own block are exact.
_OWN_BLOCK = 64


class Prototypes(nn.Module):
    """One center per slot and head, `centers` (heads, slots, head_dim), in the space of the keys."""

    centers: Tensor
    spread: Tensor

    def __init__(self, *, num_heads: int, head_dim: int, slots: int, seed: int) -> None:
        super().__init__()
        self.seed = seed
        # a buffer: assignments have no gradient
        self.register_buffer("centers", torch.empty(num_heads, slots, head_dim))
        # of the logits of each one's members: what calibration found, 0 before it
        self.register_buffer("spread", torch.zeros(num_heads, slots))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill whatever was not loaded from a checkpoint; nothing on the meta device."""
        if not self.centers.is_meta:
            generator = torch.Generator("cpu").manual_seed(self.seed)
            init.zeros_(self.spread)
            init.copy_(self.centers, torch.randn(self.centers.shape, generator=generator, dtype=torch.float32))


class _ClusterFarPart(FarKeys):
    """What encoders and decoders have in common."""

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int, prototypes: bool) -> None:
        self.num_slots, self.rounds = config.projection_length, config.rounds
        self.prototypes = None
        self.modules = {}
        if prototypes:
            self.prototypes = Prototypes(num_heads=num_heads, head_dim=head_dim, slots=self.num_slots, seed=seed)
            self.modules["prototypes"] = self.prototypes


class ClusterFarPart(_ClusterFarPart):
    """Clusters of a row's keys, in an encoder."""

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int) -> None:
        prototypes = config.landmarks == "prototypes"
        super().__init__(config, num_heads=num_heads, head_dim=head_dim, seed=seed, prototypes=prototypes)

    def summarize(self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> Slots:
        slot, _ = self.assign(query, key, rows)
        # tokens before heads, as models hold them in memory
        sums = _sums(slot.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self.num_slots)
        mean_key, mean_value, count = _means(sums, key.shape[-1])
        # (batch, 1, heads, slots, ...): all tokens are one block
        return Slots(mean_key.squeeze(1).to(key.dtype), mean_value.squeeze(1).to(value.dtype), count.squeeze(1).log())

    def summarize_by_block(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, window: int, scale: float
    ) -> "_BlockClusters":
        slot, metric = self.assign(query.transpose(1, 2), key.transpose(1, 2), rows)
        return _BlockClusters(slot.transpose(1, 2), key, value, self.num_slots, window, metric * scale**2)

    @torch.no_grad()
    def assign(self, query: Tensor, key: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The slot of each key (batch, heads, length, dim), and M.

        Returns:
            (batch, heads, length) long, `num_slots` for no slot; (batch, heads, dim, dim).
        """
        query, key = query.detach(), key.detach()
        no_slot = ~rows.far_tokens[:, None]
        metric = _second_moment(query, rows)
        if self.prototypes is not None:
            slot = nearest(key, self.prototypes.centers)[0].masked_fill(no_slot, self.num_slots)
            return slot, metric
        landmarks = self._landmarks(key, metric, rows)
        slot = nearest(key, landmarks, metric)[0].masked_fill(no_slot, self.num_slots)
        for _ in range(self.rounds):
            sums = _sums(slot.transpose(1, 2), key.transpose(1, 2), None, self.num_slots)
            mean, _, count = _means(sums, key.shape[-1])
            # a landmark without members stays where it is
            landmarks = torch.where(count.squeeze(1)[..., None] > 0, mean.squeeze(1), landmarks.float()).to(key.dtype)
            slot = nearest(key, landmarks, metric)[0].masked_fill(no_slot, self.num_slots)
        return slot, metric

    def _landmarks(self, key: Tensor, metric: Tensor, rows: Rows) -> Tensor:
        """Keys at equally spaced ranks, and those that are farthest from them: (batch, heads, slots, dim)."""
        farthest = self.num_slots // 2
        spaced = at(key, _spaced_positions(rows, self.num_slots - farthest).expand(key.shape[0], -1))
        if not farthest:
            return spaced
        score = nearest(key, spaced, metric)[1]
        # (k - c)^T M (k - c) of the nearest c, (batch, heads, length)
        distance = (_squares(key, metric) - 2 * score).masked_fill(~rows.far_tokens[:, None], float("-inf"))
        distance = F.pad(distance, (0, max(farthest - key.shape[2], 0)), value=float("-inf"))
        best = distance.topk(farthest, dim=-1)
        # where a row has fewer tokens, its first one again
        index = best.indices.masked_fill(best.values == float("-inf"), min(rows.first, rows.length - 1))
        return torch.cat((spaced, key.take_along_dim(index.unsqueeze(-1), dim=2)), dim=2)


def _spaced_positions(rows: Rows, count: int) -> Tensor:
    """Positions of the far tokens at `count` equally spaced ranks, (batch or 1, count)."""
    total = (rows.valid_lengths[:, None] - rows.first).clamp_min(1)
    return rows.first + torch.arange(count, device=rows.device) * total // count


def _second_moment(query: Tensor, rows: Rows) -> Tensor:
    """E[q q^T] over the valid queries (batch, heads, length, dim) of each row: (batch, heads, dim, dim), float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    # of a trace, which has one chunk, as many as there are
    size = rows.length if torch.jit.is_tracing() else chunk_size(query.device)
    moment = query.new_zeros(*query.shape[:2], query.shape[-1], query.shape[-1], dtype=dtype)
    position = torch.arange(rows.length, device=rows.device)
    valid = (position < rows.valid_lengths[:, None])[:, None, :, None]
    for begin in range(0, rows.length, size):
        # products of one shape, so that not one bit depends on how much padding the batch gives a row
        chunk = between(query, begin, begin + size, dim=2).to(dtype) * between(valid, begin, begin + size, dim=2)
        moment = moment + chunk.transpose(-1, -2) @ chunk
    return moment / rows.valid_lengths.clamp_min(1)[:, None, None, None]


def spread_mass(variance: Tensor) -> Tensor:
    """What the variance of its members' logits adds to the log mass of a slot."""
    return (SPREAD / 2 * variance).clamp(0.0, MOST_SPREAD)


def _squares(key: Tensor, metric: Tensor) -> Tensor:
    """k^T M k of keys (batch, heads, length, dim): (batch, heads, length), float32."""
    chunks = key.split(chunk_size(key.device), dim=2)
    return torch.cat([((x.to(metric.dtype) @ metric) * x).sum(-1) for x in chunks], dim=2)


def nearest(key: Tensor, landmarks: Tensor, metric: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The nearest of landmarks (batch or 1, heads, slots, dim) to each key (batch, heads, length, dim).

    Args:
        metric: M, (batch, heads, dim, dim); None for the identity.

    Returns:
        Index of the landmark c, and k^T M c - c^T M c / 2, (batch, heads, length) each.
    """
    landmarks = landmarks if landmarks.ndim == 4 else landmarks.unsqueeze(0)
    # M c: (batch, heads, slots, dim)
    dtype = torch.promote_types(key.dtype, torch.float32)
    landmarks = landmarks.to(dtype)
    weights = landmarks if metric is None else landmarks @ metric.to(dtype)
    half_square = (landmarks * weights).sum(-1).unsqueeze(-2) / 2
    transposed = weights.transpose(-1, -2)
    # scores of a chunk stay in the processor's cache
    best = [(x.to(dtype) @ transposed - half_square).max(-1) for x in key.split(chunk_size(key.device), dim=2)]
    return torch.cat([x.indices for x in best], dim=2), torch.cat([x.values for x in best], dim=2)


def _sums(slot: Tensor, key: Tensor, value: Tensor | None, slots: int, block: int | None = None) -> Tensor:
    """Sums of [key, value, 1] over the members of each slot of each block of `block` tokens; None: one block.

    Args:
        slot: (batch, length, heads) long, `slots` for tokens that no slot holds.
        key, value: (batch, length, heads, dim).

    Returns:
        (batch, blocks, heads, slots, dims), float32 or float64.
    """
    batch, length, heads = slot.shape
    dtype = torch.promote_types(key.dtype, torch.float32)
    parts = [key.to(dtype), *([] if value is None else [value.to(dtype)])]
    tokens = torch.cat([*parts, key.new_ones(batch, length, heads, 1, dtype=dtype)], dim=-1)
    blocks = 1 if block is None else -(-length // block)
    # one bucket per batch, block, head and slot, and one more slot for what no slot holds
    index = torch.zeros(length, device=slot.device, dtype=torch.long)
    index = index if block is None else torch.arange(length, device=slot.device) // block
    index = torch.arange(batch, device=slot.device)[:, None] * blocks + index
    index = (index[..., None] * heads + torch.arange(heads, device=slot.device)) * (slots + 1) + slot
    sums = tokens.new_zeros(batch * blocks * heads * (slots + 1), tokens.shape[-1])
    sums = sums.index_add(0, index.flatten(), tokens.flatten(0, 2))
    return sums.view(batch, blocks, heads, slots + 1, -1)[..., :slots, :]


def _means(sums: Tensor, key_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean keys, mean values and counts (..., slots) of sums (..., slots, dims)."""
    count = sums[..., -1]
    means = sums[..., :-1] / count.clamp_min(1).unsqueeze(-1)
    return means[..., :key_dim], means[..., key_dim:], count


class _BlockClusters:
    """What blocks of queries see of the clusters: the members that are far from the block.

    Each near key is taken out of its slot: the sums of all keys minus those of three blocks.

    Args:
        slot: (batch, length, heads).
        metric: M times the square of the softmax scale.
    """

    def __init__(self, slot: Tensor, key: Tensor, value: Tensor, slots: int, window: int, metric: Tensor) -> None:
        self.slot, self.key, self.slots, self.window, self.metric = slot, key, slots, window, metric
        # k^T M k as one more value: its mean minus that of the mean key is the variance of the logits
        square = _squares(key.detach().transpose(1, 2), metric).transpose(1, 2)
        self.value = torch.cat((value.to(square.dtype), square.unsqueeze(-1)), dim=-1)
        self.total = _sums(slot, key, self.value, slots)

    def chunk(self, begin: int, end: int) -> Slots:
        low, high = (begin - 1) * self.window, (end + 1) * self.window
        # where there is no token, no slot holds it
        slot = between(self.slot + 1, low, high, dim=1) - 1
        slot = slot.masked_fill(slot < 0, self.slots)
        key, value = (between(x, low, high, dim=1) for x in (self.key, self.value))
        blocks = _sums(slot, key, value, self.slots, self.window)
        far = self.total - blocks[:, :-2] - blocks[:, 1:-1] - blocks[:, 2:]
        mean_key, mean_value, count = _means(far, key.shape[-1])
        with torch.no_grad():
            of_mean = ((mean_key @ self.metric.unsqueeze(1)) * mean_key).sum(-1)
            log_mass = count.log() + spread_mass(mean_value[..., -1] - of_mean)
        # slots before heads: (batch, blocks, slots, heads, dim)
        return Slots(mean_key.transpose(2, 3), mean_value[..., :-1].transpose(2, 3), log_mass)


class CausalClusterFarPart(_ClusterFarPart):
    """Clusters of earlier keys around prototypes, in a decoder.

    The state is `sums` (batch, heads, slots, 2 dim + 1), float32: of each prototype's members the sum of keys, that of
    values, and their number. Without a window, near are the keys of the query's own block of 64 ranks.
    """

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int) -> None:
        super().__init__(config, num_heads=num_heads, head_dim=head_dim, seed=seed, prototypes=True)

    def unit(self, window: int) -> int:
        return window or _OWN_BLOCK

    def block_size(self, window: int) -> int:
        # what is far differs from block to block
        return self.unit(window)

    def reach(self, window: int, first: int) -> int:
        return window

    def near_length(self, window: int, first: int) -> int:
        return 2 * window or _OWN_BLOCK

    def near_start(self, rank: Tensor, window: int, first: int) -> Tensor:
        return (rank // window - 1) * window if window else rank // _OWN_BLOCK * _OWN_BLOCK

    def initial_state(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(key.dtype, torch.float32)
        dims = key.shape[-1] + value.shape[-1] + 1
        return (key.new_zeros(*key.shape[:2], self.num_slots, dims, dtype=dtype),)

    def absorb(
        self, state: tuple[Tensor, ...], key: Tensor, value: Tensor, valid: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        (sums,) = state
        return (sums + self._by_block(key, value, valid, key.shape[2]).squeeze(1),)

    def _by_block(self, key: Tensor, value: Tensor, valid: Tensor | None, block: int) -> Tensor:
        """Sums of each block of tokens, (batch, blocks, heads, slots, dims)."""
        assert self.prototypes is not None
        slot = nearest(key.detach(), self.prototypes.centers)[0]
        if valid is not None:
            slot = slot.masked_fill(~valid[:, None], self.num_slots)
        return _sums(slot.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self.num_slots, block)

    def chunk(
        self,
        state: tuple[Tensor, ...],
        ranks: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        window: int,
        first: int,
        end: int | None,
    ) -> tuple[Slots, tuple[Tensor, ...]]:
        (sums,) = state
        if key.shape[2]:
            blocks = self._by_block(key, value, valid, ranks.shape[2])
            # before each block and after the last: (batch, blocks + 1, heads, slots, dims)
            known = torch.cat((sums.unsqueeze(1), blocks), dim=1).cumsum(1)
            before, after = known[:, :-1], known[:, -1].clone()
        else:
            before, after = sums.unsqueeze(1), sums
        mean_key, mean_value, count = _means(before, key.shape[-1])
        # (batch, blocks, heads, 1, slots): the same for all queries of a block
        assert self.prototypes is not None
        log_mass = count.log() + spread_mass(self.prototypes.spread.to(count.dtype))
        log_mass = log_mass.unsqueeze(3).to(key.dtype)
        return Slots(mean_key.to(key.dtype), mean_value.to(value.dtype), log_mass), (after,)
