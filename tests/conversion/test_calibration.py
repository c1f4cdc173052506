"""Initialisation from data: nearer to softmax than without, on other documents, and nothing else is changed."""

import dataclasses

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hf_linattn import AttentionConfig, LayerwiseConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.conversion.calibration import calibrate, center
from hf_linattn.conversion.softmax import AttentionCall, watch_attention
from hf_linattn.modeling.feature_maps import FEATURE_MAPS

from ..helpers import POSITIONS, config_id, save_tokenizer, tiny_model, tokens

LEARNED = PerformerConfig(num_features=32, feature_map="learned")
CONFIGS = [
    LEARNED,
    dataclasses.replace(LEARNED, window_size=8, global_tokens=1),
    LinformerConfig(projection="learned", projection_length=8),
    LinformerConfig(projection="learned", projection_length=4, window_size=8, global_tokens=1),
    LinformerConfig(projection="learned", projection_length=8, sharing="none"),
]


def _documents(count: int, seed: int) -> list[list[int]]:
    return [tokens(POSITIONS - 5 * index, seed=seed + index)[0].tolist() for index in range(count)]


@torch.no_grad()
def _states(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids)[0]


def _sharp(family: str):
    """Attention of a fresh tiny model is flat, and any method gets it right: with longer queries it is not."""
    base = tiny_model(family)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if any(part in name for part in (".query.weight", ".key.weight", "c_attn.weight")):
                parameter.mul_(3.0)
    return base


def _layer_errors(model, base, ids: torch.Tensor) -> float:
    """Mean relative error of the layers' outputs on the queries, keys and values of the base model."""
    modules = [module for _, module in model.linear_attentions()]
    errors = []

    def visit(call: AttentionCall) -> None:
        linear = modules[call.layer]
        found = linear(call.query, call.key, call.value)
        errors.append(float((found - call.output).norm() / call.output.norm()))

    # of linear attention, in short rows too
    with torch.no_grad(), model.branches(exact=False), watch_attention(base, visit):
        base(ids)
    return sum(errors) / len(errors)


CASES = [(config, "bert") for config in CONFIGS] + [(config, "gpt2") for config in CONFIGS[1:3]]


@pytest.mark.parametrize(("config", "family"), CASES, ids=config_id)
def test_calibrated_is_nearer_to_softmax_on_other_documents(config: AttentionConfig, family: str) -> None:
    base = _sharp(family)
    before, after = convert(base, config), convert(base, config)
    calibrate(after, base, _documents(6, seed=0))
    ids = tokens(POSITIONS, batch=6, seed=100)
    assert _layer_errors(after, base, ids) < _layer_errors(before, base, ids)
    state = before.state_dict()
    changed = {name for name, tensor in after.state_dict().items() if not torch.equal(tensor, state[name])}
    assert changed and all(".linattn." in name for name in changed)
    # and once more to the same bits
    again = convert(base, config)
    calibrate(again, base, _documents(6, seed=0))
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name


@pytest.mark.parametrize("lengths", [None, torch.tensor([20, 11])])
def test_centring_keeps_what_is_estimated_and_lowers_its_variance(lengths: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 20, 8, generator=generator, dtype=torch.float64) * 0.3 + 0.5
    key = torch.randn(2, 3, 20, 8, generator=generator, dtype=torch.float64) * 0.5 - 0.7
    exact = (query @ key.transpose(-1, -2)).exp()
    errors = {}
    for centred in (False, True):
        found = []
        for seed in range(40):
            features = FEATURE_MAPS["learned"](
                num_heads=3, head_dim=8, num_features=64, orthogonal=True, seed=seed
            ).double()
            if centred:
                center(features, query, key, lengths)
            phi = [features(x, side).log2_phi.exp2() for x, side in ((query, "query"), (key, "key"))]
            found.append(phi[0] @ phi[1].transpose(-1, -2))
        stacked = torch.stack(found)
        errors[centred] = float(((stacked / exact) - 1).square().mean())
        # unbiased: the mean over draws comes near
        assert float((stacked.mean(0) / exact - 1).abs().median()) < 0.1
    assert errors[True] < 0.5 * errors[False]


def test_convert_takes_texts_and_records_them(tmp_path) -> None:
    base = _sharp("bert")
    base.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    texts = ["", *(" ".join(str(number) for number in range(start, start + 60)) for start in range(4))]
    model = convert(str(tmp_path), LEARNED, calibration_texts=texts, calibration_length=24)
    assert model.config.linattn_calibration == {"documents": 4, "tokens": 96, "texts": "given"}
    same = convert(base, LEARNED, calibration_texts=texts, calibration_length=24, tokenizer=_tokenizer(tmp_path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name
    model.save_pretrained(tmp_path / "converted")
    again = type(model).from_pretrained(tmp_path / "converted").eval()
    ids = tokens(30)
    assert torch.equal(_states(again, ids), _states(model, ids))


def _tokenizer(folder) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LinformerConfig(projection_length=8, projection="mean"), "projection='mean' is not fitted"),
        (LinformerConfig(projection_length=8, projection="conv"), "projection='conv' is not fitted"),
        (LinformerConfig(projection="learned", projection_length=8, sharing="layers"), "share one module"),
        (PerformerConfig(num_features=8), "feature_map='positive' has nothing"),
    ],
)
def test_what_cannot_be_fitted_is_refused(config: AttentionConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(tiny_model("bert"), config, calibration_texts=["a"])


def test_layers_without_a_far_part_are_passed_over() -> None:
    base = _sharp("bert")
    window = LinformerConfig(projection="learned", projection_length=4, window_size=8, global_tokens=1, far=False)
    model, before = (convert(base, LayerwiseConfig(by_layer={0: window, 1: LEARNED})) for _ in range(2))
    calibrate(model, base, _documents(3, seed=0))
    state = before.state_dict()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])}
    assert changed and all(".layer.1." in name for name in changed)
    with pytest.raises(ValueError, match="far=False in all layers leaves nothing to fit"):
        convert(base, window, calibration_texts=["a"])


@pytest.mark.parametrize(("texts", "kind"), [("one string", "one string"), ([1, "a"], "holds int, str")])
def test_texts_that_are_none_are_refused(texts: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"calibration_texts {'is ' if 'one' in kind else ''}{kind}"):
        convert(tiny_model("bert"), LEARNED, calibration_texts=texts, tokenizer=object())


def test_texts_without_a_word_and_models_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="calibration_texts holds no text"):
        calibrate(convert(tiny_model("bert"), LEARNED), tiny_model("bert"), [])
    with pytest.raises(ValueError, match="tokenizer is missing"):
        convert(tiny_model("bert"), LEARNED, calibration_texts=["a"])


def test_half_precision_stays_half_precision() -> None:
    base = tiny_model("bert").to(torch.bfloat16)
    model = convert(base, LEARNED)
    calibrate(model, base, _documents(2, seed=0))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
