"""One softmax over keys that come in parts, each on a scale of its own."""

import pytest
import torch
from torch import Tensor

from hf_linattn.modeling.merge import LOG2_E, NEVER, Partial, exact_part, masked, merge, with_one

from ..helpers import qkv, softmax_attention

pytestmark = pytest.mark.core

LENGTH = 12
#: how the keys are shared out
PARTS = [[12], [5, 7], [1, 10, 1], [0, 12]]


def parts_of(query: Tensor, key: Tensor, value: Tensor, sizes: list[int], valid: Tensor | None = None) -> list[Partial]:
    parts, begin = [], 0
    for size in sizes:
        keys = slice(begin, begin + size)
        logits = (query * LOG2_E) @ key[:, :, keys].transpose(-1, -2)
        if size:
            parts.append(exact_part(logits, None if valid is None else valid[..., keys], with_one(value[:, :, keys])))
        begin += size
    return parts


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("sizes", PARTS)
def test_parts_are_one_softmax(sizes: list[int], scale: float, grad: bool) -> None:
    inputs = qkv(LENGTH, scale=scale, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        out = merge(parts_of(*inputs, sizes))
    torch.testing.assert_close(out, softmax_attention(*inputs))


@pytest.mark.parametrize("sizes", PARTS)
def test_gradients_are_those_of_one_softmax(sizes: list[int]) -> None:
    inputs = [x.requires_grad_() for x in qkv(LENGTH, dtype=torch.float64)]
    outputs = merge(parts_of(*inputs, sizes)), softmax_attention(*inputs)
    weight = torch.randn_like(outputs[0])
    gradients, expected = (torch.autograd.grad((out * weight).sum(), inputs) for out in outputs)
    for gradient, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, exact)


@pytest.mark.parametrize("sizes", PARTS)
def test_keys_that_are_not_valid_have_no_mass_and_a_query_without_any_gets_zeros(sizes: list[int]) -> None:
    inputs = qkv(LENGTH, dtype=torch.float64)
    valid = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    valid[:, :, 0], valid[:, :, 1, :5] = False, False
    out = merge(parts_of(*inputs, sizes, valid))
    assert (out[:, :, 0] == 0).all()
    torch.testing.assert_close(out[:, :, 1:], softmax_attention(*inputs, valid[:, 0])[:, :, 1:])


def test_parts_are_weighted_by_their_mass_and_not_by_their_scale() -> None:
    """What is small for its scale must not outdo others on a lower one."""
    small = Partial(torch.tensor([[200.0]]), torch.tensor([[3.0e-30, 1.0e-30]]))
    large = Partial(torch.tensor([[150.0]]), torch.tensor([[5.0, 1.0]]))
    torch.testing.assert_close(merge([small, large]), torch.tensor([[5.0]]))
    # and beyond what float32 holds
    torch.testing.assert_close(merge([large, Partial(torch.tensor([[900.0]]), small.total)]), torch.tensor([[3.0]]))


def test_a_part_without_keys_may_have_any_shift() -> None:
    some = Partial(torch.tensor([[1.0]]), torch.tensor([[6.0, 2.0]]))
    for shift in (NEVER, 0.0, 500.0):
        nothing = Partial(torch.tensor([[shift]]), torch.zeros(1, 2))
        torch.testing.assert_close(merge([some, nothing]), torch.tensor([[3.0]]))
        torch.testing.assert_close(merge([nothing, nothing]), torch.tensor([[0.0]]))


@pytest.mark.parametrize("grad", [True, False])
def test_masking_writes_only_where_no_gradient_is_asked_for(grad: bool) -> None:
    logits = torch.ones(2, 3, 4, 4)
    with torch.set_grad_enabled(grad):
        result = masked(logits, torch.eye(4).bool())
    assert torch.equal(result, torch.ones(2, 3, 4, 4).masked_fill(torch.eye(4).bool(), NEVER))
    assert (result is logits) != grad
