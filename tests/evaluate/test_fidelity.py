"""Fidelity of converted layers: known cases, brute force, and the models left as they were."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, LinformerConfig, PerformerConfig, convert
from hf_linattn.evaluate.fidelity import LayerFidelity, _channels, _weights, fidelity
from hf_linattn.modeling import naive
from hf_linattn.modeling.architectures import ARCHITECTURES
from hf_linattn.modeling.attention_interface import ATTENTION_NAME

from ..helpers import (
    CAUSAL,
    DECODERS,
    ENCODERS,
    METHODS,
    POSITIONS,
    as_trained,
    config_id,
    converted_model,
    decoder,
    outputs_of,
    qkv,
    tiny_model,
    tokens,
)

LENGTH = 40
EVERYTHING = [
    LinformerConfig(projection="learned", projection_length=8, window_size=POSITIONS),
    PerformerConfig(num_features=16, window_size=POSITIONS),
]
JOINED = [
    LinformerConfig(projection="learned", projection_length=8, window_size=4, global_tokens=1),
    PerformerConfig(num_features=16, window_size=4, global_tokens=1),
]


def _documents(*lengths: int) -> list[list[int]]:
    return [tokens(length, seed=index)[0].tolist() for index, length in enumerate(lengths)]


def _pair(config: AttentionConfig, family: str = "bert") -> tuple[PreTrainedModel, LinAttnPreTrainedModel]:
    return tiny_model(family), converted_model(config, family)


@pytest.mark.parametrize("config", EVERYTHING, ids=config_id)
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_a_window_over_everything_is_softmax(family: str, config: AttentionConfig) -> None:
    base, converted = _pair(config, family)
    rows = fidelity(base, converted, _documents(LENGTH, 7, 1))
    assert [row.layer for row in rows] == [0, 1]
    for row in rows:
        assert row.relative_error < 1e-5 > max(row.head_relative_error)
        assert row.approximation_error < 1e-5 > row.reassociation_error
        assert row.cosine == pytest.approx(1.0, abs=1e-6) == pytest.approx(min(row.head_cosine), abs=1e-6)
        assert row.agreement == 1.0
        assert row.near_mass == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_means_of_identical_keys_are_exact(family: str) -> None:
    base = tiny_model(family)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("self.key.weight"):
                parameter.zero_()
            elif name.endswith("attn.c_attn.weight"):
                parameter[:, 32:64] = 0.0
    # a window of one token: what is far of a decoder starts after whole segments
    config = LinformerConfig(projection_length=8, projection="mean", window_size=0 if family == "bert" else 1)
    for row in fidelity(base, convert(base, config), _documents(LENGTH)):
        assert row.relative_error < 1e-5
        # all keys are the most attended ones
        assert row.agreement == pytest.approx(1.0)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_rounding_is_told_apart_from_the_error_of_features(family: str) -> None:
    base, converted = _pair(PerformerConfig(num_features=16), family)
    for row in fidelity(base, converted, _documents(LENGTH)):
        assert row.reassociation_error < 1e-5
        # of all queries, since the document has fewer than are drawn
        assert row.approximation_error == pytest.approx(row.relative_error, rel=1e-3)
        assert row.relative_error > 0.1
        assert row.near_mass == 0.0
        assert row.agreement < 0.9


@pytest.mark.parametrize(
    ("family", "config"),
    [*(("bert", config) for config in METHODS), *(("gpt2", config) for config in CAUSAL)],
    ids=config_id,
)
def test_weights_are_those_of_the_quadratic_reference(family: str, config: AttentionConfig) -> None:
    model = as_trained(converted_model(config)) if family == "bert" else decoder(config)
    linear = next(model.linear_attentions())[1]
    # an estimate with signs is kept above a least mass, which the reference of decoders does not do: far from it
    scale = 0.1 if getattr(config, "feature_map", None) == "trigonometric" else 0.5
    query, key, value = qkv(24, batch=1, heads=4, dim=8, scale=scale)
    positions = torch.tensor([0, 1, 3, 7, 8, 12, 15, 16, 17, 20, 23])
    weights = _weights(linear, query, key, value, positions)
    assert weights.shape == (4, 11, 24)

    leaf = value.double().requires_grad_()
    output = naive.attention(linear, query.double(), key.double(), leaf)
    channels = _channels(positions, 8)
    for row, (position, channel) in enumerate(zip(positions, channels, strict=True)):
        (expected,) = torch.autograd.grad(output[0, :, position, channel].sum(), leaf, retain_graph=True)
        torch.testing.assert_close(weights[:, row], expected[0, ..., channel].float(), rtol=2e-5, atol=2e-6)
        # and they make the output
        found = (expected[0, ..., channel] * value[0, ..., channel].double()).sum(-1)
        torch.testing.assert_close(found, output[0, :, position, channel].detach(), rtol=1e-9, atol=1e-9)


def _seen_exactly(config: AttentionConfig, causal: bool) -> Tensor:
    """Which keys are near, (queries, keys), one pair after the other."""
    window, first = config.window_size, config.global_tokens
    segment = -(-POSITIONS // getattr(config, "projection_length", POSITIONS))
    near = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for i in range(LENGTH):
        for j in range(i + 1 if causal else LENGTH):
            in_window = bool(window) and abs(i // window - j // window) <= 1
            if causal and config.method == "linformer":
                start = max((i // window - 1) * window, 0) if window else i
                in_window = j >= first + max(start - first, 0) // segment * segment
            # an encoder's first tokens see every token
            near[i, j] = j < first or in_window or (not causal and i < first)
    return near


@pytest.mark.parametrize(
    "config",
    [
        *JOINED,
        LinformerConfig(projection="learned", projection_length=8),
        PerformerConfig(num_features=16, global_tokens=3),
        LinformerConfig(projection="learned", projection_length=8, window_size=4, global_tokens=1, near=False),
        PerformerConfig(num_features=16, window_size=4, far=False),
    ],
    ids=config_id,
)
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_near_mass_by_brute_force(family: str, config: AttentionConfig) -> None:
    base, converted = _pair(config, family)
    eager = copy.deepcopy(base)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = eager(input_ids=torch.tensor(_documents(LENGTH)), output_attentions=True).attentions
    near = _seen_exactly(config, ARCHITECTURES[family].causal) & torch.tensor(config.near)
    expected = [float((attention * near).sum(-1).mean()) for attention in attentions]
    found = [row.near_mass for row in fidelity(base, converted, _documents(LENGTH))]
    assert found == pytest.approx(expected, abs=1e-5)


def test_errors_and_agreement_by_brute_force() -> None:
    """The first layer has the same inputs in both models, so that each can run on its own."""
    base, converted = _pair(JOINED[1])
    ours: list[Tensor] = []
    linear = next(converted.linear_attentions())[1]

    def keep(module: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, float], output: Tensor) -> None:
        root = kwargs["scale"] ** 0.5
        ours.extend((args[0] * root, args[1] * root, args[2], output))

    handle = linear.register_forward_hook(keep, with_kwargs=True)
    base.set_attn_implementation("eager")
    documents = _documents(LENGTH, 23)
    errors, sizes, cosines, agreed = [], [], [], []
    for document in documents:
        ours.clear()
        with torch.no_grad():
            attention = base(input_ids=torch.tensor([document]), output_attentions=True).attentions[0]
            converted(input_ids=torch.tensor([document]))
        query, key, value, output = ours
        wanted = attention @ value
        weights = naive.attention(linear, query.double(), key.double(), torch.eye(len(document)).double()[None, None])
        agreed += (weights.argmax(-1) == attention.argmax(-1)).flatten().tolist()
        errors.append((output - wanted).square().sum((0, 2, 3)))
        sizes.append(wanted.square().sum((0, 2, 3)))
        cosines += torch.cosine_similarity(output.transpose(1, 2).flatten(2), wanted.transpose(1, 2).flatten(2), -1)[0]
    handle.remove()
    row = fidelity(base, converted, documents)[0]
    error, size = sum(errors), sum(sizes)
    assert row.relative_error == pytest.approx(float((error.sum() / size.sum()).sqrt()), rel=1e-5)
    assert row.head_relative_error == pytest.approx((error / size).sqrt().tolist(), rel=1e-5)
    assert row.cosine == pytest.approx(float(torch.stack(cosines).mean()), abs=1e-5)
    assert row.agreement == pytest.approx(sum(agreed) / len(agreed))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_layers_that_stayed_softmax_have_no_row(family: str) -> None:
    base, whole = _pair(JOINED[0], family)
    part = converted_model(
        LinformerConfig(projection="learned", projection_length=8, window_size=4, global_tokens=1, layers=[1]), family
    )
    (row,) = fidelity(base, part, _documents(LENGTH))
    expected = fidelity(base, whole, _documents(LENGTH))[1]
    assert row.layer == expected.layer == 1
    # the layer before was computed by another kernel: rounding
    for name in ("relative_error", "cosine", "agreement", "near_mass", "approximation_error", "head_cosine"):
        assert getattr(row, name) == pytest.approx(getattr(expected, name), rel=1e-5)


@pytest.mark.parametrize("family", ["bert", "albert", "opt"])
def test_the_models_are_left_as_they_were(family: str) -> None:
    base, converted = _pair(JOINED[1], family)
    converted.train()
    inputs = {"input_ids": tokens(LENGTH), "attention_mask": torch.ones(1, LENGTH, dtype=torch.long)}
    before = outputs_of(base, inputs)
    implementation, modules = base.config._attn_implementation, [name for name, _ in base.named_modules()]

    def check() -> None:
        assert base.config._attn_implementation == implementation != ATTENTION_NAME
        assert [name for name, _ in base.named_modules()] == modules
        assert not any(m._forward_hooks for model in (base, converted) for m in model.modules())
        assert not base.training and converted.training
        assert all(module.far and module.exact for _, module in converted.linear_attentions())
        assert torch.equal(outputs_of(base, inputs), before)

    fidelity(base, converted, _documents(LENGTH))
    check()
    with pytest.raises(IndexError):
        # a token that the vocabulary does not have
        fidelity(base, converted, [[10_000]])
    check()


def test_a_draw_of_queries() -> None:
    base, converted = _pair(JOINED[0])
    documents = _documents(LENGTH, 30)
    every, few, again, other = (
        fidelity(base, converted, documents, queries=queries, seed=seed)
        for queries, seed in ((64, 0), (10, 0), (10, 0), (10, 1))
    )
    assert few == again != other
    for row, drawn in zip(every, few, strict=True):
        assert row.relative_error == drawn.relative_error
        assert drawn.near_mass != row.near_mass
        assert drawn.near_mass == pytest.approx(row.near_mass, abs=0.2)


def test_adapters_and_trained_weights_take_part() -> None:
    base, converted = _pair(JOINED[0])
    plain = fidelity(base, converted, _documents(LENGTH))
    adapted = get_peft_model(
        copy.deepcopy(converted), LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
    )
    assert fidelity(base, adapted, _documents(LENGTH))[0].relative_error > 1.1 * plain[0].relative_error
    merged = adapted.merge_and_unload()
    found = fidelity(base, merged, _documents(LENGTH))[0]
    assert found.relative_error > 1.1 * plain[0].relative_error


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_half_precision(family: str) -> None:
    base, converted = (model.bfloat16() for model in _pair(JOINED[0], family))
    for row in fidelity(base, converted, _documents(LENGTH)):
        assert 0.0 < row.reassociation_error < 0.02
        assert 0.0 < row.relative_error < 1.0


class _Largest(TorchDispatchMode):
    """Remembers how large the largest tensor was."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("config", [*JOINED, PerformerConfig(num_features=16)], ids=config_id)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_nothing_grows_with_the_square_of_the_length(family: str, config: AttentionConfig) -> None:
    length = 2048
    base = tiny_model(family, max_position_embeddings=length)
    converted = convert(base, config)
    with _Largest() as largest:
        (document,) = _documents(length)
        fidelity(base, converted, [document], queries=8)
    assert largest.elements < length * length / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": []}, "documents is empty"),
        ({"documents": [[5], []]}, "a document without a token"),
        ({"documents": [[5] * (POSITIONS + 1)]}, f"{POSITIONS + 1} tokens, and converted takes at most {POSITIONS}"),
        ({"queries": 0}, "queries=0 must be an integer of at least 1"),
        ({"converted": "base"}, "converted a BertModel"),
        ({"base": "electra"}, "base has model_type='electra', and converted was made from 'bert'"),
        ({"base": "larger"}, "base has num_hidden_layers=3, and converted 2"),
        ({"base": "half"}, "base is torch.bfloat16 on cpu, and converted torch.float32 on cpu"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    base, converted = _pair(JOINED[0])
    other = {
        "base": lambda: base,
        "electra": lambda: tiny_model("electra"),
        "larger": lambda: tiny_model(num_hidden_layers=3),
        "half": lambda: base.bfloat16(),
    }
    given = {"base": base, "converted": converted, "documents": _documents(LENGTH), **change}
    given = {name: other[value]() if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(ValueError, match=message):
        fidelity(given.pop("base"), given.pop("converted"), given.pop("documents"), **given)


def test_base_without_room_for_a_document() -> None:
    base = tiny_model()
    converted = convert(base, JOINED[0], max_length=2 * POSITIONS)
    with pytest.raises(ValueError, match=f"{POSITIONS + 1} tokens, and base takes at most {POSITIONS}"):
        fidelity(base, converted, _documents(POSITIONS + 1))
    # rotary positions have no table
    base = tiny_model("llama")
    rows = fidelity(base, convert(base, JOINED[0], max_length=2 * POSITIONS), _documents(POSITIONS + 1))
    assert all(isinstance(row, LayerFidelity) for row in rows)
