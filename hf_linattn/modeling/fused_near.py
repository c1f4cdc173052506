"""The near part of a bidirectional join by PyTorch's fused attention for CPUs, which returns the mass as well.

No keys are gathered and no logits are stored, as `joined_softmax.exact_part` has them, which is what trains: the kernel
has no gradient for the mass. `scaled_dot_product_attention` runs it too, but keeps to itself the logarithm that a join
needs.
"""

from typing import Any

import torch
from torch import Tensor

from .joined_softmax import LOG2_E, NEVER, Partial

_KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def can_fuse(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `fused_near_part` works here: on a CPU, without gradients, and where no graph is recorded."""
    return (
        _KERNEL is not None
        and query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == value.shape[-1]
        # which the kernel takes for granted
        and all(x.stride(-1) == 1 for x in (query, key, value))
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )


def fused_near_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: list[int] | None,
    begin: int,
    end: int,
    *,
    window_size: int,
    scale: float,
) -> Partial:
    """Exact attention of the queries of blocks begin .. end - 1 to the keys of their block and its two neighbours.

    Args:
        query, key, value: (batch, heads, length, dim).
        ends: number of real keys of each row, which stand first; None for all.

    Returns:
        A `Partial` of (batch, heads, blocks, window_size, 1 or dim + 1); no mass after the end.
    """
    batch, heads, length, dim = query.shape
    # (batch, tokens, heads, dim + 1), as the kernel writes, seen with the heads first
    total = query.new_zeros(batch, (end - begin) * window_size, heads, dim + 1).transpose(1, 2)
    shift = query.new_full((batch, total.shape[2], heads, 1), NEVER).transpose(1, 2)
    rows = [(slice(None), length)] if ends is None else [(slice(i, i + 1), real) for i, real in enumerate(ends)]
    for row, real in rows:
        for block in range(begin, end):
            first, last = block * window_size, min((block + 1) * window_size, length)
            keys = slice(max(first - window_size, 0), min(last + window_size, real))
            if keys.start >= keys.stop:
                break
            out, log_mass = _KERNEL(query[row, :, first:last], key[row, :, keys], value[row, :, keys], scale=scale)
            place = slice(first - begin * window_size, last - begin * window_size)
            total[row, :, place, :-1] = out
            # the sums are divided by the mass already
            total[row, :, place, -1] = 1.0
            shift[row, :, place, 0] = log_mass
    # tokens back into blocks
    blocks = (-1, window_size)
    return Partial(shift.mul_(LOG2_E).unflatten(2, blocks), total.unflatten(2, blocks))
