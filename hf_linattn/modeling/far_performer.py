"""Performer's far part: sums of random features (FAVOR+, Choromanski et al. 2021, arXiv:2009.14794).

    far numerator of query i = phi(q_i) S_i,  far mass = phi(q_i) z_i
    S_i = sum_{j far from i} phi(k_j) v_j^T,  z_i = sum_{j far from i} phi(k_j)

Everything is computed in float32, or in float64 for float64 inputs, whatever the inputs: exponents of half-precision
logits would be off by several per cent.

In a decoder nothing looks at later keys, stabilizers included: each chunk of queries reads sums over earlier chunks, on
a scale per feature that is the maximum over earlier keys, and the scale of pairs within a chunk is a running maximum.
Without a window, and where they can be used, the kernels of flash-linear-attention do the sums (`kernels`).
"""

from collections.abc import Callable
from copy import copy
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .blocks import from_blocks, is_large, recomputed, to_blocks
from .far_part import Chunk, FarSums, Rows
from .feature_maps import FEATURE_MAPS, FeatureMap, Features
from .feature_sums import (
    SumsByBlock,
    add,
    add_keys,
    add_product,
    bounded_features,
    expand,
    expand_to_one,
    features_in_blocks,
    floor_mass,
    read,
    sum_up,
)
from .kernels import gated_part, kernels_for
from .merge import NEVER, Partial, finite, masked, with_one

# Least estimate, as a share of what the scales of a query and a key allow. Smaller ones would be lost to
# underflow, and with no other key in sight (window_size=0) a query would be left with no mass at all.
_LEAST_ESTIMATE = 1e-30


class PerformerFarPart(FarSums):
    """Performer's far part, of encoders and of decoders.

    The state of a decoder is `sums` (batch, heads, M, value_dim + 1), S and, as the last column, z of all far keys,
    with the features divided by 2 ** shift, and `shift` (batch, heads, 1, M or 1), the largest base-2 log of a feature
    of these keys, -inf where there are none. M is the number of features, and one more for a signed map: the largest
    mass that its keys could have.
    """

    # queries per chunk without a window, and the least number with one: measured on 2 cores with 64 to 256 features
    least_block = 64

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int) -> None:
        self.feature_map: Any = FEATURE_MAPS[config.feature_map](
            num_heads=num_heads,
            head_dim=head_dim,
            num_features=config.num_features,
            orthogonal=config.orthogonal,
            seed=seed,
            init=config.init,
        )
        self.modules = {"feature_map": self.feature_map}

    def reader(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Rows,
        window: int,
        chunks: list[tuple[int, int]],
        scale: float,
    ) -> Any:
        feature_map = self.feature_map.of_rows(query, key, rows, scale)
        valid = rows.far_tokens[:, None, :, None]
        tokens = max(window, 1)

        def sums_of(begin: int, end: int) -> tuple[Tensor, Tensor]:
            """S, z and their shift: of a chunk without a window, and of each of its blocks with one."""
            part = slice(begin * tokens, min(end * tokens, rows.length))
            features = bounded_features(feature_map, key[:, :, part], "key", scale=scale)
            value_and_one = with_one(value[:, :, part])
            # nothing is padded, and no token is global: no mask
            all_valid = rows.lengths is None and part.start >= rows.first and end * tokens <= rows.length
            if not window:
                return sum_up(features, value_and_one, None if all_valid else valid[:, :, part])
            return sum_up(
                features_in_blocks(features, window),
                to_blocks(value_and_one, window),
                None if all_valid else to_blocks(valid[:, :, part], window),
            )

        parts = (recomputed(sums_of, is_large(query, rows.length), *chunk) for chunk in chunks)
        if not window:
            return _TotalReader(feature_map, reduce(lambda sums, more: add(*sums, *more), parts), scale)
        return _BlockReader(feature_map, SumsByBlock(list(parts)), window, scale)

    # decoders

    def of_text(self, dtype: torch.dtype) -> "PerformerFarPart | None":
        feature_map = self.feature_map.of_now(torch.promote_types(dtype, torch.float32))
        if feature_map is self.feature_map:
            return None
        part = copy(self)
        part.feature_map, part.modules = feature_map, {}
        return part

    def initial_state(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        batch, heads, _, _ = key.shape
        dtype = torch.promote_types(key.dtype, torch.float32)
        features = bounded_features(self.feature_map, key[:, :, :0].to(dtype), "key", scale=1.0)
        num_features = (features.log2_phi if features.factor is None else features.factor).shape[-1]
        sums = key.new_zeros(batch, heads, num_features, value.shape[-1] + 1, dtype=dtype)
        return sums, key.new_full((batch, heads, 1, features.log2_phi.shape[-1]), NEVER, dtype=dtype)

    def absorb(
        self, state: tuple[Tensor, ...], key: Tensor, value: Tensor, valid: Tensor | None, before: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        sums, shift = state
        features = bounded_features(self.feature_map, key.to(sums.dtype), "key", scale=scale)
        valid = None if valid is None else valid[:, None, :, None]
        add_keys(sums, shift, features, with_one(value.to(sums.dtype)), valid)
        return state

    def read(self, query: Tensor, state: tuple[Tensor, ...], scale: float, alone: bool) -> Partial:
        features = bounded_features(self.feature_map, query, "query", scale=scale, alone=alone)
        sums, shift = state
        return read(features, sums, shift, self.feature_map.signed)

    def chunk(self, state: tuple[Tensor, ...], chunk: Chunk, *, alone: bool) -> tuple[Partial, tuple[Tensor, ...]]:
        signed, window, scale = self.feature_map.signed, chunk.settings.window_size, chunk.settings.scale
        read_chunks: Callable[..., tuple[Partial, Tensor, Tensor]] = (
            gated_part
            if not window and kernels_for(chunk.query, chunk.query.dtype, signed)
            else partial(_read_chunks, chunk=chunk.ranks.shape[2], window=window, signed=signed)
        )
        part, *after = read_chunks(
            bounded_features(self.feature_map, chunk.query, "query", scale=scale, alone=alone),
            bounded_features(self.feature_map, chunk.key, "key", scale=scale),
            with_one(chunk.value),
            chunk.becomes_far,
            *state,
        )
        return part, tuple(after)


class CausalPerformerFarPart(PerformerFarPart):
    """The same in a decoder."""

    def __init__(self, config: Any, *, num_heads: int, head_dim: int, seed: int) -> None:
        if config.init == "row_moments":
            raise ValueError(
                "init='row_moments' cannot be causal: the moments of a document are known when it ends. Use moments."
            )
        super().__init__(config, num_heads=num_heads, head_dim=head_dim, seed=seed)


class _TotalReader:
    """What queries read of the sums over all far keys."""

    def __init__(self, feature_map: FeatureMap, total: tuple[Tensor, Tensor], scale: float) -> None:
        self.feature_map, self.total, self.scale = feature_map, total, scale

    def start(self) -> None:
        return None

    def read(self, index: int, query: Tensor, carry: None, alone: bool) -> tuple[Partial, None]:
        features = bounded_features(self.feature_map, query, "query", scale=self.scale, alone=alone)
        return read(features, *self.total, self.feature_map.signed), None


class _BlockReader:
    """What blocks of queries read of the sums over the keys that are far from each of them, a chunk after the other."""

    def __init__(self, feature_map: FeatureMap, sums: SumsByBlock, window: int, scale: float) -> None:
        self.feature_map, self.sums, self.window, self.scale = feature_map, sums, window, scale

    def start(self) -> Tensor:
        """What the first chunk carries: the sum over the blocks before it."""
        return self.sums.start()

    def read(self, index: int, query: Tensor, carry: Tensor, alone: bool) -> tuple[Partial, Tensor]:
        """Args: query (batch, heads, blocks * window, dim) of chunk `index`; `carry` what the one before returned."""
        features = bounded_features(self.feature_map, query, "query", scale=self.scale)
        sums, carry = self.sums.chunk(index, carry)
        blocks = features_in_blocks(features, self.window)
        part = read(blocks, sums, self.sums.shift, self.feature_map.signed)
        # blocks become tokens again
        return Partial(part.shift.flatten(2, 3), part.total.flatten(2, 3)), carry


def _running_shifts(shift: Tensor, key: Features) -> Tensor:
    """Largest base-2 log of each feature before each chunk and after the last: (batch, heads, chunks + 1, 1, M or 1).

    Args:
        shift: that of earlier keys, (batch, heads, 1, M or 1).
        key: features in chunks, (batch, heads, chunks, chunk, M or 1), -inf where there is no key.
    """
    per_chunk = key.log2_phi.detach().amax(3, keepdim=True)
    return torch.cat((shift.unsqueeze(2), per_chunk), dim=2).cummax(2).values


def _scan(sums: Tensor, shifts: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """What is known before each chunk, (batch, heads, chunks, M, value_dim + 1), and after the last.

    Args:
        sums: of earlier keys, (batch, heads, M, value_dim + 1), on the first of the shifts.
        shifts: as `_running_shifts` returns them.
        added: sums of each chunk, on the shift after it.
    """
    kept = (shifts[:, :, :-1] - finite(shifts[:, :, 1:])).exp2().transpose(-1, -2).unbind(2)
    steps = list(zip(kept, added.unbind(2), strict=True))
    if torch.is_grad_enabled():
        known = list(accumulate(steps, lambda sums, step: torch.addcmul(step[1], sums, step[0]), initial=sums))
        return torch.stack(known[:-1], dim=2), known[-1]
    # each written where it belongs
    before = torch.empty_like(added)
    places = [*before.unbind(2), torch.empty_like(sums)]
    places[0].copy_(sums)
    for (keep, new), earlier, later in zip(steps, places[:-1], places[1:], strict=True):
        torch.addcmul(new, earlier, keep, out=later)
    return before, places[-1]


def _read_chunks(
    query: Features,
    key: Features,
    value_and_one: Tensor,
    valid: Tensor | None,
    sums: Tensor,
    shift: Tensor,
    *,
    chunk: int,
    window: int,
    signed: bool,
) -> tuple[Partial, Tensor, Tensor]:
    """The estimate of many queries, chunk by chunk, and the sums after them.

    Args:
        query: features at positions 0 .. length - 1, a multiple of `chunk`.
        key, value_and_one: of keys `window` ranks earlier: in these positions a query sees all keys of
            earlier blocks, or, with window = 0, all keys up to its own.
        valid: (rows, length) bool, which keys are real and not global; none before the first of them is seen.
            None for all.
        sums, shift: of earlier keys.
    """
    length = query.log2_phi.shape[2]
    query, key = features_in_blocks(query, chunk), features_in_blocks(key, chunk)
    value_and_one = to_blocks(value_and_one, chunk)
    if valid is not None:
        # (rows, 1, chunks, chunk, 1)
        valid = valid.unflatten(1, (-1, chunk))[:, None, ..., None]
        key = Features(masked(key.log2_phi, ~valid), key.factor)
    shifts = _running_shifts(shift, key)
    # a copy: a view would keep all of them as long as a state lives
    before_shift, shift = shifts[:, :, :-1], shifts[:, :, -1].clone()
    base = before_shift
    if window != chunk:
        # Keys of the same chunk are met as pairs. Their scale per feature is that of earlier chunks, or, where there
        # is none, of the first key: the rest must not matter to queries that do not see it.
        first = slice(1) if valid is None else valid.to(torch.uint8).argmax(3, keepdim=True)
        log2_phi = key.log2_phi.detach()
        log_first = log2_phi[:, :, :, first] if isinstance(first, slice) else log2_phi.take_along_dim(first, dim=3)
        base = log_first.where(base == NEVER, base)
    phi = expand(key, -finite(shifts[:, :, 1:]))
    before, sums = _scan(sums, shifts, phi.transpose(-1, -2) @ value_and_one)
    if window == chunk:
        part = read(query, before, before_shift, signed)
        return Partial(from_blocks(part.shift, length), from_blocks(part.total, length)), sums, shift

    base = finite(base)
    phi_query, read_shift = expand_to_one(query, base)
    # and per key a scale of its own, (batch, heads, chunks, chunk, 1), given back below
    phi_key, key_shift = expand_to_one(key, -base)
    level = _running_level(key_shift, window)
    # the largest scale that a query finds; that of the earlier chunks is 0
    level = torch.maximum(level, torch.zeros_like(level).masked_fill(before_shift[..., :1] == NEVER, NEVER))
    # zero for pairs that do not see each other, whose scales may be beyond any number
    scale = (key_shift.transpose(-1, -2) - finite(level)).exp2_()
    if window:
        block = torch.arange(chunk, device=level.device) // window
        scale = scale.masked_fill_(block[:, None] <= block, 0.0)
    else:
        scale = scale.tril_()
    earlier = (-finite(level)).exp2_()
    estimate = phi_query @ phi_key.transpose(-1, -2)
    total = phi_query @ before
    if torch.is_grad_enabled():
        estimate = estimate if window or signed else estimate.clamp_min(_LEAST_ESTIMATE)
        total = torch.addcmul((estimate * scale) @ value_and_one, total, earlier)
    else:
        # the same in place
        estimate = estimate if window or signed else estimate.clamp_min_(_LEAST_ESTIMATE)
        total = add_product(total.mul_(earlier), estimate.mul_(scale), value_and_one)
    if signed and key.factor is not None:
        largest = (key.factor[..., -1:].transpose(-1, -2) * scale).sum(-1, keepdim=True)
        total = floor_mass(total, earlier * before[..., -1:, -1:] + largest)
    return Partial(from_blocks(read_shift + level, length), from_blocks(total, length)), sums, shift


def _running_level(key_shift: Tensor, window: int) -> Tensor:
    """Largest of (batch, heads, chunks, chunk, 1) up to each position; with a window, in earlier blocks of it."""
    if not window:
        return key_shift.cummax(3).values
    # split the chunk into blocks, take the maximum of each: (batch, heads, chunks, blocks, 1, 1)
    blocks = key_shift.unflatten(3, (-1, window)).amax(4, keepdim=True).cummax(3).values
    earlier = torch.cat((torch.full_like(blocks[:, :, :, :1], NEVER), blocks[:, :, :, :-1]), dim=3)
    # every position of a block has the same: blocks and positions back into one chunk
    return earlier.expand(-1, -1, -1, -1, window, -1).flatten(3, 4)
