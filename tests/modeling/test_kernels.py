"""The way by gated linear attention gives what the plain one does, in values, gradients and states.

The kernels run on a CUDA device only (test_gpu.py). Here their formula stands in for them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import PerformerConfig
from hf_linattn.modeling import far_performer, kernels
from hf_linattn.modeling.feature_maps import FEATURE_MAPS
from hf_linattn.modeling.linear_attention import LinearAttention

from ..helpers import from_state, in_chunks, linear_attention, qkv

pytestmark = pytest.mark.core

LENGTH, HEAD_DIM = 150, 8
#: the kernels have no floor for masses that may be negative
MAPS = [name for name, kind in FEATURE_MAPS.items() if not kind.signed]


def decoder(feature_map: str, **settings: Any) -> LinearAttention:
    config = PerformerConfig(num_features=32, feature_map=feature_map, **settings)
    return linear_attention(config, causal=True, head_dim=HEAD_DIM)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor, output_final_state: bool
) -> tuple[Tensor, Tensor]:
    """S_i = diag(exp(g_i)) S_(i-1) + k_i v_i^T, o_i = scale q_i S_i, token by token (arXiv:2312.06635, section 4.1)."""
    assert output_final_state
    assert q.shape == k.shape == g.shape
    assert v.shape[:3] == q.shape[:3]
    # what keeps the kernels within numbers
    assert (g <= 0).all()
    state, out = initial_state, []
    for index in range(q.shape[1]):
        state = state * g[:, index, :, :, None].exp() + k[:, index, :, :, None] * v[:, index, :, None]
        out.append(scale * (q[:, index, :, None] @ state)[:, :, 0])
    return torch.stack(out, dim=1), state


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a function with the kernels, which it must use."""

    def run(function: Callable[..., Any], *args: Any) -> Any:
        calls = []

        def count(*inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            calls.append(inputs)
            return gated_linear_attention(*inputs, **options)

        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_gated_linear_attention", count)
            patch.setattr(far_performer, "kernels_for", lambda x, dtype, signed: not signed)
            out = function(*args)
        assert calls
        return out

    return run


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("global_tokens", [0, 3])
@pytest.mark.parametrize("lengths", [None, [LENGTH, 40], [0, 1]])
def test_values_and_gradients(
    by_kernels: Callable[..., Any], feature_map: str, global_tokens: int, lengths: list[int] | None
) -> None:
    layer = decoder(feature_map, global_tokens=global_tokens)
    given = None if lengths is None else torch.tensor(lengths)
    results = []
    for run in (lambda function, *args: function(*args), by_kernels):
        inputs = [x.requires_grad_() for x in qkv(LENGTH, dim=HEAD_DIM, dtype=torch.float64)]
        out = run(layer, *inputs, given)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        parameters = list(layer.parameters())
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), [*inputs, *parameters])])
    for expected, output in zip(*results, strict=True):
        # parameters and their gradients are float32
        tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("feature_map", MAPS)
def test_states_and_far_apart_keys(by_kernels: Callable[..., Any], feature_map: str) -> None:
    query, key, value = qkv(LENGTH, dim=HEAD_DIM, scale=2.0)
    # maxima that rise by a lot, where sums on one scale would under- or overflow
    inputs = [query, key * torch.linspace(0.1, 12, LENGTH)[:, None], value]
    layer = decoder(feature_map)
    expected = layer(*inputs)
    sizes = [70, 5, 75]
    # from and to states, and one token at a time after them, which goes without
    out, state = by_kernels(in_chunks, layer, inputs, sizes)
    _, plain = in_chunks(layer, inputs, sizes)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    more = [x[:, :, :1] for x in inputs]
    after, plain_after = (from_state(layer, more, x)[0] for x in (state, plain))
    torch.testing.assert_close(after, plain_after, rtol=1e-4, atol=1e-4)
    # the shift
    torch.testing.assert_close(state.far[1], plain.far[1])


def test_used_where_they_can_be() -> None:
    x = torch.zeros(1, 1, 1, 4)
    assert not kernels.kernels_for(x, torch.float32, False)
