"""A layer's linear attention: of every method, the form with a state and the parallel form of a decoder are one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import AttentionConfig, LinformerConfig
from hf_linattn.modeling import blocks
from hf_linattn.modeling.decoder_attention import attend_causally
from hf_linattn.modeling.far_linformer import CausalLinformerFarPart
from hf_linattn.modeling.far_part import FarSums
from hf_linattn.modeling.far_performer import PerformerFarPart
from hf_linattn.modeling.linear_attention import LinearAttention
from hf_linattn.modeling.state import State

from ..helpers import (
    CAUSAL_FEW,
    METHODS,
    PURE,
    SHARED,
    can_be_causal,
    config_id,
    from_state,
    in_chunks,
    initial_state,
    linear_attention,
    qkv,
    trained,
)

pytestmark = pytest.mark.core

HEAD_DIM, LENGTH = 8, 100
# of Linformer: segments of 7, 3 and 21 tokens, which divide the window or not
_SEGMENTS = [(15, 0, 0), (15, 0, 3), (15, 7, 0), (15, 8, 2), (34, 16, 1), (5, 4, 0), (5, 30, 4)]
# of others (window_size, global_tokens): windows of less than a chunk, of one chunk, of more than one
_WINDOWS = [(0, 0), (0, 3), (4, 0), (4, 6), (24, 1), (40, 2)]


def settings_of(config: AttentionConfig) -> list[dict[str, int]]:
    if isinstance(config, LinformerConfig):
        names = ("projection_length", "window_size", "global_tokens")
        return [dict(zip(names, settings, strict=True)) for settings in _SEGMENTS]
    return [{"window_size": window, "global_tokens": first} for window, first in _WINDOWS]


def with_settings(config: AttentionConfig, **settings: Any) -> AttentionConfig:
    return type(config)(**{**vars(config), "max_length": LENGTH + 2, **settings})


CAUSAL_PURE = [config for config in PURE if can_be_causal(config)]
#: every method that can be causal with every choice, and with all of its settings
LAYERS = [with_settings(config, **settings) for config in CAUSAL_PURE for settings in settings_of(config)]
#: every method that can be causal with every choice, with few settings
FEW_LAYERS = [
    with_settings(config, **({"projection_length": 15} if isinstance(config, LinformerConfig) else {}), **settings)
    for config in CAUSAL_PURE
    for settings in (
        {"window_size": 0, "global_tokens": 0},
        {"window_size": 7, "global_tokens": 2},
        {"window_size": 24, "global_tokens": 1},
    )
]
#: the default of every method with all of its settings
DEFAULTS = [
    with_settings(config, **settings)
    for index, config in enumerate(CAUSAL_PURE)
    if type(config) not in map(type, CAUSAL_PURE[:index])
    for settings in settings_of(config)
]
ALL_LAYERS = pytest.mark.parametrize("config", LAYERS, ids=config_id)
ALL_DEFAULTS = pytest.mark.parametrize("config", DEFAULTS, ids=config_id)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of queries, and several chunks of them, in short rows."""
    monkeypatch.setattr(CausalLinformerFarPart, "least_block", 16)
    monkeypatch.setattr(PerformerFarPart, "least_block", 16)
    monkeypatch.setattr(blocks, "_CPU_CHUNK", 32)


def decoder(config: AttentionConfig) -> LinearAttention:
    """Two heads of 8; after training, but for feature maps, whose estimate it would spoil."""
    layer = linear_attention(config, causal=True, head_dim=HEAD_DIM)
    return layer if isinstance(layer.far_part, FarSums) else trained(layer)


def inputs_of(config: AttentionConfig, length: int = LENGTH, **options: Any) -> list[Tensor]:
    return qkv(length, dim=HEAD_DIM, scale=1.0 if isinstance(config, LinformerConfig) else 0.5, **options)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("config", "causal"),
    [*((config, False) for config in [*METHODS, *SHARED]), *((config, True) for config in CAUSAL_FEW)],
    ids=config_id,
)
def test_the_scale_is_that_of_products_of_queries_and_keys(config: AttentionConfig, causal: bool, grad: bool) -> None:
    layer = linear_attention(config, causal=causal)
    query, key, value = qkv(20)
    with torch.set_grad_enabled(grad):
        out = layer(query, key, value, scale=0.3)
        # features see half of it each; prototypes are in the space of the keys as they are
        key_factor = 1.0 if hasattr(layer, "prototypes") else 0.3**0.5
        expected = layer(query * (0.3 / key_factor), key * key_factor, value)
    torch.testing.assert_close(out, expected)


def visible(state: State) -> list[torch.Tensor]:
    """The tensors of a state, with zeros in columns that the next token does not see."""
    seen = (state.log_mass > state.absent)[:, :, 0, :, None]
    return [
        state.key * seen,
        state.value * seen,
        *(x for x in state.tensors() if x is not state.key and x is not state.value),
    ]


@pytest.mark.usefixtures("small_chunks")
@ALL_LAYERS
def test_steps_and_chunks_equal_parallel(config: AttentionConfig) -> None:
    inputs, layer = inputs_of(config), decoder(config)
    sums = isinstance(layer.far_part, FarSums)
    with torch.no_grad():
        out = layer(*inputs)
        whole, whole_state = in_chunks(layer, inputs, [LENGTH])
        torch.testing.assert_close(whole, out, rtol=0, atol=0)
        for sizes in ([1] * LENGTH, [7, 1, 50, 2, 40], [3, 5, 1, 1, 90], [30, 1, 1, 7, *[1] * 61]):
            other, state = in_chunks(layer, inputs, sizes)
            # trigonometric outputs may be far larger than the values
            torch.testing.assert_close(other, out, rtol=1e-5 if sums else 0, atol=1e-5)
            rtol, atol = (1e-4, 1e-3) if sums else (0, 1e-5)
            for index, (ours, theirs) in enumerate(zip(visible(state), visible(whole_state), strict=True)):
                torch.testing.assert_close(
                    ours, theirs, rtol=rtol, atol=atol, msg=lambda m, index=index: f"tensor {index}: {m}"
                )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("config", FEW_LAYERS, ids=config_id)
def test_rows_of_unequal_length(config: AttentionConfig) -> None:
    """Rows do not depend on their padding, and go on from their own lengths in lockstep."""
    inputs, layer = inputs_of(config, batch=3), decoder(config)
    prompts, more = torch.tensor([37, 1, 80]), torch.tensor([5, 0, 9])
    padded = [torch.zeros(3, 2, 95, HEAD_DIM) + 3.0 for _ in inputs]
    later = [torch.zeros(3, 2, 9, HEAD_DIM) - 2.0 for _ in inputs]
    for row in range(3):
        p, m = int(prompts[row]), int(more[row])
        for x, first, second in zip(inputs, padded, later, strict=True):
            first[row, :, :p], second[row, :, :m] = x[row, :, :p], x[row, :, p : p + m]
    first, state = from_state(layer, padded, lengths=prompts)
    second, state = from_state(layer, later, state, more)
    assert state.seen.tolist() == [42, 1, 89]
    # in the end a step each, and a step for two rows only
    steps = []
    for lengths in (None, torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1])):
        token = (torch.stack([x[row, :, int(state.seen[row]), None] for row in range(3)]) for x in inputs)
        out, state = from_state(layer, token, state, lengths)
        steps.append(out)
    assert state.seen.tolist() == [45, 3, 92]
    signed = getattr(getattr(layer.far_part, "feature_map", None), "signed", False)
    rtol = 1e-5 if signed else 0
    for row in range(3):
        expected = layer(*(x[row : row + 1] for x in inputs))[0]
        p, m, end = int(prompts[row]), int(more[row]), int(state.seen[row])
        torch.testing.assert_close(first[row, :, :p], expected[:, :p], rtol=rtol, atol=1e-5)
        torch.testing.assert_close(second[row, :, :m], expected[:, p : p + m], rtol=rtol, atol=1e-5)
        assert (first[row, :, p:] == 0).all() and (second[row, :, m:] == 0).all()
        done = [out[row] for i, out in enumerate(steps) if not (row == 1 and i == 1)]
        torch.testing.assert_close(torch.cat(done, dim=1), expected[:, p + m : end], rtol=rtol, atol=1e-5)
    assert (steps[1][1] == 0).all()
    # a row without any token is finite
    out, state = from_state(layer, padded, lengths=torch.tensor([0, 4, 95]))
    assert (out[0] == 0).all() and out.isfinite().all()
    assert not any(x.isnan().any() or x.isposinf().any() for x in state.tensors())
    if not isinstance(layer.far_part, FarSums):
        assert all(x.isfinite().all() for x in state.tensors())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("near", [True, False])
@ALL_LAYERS
def test_no_gradient_to_the_future(config: AttentionConfig, near: bool) -> None:
    inputs, layer = [x.requires_grad_() for x in inputs_of(config, batch=1)], decoder(config)
    layer.near = near
    out = layer(*inputs)
    for i in (0, 5, 15, 16, 40, 64, LENGTH - 2):
        gradients = torch.autograd.grad(
            out[:, :, i].sum(), inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for gradient in gradients:
            assert (gradient[:, :, i + 1 :] == 0).all()
        if near:
            assert (gradients[2][:, :, i] != 0).any()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("future", [1.0, 30.0, 300.0])
@ALL_DEFAULTS
def test_values_do_not_depend_on_the_future(config: AttentionConfig, future: float) -> None:
    """Not even through a stabilizer, however large the later keys are."""
    inputs, layer = inputs_of(config), decoder(config)
    out = layer(*inputs)
    for t in (1, 15, 30, 63, 80):
        changed = [torch.cat((x[:, :, :t], future * x[:, :, t:].flip(2)), dim=2) for x in inputs]
        torch.testing.assert_close(layer(*changed)[:, :, :t], out[:, :, :t], rtol=0, atol=1e-6)
        prefix = layer(*(x[:, :, :t] for x in inputs))
        torch.testing.assert_close(prefix, out[:, :, :t], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
@ALL_DEFAULTS
def test_the_state_has_constant_size_and_rows_can_be_chosen(config: AttentionConfig) -> None:
    inputs, layer = inputs_of(config, batch=3), decoder(config)
    empty = initial_state(layer, *inputs[1:])
    _, state = from_state(layer, (x[:, :, :1] for x in inputs), empty)
    _, long_state = from_state(layer, (x[:, :, 1:90] for x in inputs), state)
    for first, second, third in zip(empty.tensors(), state.tensors(), long_state.tensors(), strict=True):
        assert first.shape == second.shape == third.shape and first.dtype == second.dtype == third.dtype
        assert first.shape[0] == 3
    rows = torch.tensor([2, 0, 0, 1])
    token = [x[:, :, 90:91] for x in inputs]
    expected, _ = from_state(layer, token, long_state)
    out, _ = from_state(layer, (x[rows] for x in token), long_state.map(lambda x: x.index_select(0, rows)))
    torch.testing.assert_close(out, expected[rows])


@pytest.mark.usefixtures("small_chunks")
@ALL_DEFAULTS
def test_gradients_go_through_steps(config: AttentionConfig) -> None:
    """Steps write into the state, but never into what the gradient needs, be it off in these steps or not."""
    layer, weight = trained(decoder(config)), qkv(LENGTH, dim=HEAD_DIM, seed=3)[0]
    results: list[list[torch.Tensor]] = []
    for sizes in ([LENGTH], [30, *[1] * (LENGTH - 30)]):
        inputs, state, outputs, begin = [x.requires_grad_() for x in inputs_of(config)], None, [], 0
        for size in sizes:
            new = (x[:, :, begin : begin + size] for x in inputs)
            out, state = attend_causally(*new, layer.far_part, state, None, layer.settings())
            outputs.append(out)
            begin += size
            if begin == 30:
                # on the side, from a state that the graph needs
                with torch.no_grad():
                    side = copy.copy(state)
                    for _ in range(20):
                        _, side = attend_causally(
                            *(x[:, :, :1] for x in inputs), layer.far_part, side, None, layer.settings()
                        )
        loss = (torch.cat(outputs, dim=2) * weight).sum()
        results.append(torch.autograd.grad(loss, [*inputs, *layer.parameters()], allow_unused=True))
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("small_chunks")
@ALL_DEFAULTS
def test_a_row_without_a_token_stays_as_it_is(config: AttentionConfig) -> None:
    """Step by step, while another row goes on."""
    inputs, layer = inputs_of(config), decoder(config)
    with torch.no_grad():
        expected = layer(*inputs)
        state, taken = None, 0
        for index in range(LENGTH):
            # the second row has no token in two of three steps
            new = int(index % 3 == 0)
            token = [torch.cat((x[:1, :, index, None], x[1:, :, taken, None])) for x in inputs]
            state = initial_state(layer, *token[1:]) if state is None else state
            out, state = from_state(layer, token, state, torch.tensor([1, new]))
            torch.testing.assert_close(out[0, :, 0], expected[0, :, index], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out[1, :, 0], expected[1, :, taken] * new, rtol=1e-5, atol=1e-5)
            taken += new


@pytest.mark.usefixtures("small_chunks")
@ALL_DEFAULTS
def test_the_empty_state_equals_none(config: AttentionConfig) -> None:
    inputs, layer = inputs_of(config), decoder(config)
    expected, _ = from_state(layer, inputs)
    out, _ = from_state(layer, inputs, initial_state(layer, *inputs[1:]))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [None, [LENGTH, 40]], ids=["full", "padded"])
@ALL_DEFAULTS
def test_the_state_keeps_no_more_in_memory_than_it_has(config: AttentionConfig, lengths: list[int] | None) -> None:
    """A view of a long prompt would keep all of its keys and values alive."""
    layer = decoder(config)
    _, state = from_state(layer, inputs_of(config), lengths=None if lengths is None else torch.tensor(lengths))
    # a row that is shorter than what a state keeps is filled up in front
    short = layer.far_part.near_length(config.window_size, config.global_tokens) > LENGTH
    for index, tensor in enumerate(state.tensors()):
        size = tensor.numel() * tensor.element_size()
        kept = tensor.untyped_storage().nbytes()
        assert kept < 2 * size if short else kept == size, index


def test_a_decoders_window_is_the_block_of_the_query_and_the_one_before() -> None:
    query, key, value = qkv(LENGTH, dim=HEAD_DIM, scale=2.0)
    for config in DEFAULTS[:: len(DEFAULTS) // 2]:
        layer = linear_attention(
            type(config)(**{**vars(config), "window_size": 8, "global_tokens": 0, "projection_length": LENGTH})
            if isinstance(config, LinformerConfig)
            else type(config)(**{**vars(config), "window_size": 8, "global_tokens": 0, "far": False}),
            causal=True,
            head_dim=HEAD_DIM,
        )
        layer.far = False
        i = 29
        logits = query[:, :, i, None] @ key[:, :, 16 : i + 1].transpose(-1, -2)
        out = layer(query, key, value)[:, :, i, None]
        torch.testing.assert_close(out, logits.softmax(-1) @ value[:, :, 16 : i + 1])
