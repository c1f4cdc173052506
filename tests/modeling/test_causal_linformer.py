"""Causal Linformer: the parallel form, the form with a state and the reference are one and the same."""

import math

import pytest
import torch
from hf_linattn.modeling.causal_linformer import (
    CausalLinformerState,
    CausalProjection,
    causal_linformer_attention,
    causal_linformer_attention_reference,
    causal_linformer_prefill,
    causal_linformer_state,
    near_length,
)

from hf_linattn.modeling import causal_linformer
from hf_linattn.modeling.projections import PROJECTIONS, SHARING

HEADS, DIM, LENGTH = 2, 8, 100
KINDS = [kind for kind in PROJECTIONS if kind != "gaussian"]
# (slots, window_size, global_tokens): segments of 7, 3 and 21 tokens, which divide the window or not
SETTINGS = [(15, 0, 0), (15, 0, 3), (15, 7, 0), (15, 8, 2), (34, 16, 1), (5, 4, 0), (5, 30, 4)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of queries, and several pieces, in short sequences."""
    monkeypatch.setattr(causal_linformer, "_BLOCK", 16)
    monkeypatch.setattr(causal_linformer, "_PIECE", 32)


def make_projection(projection="learned", sharing="heads", slots=15, max_length=LENGTH + 2, trained=True):
    module = CausalProjection(
        projection=projection, sharing=sharing, slots=slots, max_length=max_length, num_heads=HEADS, head_dim=DIM
    )
    if trained:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def make_inputs(length=LENGTH, batch=2, scale=1.0, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, HEADS, length, DIM, generator=generator) for _ in range(3))
    return (query * scale).to(dtype), (key * scale).to(dtype), value.to(dtype)


def in_chunks(inputs, projection, sizes, **settings):
    """Outputs of tokens that come in chunks of these sizes, and the state after the last."""
    state, outputs, begin = None, [], 0
    for size in sizes:
        chunk = (x[:, :, begin : begin + size] for x in inputs)
        out, state = causal_linformer_prefill(*chunk, projection, state, **settings)
        outputs.append(out)
        begin += size
    return torch.cat(outputs, dim=2), state


def check_against_reference(projection, **settings):
    results = []
    for function, dtype in (
        (causal_linformer_attention, torch.float64),
        (causal_linformer_attention, torch.float32),
        (causal_linformer_attention_reference, torch.float64),
    ):
        inputs = [x.requires_grad_() for x in make_inputs(dtype=dtype)]
        out = function(*inputs, projection, **settings)
        weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        gradients = torch.autograd.grad(
            (out * weights).sum(), [*inputs, *projection.parameters()], materialize_grads=True, allow_unused=True
        )
        results.append([out.detach(), *gradients])
    for exact, rounded, expected in zip(*results, strict=True):
        tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(exact, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(rounded.double(), expected.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[1][0].double(), results[2][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("slots,window_size,global_tokens", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_parallel_equals_reference(kind, slots, window_size, global_tokens):
    check_against_reference(make_projection(kind, slots=slots), window_size=window_size, global_tokens=global_tokens)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("kind", ["learned", "conv"])
def test_sharing(kind, sharing):
    projection = make_projection(kind, sharing)
    assert projection.key_weight.shape[0] == (HEADS if sharing == "none" else 1)
    assert hasattr(projection, "value_weight") == (sharing in ("none", "heads"))
    check_against_reference(projection, window_size=8)
    inputs = make_inputs()
    out = causal_linformer_attention(*inputs, projection, window_size=8)
    torch.testing.assert_close(in_chunks(inputs, projection, [9] + [1] * 91, window_size=8)[0], out, rtol=0, atol=1e-5)


@pytest.mark.parametrize("near,far", [(True, False), (False, True)])
@pytest.mark.parametrize("slots,window_size,global_tokens", SETTINGS)
def test_one_part_alone(near, far, slots, window_size, global_tokens):
    inputs, projection = make_inputs(), make_projection(slots=slots)
    settings = {"window_size": window_size, "global_tokens": global_tokens, "near": near, "far": far}
    check_against_reference(projection, **settings)
    out = causal_linformer_attention(*inputs, projection, **settings)
    steps, _ = in_chunks(inputs, projection, [5] + [1] * 20 + [75], **settings)
    torch.testing.assert_close(steps, out, rtol=0, atol=1e-5)
    if not near:
        # the first queries have nothing that is far
        assert (out[:, :, : max(window_size, 1)] == 0).all()


@pytest.mark.parametrize("slots,window_size,global_tokens", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_chunks_equal_parallel(kind, slots, window_size, global_tokens):
    inputs, projection = make_inputs(), make_projection(kind, slots=slots)
    settings = {"window_size": window_size, "global_tokens": global_tokens}
    with torch.no_grad():
        out = causal_linformer_attention(*inputs, projection, **settings)
        whole, whole_state = in_chunks(inputs, projection, [LENGTH], **settings)
        torch.testing.assert_close(whole, out, rtol=0, atol=0)
        for sizes in ([1] * LENGTH, [7, 1, 50, 2, 40], [3, 5, 1, 1, 90]):
            other, state = in_chunks(inputs, projection, sizes, **settings)
            torch.testing.assert_close(other, out, rtol=0, atol=1e-5)
            for name, ours, theirs in zip(state._fields, state, whole_state, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("window_size,global_tokens", [(0, 0), (7, 2), (24, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_unequal_length(kind, window_size, global_tokens):
    """Rows do not depend on their padding, and go on from their own lengths in lockstep."""
    inputs, projection = make_inputs(batch=3), make_projection(kind)
    settings = {"window_size": window_size, "global_tokens": global_tokens}
    prompts, more = torch.tensor([37, 1, 80]), torch.tensor([5, 0, 9])
    padded = [torch.zeros(3, HEADS, 95, DIM) + 3.0 for _ in inputs]
    later = [torch.zeros(3, HEADS, 9, DIM) + 2.0 for _ in inputs]
    for row in range(3):
        p, m = int(prompts[row]), int(more[row])
        for x, first, second in zip(inputs, padded, later, strict=True):
            first[row, :, :p], second[row, :, :m] = x[row, :, :p], x[row, :, p : p + m]
    first, state = causal_linformer_prefill(*padded, projection, lengths=prompts, **settings)
    second, state = causal_linformer_prefill(*later, projection, state, lengths=more, **settings)
    # in the end a step each, and a step for two rows only
    steps = []
    for lengths in (None, torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1])):
        token = (torch.stack([x[row, :, int(state.seen[row]), None] for row in range(3)]) for x in inputs)
        out, state = causal_linformer_prefill(*token, projection, state, lengths=lengths, **settings)
        steps.append(out)
    assert state.seen.tolist() == [45, 3, 92]
    for row in range(3):
        expected = causal_linformer_attention(*(x[row : row + 1] for x in inputs), projection, **settings)[0]
        p, m, end = int(prompts[row]), int(more[row]), int(state.seen[row])
        torch.testing.assert_close(first[row, :, :p], expected[:, :p], rtol=0, atol=1e-5)
        torch.testing.assert_close(second[row, :, :m], expected[:, p : p + m], rtol=0, atol=1e-5)
        assert (first[row, :, p:] == 0).all() and (second[row, :, m:] == 0).all()
        done = [out[row] for i, out in enumerate(steps) if not (row == 1 and i == 1)]
        torch.testing.assert_close(torch.cat(done, dim=1), expected[:, p + m : end], rtol=0, atol=1e-5)
    # a row without any token is finite
    out, state = causal_linformer_prefill(*padded, projection, lengths=torch.tensor([0, 4, 95]), **settings)
    assert (out[0] == 0).all() and out.isfinite().all() and all(x.isfinite().all() for x in state)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("slots,window_size,global_tokens", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_to_the_future(kind, slots, window_size, global_tokens, near):
    inputs, projection = [x.requires_grad_() for x in make_inputs(batch=1)], make_projection(kind, slots=slots)
    out = causal_linformer_attention(
        *inputs, projection, window_size=window_size, global_tokens=global_tokens, near=near
    )
    for i in (0, 5, 15, 16, 40, LENGTH - 2):
        gradients = torch.autograd.grad(
            out[:, :, i].sum(), inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for gradient in gradients:
            assert (gradient[:, :, i + 1 :] == 0).all()
        if near:
            assert (gradients[2][:, :, i] != 0).any()


@pytest.mark.parametrize("slots,window_size,global_tokens", SETTINGS)
@pytest.mark.parametrize("future", [1.0, 100.0])
def test_values_do_not_depend_on_the_future(slots, window_size, global_tokens, future):
    query, key, value = make_inputs()
    projection, settings = make_projection(slots=slots), {"window_size": window_size, "global_tokens": global_tokens}
    out = causal_linformer_attention(query, key, value, projection, **settings)
    for t in (1, 15, 30, 63, 80):
        changed = [torch.cat((x[:, :, :t], future * x[:, :, t:].flip(2)), dim=2) for x in (query, key, value)]
        torch.testing.assert_close(
            causal_linformer_attention(*changed, projection, **settings)[:, :, :t], out[:, :, :t], rtol=0, atol=1e-6
        )
        prefix = causal_linformer_attention(*(x[:, :, :t] for x in (query, key, value)), projection, **settings)
        torch.testing.assert_close(prefix, out[:, :, :t], rtol=0, atol=1e-6)


@pytest.mark.parametrize("slots,window_size,global_tokens", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_identical_keys_are_summarised_exactly(kind, slots, window_size, global_tokens):
    """With one key throughout, every query reads the mean of all values up to its own."""
    query, key, value = make_inputs()
    key = key[:, :, :1].expand_as(key)
    # values equal within a segment, so that max is their mean too
    segment = (torch.arange(LENGTH) - global_tokens).clamp_min(0) // math.ceil((LENGTH + 2) / slots)
    value = value[:, :, segment]
    projection = make_projection(kind, slots=slots, trained=False)
    out = causal_linformer_attention(
        query, key, value, projection, window_size=window_size, global_tokens=global_tokens
    )
    expected = value.cumsum(2) / torch.arange(1, LENGTH + 1)[:, None]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_segments_of_one_token_are_softmax():
    query, key, value = make_inputs(scale=2.0)
    projection = make_projection("mean", slots=LENGTH, max_length=LENGTH)
    out = causal_linformer_attention(query, key, value, projection)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slots,window_size,global_tokens", SETTINGS)
def test_near_length_is_the_most_that_is_seen(slots, window_size, global_tokens):
    projection = make_projection(slots=slots)
    rank = torch.arange(2000)
    ended = causal_linformer._ended_segments(rank, projection.segment_length, window_size, global_tokens)
    count = rank + 1 - global_tokens - ended * projection.segment_length
    assert int(count.max()) == near_length(projection, window_size, global_tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window_size", [0, 64])
def test_long_and_large_inputs_are_finite(monkeypatch, dtype, kind, window_size):
    monkeypatch.setattr(causal_linformer, "_BLOCK", 128)
    monkeypatch.setattr(causal_linformer, "_PIECE", 1024)
    projection = make_projection(kind, slots=128, max_length=8193)
    for scale in (0.3, 30.0):
        inputs = [x.requires_grad_() for x in make_inputs(8192, batch=1, scale=scale, dtype=dtype)]
        out, state = causal_linformer_prefill(*inputs, projection, window_size=window_size, global_tokens=1)
        out.float().square().mean().backward()
        assert out.dtype == dtype and out.isfinite().all()
        assert all(x.grad.isfinite().all() for x in inputs)
        token = (x[:, :, -1:].detach() for x in inputs)
        out, state = causal_linformer_prefill(*token, projection, state, window_size=window_size, global_tokens=1)
        assert out.isfinite().all() and all(x.isfinite().all() for x in state)


@pytest.mark.parametrize("window_size,global_tokens", [(0, 0), (8, 3)])
def test_state_has_constant_size_and_rows_can_be_chosen(window_size, global_tokens):
    inputs, projection = make_inputs(batch=3), make_projection()
    settings = {"window_size": window_size, "global_tokens": global_tokens}
    empty = causal_linformer_state(*inputs[1:], projection, **settings)
    _, state = causal_linformer_prefill(*(x[:, :, :1] for x in inputs), projection, empty, **settings)
    _, long_state = causal_linformer_prefill(*(x[:, :, 1:90] for x in inputs), projection, state, **settings)
    for first, second, third in zip(empty, state, long_state, strict=True):
        assert first.shape == second.shape == third.shape and first.dtype == second.dtype == third.dtype
        assert first.shape[0] == 3
    rows = torch.tensor([2, 0, 0, 1])
    chosen = CausalLinformerState(*(x.index_select(0, rows) for x in long_state))
    token = [x[:, :, 90:91] for x in inputs]
    expected, _ = causal_linformer_prefill(*token, projection, long_state, **settings)
    out, _ = causal_linformer_prefill(*(x[rows] for x in token), projection, chosen, **settings)
    torch.testing.assert_close(out, expected[rows])


def test_what_cannot_be_causal_is_refused():
    with pytest.raises(ValueError, match="projection='gaussian' cannot be causal: each of its slots mixes all tokens"):
        make_projection("gaussian")
    with pytest.raises(ValueError, match="projection='median' is not one of learned, mean, max, conv"):
        make_projection("median")


def test_rows_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match="103 tokens are more than max_length=102"):
        causal_linformer_attention(*make_inputs(103), make_projection())


@torch.no_grad()
def test_learned_starts_as_the_mean():
    inputs = make_inputs()
    expected = causal_linformer_attention(*inputs, make_projection("mean"), window_size=8)
    for kind in ("learned", "conv"):
        out = causal_linformer_attention(*inputs, make_projection(kind, trained=False), window_size=8)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_the_state_keeps_no_more_in_memory_than_it_has():
    """A view of a long prompt would keep all of its keys and values alive."""
    _, state = causal_linformer_prefill(*make_inputs(), make_projection(), window_size=4, global_tokens=2)
    for name, tensor in state._asdict().items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
