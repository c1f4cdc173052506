"""Heads that stay softmax: which they are, what a decoder keeps of them, and what they cost."""

import argparse
import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from hf_linattn import AttentionConfig, LayerwiseConfig, LinAttnPreTrainedModel, LinformerConfig, PerformerConfig
from hf_linattn.cli.options import add_options
from hf_linattn.conversion.calibration import calibrate
from hf_linattn.conversion.flops import linear_flops
from hf_linattn.conversion.summary import summarize
from hf_linattn.modeling.linear_attention import LinearAttention

from ..helpers import (
    CACHE,
    POSITIONS,
    SPLIT,
    cache_of,
    config_id,
    converted_model,
    decoder,
    logits_in_pieces,
    positions_of,
    prompts,
    qkv,
    softmax_attention,
    tiny_model,
    tokens,
)

pytestmark = pytest.mark.core

NEAR = {"window_size": 4, "global_tokens": 1}
HEADS = {0: [0, 1, 3], 1: [2]}


def settings(**options: Any) -> LinformerConfig:
    return LinformerConfig(projection_length=8, softmax_heads=HEADS, **NEAR, **options)


def layer_of(*heads: int, causal: bool = False, group_size: int = 1) -> LinearAttention:
    """Four heads of 4 with these as softmax."""
    config = LinformerConfig(projection_length=3, max_length=POSITIONS, **NEAR)
    return LinearAttention(
        config, num_heads=4, head_dim=4, causal=causal, seed=0, softmax_heads=heads, group_size=group_size
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(1,), (0, 3), (0, 1, 2)])
def test_the_heads_are_softmax_and_the_others_linear(heads: tuple[int, ...], causal: bool) -> None:
    inputs = qkv(30, heads=4, scale=2.0)
    out = layer_of(*heads, causal=causal)(*inputs)
    seen = torch.ones(1, 30, 30).tril().bool() if causal else None
    differs = (out - softmax_attention(*inputs, seen)).abs().amax((0, 2, 3)) > 1e-4
    assert differs.tolist() == [head not in heads for head in range(4)]
    if not causal:
        # clusters have no parameters, so that each head is that of the layer without softmax heads
        others = [head for head in range(4) if head not in heads]
        torch.testing.assert_close(out[:, others], layer_of()(*inputs)[:, others])


def state_after(model: LinAttnPreTrainedModel, inputs: dict[str, Tensor]) -> Any:
    outputs = model(**inputs, position_ids=positions_of(inputs["attention_mask"]), use_cache=True)
    return cache_of(outputs).layers


@torch.no_grad()
@pytest.mark.parametrize(("family", "kept"), [("gpt2", (3, 1)), ("llama", (2, 1))])
def test_a_decoder_keeps_the_keys_of_these_heads_only(family: str, kept: tuple[int, int]) -> None:
    """Llama's four heads of queries share two heads of keys, and each is kept once."""
    layers = state_after(decoder(settings(), family), prompts(20, 9))
    for layer, heads in zip(layers, kept, strict=True):
        assert layer.state.key.shape == layer.state.value.shape == (2, heads, 20, 8)
        assert layer.state.valid.sum(1).tolist() == layer.state.seen.tolist() == [20, 9]
        # columns of the others: the first token, two blocks of 4 and 8 slots
        assert layer.state.linear.key.shape[1:3] == (4 - len(HEADS[layers.index(layer)]), 17)
        assert layer.nbytes() > layer.state.key.numel() * 8


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_steps_and_beams_are_the_parallel_form(family: str) -> None:
    model, inputs = decoder(settings(), family), prompts(30, 17, 2)
    expected = model(**inputs, position_ids=positions_of(inputs["attention_mask"]), use_cache=False).logits
    for sizes in ([20] + [1] * 10, [3, 1, 12, 1, 13]):
        found, _ = logits_in_pieces(model, inputs, sizes)
        valid = inputs["attention_mask"].bool()
        torch.testing.assert_close(found[valid], expected[valid], rtol=0, atol=1e-5)
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "no_repeat_ngram_size": 2}
    assert torch.equal(model.generate(**inputs, **options), model.generate(**inputs, use_cache=False, **options))


@torch.no_grad()
def test_the_cache_moves_rows_and_refuses_another_model() -> None:
    model = decoder(settings())
    cache = DynamicCache()
    model(tokens(12, batch=2), **{CACHE: cache})
    before = [layer.state.key for layer in cache.layers]
    cache.reorder_cache(torch.tensor([1, 1]))
    assert all(torch.equal(layer.state.key, old[[1, 1]]) for layer, old in zip(cache.layers, before, strict=True))
    other = decoder(dataclasses.replace(settings(), softmax_heads={0: [0]}))
    with pytest.raises(ValueError, match="cannot go on from the cache of another model"):
        other(tokens(1, batch=2), **{CACHE: cache})


@pytest.mark.parametrize("config", [settings(), PerformerConfig(softmax_heads={1: [3, 0]}, layers=[1])], ids=config_id)
def test_settings_are_the_same_after_json(config: AttentionConfig) -> None:
    again = AttentionConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.heads_of_layer(1) == config.softmax_heads[1] == sorted(config.softmax_heads[1])


def test_the_command_line_takes_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, LinformerConfig, only=["softmax_heads"])
    given = vars(parser.parse_args(["--softmax-heads", '{"3": [5, 0]}']))
    assert LinformerConfig(**given).softmax_heads == {3: [0, 5]}
    with pytest.raises(SystemExit):
        parser.parse_args(["--softmax-heads", "3:5"])
    assert "argument --softmax-heads: '3:5' is not JSON" in capsys.readouterr().err


def test_settings_by_layer_have_the_heads_of_the_whole() -> None:
    by_layer = {0: LinformerConfig(projection_length=8, **NEAR), 1: PerformerConfig(num_features=16, **NEAR)}
    config = LayerwiseConfig(by_layer=by_layer, softmax_heads=HEADS)
    assert [config.of_layer(index).softmax_heads for index in (0, 1)] == [{0: [0, 1, 3]}, {1: [2]}]
    assert AttentionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    model = converted_model(config)
    assert [module.split.exact for _, module in model.linear_attentions()] == [[0, 1, 3], [2]]
    assert model.linear_attentions().__next__()[1].far_part.modules == {}
    with pytest.raises(ValueError, match=r"by_layer\[0\].softmax_heads={0: \[2\]} must be left out"):
        LayerwiseConfig(by_layer={0: PerformerConfig(softmax_heads={0: [2]})})


@pytest.mark.parametrize("heads", [[], {}, {0: 1}, {0: []}, {"a": [1]}, {0: [1, 1]}, {0: [True]}, {-1: [0]}], ids=str)
def test_what_names_no_heads_is_refused(heads: Any) -> None:
    with pytest.raises(ValueError, match="LinformerConfig: softmax_heads"):
        LinformerConfig(softmax_heads=heads)


@pytest.mark.parametrize(
    ("heads", "options", "family", "message"),
    [
        ({2: [0]}, {}, "bert", "softmax_heads has layer 2; it must be one of the converted layers, 0, 1"),
        ({0: [0]}, {"layers": [1]}, "gpt2", "softmax_heads has layer 0; it must be one of the converted layers, 1"),
        ({1: [4]}, {}, "llama", r"softmax_heads\[1\]=\[4\]; the layer has heads 0 to 3"),
        ({1: [0, 1, 2, 3]}, {}, "bert", "has all 4 heads of the layer.*Leave it out of `layers`"),
        ({0: [0]}, {}, "albert", "must be left out: albert has one attention module for all layers"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(heads: Any, options: Any, family: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        converted_model(LinformerConfig(softmax_heads=heads, **options), family)


@pytest.mark.parametrize("config", SPLIT, ids=config_id)
def test_operations_are_those_that_run(config: AttentionConfig) -> None:
    model = converted_model(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device("meta"):
        layer = dataclasses.replace(config, max_length=POSITIONS, exact_length=0)
        layer = LinearAttention(layer, num_heads=4, head_dim=8, causal=False, seed=0, softmax_heads=[0])
        layer(*(torch.empty(1, 4, 64, 8) for _ in range(3)))
    found = linear_flops(model.config.attention, model.config, 64, softmax_heads=1)
    assert found == pytest.approx(counter.get_total_flops())


def test_the_summary_says_that_they_cost_n_times_n() -> None:
    mean = LinformerConfig(projection="mean", projection_length=8)
    plain, split = (summarize(converted_model(dataclasses.replace(mean, softmax_heads=h))) for h in (None, {1: [0, 2]}))
    assert split.flops == pytest.approx(plain.flops + (plain.softmax_flops - plain.flops) / 4)
    assert str(split).splitlines()[-1] == "grows with n * n        2 heads with all n tokens (softmax_heads)"
    assert split.parameters_added == plain.parameters_added


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (LinformerConfig(projection_length=8, softmax_heads=HEADS, **NEAR), "llama"),
        (PerformerConfig(num_features=16, feature_map="learned", softmax_heads=HEADS, **NEAR), "bert"),
        (PerformerConfig(num_features=16, init="moments", softmax_heads=HEADS, **NEAR), "gpt2"),
    ],
    ids=config_id,
)
def test_calibration_fits_the_other_heads(config: AttentionConfig, family: str) -> None:
    auto = "AutoModelForCausalLM" if family != "bert" else "AutoModel"
    documents = tokens(40, batch=2)
    model = converted_model(config, family, auto)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".linattn." in name}
    calibrate(model, tiny_model(family, auto), documents.tolist())
    after = model.state_dict()
    assert before and not all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert model(tokens(30))[0].isfinite().all()


def test_layers_with_one_projection_may_differ_in_their_heads() -> None:
    config = LinformerConfig(projection_length=8, projection="learned", sharing="layers", softmax_heads=HEADS, **NEAR)
    for family in ("bert", "gpt2"):
        out = converted_model(config, family)(tokens(40))[0]
        assert out.isfinite().all()
        others = converted_model(dataclasses.replace(config, softmax_heads=None), family)(tokens(40))[0]
        assert not torch.allclose(out, others, atol=1e-3)
