"""Settings that differ by layer: they convert, compute what each layer's own settings say, and survive saving."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModel

from hf_linattn import LayerwiseConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.conversion.flops import linear_flops, softmax_flops
from hf_linattn.conversion.summary import summarize
from hf_linattn.evaluate.models import compared_models
from hf_linattn.modeling.configuration_linattn import AttentionConfig
from hf_linattn.publish.card import model_card
from hf_linattn.utils.labels import attention_text

from ..helpers import tiny_model, tokens

FIRST = LinformerConfig(projection="learned", projection_length=4, window_size=8, global_tokens=1, exact_length=0)
LAST = PerformerConfig(num_features=16, window_size=4, feature_map="learned", exact_length=0)
CONFIG = LayerwiseConfig(by_layer={1: LAST, 0: FIRST})


def test_settings_are_plain_json_and_come_back() -> None:
    settings = json.loads(json.dumps(CONFIG.to_dict()))
    assert AttentionConfig.from_dict(settings) == CONFIG
    assert CONFIG.layers == [0, 1]
    assert CONFIG.of_layer(0) == FIRST and CONFIG.of_layer(1) == LAST and CONFIG.of_layer(2) is None


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_each_layer_has_its_own_settings_also_after_saving(family: str, tmp_path) -> None:
    base = tiny_model(family)
    model = convert(base, CONFIG)
    found = [module.config for _, module in model.linear_attentions()]
    length = model.attention_config.max_length
    assert found == [dataclasses.replace(x, max_length=length) for x in (FIRST, LAST)]
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path).eval()
    ids = tokens(20)
    with torch.no_grad():
        wanted, states = model(ids)[0], again(ids)[0]
        uniform = convert(base, FIRST)(ids)[0]
    assert torch.equal(states, wanted)
    assert not torch.allclose(uniform, wanted, atol=1e-5)


def test_layers_without_settings_stay_softmax() -> None:
    base = tiny_model("bert")
    model = convert(base, LayerwiseConfig(by_layer={1: FIRST}))
    one = convert(base, dataclasses.replace(FIRST, layers=[1]))
    assert [name for name, _ in model.linear_attentions()] == [name for name, _ in one.linear_attentions()]
    ids = tokens(20)
    with torch.no_grad():
        assert torch.equal(model(ids)[0], one(ids)[0])


def test_branches_switch_in_every_layer() -> None:
    model = convert(tiny_model("bert"), CONFIG)
    model.set_branches(far=False)
    assert [module.far for _, module in model.linear_attentions()] == [False, False]
    assert model.attention_config.far is False and AttentionConfig.from_dict(model.config.linattn).far is False
    model.set_branches()
    assert model.attention_config == dataclasses.replace(CONFIG, max_length=model.attention_config.max_length)
    mixed = convert(tiny_model("bert"), LayerwiseConfig(by_layer={0: FIRST, 1: PerformerConfig(num_features=16)}))
    with pytest.raises(ValueError, match="far=False leaves nothing to attend to"):
        mixed.set_branches(far=False)


def test_operations_are_those_of_the_layers() -> None:
    model = convert(tiny_model("bert"), LayerwiseConfig(by_layer={0: FIRST}))
    length, config = model.attention_config.max_length, model.config
    wanted = linear_flops(model.attention_config.of_layer(0), config, length) + softmax_flops(config, length)
    assert summarize(model).flops == pytest.approx(wanted / length)


def test_reports_and_cards_tell_the_layers_apart(tmp_path) -> None:
    model = convert(tiny_model("bert"), LayerwiseConfig(by_layer={0: FIRST, 1: dataclasses.replace(FIRST, far=False)}))
    model.config.linattn_calibration = {"documents": 3, "tokens": 1500}
    model.save_pretrained(tmp_path / "mixed")
    text = model_card(tmp_path / "mixed", repo_id="me/mixed", revision="main", base_model=None).text
    assert (
        "| `layer 0` | linformer, window_size=8, global_tokens=1, exact_length=0, projection_length=4, "
        "projection=learned |" in text
    )
    assert (
        "| `layer 1` | linformer, window_size=8, global_tokens=1, exact_length=0, far=False, projection_length=4, "
        "projection=learned |" in text
    )
    assert "attention on 3 documents\n(1,500 tokens)" in text
    assert attention_text(model.config.linattn).startswith("layer 0: window 8, first 1 exact, Linformer k=4")
    # one layer has no far part: the branches cannot be switched off apart
    tiny_model("bert").save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    assert [column.name for column in compared_models(base, {"mixed": str(tmp_path / "mixed")})][2:] == ["mixed"]
    convert(tiny_model("bert"), CONFIG).save_pretrained(tmp_path / "both")
    names = [column.name for column in compared_models(base, {"both": str(tmp_path / "both")})]
    assert names[2:] == ["both", "both, near only", "both, far only"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by_layer": {}}, "by_layer={} must be a dict.*at least one layer.*extend_positions"),
        ({"by_layer": [FIRST]}, "must be a dict"),
        ({"by_layer": {0: dataclasses.replace(FIRST, max_length=32)}}, r"by_layer\[0\].max_length=32"),
        ({"by_layer": {"first": FIRST}}, "keys"),
        ({"by_layer": {-1: FIRST}}, "layers=-1"),
        ({"by_layer": {0: "linformer"}}, r"by_layer\[0\]='linformer'"),
        ({"by_layer": {0: CONFIG}}, r"by_layer\[0\]="),
        ({"by_layer": {0: dataclasses.replace(FIRST, layers=[0])}}, r"by_layer\[0\].layers"),
        ({"by_layer": {0: LinformerConfig(projection="learned", sharing="layers")}}, r"by_layer\[0\].sharing"),
        ({"by_layer": {0: FIRST}, "window_size": 4}, "window_size=4 must be set for each layer"),
        ({"by_layer": {0: FIRST}, "layers": [1]}, r"layers=\[1\]"),
    ],
)
def test_errors_name_the_field(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerwiseConfig(**options)


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has layers 0 to"):
        convert(tiny_model("bert"), LayerwiseConfig(by_layer={7: FIRST}))
