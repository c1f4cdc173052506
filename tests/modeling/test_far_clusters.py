"""Linformer's far part by content: assignments, landmarks and means, against the reference and exact numbers."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import LinformerConfig
from hf_linattn.modeling import blocks, far_clusters, naive
from hf_linattn.modeling.far_clusters import Prototypes, nearest
from hf_linattn.modeling.far_part import Rows
from hf_linattn.modeling.linear_attention import LinearAttention

from ..helpers import (
    assert_values_and_gradients_agree,
    converted_model,
    from_state,
    in_chunks,
    initial_state,
    linear_attention,
    qkv,
    softmax_attention,
    tokens,
)

pytestmark = pytest.mark.core

LENGTH, HEAD_DIM = 30, 4
LENGTHS = pytest.mark.parametrize("lengths", [None, torch.tensor([30, 17])], ids=["full", "padded"])
# (window_size, global_tokens)
NEAR = pytest.mark.parametrize(("window_size", "global_tokens"), [(0, 0), (4, 0), (0, 2), (6, 1), (64, 0)])
#: landmarks and rounds
LANDMARKS = pytest.mark.parametrize(("landmarks", "rounds"), [("keys", 0), ("keys", 1), ("keys", 3), ("prototypes", 0)])
SLOTS = pytest.mark.parametrize("slots", [1, 2, 7, 64])


def encoder(slots: int = 8, **settings: Any) -> LinearAttention:
    """Two heads of 4."""
    return linear_attention(LinformerConfig(projection="cluster", projection_length=slots, **settings))


def decoder(slots: int = 8, **settings: Any) -> LinearAttention:
    return linear_attention(LinformerConfig(projection="cluster", projection_length=slots, **settings), causal=True)


def slots_of(layer: LinearAttention, query: Tensor, key: Tensor, lengths: Tensor | None = None) -> Tensor:
    rows = Rows(lengths, key.shape[2], layer.config.global_tokens, key.device)
    return layer.far_part.assign(query, key, rows).slot.transpose(1, 2)


def check_encoder(layer: LinearAttention, lengths: Tensor | None) -> None:
    """Values and gradients of the valid tokens are those of the reference."""
    assert_values_and_gradients_agree(
        lambda *x: layer(*x, lengths),
        lambda *x: naive.attention(layer, *x, lengths),
        qkv(LENGTH, dim=HEAD_DIM),
        valid=None if lengths is None else torch.arange(LENGTH) < lengths[:, None],
    )


# the fast form is the reference


@LENGTHS
@SLOTS
@pytest.mark.parametrize("selected_tokens", [1, 6, 64])
@pytest.mark.parametrize("summary", [True, False])
@pytest.mark.parametrize(("window_size", "global_tokens"), [(4, 1), (6, 1), (64, 0)])
def test_selected_tokens_are_the_reference(
    window_size: int, global_tokens: int, summary: bool, selected_tokens: int, slots: int, lengths: Tensor | None
) -> None:
    layer = encoder(slots, window_size=window_size, global_tokens=global_tokens, selected_tokens=selected_tokens)
    layer.far_part.switches["summary"] = summary
    check_encoder(layer, lengths)


@LENGTHS
@SLOTS
def test_all_tokens_selected_are_softmax(slots: int, lengths: Tensor | None) -> None:
    layer, inputs = encoder(slots, window_size=4, selected_tokens=LENGTH), qkv(LENGTH, dim=HEAD_DIM, scale=2.0)
    valid = torch.ones(2, LENGTH).bool() if lengths is None else torch.arange(LENGTH) < lengths[:, None]
    out, expected = layer(*inputs, lengths), softmax_attention(*inputs, valid[:, None, :])
    torch.testing.assert_close(out.transpose(1, 2)[valid], expected.transpose(1, 2)[valid], rtol=1e-5, atol=1e-5)


def test_the_tokens_that_a_block_asks_for_are_selected() -> None:
    """A far key that all look at, in a cluster with another: the summary blurs it, and the token is exact."""
    query, key, value = qkv(64, dim=HEAD_DIM, scale=0.5)
    key[:, :, 40], key[:, :, 50], query[:, :, :4] = 3.0, 2.0, 2.0
    expected = softmax_attention(query, key, value)[:, :, :4]
    errors = [
        (encoder(2, window_size=4, selected_tokens=count)(query, key, value)[:, :, :4] - expected).abs().max()
        for count in (0, 24)
    ]
    assert errors[0] > 0.1
    assert errors[1] < errors[0] / 10


@pytest.mark.parametrize("settings", [{"window_size": 0}, {"window_size": 4, "projection": "mean"}], ids=str)
def test_selected_tokens_need_clusters_and_a_window(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"selected_tokens=5 must be 0 with projection='\w+' and window_size=\d"):
        LinformerConfig(selected_tokens=5, **settings)


@torch.no_grad()
def test_parts_of_the_far_part_are_switched_off_in_turn() -> None:
    config = LinformerConfig(projection_length=4, window_size=4, selected_tokens=6, exact_length=0)
    model, inputs = converted_model(config, "bert"), {"input_ids": tokens(LENGTH)}
    outputs = [model(**inputs)[0]]
    for switches in ({"near": False}, {"selected": False}, {"summary": False}, {"far": False}):
        with model.branches(**switches):
            outputs.append(model(**inputs)[0])
    for index, out in enumerate(outputs):
        assert not any(torch.allclose(out, other, atol=1e-3) for other in outputs[:index])
    assert torch.equal(model(**inputs)[0], outputs[0])
    without = converted_model(dataclasses.replace(config, selected_tokens=0), "bert")
    torch.testing.assert_close(without(**inputs)[0], outputs[2])


@LENGTHS
@SLOTS
@LANDMARKS
@NEAR
def test_an_encoder_is_the_reference(
    window_size: int, global_tokens: int, landmarks: str, rounds: int, slots: int, lengths: Tensor | None
) -> None:
    layer = encoder(slots, window_size=window_size, global_tokens=global_tokens, landmarks=landmarks, rounds=rounds)
    check_encoder(layer, lengths)


@LENGTHS
@pytest.mark.parametrize("tokens_per_slot", [1, 3, 4, 29, 64])
@pytest.mark.parametrize(
    "settings",
    [{}, {"global_tokens": 2, "rounds": 2}, {"window_size": 4, "global_tokens": 1}]
    + [{"window_size": 4, **more} for more in ({"rounds": 2}, {"selected_tokens": 6})],
    ids=str,
)
def test_slots_by_length_are_the_reference(
    settings: dict[str, int], tokens_per_slot: int, lengths: Tensor | None
) -> None:
    check_encoder(encoder(2, tokens_per_slot=tokens_per_slot, **settings), lengths)


@pytest.mark.parametrize(("length", "slots"), [(1, 3), (12, 3), (13, 4), (16, 4), (17, 5), (30, 8)])
def test_a_row_has_the_slots_of_its_own_length(length: int, slots: int) -> None:
    """At least 3, and one for every 4 tokens: as if projection_length were that, beside a longer row too."""
    layer, inputs, lengths = encoder(3, tokens_per_slot=4), qkv(LENGTH, scale=2.0), torch.tensor([length, LENGTH])
    alone = encoder(slots)(*(x[:1, :, :length] for x in inputs))
    for out in (layer(*inputs, lengths), layer(*(x[:1, :, :length] for x in inputs))):
        torch.testing.assert_close(out[:1, :, :length], alone, rtol=1e-5, atol=1e-6)


def test_slots_by_length_need_clusters_of_keys() -> None:
    for settings in ({"projection": "mean"}, {"landmarks": "prototypes"}):
        with pytest.raises(
            ValueError, match=r"tokens_per_slot=4 must be left out with projection='\w+' and landmarks="
        ):
            LinformerConfig(tokens_per_slot=4, **settings)
    with pytest.raises(ValueError, match="tokens_per_slot=4 must be left out: gpt2 is a decoder"):
        converted_model(LinformerConfig(tokens_per_slot=4), "gpt2")


@LENGTHS
@SLOTS
@pytest.mark.parametrize("selected_tokens", [1, 6, 64])
@pytest.mark.parametrize("summary", [True, False])
@pytest.mark.parametrize(("window_size", "global_tokens"), [(4, 1), (6, 1), (64, 0)])
def test_tokens_that_a_decoder_selects_are_the_reference(
    window_size: int, global_tokens: int, summary: bool, selected_tokens: int, slots: int, lengths: Tensor | None
) -> None:
    layer = decoder(slots, window_size=window_size, global_tokens=global_tokens, selected_tokens=selected_tokens)
    layer.far_part.switches["summary"] = summary
    assert_values_and_gradients_agree(
        lambda *x: layer(*x, lengths), lambda *x: naive.attention(layer, *x, lengths), qkv(LENGTH, dim=HEAD_DIM)
    )


@torch.no_grad()
@SLOTS
@pytest.mark.parametrize("size", [1, 3, 8])
def test_tokens_that_a_decoder_selects_step_by_step_are_those_in_parallel(slots: int, size: int) -> None:
    layer = decoder(slots, window_size=4, global_tokens=1, selected_tokens=6)
    inputs = qkv(LENGTH, dim=HEAD_DIM)
    sizes = [6, *[size] * (24 // size)]
    out, _ = in_chunks(layer, inputs, sizes)
    torch.testing.assert_close(out, layer(*inputs), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@SLOTS
def test_all_tokens_selected_are_softmax_in_a_decoder(slots: int) -> None:
    layer, inputs = decoder(slots, window_size=4, selected_tokens=LENGTH), qkv(LENGTH, dim=HEAD_DIM, scale=2.0)
    past = torch.ones(1, LENGTH, LENGTH).tril().bool()
    torch.testing.assert_close(layer(*inputs), softmax_attention(*inputs, past), rtol=1e-5, atol=1e-5)


@LENGTHS
@SLOTS
@NEAR
def test_a_decoder_is_the_reference(window_size: int, global_tokens: int, slots: int, lengths: Tensor | None) -> None:
    layer = decoder(slots, window_size=window_size, global_tokens=global_tokens)
    length = 30 if window_size else 150
    if lengths is not None and not window_size:
        lengths = torch.tensor([150, 77])
    assert_values_and_gradients_agree(
        lambda *x: layer(*x, lengths),
        lambda *x: naive.attention(layer, *x, lengths),
        qkv(length, dim=HEAD_DIM),
    )


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_branch_that_is_off_is_left_out(causal: bool, near: bool, far: bool) -> None:
    layer = (decoder if causal else encoder)(window_size=4, global_tokens=1, near=near, far=far)
    inputs = qkv(LENGTH)
    # without what is near, the first queries of a decoder see nothing
    torch.testing.assert_close(layer(*inputs), naive.attention(layer, *inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("window_size", [0, 4])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, window_size: int, rounds: int) -> None:
    layer, inputs = encoder(window_size=window_size, rounds=rounds), qkv(60)
    expected = layer(*inputs)
    monkeypatch.setattr(blocks, "_CPU_CHUNK", 8)
    torch.testing.assert_close(layer(*inputs), expected, rtol=1e-5, atol=1e-6)


# assignments


def test_the_nearest_landmark_of_a_worked_example() -> None:
    """Landmarks 0, 3 and 4; the keys 1, 2, 3.4 and 9 belong to 0, 3, 3 and 4."""
    key, landmarks = torch.tensor([1.0, 2.0, 3.4, 9.0]).view(1, 1, 4, 1), torch.tensor([0.0, 3.0, 4.0]).view(1, 3, 1)
    assert nearest(key, landmarks).flatten().tolist() == [0, 1, 1, 2]


def test_the_metric_decides_what_is_near() -> None:
    """(1, 0) is as far from (0, 0) as from (1, 1), but for a metric that looks at one coordinate only."""
    key, landmarks = torch.tensor([1.0, 0.4]).view(1, 1, 1, 2), torch.tensor([[0.0, 0.4], [1.0, 9.0]])[None]
    assert nearest(key, landmarks).item() == 0
    assert nearest(key, landmarks, torch.diag(torch.tensor([1.0, 0.0]))[None, None]).item() == 1


def test_of_equal_scores_the_first_counts() -> None:
    key = torch.tensor([0.0, 1.0, -1.0]).view(1, 1, 3, 1)
    # 1 and -1 are equally far from 0; the last landmark repeats the first
    slot = nearest(key, torch.tensor([1.0, -1.0, 1.0]).view(1, 3, 1))
    assert slot.flatten().tolist() == [0, 0, 1]


def test_a_key_that_is_no_number_has_a_slot() -> None:
    """What it spoils is seen in the output, and is not an index outside the sums."""
    key = torch.tensor([float("nan"), float("inf"), 1.0]).view(1, 1, 3, 1)
    slot = nearest(key, torch.tensor([1.0, -1.0]).view(1, 2, 1))
    assert ((slot >= 0) & (slot < 2)).all()
    query, key, value = qkv(LENGTH)
    key[0, 0, 5] = float("nan")
    assert encoder(window_size=4)(query, key, value).isnan().any()


@pytest.mark.parametrize("window_size", [0, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_the_metric_of_long_rows_is_that_of_some_queries(
    window_size: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference with as few queries, and no bit depends on how wide the batch is."""
    monkeypatch.setattr(far_clusters, "METRIC_QUERIES", 5)
    query, key, value = qkv(LENGTH, scale=2.0)
    lengths = torch.tensor([LENGTH - 6, 3]) if padded else None
    layer = encoder(window_size=window_size)
    out, expected = layer(query, key, value, lengths), naive.attention(layer, query, key, value, lengths)
    valid = torch.ones(2, LENGTH).bool() if lengths is None else torch.arange(LENGTH) < lengths[:, None]
    torch.testing.assert_close(out.transpose(1, 2)[valid], expected.transpose(1, 2)[valid])
    if lengths is not None:
        narrow = (x[:, :, : LENGTH - 6] for x in (query, key, value))
        assert torch.equal(layer(*narrow, lengths), out[:, :, : LENGTH - 6])


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("window_size", [0, 4])
def test_equal_keys_are_one_cluster_and_exact(window_size: int, rounds: int) -> None:
    """All landmarks tie: one slot holds all tokens, the others nothing, and their mean is what softmax gives."""
    query, key, value = qkv(LENGTH, scale=2.0)
    key = key[:, :, :1].expand_as(key)
    layer = encoder(window_size=window_size, rounds=rounds)
    slot = slots_of(layer, query, key)
    # the first; of means, rounding chooses
    assert (slot == (slot[..., :1] if rounds else 0)).all()
    out = layer(query, key, value)
    torch.testing.assert_close(out, softmax_attention(query, key, value))


@pytest.mark.parametrize("window_size", [0, 3])
@pytest.mark.parametrize("rounds", [0, 2])
def test_repeated_keys_are_summarized_exactly_wherever_they_stand(window_size: int, rounds: int) -> None:
    """Four different keys with their values, in any order, and half of 8 landmarks that are farthest from the rest."""
    query, key, value = qkv(27, scale=2.0)
    order = torch.randint(4, (27,), generator=torch.Generator().manual_seed(3))
    key, value = key[:, :, order], value[:, :, order]
    out = encoder(8, window_size=window_size, rounds=rounds)(query, key, value)
    torch.testing.assert_close(out, softmax_attention(query, key, value), rtol=1e-5, atol=1e-5)


@LENGTHS
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize(("window_size", "global_tokens"), [(0, 0), (4, 0), (0, 3), (4, 2)])
def test_two_slots_for_every_token_are_softmax(
    window_size: int, global_tokens: int, rounds: int, lengths: Tensor | None
) -> None:
    """Half of the slots are at equally spaced keys: that is every key."""
    layer = encoder(2 * LENGTH, window_size=window_size, global_tokens=global_tokens, rounds=rounds)
    inputs = qkv(LENGTH, scale=2.0)
    valid = torch.ones(2, LENGTH).bool() if lengths is None else torch.arange(LENGTH) < lengths[:, None]
    out, expected = layer(*inputs, lengths), softmax_attention(*inputs, valid[:, None, :])
    torch.testing.assert_close(out.transpose(1, 2)[valid], expected.transpose(1, 2)[valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [30, 33, 45])
@pytest.mark.parametrize("seed", range(4))
def test_as_many_slots_as_tokens_are_softmax(slots: int, seed: int) -> None:
    """The spaced half, and the farthest keys, which are all others."""
    inputs = qkv(LENGTH, scale=2.0, seed=seed)
    torch.testing.assert_close(encoder(slots)(*inputs), softmax_attention(*inputs), rtol=1e-5, atol=1e-5)


def test_prototypes_at_the_keys_are_softmax() -> None:
    query, key, value = qkv(LENGTH, scale=2.0, batch=1)
    for causal, seen in ((False, None), (True, torch.ones(1, LENGTH, LENGTH).tril().bool())):
        layer = linear_attention(
            LinformerConfig(
                projection="cluster",
                landmarks="prototypes",
                projection_length=LENGTH,
                window_size=2,
            ),
            causal=causal,
        )
        with torch.no_grad():
            layer.prototypes.centers.copy_(key[0])
        torch.testing.assert_close(layer(query, key, value), softmax_attention(query, key, value, seen))


def test_a_slot_weighs_as_much_as_it_has_members() -> None:
    """Query 1; keys 0, 0.2 and 4 around prototypes 0 and 4: means 0.1, of two tokens, and 4."""
    layer = linear_attention(
        LinformerConfig(projection="cluster", landmarks="prototypes", projection_length=2), heads=1, head_dim=1
    )
    with torch.no_grad():
        layer.prototypes.centers.copy_(torch.tensor([[[0.0], [4.0]]]))
    key, value = (torch.tensor(x).view(1, 1, 3, 1) for x in ([0.0, 0.2, 4.0], [1.0, 3.0, 10.0]))
    out = layer(torch.ones(1, 1, 3, 1), key, value)
    near, far = 2 * math.exp(0.1), math.exp(4)
    assert out.flatten().tolist() == pytest.approx([(near * 2 + far * 10) / (near + far)] * 3, rel=1e-6)


@pytest.mark.parametrize("rounds", [1, 5])
def test_rounds_bring_landmarks_nearer_to_their_members(rounds: int) -> None:
    """Lloyd's algorithm lowers the squared distance to the means of the clusters, in the metric of the queries."""

    def spread(rounds: int) -> Tensor:
        query, key, _ = qkv(64, batch=3)
        slot = slots_of(encoder(6, rounds=rounds), query, key)
        one_hot = torch.nn.functional.one_hot(slot, 6).to(key.dtype).transpose(-1, -2)
        mean = one_hot @ key / one_hot.sum(-1, keepdim=True).clamp_min(1)
        error = key - mean.take_along_dim(slot.unsqueeze(-1), dim=2)
        return (query @ error.transpose(-1, -2)).square().sum((-1, -2))

    assert (spread(rounds) <= spread(rounds - 1) * (1 + 1e-5)).all()
    assert spread(rounds).sum() < spread(0).sum()


@pytest.mark.parametrize("global_tokens", [0, 2])
def test_padding_and_global_tokens_are_in_no_slot(global_tokens: int) -> None:
    query, key, _ = qkv(LENGTH)
    slot = slots_of(encoder(8, global_tokens=global_tokens), query, key, torch.tensor([30, 17]))
    assert (slot[:, :, :global_tokens] == 8).all() and (slot[1, :, 17:] == 8).all()
    assert (slot[0, :, global_tokens:] < 8).all() and (slot[1, :, global_tokens:17] < 8).all()


# padding


@pytest.mark.parametrize("garbage", [0.0, 1e4, 1e18])
@LANDMARKS
@pytest.mark.parametrize(("window_size", "global_tokens"), [(0, 0), (4, 2)])
def test_what_stands_in_padding_does_not_matter(
    window_size: int, global_tokens: int, landmarks: str, rounds: int, garbage: float
) -> None:
    layer = encoder(8, window_size=window_size, global_tokens=global_tokens, landmarks=landmarks, rounds=rounds)
    inputs, lengths = qkv(LENGTH), torch.tensor([30, 17])
    expected = layer(*inputs, lengths)
    for x in inputs:
        x[1, :, 17:] = garbage * torch.randn(x[1, :, 17:].shape, generator=torch.Generator().manual_seed(0)).sign()
    out = layer(*inputs, lengths)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1, :, :17], expected[1, :, :17])


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("slots", [3, 8, 64])
@pytest.mark.parametrize("window_size", [0, 4])
@pytest.mark.parametrize("length", [1, 2, 5, 17, 29])
def test_a_row_is_the_row_without_its_padding(length: int, window_size: int, slots: int, rounds: int) -> None:
    layer, inputs = encoder(slots, window_size=window_size, global_tokens=1, rounds=rounds), qkv(LENGTH)
    out = layer(*inputs, torch.tensor([length, LENGTH]))
    alone = layer(*(x[:1, :, :length] for x in inputs))
    torch.testing.assert_close(out[:1, :, :length], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("landmarks", ["keys", "prototypes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("window_size", [0, 4])
def test_any_scale_is_finite(window_size: int, scale: float, dtype: torch.dtype, landmarks: str) -> None:
    layer = encoder(window_size=window_size, global_tokens=1, landmarks=landmarks, rounds=1)
    inputs = [x.requires_grad_() for x in qkv(64, scale=scale, dtype=dtype)]
    out = layer(*inputs, torch.tensor([64, 0]))
    out[0].float().square().sum().backward()
    assert out.isfinite().all() and all(x.grad.isfinite().all() for x in inputs)


# decoders


@torch.no_grad()
@pytest.mark.parametrize(("window_size", "global_tokens"), [(0, 0), (0, 3), (4, 0), (7, 2), (80, 1)])
def test_steps_are_the_parallel_form(window_size: int, global_tokens: int) -> None:
    layer, inputs = decoder(window_size=window_size, global_tokens=global_tokens), qkv(200)
    out = layer(*inputs)
    for sizes in ([1] * 200, [130] + [1] * 70, [3, 63, 1, 64, 1, 68]):
        steps, _ = in_chunks(layer, inputs, sizes)
        torch.testing.assert_close(steps, out, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("window_size", [0, 8])
def test_the_state_is_counts_and_sums_of_constant_size(window_size: int) -> None:
    layer = decoder(5, window_size=window_size, global_tokens=1)
    inputs = qkv(600)
    shapes = []
    for length in (1, 100, 600):
        _, state = from_state(layer, (x[:, :, :length] for x in inputs))
        shapes.append([x.shape for x in state.tensors()])
        # heads of 4: keys, values and counts of 5 slots
        assert [x.shape for x in state.far] == [(2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5)]
        assert {x.dtype for x in state.far} == {torch.float32}
    assert shapes[0] == shapes[1] == shapes[2]
    assert [x.shape for x in initial_state(layer, *inputs[1:]).tensors()] == shapes[0]
    # every token but the first and those that the next one finds near
    unit = window_size or 64
    begin = 600 // unit * unit - window_size
    keys, _, members = state.far
    assert (members.sum(-1) == begin - 1).all()
    torch.testing.assert_close(keys.sum(2), inputs[1][:, :, 1:begin].sum(2), rtol=1e-4, atol=1e-4)


def test_without_a_window_the_own_block_is_exact() -> None:
    inputs = qkv(64)
    past = torch.ones(1, 64, 64).tril().bool()
    torch.testing.assert_close(decoder()(*inputs), softmax_attention(*inputs, past))


def test_prototypes_come_from_the_seed_and_are_saved() -> None:
    first, again, other = (Prototypes(num_heads=2, head_dim=4, slots=8, seed=seed) for seed in (0, 0, 1))
    assert first.centers.shape == (2, 8, 4)
    assert torch.equal(first.centers, again.centers) and not torch.equal(first.centers, other.centers)
    assert set(decoder().state_dict()) == {"prototypes.centers", "prototypes.spread"}
    assert set(encoder(landmarks="prototypes").state_dict()) == {"prototypes.centers", "prototypes.spread"}
    # landmarks that are keys have nothing to save
    assert encoder().state_dict() == {}


def test_assignments_pass_no_gradient_and_means_do() -> None:
    layer = encoder(landmarks="prototypes")
    inputs = [x.requires_grad_() for x in qkv(LENGTH)]
    layer(*inputs).square().sum().backward()
    assert layer.prototypes.centers.grad is None
    assert all(x.grad.abs().sum() > 0 for x in inputs)
