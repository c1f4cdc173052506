"""Linformer's far part by content: slot s holds the mean key, the mean value and the log count of a cluster of keys.

    a(j) = argmin_s (k_j - c_s)^T M (k_j - c_s) = argmax_s (k_j^T M c_s - c_s^T M c_s / 2)
    members of slot s: the far keys with a(j) = s

Keys of a pretrained model are clustered, where Transformer-VQ (Lingle 2024, arXiv:2309.16354) quantizes keys in
training; clustered attention (Vyas et al. 2020, arXiv:2007.04825) clusters queries, and MuSe (arXiv:2509.10406) both.
A far key that is repeated is summarized without error. Gradients go through the means; assignments have none. Of equal
scores the first counts.

In an encoder M = E[q q^T] over some of the row's queries: keys are near each other where the logits of queries are.
Half of the landmarks c_s are the keys at equally spaced ranks of the row, the other half the keys that are farthest
from these. There are `projection_length` of them, or one for every `tokens_per_slot` tokens of a row if that is more.
They are moved to the mean of their members `rounds` times (Lloyd's algorithm). Or they are `prototypes`, which are
fixed, and M = 1. A decoder has prototypes: its state is the count and the sums of keys and values of each. Prototypes
start as random vectors; calibration makes them the centers of k-means over keys of the model.

A slot's mass is sum_j exp(q.k_j), which is more than count * exp(q.mean): to second order by the factor exp(var / 2),
with var the variance of the members' logits. Beside near keys, whose mass is exact, slots would weigh too little. So
their log mass is log count + `SPREAD` * var / 2, with var the mean over queries, tr(M Cov(members)), where members are
all of the slot's in the row; a decoder has one from calibration for each prototype, and `CAUSAL_SPREAD`. Without a
window all slots of an encoder err alike, and nothing is added.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .blocks import at, between, chunk_size, running_sums, spaced_positions
from .far_part import Chunk, FarKeys, Rows, Slots
from .selection import Selection

#: Share of the second-order term of a slot's log mass that is added to it: of 0, 0.5 and 1, 0.5 is best at 512 tokens
#: and 1 at 2,048 and 4,096.
SPREAD = 0.75
#: The same of a decoder: of 0, 0.25, 0.5, 0.75 and 1, 0.5 gives SmolLM2 the lowest perplexity, on two sets of texts.
CAUSAL_SPREAD = 0.5
#: The most that is added: the second order says nothing of larger spreads, and half precision has no room for them.
MOST_SPREAD = 8.0
#: Queries of a row that M is the mean over, at equally spaced ranks.
METRIC_QUERIES = 512
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


class _Assignment(NamedTuple):
    """Which slot each key of a row is in.

    slots: the number of slots.
    slot: (batch, length, heads) long, the number of slots for a key that is in none.
    metric: M, (batch, heads, dim, dim), float32.
    square: k^T M k of each key, (batch, heads, length), float32.
    """

    slots: int
    slot: Tensor
    metric: Tensor
    square: Tensor


class ClusterFarPart(_ClusterFarPart):
    """Clusters of a row's keys, in an encoder."""

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int) -> None:
        prototypes = config.landmarks == "prototypes"
        super().__init__(config, num_heads=num_heads, head_dim=head_dim, seed=seed, prototypes=prototypes)
        self.tokens_per_slot, self.selected_tokens = config.tokens_per_slot, config.selected_tokens
        # switches: see `LinAttnPreTrainedModel.branches`
        self.switches = {"summary": True, "selected": True}

    def slots_of(self, length: int | Tensor) -> Any:
        """How many slots a row of so many valid tokens has."""
        if self.tokens_per_slot is None:
            return self.num_slots
        asked = (length + self.tokens_per_slot - 1) // self.tokens_per_slot
        return asked.clamp_min(self.num_slots) if isinstance(asked, Tensor) else max(asked, self.num_slots)

    def summarize(self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> Slots:
        assignment = self.assign(query, key, rows)
        # tokens before heads, as models hold them in memory
        sums = _sums(assignment.slot, (key.transpose(1, 2), value.transpose(1, 2)), assignment.slots)
        mean_key, mean_value = sums.means()
        # (batch, 1, heads, slots, ...): all tokens are one block
        return Slots(
            mean_key.squeeze(1).to(key.dtype), mean_value.squeeze(1).to(value.dtype), sums.members.squeeze(1).log()
        )

    def summarize_by_block(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, window: int, scale: float
    ) -> "_BlockClusters":
        assignment = self.assign(query.transpose(1, 2), key.transpose(1, 2), rows)
        clusters = _BlockClusters(assignment, key, value, window, scale)
        if self.selected_tokens and self.switches["selected"]:
            clusters.selection = Selection(
                query,
                key,
                value,
                valid_lengths=rows.valid_lengths,
                slot=assignment.slot,
                members=clusters.total.members.squeeze(1),
                variance=clusters.variance,
                window=window,
                count=self.selected_tokens,
                scale=scale,
            )
        clusters.summary = self.switches["summary"]
        return clusters

    @torch.no_grad()
    def assign(self, query: Tensor, key: Tensor, rows: Rows) -> _Assignment:
        """The slots of the keys of (batch, heads, length, dim)."""
        query, key = query.detach(), key.detach()
        metric = _metric(query, rows)
        square = _squares(key, metric)
        # the most that rows of this length can have: no shape depends on how many tokens are valid
        slots = self.slots_of(rows.length)

        def slots_of_keys(landmarks: Tensor, metric: Tensor | None, exists: Tensor | None) -> Tensor:
            slot = nearest(key, landmarks, metric, exists)
            # (batch, length, heads)
            return slot.masked_fill(~rows.far_tokens[:, None], slots).transpose(1, 2)

        if self.prototypes is not None:
            return _Assignment(slots, slots_of_keys(self.prototypes.centers, None, None), metric, square)
        landmarks, exists = self._landmarks(key, metric, square, rows, slots)
        slot = slots_of_keys(landmarks, metric, exists)
        for _ in range(self.rounds):
            sums = _sums(slot, (key.transpose(1, 2),), slots)
            (mean,) = sums.means()
            # a landmark without members stays where it is
            landmarks = torch.where(sums.members.squeeze(1)[..., None] > 0, mean.squeeze(1), landmarks)
            slot = slots_of_keys(landmarks, metric, exists)
        return _Assignment(slots, slot, metric, square)

    def _landmarks(
        self, key: Tensor, metric: Tensor, square: Tensor, rows: Rows, slots: int
    ) -> tuple[Tensor, Tensor | None]:
        """Keys at equally spaced ranks, and those that are farthest from them.

        Returns:
            (batch, heads, slots, dim); and (batch, slots) bool, which of them a row has, or None for all.
        """
        farthest = slots // 2
        # of each row, (batch or 1, 1)
        of_row = self.slots_of(rows.valid_lengths[:, None]) if rows.lengths is not None else slots
        position, is_spaced = _spaced_positions(rows, slots - farthest, of_row - of_row // 2)
        all_exist = self.tokens_per_slot is None or rows.lengths is None
        spaced = at(key, position)
        if not farthest:
            return spaced, None
        score = _nearest_scores(key, spaced, metric, None if all_exist else is_spaced)
        # (k - c)^T M (k - c) of the nearest c, (batch, heads, length)
        distance = (square - 2 * score).masked_fill(~rows.far_tokens[:, None], float("-inf"))
        distance = F.pad(distance, (0, max(farthest - key.shape[2], 0)), value=float("-inf"))
        best = distance.topk(farthest, dim=-1)
        # where a row has fewer tokens, its first one again
        index = best.indices.masked_fill(best.values == float("-inf"), min(rows.first, rows.length - 1))
        landmarks = torch.cat((spaced, key.take_along_dim(index.unsqueeze(-1), dim=2)), dim=2)
        if all_exist:
            return landmarks, None
        is_farthest = torch.arange(farthest, device=key.device) < of_row // 2
        return landmarks, torch.cat((is_spaced, is_farthest), dim=1)


def _spaced_positions(rows: Rows, most: int, count: int | Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the far tokens at `count` (an int or (batch, 1)) equally spaced ranks, and which of `most` exist."""
    total = (rows.valid_lengths[:, None] - rows.first).clamp_min(1)
    number = torch.arange(most, device=rows.device)
    return rows.first + number * total // count, (number < count).expand(len(total), -1)


def _metric(query: Tensor, rows: Rows) -> Tensor:
    """M = E[q q^T] over queries (batch, heads, length, dim) of each row: (batch, heads, dim, dim), float32."""
    positions, valid = spaced_positions(rows.valid_lengths, METRIC_QUERIES)
    dtype = torch.promote_types(query.dtype, torch.float32)
    queries = at(query, positions).to(dtype) * valid[:, None, :, None]
    return queries.transpose(-1, -2) @ queries / valid.sum(1).clamp_min(1)[:, None, None, None]


def spread_mass(variance: Tensor, share: float) -> Tensor:
    """What the variance of its members' logits adds to the log mass of a slot."""
    return (share / 2 * variance).clamp(0.0, MOST_SPREAD)


def _squares(key: Tensor, metric: Tensor) -> Tensor:
    """k^T M k of keys (batch, heads, length, dim): (batch, heads, length), float32."""
    chunks = key.split(chunk_size(key.device), dim=2)
    return torch.cat([(x.to(metric.dtype) @ metric).mul_(x).sum(-1) for x in chunks], dim=2)


def _scores(key: Tensor, landmarks: Tensor, metric: Tensor | None, exists: Tensor | None) -> Iterator[Tensor]:
    """k^T M c - c^T M c / 2 for a chunk of keys after the other, (batch, heads, tokens, slots); see `nearest`."""
    landmarks = landmarks if landmarks.ndim == 4 else landmarks.unsqueeze(0)
    # M c: (batch, heads, slots, dim)
    dtype = torch.promote_types(key.dtype, torch.float32)
    landmarks = landmarks.to(dtype)
    weights = landmarks if metric is None else landmarks @ metric.to(dtype)
    half_square = (landmarks * weights).sum(-1).unsqueeze(-2) / 2
    if exists is not None:
        half_square = half_square.masked_fill(~exists[:, None, None], float("inf"))
    # scores of a chunk stay in the processor's cache
    return ((x.to(dtype) @ weights.mT).sub_(half_square) for x in key.split(chunk_size(key.device), dim=2))


@torch.no_grad()
def nearest(key: Tensor, landmarks: Tensor, metric: Tensor | None = None, exists: Tensor | None = None) -> Tensor:
    """Index of the nearest of landmarks (batch or 1, heads, slots, dim) to each key (batch, heads, length, dim).

    Args:
        metric: M, (batch, heads, dim, dim); None for the identity.
        exists: (batch, slots) bool, which landmarks a row has; None for all.

    Returns:
        (batch, heads, length) long; of equally near ones the first.
    """
    slots = landmarks.shape[-2]
    # `argmax` takes ten times as long as `amax` on CPUs: the largest number of those that reach the maximum
    number = torch.arange(slots, 0, -1, device=key.device, dtype=torch.float32)
    best = [
        scores.sub_(scores.amax(-1, keepdim=True)).sign_().add_(1).mul_(number).amax(-1)
        for scores in _scores(key, landmarks, metric, exists)
    ]
    # what is no number counts as the last
    return slots - torch.cat(best, dim=2).long().clamp(1, slots)


def _nearest_scores(key: Tensor, landmarks: Tensor, metric: Tensor, exists: Tensor | None) -> Tensor:
    """k^T M c - c^T M c / 2 of each key and the landmark c that is nearest to it, (batch, heads, length)."""
    return torch.cat([scores.amax(-1) for scores in _scores(key, landmarks, metric, exists)], dim=2)


class _Sums(NamedTuple):
    """Sums over the members of each slot of each block of tokens; float32 or float64.

    totals: of keys, values or what was asked for, (batch, blocks, heads, slots, dim) each.
    members: their number, (batch, blocks, heads, slots).
    """

    totals: tuple[Tensor, ...]
    members: Tensor

    def means(self) -> tuple[Tensor, ...]:
        """Zeros for a slot without members."""
        count = self.members.clamp_min(1).unsqueeze(-1)
        return tuple(total / count for total in self.totals)


def _sums(slot: Tensor, tokens: tuple[Tensor, ...], slots: int, block: int | None = None) -> _Sums:
    """Sums of each of `tokens` (batch, length, heads, dim) over blocks of `block` tokens; None: one block.

    Args:
        slot: (batch, length, heads) long, `slots` for tokens that no slot holds.
    """
    batch, length, heads = slot.shape
    blocks = 1 if block is None else -(-length // block)
    # one bucket per batch, block, head and slot, and one more slot for what no slot holds
    index = torch.zeros(length, device=slot.device, dtype=torch.long)
    index = index if block is None else torch.arange(length, device=slot.device) // block
    index = torch.arange(batch, device=slot.device)[:, None] * blocks + index
    index = ((index[..., None] * heads + torch.arange(heads, device=slot.device)) * (slots + 1) + slot).flatten()
    buckets, dtype = batch * blocks * heads * (slots + 1), torch.promote_types(tokens[0].dtype, torch.float32)

    def add_up(x: Tensor) -> Tensor:
        sums = x.new_zeros(buckets, *x.shape[1:]).index_add(0, index, x)
        return sums.unflatten(0, (batch, blocks, heads, slots + 1))[:, :, :, :slots]

    # tokens and heads side by side
    totals = tuple(add_up(x.to(dtype).flatten(0, 2)) for x in tokens)
    return _Sums(totals, add_up(torch.ones_like(index, dtype=dtype)))


class _BlockClusters:
    """What blocks of queries see of the clusters: the members that are far from the block.

    Each near key is taken out of its slot: the sums of all keys minus those of three blocks.
    """

    def __init__(self, assignment: _Assignment, key: Tensor, value: Tensor, window: int, scale: float) -> None:
        slots, slot, metric, square = assignment
        self.slot, self.key, self.value, self.slots, self.window = slot, key, value, slots, window
        self.total = _sums(slot, (key, value), slots)
        with torch.no_grad():
            mean_key = self.total.means()[0].squeeze(1)
            mean_square = _sums(slot, (square.transpose(1, 2).unsqueeze(-1),), slots).means()[0].squeeze(1).squeeze(-1)
            # of the logits of members, a mean over queries: (batch, heads, slots), the same for all blocks
            variance = (mean_square - ((mean_key @ metric) * mean_key).sum(-1)) * scale**2
            self.variance = variance.clamp_min(0)
        self.selection: Selection | None = None
        self.summary = True

    def chunk(self, begin: int, end: int) -> Slots:
        low, high = (begin - 1) * self.window, (end + 1) * self.window
        # where there is no token, no slot holds it
        slot = between(self.slot + 1, low, high, dim=1) - 1
        slot = slot.masked_fill(slot < 0, self.slots)
        near = _sums(slot, tuple(between(x, low, high, dim=1) for x in (self.key, self.value)), self.slots, self.window)

        def far(total: Tensor, blocks: Tensor) -> Tensor:
            return (total - blocks[:, :-2]).sub_(blocks[:, 1:-1]).sub_(blocks[:, 2:])

        sums = _Sums(tuple(map(far, self.total.totals, near.totals)), far(self.total.members, near.members))
        mean_key, mean_value = sums.means()
        # slots before heads: (batch, blocks, slots, heads, dim)
        log_mass = sums.members.log() + spread_mass(self.variance, SPREAD).unsqueeze(1)
        slots = Slots(mean_key.transpose(2, 3), mean_value.transpose(2, 3), log_mass)
        if self.selection is None:
            return slots
        left, tokens = self.selection.split(slots, begin, end)
        if not self.summary:
            return tokens
        return Slots(*(torch.cat((a, b), dim=dim) for a, b, dim in zip(left, tokens, (2, 2, 3), strict=True)))


class CausalClusterFarPart(_ClusterFarPart):
    """Clusters of earlier keys around prototypes, in a decoder.

    The state is, of each prototype's members, the sum of keys and that of values, (batch, heads, slots, dim) each, and
    their number, (batch, heads, slots); float32. Without a window, near are the keys of the query's own block of 64
    ranks.
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
        batch, heads, slots = *key.shape[:2], self.num_slots
        sums = (key.new_zeros(batch, heads, slots, x.shape[-1], dtype=dtype) for x in (key, value))
        return (*sums, key.new_zeros(batch, heads, slots, dtype=dtype))

    def absorb(
        self, state: tuple[Tensor, ...], key: Tensor, value: Tensor, valid: Tensor | None, before: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        return self._with_block(state, self._slots(key, valid), key, value)

    def _with_block(self, state: tuple[Tensor, ...], slot: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The sums with one block of tokens in these slots."""
        new = self._by_block(slot, key, value, key.shape[2])
        return tuple(old + x.squeeze(1) for old, x in zip(state, new, strict=True))

    def save(self, state: tuple[Tensor, ...], count: Tensor) -> tuple[tuple[Tensor, ...], Slots]:
        sums = _Sums((state[0], state[1]), state[2])
        mean_key, mean_value = sums.means()
        return state, Slots(mean_key, mean_value, self._log_mass(sums.members))

    def _log_mass(self, members: Tensor) -> Tensor:
        assert self.prototypes is not None
        return members.log() + spread_mass(self.prototypes.spread.to(members.dtype), CAUSAL_SPREAD)

    def _slots(self, key: Tensor, valid: Tensor | None) -> Tensor:
        """(batch, heads, tokens) long: the slot of each key (batch, heads, tokens, dim), `num_slots` if not `valid`."""
        assert self.prototypes is not None
        slot = nearest(key.detach(), self.prototypes.centers)
        return slot if valid is None else slot.masked_fill(~valid[:, None], self.num_slots)

    def _by_block(self, slot: Tensor, key: Tensor, value: Tensor, block: int) -> tuple[Tensor, ...]:
        """What each block of tokens adds to the state, (batch, blocks, ...)."""
        sums = _sums(slot.transpose(1, 2), (key.transpose(1, 2), value.transpose(1, 2)), self.num_slots, block)
        return *sums.totals, sums.members

    def chunk(self, state: tuple[Tensor, ...], chunk: Chunk) -> tuple[Slots, tuple[Tensor, ...]]:
        slots, state, _ = self._known(state, chunk, self._slots(chunk.key, chunk.becomes_far))
        return slots, state

    def _known(
        self, state: tuple[Tensor, ...], chunk: Chunk, slot: Tensor
    ) -> tuple[Slots, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The slots that blocks of queries see, the state after them, and before each block (batch, blocks, ...)."""
        blocks = self._by_block(slot, chunk.key, chunk.value, chunk.ranks.shape[2])
        sums_by_block = [running_sums(x, list(y.unbind(1)), dim=1) for x, y in zip(state, blocks, strict=True)]
        known, state = tuple(x[:, :-1] for x in sums_by_block), tuple(x[:, -1].clone() for x in sums_by_block)
        sums = _Sums((known[0], known[1]), known[2])
        mean_key, mean_value = sums.means()
        # (batch, blocks, heads, 1, slots): the same for all queries of a block
        log_mass = self._log_mass(sums.members).unsqueeze(3)
        key_dtype, value_dtype = chunk.key.dtype, chunk.value.dtype
        return Slots(mean_key.to(key_dtype), mean_value.to(value_dtype), log_mass.to(key_dtype)), state, known
