"""Layers with a sliding window: they stay softmax with their window, beside layers that are converted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, DynamicCache

from hf_linattn import LayerwiseConfig, LinAttnPreTrainedModel, LinformerConfig, PerformerConfig, convert
from hf_linattn.adapt.teacher import softmax_teacher
from hf_linattn.analyze import Analysis, AnalyzeConfig, analyze
from hf_linattn.analyze.analysis import settings_by_layer
from hf_linattn.analyze.report import write_report
from hf_linattn.conversion.softmax import watch_attention
from hf_linattn.conversion.summary import summarize
from hf_linattn.evaluate import fidelity
from hf_linattn.modeling.attention_interface import softmax_attention
from hf_linattn.modeling.cache import LinAttnCacheLayer
from hf_linattn.modeling.modeling_linattn import sliding_layers

from ..helpers import POSITIONS, logits_in_pieces, outputs_of, prompts, qkv, tiny_model, tokens

pytestmark = pytest.mark.core

CAUSAL_LM = "AutoModelForCausalLM"
WINDOW = 8
#: architecture -> what gives it a sliding window in its first layer
DECODERS: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3_text": {},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
FAMILIES = pytest.mark.parametrize("family", DECODERS)
CONFIG = LinformerConfig(projection="mean", projection_length=8, window_size=4, global_tokens=1)


def decoder(family: str, config: Any = CONFIG, **overrides: Any) -> LinAttnPreTrainedModel:
    return convert(tiny_model(family, CAUSAL_LM, **DECODERS[family], **overrides), config)


@FAMILIES
def test_they_are_those_of_the_base_model(family: str) -> None:
    """The converted layer attends exactly here, so that all differences would be the other layer's."""
    base = tiny_model(family, CAUSAL_LM, **DECODERS[family])
    assert sliding_layers(base.config) == [0]
    model = convert(base, PerformerConfig(num_features=16, window_size=POSITIONS))
    assert model.config.layer_types == base.config.layer_types
    assert [name for name, _ in model.linear_attentions()] == ["model.layers.1.self_attn.linattn"]
    # rows longer and shorter than two windows, padded and not
    for lengths in ((40, 9), (12, 5), (64,)):
        inputs = prompts(*lengths)
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        for options in ({"use_cache": False}, {}):
            found, expected = (outputs_of(x, {**inputs, **options}) for x in (model, base))
            size = min(found.numel(), expected.numel())
            torch.testing.assert_close(found[:size], expected[:size], atol=1e-5, rtol=1e-5)


@FAMILIES
def test_a_cache_holds_their_window_and_no_more(family: str) -> None:
    model, inputs = decoder(family), prompts(40, 27)
    expected, _ = logits_in_pieces(model, inputs, [40])
    for cache in (None, DynamicCache()):
        logits, cache = logits_in_pieces(model, inputs, [20, 1, 1, 10, 8], cache)
        valid = inputs["attention_mask"].bool()
        torch.testing.assert_close(logits[valid], expected[valid], atol=1e-5, rtol=1e-5)
        assert isinstance(cache.layers[1], LinAttnCacheLayer)
    _, cache = logits_in_pieces(model, inputs, [40])
    assert cache.layers[0].keys.shape[2] == WINDOW - 1
    for options in ({}, {"num_beams": 2}):
        settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 2, **options}
        found = model.generate(**inputs, **settings)
        assert torch.equal(found, model.generate(**inputs, **settings, use_cache=False))


def test_modernbert_keeps_them_on_both_sides(tmp_path: Path) -> None:
    base = tiny_model("modernbert", num_hidden_layers=4)
    assert sliding_layers(base.config) == [1, 2]
    model = convert(base, LinformerConfig(window_size=POSITIONS, exact_length=0))
    assert model.config.attention.layers == [0, 3]
    for lengths in ((40, 9), (64, 30)):
        inputs = prompts(*lengths, side="right")
        torch.testing.assert_close(outputs_of(model, inputs), outputs_of(base, inputs), atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config.layer_types == base.config.layer_types
    assert again.config.sliding_window == base.config.sliding_window == WINDOW
    assert torch.equal(outputs_of(again, inputs), outputs_of(model, inputs))


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 3, 8, 13])
def test_blocks_are_the_dense_form(window: int, causal: bool, padded: bool) -> None:
    length = 41
    query, key, value = qkv(length)
    lengths = torch.tensor([length, 20]) if padded else None
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance < window) & (distance >= 0 if causal else distance > -window)
    seen = seen.expand(2, -1, -1)
    if lengths is not None:
        seen = seen & (torch.arange(length) < lengths[:, None])[:, None]
    logits = (query @ key.transpose(-1, -2) * 0.5).masked_fill(~seen[:, None], float("-inf"))
    expected = logits.softmax(-1) @ value
    found = softmax_attention(query, key, value, lengths, 0.5, causal=causal, window=window)
    assert found.isfinite().all()
    for row, real in enumerate([length, 20] if padded else [length, length]):
        torch.testing.assert_close(found[row, :, :real], expected[row, :, :real], atol=1e-5, rtol=1e-5)


def test_long_rows_have_no_quadratic_tensor() -> None:
    from .conformance.test_length import LENGTH, LargestTensor

    query, key, value = qkv(LENGTH, batch=1)
    with LargestTensor() as watch:
        softmax_attention(query, key, value, None, 1.0, causal=True, window=WINDOW)
    assert watch.elements < LENGTH * LENGTH // 4, watch.operation


@pytest.mark.parametrize("config", [LinformerConfig(layers=[0, 1]), LayerwiseConfig(by_layer={0: LinformerConfig()})])
def test_converting_them_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match=r"layers \[0\] have a sliding window of 8 tokens.*leave them out"):
        decoder("gemma3_text", config)


@pytest.mark.parametrize("family", ["mistral", "phi3", "starcoder2"])
def test_a_model_of_nothing_else_is_refused_and_can_be_told_to_see_everything(family: str, tmp_path: Path) -> None:
    base = tiny_model(family, CAUSAL_LM, sliding_window=WINDOW)
    with pytest.raises(ValueError, match=r"sliding_window=8 in every layer.*sliding_window=None"):
        convert(base, CONFIG)
    base.save_pretrained(tmp_path)
    model = convert(tmp_path, CONFIG, sliding_window=None)
    assert model.config.sliding_window is None
    assert len(list(model.linear_attentions())) == 2


@pytest.mark.parametrize(
    ("family", "overrides", "told"),
    [
        ("gemma2", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0 must be None"),
        ("gemma3_text", {"use_bidirectional_attention": True}, r"use_bidirectional_attention=True must be False"),
        ("llama", {"is_causal": False}, r"is_causal=False must be True"),
    ],
)
def test_attention_that_is_no_causal_softmax_is_refused(family: str, overrides: dict[str, Any], told: str) -> None:
    base = tiny_model(family, CAUSAL_LM, **overrides)
    with pytest.raises(ValueError, match=told):
        convert(base, CONFIG)


def test_gemma_2_without_its_bound_is_converted_from_a_folder(tmp_path: Path) -> None:
    tiny_model("gemma2", CAUSAL_LM, attn_logit_softcapping=50.0).save_pretrained(tmp_path)
    model = convert(tmp_path, CONFIG, attn_logit_softcapping=None)
    assert model.config.attn_logit_softcapping is None
    assert model.config.final_logit_softcapping == 30.0


def test_what_watches_attention_sees_them_with_their_window() -> None:
    base, inputs = tiny_model("gemma3_text"), {**prompts(40, side="right"), "use_cache": False}
    expected, layers = outputs_of(base, inputs), []
    with watch_attention(base, lambda call: layers.append(call.layer)):
        found = outputs_of(base, inputs)
    assert layers == [0, 1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # which fits what is calibrated, and compares what was converted
    texts = ["w7 w8 w9"]
    model = convert(
        base, PerformerConfig(num_features=16, init="moments"), calibration_texts=texts, tokenizer=_tokenize
    )
    rows = fidelity.fidelity(base, model, [tokens(40)[0].tolist()])
    assert [row.layer for row in rows] == [1]


def test_a_teacher_has_them_too() -> None:
    model, inputs = decoder("gemma3_text"), prompts(40, 9)
    found = outputs_of(softmax_teacher(model), inputs)
    torch.testing.assert_close(found, outputs_of(tiny_model("gemma3_text", CAUSAL_LM), inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "auto"), [("modernbert", "AutoModel"), ("gemma3_text", CAUSAL_LM)])
def test_analysis_leaves_them_out(family: str, auto: str, tmp_path: Path) -> None:
    base = tiny_model(family, auto)
    sliding = sliding_layers(base.config)
    config = AnalyzeConfig(length=32, max_length=64, spectrum_length=16, window_sizes=[4])
    tried = {"window": LinformerConfig(window_size=4, global_tokens=1, far=False)}
    analysis = analyze(base, ["w7 w8"], config, candidates=tried, tokenizer=_tokenize)
    assert sliding and analysis.left_out == tuple(sliding)
    assert analysis.indices == [x for x in range(base.config.num_hidden_layers) if x not in sliding]
    assert analysis.candidates[0].uniform_loss > 0
    write_report(analysis, tmp_path)
    assert Analysis.load(tmp_path) == analysis
    assert f"sliding window and stay as they are: layers {sliding[0]}" in (tmp_path / "report.md").read_text()
    model = convert(base, settings_by_layer(analysis, ["window"] * analysis.layers))
    assert [*model.config.attention.by_layer] == analysis.indices


def _tokenize(texts: Any, **options: Any) -> dict[str, list[Any]]:
    ids = tokens(40)[0].tolist()
    return {"input_ids": ids if isinstance(texts, str) else [ids]}


def test_they_cost_what_their_window_costs() -> None:
    summary = summarize(decoder("gemma3_text", max_position_embeddings=1024))
    # per token: two products of 4 heads of 16, of a multiply and an add; half of 1,024 keys, or 8
    assert summary.softmax_flops == 4 * 4 * 16 * (512 + WINDOW)
    assert (summary.layers, summary.converted) == (2, 1)
    assert summary.flops > 4 * 4 * 16 * WINDOW
