"""Causal Performer: the parallel form, the form with a state and the quadratic reference are one and the same."""

import itertools

import pytest
import torch
from hf_linattn.modeling.causal_performer import (
    CausalPerformerState,
    causal_performer_attention,
    causal_performer_attention_reference,
    causal_performer_prefill,
    causal_performer_state,
)

from hf_linattn.modeling.feature_maps import FEATURE_MAPS, FeatureMap

HEADS, DIM, LENGTH = 2, 8, 150
# (window_size, global_tokens): none; windows of less than a chunk, of one chunk, of more than one; global tokens
SETTINGS = [(0, 0), (0, 3), (4, 0), (4, 6), (24, 1), (70, 2)]


def make_map(feature_map="positive", num_features=32):
    return FeatureMap(
        feature_map=feature_map, num_heads=HEADS, head_dim=DIM, num_features=num_features, orthogonal=True, seed=0
    )


def make_inputs(length=LENGTH, batch=2, scale=0.5, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, HEADS, length, DIM, generator=generator) for _ in range(3))
    return (query * scale).to(dtype), (key * scale).to(dtype), value.to(dtype)


def in_chunks(inputs, feature_map, sizes, **settings):
    """Outputs of tokens that come in chunks of these sizes, and the state after the last."""
    state, outputs, begin = None, [], 0
    for size in sizes:
        chunk = (x[:, :, begin : begin + size] for x in inputs)
        out, state = causal_performer_prefill(*chunk, feature_map, state, **settings)
        outputs.append(out)
        begin += size
    return torch.cat(outputs, dim=2), state


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("window_size,global_tokens", SETTINGS)
def test_parallel_equals_reference(feature_map, window_size, global_tokens):
    # trigonometric estimates that come out near zero or below are guarded, which the reference is not
    scale, features = (0.1, 128) if feature_map == "trigonometric" else (0.5, 32)
    phi = make_map(feature_map, features)
    settings = {"window_size": window_size, "global_tokens": global_tokens}
    results = []
    for function, dtype in (
        (causal_performer_attention, torch.float64),
        (causal_performer_attention, torch.float32),
        (causal_performer_attention_reference, torch.float64),
    ):
        inputs = [x.requires_grad_() for x in make_inputs(scale=scale, dtype=dtype)]
        out = function(*inputs, phi, **settings)
        weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        parameters = list(phi.parameters())
        gradients = torch.autograd.grad((out * weights).sum(), [*inputs, *parameters])
        results.append([out.detach(), *gradients])
    for exact, rounded, expected in zip(*results, strict=True):
        # parameters and their gradients are float32
        tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(exact, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(rounded.double(), expected.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[1][0].double(), results[2][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("near,far", [(True, False), (False, True)])
@pytest.mark.parametrize("window_size,global_tokens", [(4, 0), (24, 2), (0, 2)])
def test_one_part_alone(near, far, window_size, global_tokens):
    inputs, phi = make_inputs(), make_map()
    settings = {"window_size": window_size, "global_tokens": global_tokens, "near": near, "far": far}
    out = causal_performer_attention(*inputs, phi, **settings)
    expected = causal_performer_attention_reference(*(x.double() for x in inputs), phi, **settings)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    steps, _ = in_chunks(inputs, phi, [5] + [1] * 20 + [125], **settings)
    torch.testing.assert_close(steps, out, rtol=0, atol=1e-5)
    if not near:
        # the first queries have nothing that is far
        assert (out[:, :, : window_size or global_tokens] == 0).all()


def test_window_alone_is_softmax_over_two_blocks():
    query, key, value = make_inputs(scale=2.0)
    out = causal_performer_attention(query, key, value, make_map(), window_size=8, far=False)
    i = 29
    logits = query[:, :, i, None] @ key[:, :, 16 : i + 1].transpose(-1, -2)
    torch.testing.assert_close(out[:, :, i, None], logits.softmax(-1) @ value[:, :, 16 : i + 1])


def test_running_sums_of_known_features():
    """Key features (1, 0), (0, 2), values 3, 5: S = (3, 10), z = (1, 2), and query features (1, 1) read 13 / 3."""

    class Given:
        signed = False

        def __call__(self, x, side, scale=1.0, relative=False):
            from hf_linattn.modeling.feature_maps import Features

            return Features(torch.zeros_like(x[..., :1]), x)

    query = torch.tensor([[1.0, 1.0], [1.0, 1.0]])[None, None]
    key = torch.tensor([[1.0, 0.0], [0.0, 2.0]])[None, None]
    value = torch.tensor([[3.0], [5.0]])[None, None]
    out, state = causal_performer_prefill(query, key, value, Given())
    torch.testing.assert_close(state.sums[0, 0], torch.tensor([[3.0, 1.0], [10.0, 2.0]]))
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 13 / 3]))


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("window_size,global_tokens", SETTINGS)
def test_steps_and_chunks_equal_parallel(feature_map, window_size, global_tokens):
    inputs, phi = make_inputs(), make_map(feature_map)
    settings = {"window_size": window_size, "global_tokens": global_tokens}
    with torch.no_grad():
        out = causal_performer_attention(*inputs, phi, **settings)
        whole, whole_state = in_chunks(inputs, phi, [LENGTH], **settings)
        torch.testing.assert_close(whole, out, rtol=0, atol=0)
        for sizes in ([1] * LENGTH, [7, 1, 50, 2, 90], [3, 5, 1, 1, 140]):
            other, state = in_chunks(inputs, phi, sizes, **settings)
            # trigonometric outputs may be far larger than the values
            torch.testing.assert_close(other, out, rtol=1e-5, atol=1e-5)
            for name, ours, theirs in zip(state._fields, state, whole_state, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("window_size,global_tokens", [(0, 0), (4, 2), (24, 1)])
def test_rows_of_unequal_length(window_size, global_tokens):
    """Rows do not depend on their padding, and go on from their own lengths in lockstep."""
    inputs, phi = make_inputs(batch=3), make_map()
    settings = {"window_size": window_size, "global_tokens": global_tokens}
    prompts, more = torch.tensor([37, 1, 80]), torch.tensor([5, 0, 9])
    padded = [torch.zeros(3, HEADS, 95, DIM) + 3.0 for _ in inputs]
    later = [torch.zeros(3, HEADS, 9, DIM) - 2.0 for _ in inputs]
    for row in range(3):
        p, m = int(prompts[row]), int(more[row])
        for x, first, second in zip(inputs, padded, later, strict=True):
            first[row, :, :p], second[row, :, :m] = x[row, :, :p], x[row, :, p : p + m]
    first, state = causal_performer_prefill(*padded, phi, lengths=prompts, **settings)
    second, state = causal_performer_prefill(*later, phi, state, lengths=more, **settings)
    assert state.seen.tolist() == [42, 1, 89]
    # in the end a step each, and a step for two rows only
    steps = []
    for lengths in (None, torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1])):
        token = (torch.stack([x[row, :, int(state.seen[row]), None] for row in range(3)]) for x in inputs)
        out, state = causal_performer_prefill(*token, phi, state, lengths=lengths, **settings)
        steps.append(out)
    assert state.seen.tolist() == [45, 3, 92]
    for row in range(3):
        expected = causal_performer_attention(*(x[row : row + 1] for x in inputs), phi, **settings)[0]
        p, m, end = int(prompts[row]), int(more[row]), int(state.seen[row])
        torch.testing.assert_close(first[row, :, :p], expected[:, :p], rtol=0, atol=1e-5)
        torch.testing.assert_close(second[row, :, :m], expected[:, p : p + m], rtol=0, atol=1e-5)
        assert (first[row, :, p:] == 0).all() and (second[row, :, m:] == 0).all()
        done = [out[row] for i, out in enumerate(steps) if not (row == 1 and i == 1)]
        torch.testing.assert_close(torch.cat(done, dim=1), expected[:, p + m : end], rtol=0, atol=1e-5)
    assert (steps[1][1] == 0).all()
    # a row without any token is finite
    out, state = causal_performer_prefill(*padded, phi, lengths=torch.tensor([0, 4, 95]), **settings)
    assert out.isfinite().all() and (out[0] == 0).all()


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("window_size,global_tokens", SETTINGS)
def test_no_gradient_to_the_future(feature_map, window_size, global_tokens):
    inputs, phi = [x.requires_grad_() for x in make_inputs(batch=1)], make_map(feature_map)
    out = causal_performer_attention(*inputs, phi, window_size=window_size, global_tokens=global_tokens)
    for i in (0, 5, 64, 127, 128, LENGTH - 2):
        gradients = torch.autograd.grad(out[:, :, i].sum(), inputs, retain_graph=True)
        for gradient in gradients:
            assert (gradient[:, :, i + 1 :] == 0).all()
        assert (gradients[2][:, :, i] != 0).any()


@pytest.mark.parametrize("window_size,global_tokens", SETTINGS)
@pytest.mark.parametrize("future", [1.0, 30.0, 300.0])
def test_values_do_not_depend_on_the_future(window_size, global_tokens, future):
    """Not even through a stabiliser, however large the later keys are."""
    query, key, value = make_inputs()
    phi, settings = make_map(), {"window_size": window_size, "global_tokens": global_tokens}
    out = causal_performer_attention(query, key, value, phi, **settings)
    for t in (1, 30, 63, 100, 129):
        changed = [torch.cat((x[:, :, :t], future * x[:, :, t:].flip(2)), dim=2) for x in (query, key, value)]
        torch.testing.assert_close(
            causal_performer_attention(*changed, phi, **settings)[:, :, :t], out[:, :, :t], rtol=0, atol=1e-6
        )
        prefix = causal_performer_attention(*(x[:, :, :t] for x in (query, key, value)), phi, **settings)
        torch.testing.assert_close(prefix, out[:, :, :t], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("window_size", [0, 16, 64])
def test_long_and_large_inputs_are_finite(dtype, feature_map, window_size):
    phi = make_map(feature_map, 16)
    length = 8192 if feature_map == "positive" else 1024
    # elu features of large negative inputs are 0 to rounding: there the true gradient is beyond float16
    for scale in (0.3, 3.0) if feature_map == "elu" else (0.3, 10.0, 100.0):
        inputs = [x.requires_grad_() for x in make_inputs(length, batch=1, scale=scale, dtype=dtype)]
        out, state = causal_performer_prefill(*inputs, phi, window_size=window_size, global_tokens=1)
        out.float().square().mean().backward()
        assert out.dtype == dtype and out.isfinite().all()
        assert all(x.grad.isfinite().all() for x in inputs)
        assert not any(x.isnan().any() or x.isposinf().any() for x in state)
        token = (x[:, :, -1:].detach() for x in inputs)
        out, state = causal_performer_prefill(*token, phi, state, window_size=window_size, global_tokens=1)
        assert out.isfinite().all() and not any(x.isnan().any() or x.isposinf().any() for x in state)


def test_every_query_keeps_some_mass_at_any_scale():
    """The outputs of a pure Performer are averages of values, also where all estimates are tiny."""
    query, key, value = make_inputs(scale=20.0)
    for inputs in ((query, key), (query, -query), (query, key * 0)):
        out = causal_performer_attention(*inputs, torch.ones_like(value), make_map())
        torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("window_size,global_tokens", [(0, 0), (4, 3)])
def test_state_has_constant_size_and_rows_can_be_chosen(window_size, global_tokens):
    inputs, phi = make_inputs(batch=3), make_map()
    settings = {"window_size": window_size, "global_tokens": global_tokens}
    empty = causal_performer_state(*inputs[1:], phi, **settings)
    _, state = causal_performer_prefill(*(x[:, :, :1] for x in inputs), phi, empty, **settings)
    _, long_state = causal_performer_prefill(*(x[:, :, 1:140] for x in inputs), phi, state, **settings)
    for first, second, third in zip(empty, state, long_state, strict=True):
        assert first.shape == second.shape == third.shape and first.dtype == second.dtype == third.dtype
        assert first.shape[0] == 3
    rows = torch.tensor([2, 0, 0, 1])
    chosen = CausalPerformerState(*(x.index_select(0, rows) for x in long_state))
    token = [x[:, :, 140:141] for x in inputs]
    expected, _ = causal_performer_prefill(*token, phi, long_state, **settings)
    out, _ = causal_performer_prefill(*(x[rows] for x in token), phi, chosen, **settings)
    torch.testing.assert_close(out, expected[rows])


def test_prefill_from_the_empty_state_equals_prefill_from_none():
    inputs, phi = make_inputs(), make_map()
    for window_size, global_tokens in itertools.product((0, 4), (0, 3)):
        settings = {"window_size": window_size, "global_tokens": global_tokens}
        empty = causal_performer_state(*inputs[1:], phi, **settings)
        expected, _ = causal_performer_prefill(*inputs, phi, **settings)
        out, _ = causal_performer_prefill(*inputs, phi, empty, **settings)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_the_state_keeps_no_more_in_memory_than_it_has():
    """A view of a long prompt would keep all of its keys and values alive."""
    _, state = causal_performer_prefill(*make_inputs(), make_map(), window_size=4, global_tokens=2)
    for name, tensor in state._asdict().items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
