"""The formulas of all methods with whole matrices of weights: what the fast forms are tested against.

Time and memory grow with the square of the length or faster. Computed in the dtype of the inputs; those with features
have no stabilizer and are meant for float64 inputs of moderate size. Nothing that a model uses is here, and this file
does not travel with a checkpoint.
"""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import far_clusters
from .blocks import after_end, spaced_positions
from .causal_projections import CausalProjection
from .far_clusters import CausalClusterFarPart, ClusterFarPart, spread_mass
from .far_part import Rows, Settings
from .feature_maps import FeatureMap
from .feature_sums import SIGNED_MASS_FLOOR, expand
from .linear_attention import LinearAttention
from .projections import Projection, Segments, segment

_DEFAULT = Settings()


def attention(
    layer: LinearAttention, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """What `layer(query, key, value, lengths, scale=scale)` computes, by the formula of its method."""
    settings = layer.settings(scale)
    if layer.split is not None:
        return _split_attention(layer, query, key, value, lengths, scale)
    position = torch.arange(query.shape[2], device=query.device)
    valid_lengths = _valid_lengths(lengths, query.shape[2], query.device)
    valid = (position < valid_lengths[:, None])[:, None, :, None]
    # nobody reads padding; far from all of a row's keys, its features could overflow
    query, key, value = (torch.where(valid, x, x[:, :, :1]) for x in (query, key, value))
    if isinstance(layer.far_part, (ClusterFarPart, CausalClusterFarPart)):
        out = cluster_attention(query, key, value, layer.far_part, lengths, settings)
    else:
        reference: Any = _REFERENCES[layer.config.method, layer.causal]
        (parameters,) = layer.far_part.modules.values()
        out = reference(query, key, value, parameters, lengths, settings)
    if layer.causal:
        return out
    # rows that are attended exactly, and first tokens that see every token
    exact = (valid_lengths <= settings.exact_length)[:, None].expand(len(query), len(position))
    if settings.global_queries and settings.near:
        exact = exact | (position < settings.global_tokens)
    logits = (query * scale) @ key.transpose(-1, -2)
    logits = logits.masked_fill(~valid.mT, float("-inf"))
    return torch.where(exact[:, None, :, None], logits.softmax(-1) @ value, out)


def _split_attention(
    layer: LinearAttention, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, scale: float
) -> Tensor:
    """All heads as softmax, and those that do not stay softmax by the formula of the method."""
    split, position = layer.split, torch.arange(query.shape[2], device=query.device)
    assert split is not None
    seen = (position < _valid_lengths(lengths, len(position), query.device)[:, None])[:, None, None]
    seen = seen & (position <= position[:, None]) if layer.causal else seen
    logits = (query * scale) @ key.transpose(-1, -2)
    out = logits.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num() @ value
    out = after_end(out, lengths) if layer.causal else out
    try:
        layer.split = None
        query, key, value = (x[:, split.linear] for x in (query, key, value))
        out[:, split.linear] = attention(layer, query, key, value, lengths, scale)
    finally:
        layer.split = split
    return out


def _valid_lengths(lengths: Tensor | None, length: int, device: torch.device) -> Tensor:
    return torch.full((1,), length, device=device) if lengths is None else lengths


def _near_mask(length: int, lengths: Tensor | None, window: int, global_tokens: int, device: torch.device) -> Tensor:
    """Which keys are near which query, shape (batch, length, length), bool."""
    position = torch.arange(length, device=device)
    valid = position < _valid_lengths(lengths, length, device)[:, None]
    near = position < global_tokens
    if window:
        block = position // window
        near = near | ((block[:, None] - block[None, :]).abs() <= 1)
    return near.expand(length, length) & valid[:, None, :]


def linformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Projection,
    lengths: Tensor | None = None,
    settings: Settings = _DEFAULT,
) -> Tensor:
    """Every query has summaries of its own, (length, slots, length) weights in all."""
    window_size, global_tokens, near, far, scale = settings[:5]
    length, slots = query.shape[2], projection.slots
    query = query * scale
    # a block longer than the rows is the row
    window_size = min(window_size, length)
    valid_lengths = _valid_lengths(lengths, length, query.device)
    segments = segment(valid_lengths, length, slots, first=global_tokens)
    is_near = _near_mask(length, lengths, window_size, global_tokens, query.device)
    # (batch, query, key) and (batch, query, slot, key)
    is_far = segments.valid[:, None] & ~is_near
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


def cluster_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    far_part: ClusterFarPart | CausalClusterFarPart,
    lengths: Tensor | None = None,
    settings: Settings = _DEFAULT,
) -> Tensor:
    """Every query has means of its own over the members of each cluster that are far from it."""
    window_size, global_tokens, near, far, scale = settings[:5]
    length, device = query.shape[2], query.device
    position = torch.arange(length, device=device)
    valid_lengths = _valid_lengths(lengths, length, device)
    causal = isinstance(far_part, CausalClusterFarPart)
    if not causal and far_part.tokens_per_slot is not None and len(query) > 1:  # type: ignore[union-attr]
        # rows differ in their number of slots
        rows = zip(query.split(1), key.split(1), value.split(1), valid_lengths.expand(len(query)).split(1), strict=True)
        return torch.cat([cluster_attention(q, k, v, far_part, n, settings) for q, k, v, n in rows])
    slots = far_part.num_slots
    if not causal and far_part.tokens_per_slot is not None:  # type: ignore[union-attr]
        slots = max(slots, math.ceil(int(valid_lengths) / far_part.tokens_per_slot))  # type: ignore[union-attr]
    if causal:
        begins = far_part.near_start(position, window_size, global_tokens)
        is_near = (position >= begins[:, None]) | (position < global_tokens)
        past = position <= position[:, None]
        is_near, is_far = (is_near & past)[None], (~is_near & past)[None]
    else:
        is_near = _near_mask(length, lengths, min(window_size, length), global_tokens, device)
        is_far = (position < valid_lengths[:, None])[:, None] & ~is_near
    # the cluster of each key, (batch, heads, length, slots)
    clustered = ((position >= global_tokens) & (position < valid_lengths[:, None]))[:, None, :, None]
    if far_part.prototypes is not None:
        centers = far_part.prototypes.centers.to(key.dtype).expand(len(key), -1, -1, -1)
        metric = torch.eye(key.shape[-1], dtype=key.dtype, device=device).expand(*key.shape[:2], -1, -1)
        one_hot = _nearest(key, centers, metric)[0] * clustered
    else:
        metric = _metric(query, valid_lengths)
        total = (valid_lengths - global_tokens).clamp_min(1)[:, None].expand(len(key), 1)
        spaced = slots - slots // 2
        landmark = (global_tokens + torch.arange(spaced, device=device) * total // spaced).clamp_max(length - 1)
        centers = torch.stack([row[:, its_own] for row, its_own in zip(key, landmark, strict=True)])
        distance = _nearest(key, centers, metric)[1].masked_fill(~clustered[..., 0], float("-inf"))
        order = distance.sort(-1, descending=True)
        # where a row has fewer tokens, its first one again
        farthest = order.indices.masked_fill(order.values == float("-inf"), min(global_tokens, length - 1))
        farthest = farthest[..., : slots // 2]
        centers = torch.cat((centers, key.take_along_dim(farthest.unsqueeze(-1), dim=2)), dim=2)
        # as many landmarks as slots, in short rows the first one several times
        centers = torch.cat((centers, centers[:, :, :1].expand(-1, -1, slots - centers.shape[2], -1)), dim=2)
        one_hot = _nearest(key, centers, metric)[0] * clustered
        for _ in range(far_part.rounds):
            members = one_hot.sum(2)[..., None]
            means = one_hot.transpose(-1, -2) @ key / members.clamp_min(1)
            centers = torch.where(members > 0, means, centers)
            one_hot = _nearest(key, centers, metric)[0] * clustered
    # (batch, heads, query, slot, key): 1 for each member of the slot that is far from the query
    members = one_hot.transpose(-1, -2)[:, :, None] * is_far[:, None, :, None]
    count = members.sum(-1)
    weights = members / count.clamp_min(1)[..., None]
    log_mass = count.log()
    if causal:
        log_mass = log_mass + spread_mass(far_part.prototypes.spread, far_clusters.CAUSAL_SPREAD)[:, None]  # type: ignore[union-attr]
    elif window_size:
        # variance of the logits over all members of a slot, a mean over queries: (batch, heads, 1, slots)
        moment = scale**2 * _metric(query, valid_lengths).detach()
        of_row = one_hot.transpose(-1, -2) / one_hot.sum(2).clamp_min(1)[..., None]
        mean = (of_row @ key).detach()
        offset = key[:, :, None] - mean[:, :, :, None]
        square = ((offset @ moment[:, :, None]) * offset).sum(-1).detach()
        variance = (of_row * square).sum(-1)
        log_mass = log_mass + spread_mass(variance, far_clusters.SPREAD)[:, :, None]
    query = query * scale
    near_logits = (query @ key.transpose(-1, -2)).masked_fill(~is_near[:, None] | (not near), float("-inf"))
    far_logits = torch.einsum("bhid,bhisd->bhis", query, weights @ key[:, :, None]) + log_mass
    if getattr(far_part, "selected_tokens", 0) and far_part.switches["selected"]:  # type: ignore[union-attr]
        share = far_logits.detach().softmax(-1).nan_to_num()
        if causal:
            sizes, block = count, 1
            # of each query's far members, in the space of keys
            offset = (weights @ key[:, :, None].square() - (weights @ key[:, :, None]).square()).sum(-1).detach()
            gain = share * offset.clamp_min(0)
        else:
            sizes, block = one_hot.sum(2)[:, :, None].expand_as(count), min(window_size, length)
            valid_query = (position < valid_lengths[:, None])[:, None, :, None]
            gain = (share * variance[:, :, None]) * valid_query
        taken = _taken(gain / sizes.clamp_min(1) * (count > 0), sizes, block, far_part.selected_tokens)  # type: ignore[union-attr]
        # members of the taken slots, (batch, heads, query, key), are near instead
        near_logits = (query @ key.transpose(-1, -2)).where(
            (members * taken[..., None]).sum(3).bool() & torch.tensor(far), near_logits
        )
        without = torch.tensor(not far_part.switches["summary"])  # type: ignore[union-attr]
        far_logits = far_logits.masked_fill(taken | without, float("-inf"))
    far_logits = far_logits.masked_fill(torch.tensor(not far), float("-inf"))
    probabilities = torch.cat((near_logits, far_logits), dim=-1).softmax(-1)
    # a query that sees no key at all gets zeros
    probabilities = probabilities.nan_to_num() if causal else probabilities
    out = probabilities[..., :length] @ value
    out = out + torch.einsum("bhis,bhisd->bhid", probabilities[..., length:], weights @ value[:, :, None])
    return after_end(out, lengths) if causal else out


def _taken(gain: Tensor, sizes: Tensor, block: int, count: int) -> Tensor:
    """Which slots' tokens queries see in place of the slots, (batch, heads, query, slots) bool, block by block.

    gain: (batch, heads, query, slots), which is added up over the queries of a block; sizes: of all members of a slot,
    the same shape.
    """
    taken = torch.zeros_like(gain, dtype=torch.bool)
    for row, head in itertools.product(range(len(gain)), range(gain.shape[1])):
        for begin in range(0, gain.shape[2], block):
            of_block = slice(begin, begin + block)
            size = sizes[row, head, begin]
            total, room = gain[row, head, of_block].sum(0) * (size <= count), count
            for slot in total.argsort(descending=True, stable=True).tolist():
                if total[slot] <= 0 or size[slot] > room:
                    break
                room -= int(size[slot])
                taken[row, head, of_block, slot] = True
    return taken


def _metric(query: Tensor, valid_lengths: Tensor) -> Tensor:
    """E[q q^T] over some of the valid queries of each row: (batch, heads, dim, dim)."""
    chosen = spaced_positions(valid_lengths, far_clusters.METRIC_QUERIES)
    moments = []
    for row, positions, valid in zip(query, *_each_row(chosen, len(query)), strict=True):
        queries = row[:, positions[valid]]
        moments.append(queries.transpose(-1, -2) @ queries / valid.sum().clamp_min(1))
    return torch.stack(moments)


def _each_row(tensors: tuple[Tensor, ...], rows: int) -> list[Tensor]:
    return [tensor.expand(rows, -1) for tensor in tensors]


def _nearest(key: Tensor, centers: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest center of each key as a one-hot row, (batch, heads, length, slots), and its squared distance."""
    difference = key[..., None, :] - centers[..., None, :, :]
    distance = ((difference @ metric[:, :, None]) * difference).sum(-1)
    return F.one_hot(distance.argmin(-1), centers.shape[2]).to(key.dtype), distance.amin(-1)


def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    lengths: Tensor | None = None,
    settings: Settings = _DEFAULT,
) -> Tensor:
    """The whole (length, length) matrix of weights."""
    window_size, global_tokens, near, far, scale = settings[:5]
    length = query.shape[2]
    query, key = query * scale**0.5, key * scale**0.5
    feature_map = feature_map.of_rows(query, key, Rows(lengths, length, global_tokens, query.device), 1.0)
    query_features, key_features = feature_map(query, "query"), feature_map(key, "key")
    phi_query = expand(query_features, query.new_zeros(()))
    phi_key = expand(key_features, key.new_zeros(()))
    position = torch.arange(length, device=query.device)
    valid = position < _valid_lengths(lengths, length, query.device)[:, None]
    is_near = _near_mask(length, lengths, window_size, global_tokens, query.device)
    is_far = valid[:, None, :] & ~is_near
    exact = (query @ key.transpose(-1, -2)).exp() * is_near[:, None]
    estimate = (phi_query @ phi_key.transpose(-1, -2)) * is_far[:, None]
    far_mass = estimate.sum(-1, keepdim=True)
    if feature_map.signed:
        largest = (query_features.log2_phi + key_features.log2_phi.transpose(-1, -2)).exp2() * is_far[:, None]
        largest = largest.sum(-1, keepdim=True) * (phi_key.shape[-1] / 2)
        far_mass = torch.maximum(far_mass, SIGNED_MASS_FLOOR * largest)
    weights = exact * float(near) + estimate * float(far)
    return weights @ value / (exact.sum(-1, keepdim=True) * float(near) + far_mass * float(far))


def causal_linformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: CausalProjection,
    lengths: Tensor | None = None,
    settings: Settings = _DEFAULT,
) -> Tensor:
    """One query at a time."""
    window_size, global_tokens, near, far, scale = settings[:5]
    heads, g, first = query.shape[1], projection.segment_length, global_tokens
    query, outputs = query * scale, []
    for i in range(query.shape[2]):
        start = max((i // window_size - 1) * window_size, 0) if window_size else i
        ended = max(start - first, 0) // g
        exact = [j for j in range(i + 1) if j < first or j >= first + ended * g] if near else []
        logits, taken = query[:, :, i, None] @ key[:, :, exact].transpose(-1, -2), value[:, :, exact]
        for s in range(ended if far else 0):
            segment = slice(first + s * g, first + (s + 1) * g)
            summary_key = _reference_summary(projection, "key", key[:, :, segment], s)
            mass = projection.log_mass(query)[:, s].expand(heads)[:, None, None]
            logits = torch.cat((logits, query[:, :, i, None] @ summary_key.transpose(-1, -2) + mass), dim=-1)
            taken = torch.cat((taken, _reference_summary(projection, "value", value[:, :, segment], s)), dim=2)
        # a query that sees no key at all gets zeros
        outputs.append(logits.softmax(-1) @ taken)
    return after_end(torch.cat(outputs, dim=2), lengths)


def _reference_summary(projection: CausalProjection, side: str, x: Tensor, slot: int) -> Tensor:
    """One slot's projected key or value, (batch, heads, 1, dim), from the tokens x of its segment."""
    if projection.projection == "max":
        return x.amax(2, keepdim=True)
    if projection.projection == "mean":
        return x.mean(2, keepdim=True)
    weight = getattr(projection, f"{side if side in projection.sides else 'key'}_weight").to(x.dtype)
    if projection.projection == "conv":
        return (x * weight).mean(2, keepdim=True)
    return (x * (1 + weight[:, slot, :, None])).mean(2, keepdim=True)


def causal_performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    lengths: Tensor | None = None,
    settings: Settings = _DEFAULT,
) -> Tensor:
    """The whole (length, length) matrix of weights."""
    window_size, global_tokens, near, far, scale = settings[:5]
    length = query.shape[2]
    query, key = query * scale**0.5, key * scale**0.5
    phi_query = expand(feature_map(query, "query"), query.new_zeros(()))
    phi_key = expand(feature_map(key, "key"), key.new_zeros(()))
    position = torch.arange(length, device=query.device)
    past = position <= position[:, None]
    is_near = past & (position < global_tokens)
    if window_size:
        block = position // window_size
        is_near = is_near | (past & (block[:, None] - block <= 1))
    exact = (query @ key.transpose(-1, -2)).exp() * (is_near if near else 0)
    estimate = (phi_query @ phi_key.transpose(-1, -2)) * (past & ~is_near if far else 0)
    weights = exact + estimate
    mass = weights.sum(-1, keepdim=True)
    # a query that sees no key at all gets zeros
    out = weights @ value / mass.where(mass != 0, torch.ones_like(mass))
    return after_end(out, lengths)


_REFERENCES = {
    ("linformer", False): linformer_attention,
    ("linformer", True): causal_linformer_attention,
    ("performer", False): performer_attention,
    ("performer", True): causal_performer_attention,
}
