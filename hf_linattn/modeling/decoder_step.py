"""One new token per row of a decoder, after those of a `State`, which is written in place: few operations, no copy."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import after_end
from .far_part import FarKeys, FarPart, FarSums, Settings
from .merge import merge
from .state import State


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    far: FarPart,
    state: State,
    lengths: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, State]:
    """Attention of one token per row, or of none where `lengths` (batch,) is 0, and the state after it.

    query, key, value: (batch, heads, 1, dim), as the result.
    """
    state, first = state.writable(), settings.global_tokens
    new = None if lengths is None else lengths > 0
    # whether the query's own key is far, and so are all before it
    at_once = not far.leaving(settings.window_size)
    if at_once and settings.far:
        valid = None if not first and new is None else (state.seen >= first) & (True if new is None else new)
        far.absorb(state.far, key, value, None if valid is None else valid[:, None], state.seen, settings.scale)
    state.write(key, value, new)
    out = (
        _with_sums(query, far, state, settings) if isinstance(far, FarSums) else _with_keys(query, far, state, settings)
    )
    state.seen += 1 if lengths is None else lengths
    if not at_once:
        state = _absorb(far, state, new, settings)
    return after_end(out, lengths), state


def _with_keys(query: Tensor, far: FarPart, state: State, settings: Settings) -> Tensor:
    """The exact columns and the far part's slots in one softmax; zeros for queries that see none."""
    reads = settings.far and isinstance(far, FarKeys) and far.reads_tokens
    columns = slice(None if settings.far and not reads else state.exact)
    key, value, mask, nothing = state.key[:, :, columns], state.value[:, :, columns], state.log_mass[..., columns], None
    if reads:
        seen = far.read_tokens(query, state.far, state.slots, settings.scale)  # type: ignore[attr-defined]
        key, value = torch.cat((key, seen.key), dim=2), torch.cat((value, seen.value), dim=2)
        mask = torch.cat((mask, seen.log_mass.clamp_min(state.absent).unsqueeze(2)), dim=3)
    if not settings.near:
        mask = mask.clone()
        mask[..., : state.exact] = state.absent
        nothing = (mask == state.absent).all(-1, keepdim=True)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=settings.scale)
    return out if nothing is None else out.masked_fill(nothing, 0.0)


def _with_sums(query: Tensor, far: FarSums, state: State, settings: Settings) -> Tensor:
    """The exact columns and what the query reads of the sums, as if that were one more of them."""
    out_dtype, dtype = query.dtype, torch.promote_types(query.dtype, torch.float32)
    query, alone = query.to(dtype), not (settings.near and state.exact)
    part: Any = far.read(query, state.far, settings.scale, alone) if settings.far else None
    if alone:
        return merge([part]).to(out_dtype)
    logits = (query * settings.scale) @ state.key.to(dtype).mT + state.log_mass
    if part is None:
        return (logits.softmax(-1) @ state.value.to(dtype)).to(out_dtype)
    # no sums: the shift is -inf
    mass = part.total[..., -1:].clamp_min(torch.finfo(dtype).tiny)
    weight = torch.cat((logits, part.shift * math.log(2) + mass.log()), dim=-1).softmax(-1)
    out = weight[..., :-1] @ state.value.to(dtype)
    return torch.addcmul(out, weight[..., -1:] / mass, part.total[..., :-1]).to(out_dtype)


def _absorb(far: FarPart, state: State, new: Tensor | None, settings: Settings) -> State:
    """What the query saw as near and the next one finds far becomes so, in rows that have a new token."""
    window, first = settings.window_size, settings.global_tokens
    compiling = torch.compiler.is_compiling()
    if not compiling:
        state.quiet_steps -= 1
        if state.quiet_steps > 0:
            return state
    # a graph of gradients may need what the query read
    state = state.writable()
    begins, ends = (far.near_start(seen, window, first).clamp_min(first) for seen in (state.seen - 1, state.seen))
    far_state = far.load(state.far, state.slots)
    if settings.far:
        rank = begins[:, None] + torch.arange(far.leaving(window), device=begins.device)
        key, value = (state.near_tokens(x, rank) for x in (state.key, state.value))
        valid = rank < (ends if new is None else ends.where(new, begins))[:, None]
        far_state = far.absorb(far_state, key, value, valid, begins - first, settings.scale)
    if torch.is_grad_enabled():
        return state.settle(far, far_state, settings)
    state.renew(far, far_state, settings)
    state.quiet_steps = 0 if compiling else int(far.quiet_steps(state.seen, window, first).amin())
    return state
