"""The way by gated linear attention gives what the plain one does, in values, gradients and states.

The kernels run on a CUDA device only (tests/test_gpu.py). Here their formula stands in for them.
"""

import pytest
import torch
from hf_linattn.modeling.causal_performer import causal_performer_attention, causal_performer_prefill
from torch import Tensor

from hf_linattn.modeling import causal_performer, kernels

from .test_causal_performer import LENGTH, in_chunks, make_inputs, make_map

MAPS = ["learned", "positive", "hyperbolic", "relu", "elu"]


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
def by_kernels(monkeypatch):
    """Runs a function with the kernels, of which it must make use."""

    def run(function, *args, **kwargs):
        calls = []

        def count(*inputs, **options):
            calls.append(inputs)
            return gated_linear_attention(*inputs, **options)

        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_gated_linear_attention", count)
            patch.setattr(causal_performer, "kernels_for", lambda x, dtype, signed: not signed)
            out = function(*args, **kwargs)
        assert calls
        return out

    return run


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("global_tokens", [0, 3])
@pytest.mark.parametrize("lengths", [None, [LENGTH, 40], [0, 1]])
def test_values_and_gradients(by_kernels, feature_map, global_tokens, lengths):
    phi = make_map(feature_map)
    settings = {"global_tokens": global_tokens, "lengths": None if lengths is None else torch.tensor(lengths)}
    results = []
    for run in (lambda function, *args, **kwargs: function(*args, **kwargs), by_kernels):
        inputs = [x.requires_grad_() for x in make_inputs(scale=1.0, dtype=torch.float64)]
        out = run(causal_performer_attention, *inputs, phi, **settings)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        parameters = list(phi.parameters())
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), [*inputs, *parameters])])
    for expected, found in zip(*results, strict=True):
        # parameters and their gradients are float32
        tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("feature_map", MAPS)
def test_states_and_far_apart_keys(by_kernels, feature_map):
    query, key, value = make_inputs(scale=2.0)
    # maxima that rise by a lot, where sums on one scale would under- or overflow
    inputs = query, key * torch.linspace(0.1, 12, LENGTH)[:, None], value
    phi = make_map(feature_map)
    with torch.no_grad():
        expected = causal_performer_attention(*inputs, phi)
        sizes = [70, 5, 75]
        # from and to states, and one token at a time after them, which goes without
        out, state = by_kernels(in_chunks, inputs, phi, sizes)
        _, plain = in_chunks(inputs, phi, sizes)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        more = [x[:, :, :1] for x in inputs]
        after, _ = causal_performer_prefill(*more, phi, state)
        torch.testing.assert_close(after, causal_performer_prefill(*more, phi, plain)[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.shift, plain.shift)


def test_used_where_they_can_be():
    x = torch.zeros(1, 1, 1, 4)
    assert not kernels.kernels_for(x, torch.float32, False)
