"""`analyze` on tiny models: what it reports is what the models do, and the whole way to a converted checkpoint."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

from hf_linattn import LayerwiseConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.analyze import CANDIDATES, DECODER_CANDIDATES, Analysis, AnalyzeConfig, analyze, suggest
from hf_linattn.analyze.analysis import SwappedModel, tokenized
from hf_linattn.analyze.config import candidates_for
from hf_linattn.analyze.cost import measure
from hf_linattn.analyze.report import write_report, written_text
from hf_linattn.cli.main import main
from hf_linattn.evaluate.fidelity import fidelity

from ..helpers import POSITIONS, save_tokenizer, tiny_model

TRIED = {
    "window": LinformerConfig(
        projection="learned", projection_length=4, window_size=4, global_tokens=1, far=False, exact_length=0
    ),
    "linformer": LinformerConfig(projection="learned", projection_length=8),
    "performer": PerformerConfig(num_features=16, feature_map="learned", window_size=4, exact_length=0),
}
TEXTS = [" ".join(str((3 * number + start) % 90) for number in range(50 + start)) for start in range(4)]
CONFIG = AnalyzeConfig(length=48, documents=3, spectrum_length=32, window_sizes=[4])


class _Numbers:
    """A tokenizer of texts of numbers."""

    def __call__(self, texts, truncation: bool, max_length: int, verbose: bool = False) -> dict:
        return {"input_ids": [[int(word) for word in text.split()][:max_length] for text in texts]}


def _model(family: str):
    model = tiny_model(family, "AutoModelForCausalLM" if family in ("gpt2", "llama") else "AutoModel")
    with torch.no_grad():
        # attention of a fresh model is flat, and every setting exact
        for name, parameter in model.named_parameters():
            if any(part in name for part in (".query.weight", ".key.weight", "c_attn.weight", "_proj.weight")):
                parameter.mul_(3.0)
    return model


@pytest.fixture(scope="module", params=["bert", "gpt2", "llama"])
def found(request: pytest.FixtureRequest) -> tuple[str, Analysis]:
    return request.param, analyze(_model(request.param), TEXTS, CONFIG, candidates=TRIED, tokenizer=_Numbers())


def _states(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if hasattr(model, "lm_head"):
            return model(ids, use_cache=False).logits[0].log_softmax(-1)
        return model(ids).last_hidden_state[0].mean(0)


def _loss(base, model, documents: list[list[int]]) -> float:
    losses = []
    for document in documents:
        wanted, ours = (_states(x, torch.tensor([document])) for x in (base, model))
        if wanted.ndim == 2:
            losses.append(float((wanted.exp() * (wanted - ours)).sum(-1).mean()))
        else:
            losses.append(float(1 - F.cosine_similarity(wanted.double(), ours.double(), dim=0)))
    return sum(losses) / len(losses)


def test_losses_are_those_of_the_converted_models(found: tuple[str, Analysis]) -> None:
    family, analysis = found
    base = _model(family)
    documents = tokenized(TEXTS, _Numbers(), CONFIG.length, CONFIG.documents)
    assert analysis.documents == 3 and analysis.length == 48 and analysis.layers == base.config.num_hidden_layers
    for candidate in analysis.candidates:
        settings = TRIED[candidate.name]
        alone = [
            _loss(base, convert(base, LayerwiseConfig(by_layer={layer: settings})), documents)
            for layer in range(analysis.layers)
        ]
        assert candidate.loss == pytest.approx(alone, rel=1e-3, abs=1e-6)
        assert candidate.uniform_loss == pytest.approx(_loss(base, convert(base, settings), documents), rel=1e-3)


def test_errors_are_those_that_the_comparison_measures() -> None:
    base = _model("bert")
    analysis = analyze(base, TEXTS, CONFIG, candidates=TRIED, tokenizer=_Numbers())
    documents = tokenized(TEXTS, _Numbers(), CONFIG.length, CONFIG.documents)
    for candidate in analysis.candidates:
        wanted = fidelity(base, convert(base, TRIED[candidate.name]), documents)
        assert candidate.errors[0] == pytest.approx(wanted[0].head_relative_error, rel=1e-4)
        # layers after the first see other inputs in a converted model, but not in either of these two
        assert candidate.errors[1] == pytest.approx(wanted[1].head_relative_error, rel=1e-4)


def test_the_model_is_left_as_it_was() -> None:
    base = _model("bert").train()
    state, implementation = {k: v.clone() for k, v in base.state_dict().items()}, base.config._attn_implementation
    analyze(base, TEXTS[:1], CONFIG, candidates={"window": TRIED["window"]}, tokenizer=_Numbers())
    assert base.training and base.config._attn_implementation == implementation
    assert list(base.state_dict()) == list(state) and not any("linattn" in name for name, _ in base.named_modules())
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_json_and_the_report(found: tuple[str, Analysis], tmp_path: Path) -> None:
    _, analysis = found
    path = write_report(analysis, tmp_path / "a report")
    assert Analysis.load(path.parent) == analysis
    text = path.read_text()
    assert f"# Attention of {analysis.model_type}" in text and all(
        candidate.name in text for candidate in analysis.candidates
    )
    for plot in ("spectrum", "energy", "errors", "quality-cost"):
        assert (path.parent / f"{plot}.png").read_bytes()[:4] == b"\x89PNG" and f"({plot}.png)" in text
    values = json.loads((path.parent / "analysis.json").read_text()) | {"format_version": 99}
    with pytest.raises(ValueError, match="format_version=99"):
        Analysis.from_dict(values)


def test_from_analyze_to_a_converted_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, report, output = tmp_path / "base", tmp_path / "report", tmp_path / "converted"
    _model("bert").save_pretrained(folder)
    save_tokenizer(folder)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": " ".join(["w5"] * 80)}) + "\n" for _ in range(3)))
    options = ["--output", str(report), "--operations", "0.99"]
    common = ["--length", str(POSITIONS), "--documents", "2", "--spectrum-length", "16"]
    # what cannot be had costs a word, and not the analysis
    assert main(["analyze", str(folder), "--dataset", str(texts), *options[:2], "--memory", "0.01", *common]) == 1
    assert (
        "memory=0.01: the least that a candidate takes" in capsys.readouterr().err
        and (report / "analysis.json").exists()
    )
    assert main(["analyze", str(folder), "--dataset", str(texts), *options, *common]) == 0
    assert "Measured in the whole model, without training" in capsys.readouterr().out
    # the analysis is kept, and another suggestion needs no documents
    made = (report / "analysis.json").read_bytes()
    assert main(["analyze", str(folder), *options]) == 0
    assert (report / "analysis.json").read_bytes() == made
    suggestion = json.loads((report / "suggestion.json").read_text())
    # what would not be looked at is refused; what is damaged is named, and made again where there are texts
    assert main(["analyze", str(folder), *options, "--length", "32"]) == 1
    assert "give --dataset for one" in capsys.readouterr().err
    (report / "analysis.json").write_bytes(made[:500])
    assert main(["analyze", str(folder), *options]) == 1
    assert "analysis.json' is no analysis" in capsys.readouterr().err
    assert main(["analyze", str(folder), "--dataset", str(texts), *options, *common]) == 0
    assert Analysis.load(report).names == Analysis.from_dict(json.loads(made)).names
    assert main(["convert", str(folder), "--config", str(report), "--output", str(output)]) == 0
    model = AutoModel.from_pretrained(output)
    assert model.config.linattn["by_layer"].keys() == suggestion["config"]["by_layer"].keys()
    for index, (_, module) in zip(suggestion["config"]["by_layer"], model.linear_attentions(), strict=True):
        settings = {**suggestion["config"]["by_layer"][index], "max_length": POSITIONS}
        # where a window makes short rows exact, they are as long as the base reads
        settings["exact_length"] = POSITIONS if settings["window_size"] else 0
        assert module.config.to_dict() == settings


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["--operations", "0.01"], r"operations=0.01 cannot be had at 48 tokens: .* '(.*)', takes 0\.\d+ of softmax's"),
        (["--operations", "0.5", "--time", "0.5"], "time=0.5 and operations=0.5: give one of them"),
        (["--fidelity", "-1"], "fidelity=-1.0 must be a number above 0"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_passes(
    wanted: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SwappedModel, "outcome", lambda *arguments: pytest.fail("a pass was made"))
    folder, texts = tmp_path / "base", tmp_path / "texts.jsonl"
    _model("bert").save_pretrained(folder)
    save_tokenizer(folder)
    texts.write_text(json.dumps({"text": " ".join(["w5"] * 80)}) + "\n")
    call = ["analyze", str(folder), "--dataset", str(texts), "--length", "48", "--output", str(tmp_path / "report")]
    assert main([*call, *wanted]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "report").exists()


def test_the_least_that_is_told_can_be_had(tmp_path: Path) -> None:
    arguments = (_model("bert"), TEXTS, CONFIG)
    options = {"candidates": TRIED, "tokenizer": _Numbers()}
    with pytest.raises(ValueError, match="cannot be had") as error:
        analyze(*arguments, operations=0.01, **options)
    name, least = re.search(r"the fewest, '(.*)', takes (\S+) of", str(error.value)).groups()
    analysis = analyze(*arguments, operations=float(least) + 0.001, **options)
    assert suggest(analysis, operations=float(least) + 0.001).names == (name,) * 2


def test_without_matplotlib_no_plots_are_told_of(
    found: tuple[str, Analysis], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert written_text(tmp_path, None) == f"Written: {tmp_path}/report.md, report.html, analysis.json and plots."
    monkeypatch.setattr("hf_linattn.analyze.report.has_matplotlib", lambda: False)
    write_report(found[1], tmp_path)
    assert not list(tmp_path.glob("*.png"))
    told = f"Written: {tmp_path}/report.md, report.html and analysis.json; for plots: pip install 'hf-linattn[plots]'."
    assert written_text(tmp_path, None) == told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze", "{base}", "--output", "{out}"], "--dataset is missing"),
        (
            ["analyze", "{base}", "--output", "{out}", "--dataset", "topics", "--candidates", "window 9"],
            "--candidates 'window 9' is not among 'window 8'",
        ),
        (["convert", "{base}", "--output", "{out}"], "Give --method"),
        (["convert", "{base}", "--output", "{out}", "--config", "{bad}"], "holds no attention settings"),
        (
            ["convert", "{base}", "--output", "{out}", "--config", "{bad}", "--method", "linformer"],
            "--method: not with",
        ),
        (
            ["convert", "{base}", "--output", "{out}", "--config", "{bad}", "--window-size", "4"],
            "--window-size: not with",
        ),
    ],
)
def test_the_commands_name_what_is_missing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("{")
    tiny_model("bert").config.save_pretrained(tmp_path)
    names = {"base": tmp_path, "out": tmp_path / "out", "bad": tmp_path / "bad.json"}
    assert main([argument.format(**names) for argument in arguments]) == 1
    assert message in capsys.readouterr().err


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="texts holds no text"):
        analyze(_model("bert"), ["", "  "], CONFIG, tokenizer=_Numbers())
    with pytest.raises(TypeError, match="texts is one string"):
        analyze(_model("bert"), "a text", CONFIG, tokenizer=_Numbers())
    with pytest.raises(ValueError, match="candidates is empty"):
        analyze(_model("bert"), TEXTS, CONFIG, candidates={}, tokenizer=_Numbers())
    with pytest.raises(ValueError, match="model_type='t5' is not supported"):
        from transformers import T5Config, T5Model

        config = T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50)
        analyze(T5Model(config), TEXTS, CONFIG, tokenizer=_Numbers())
    with pytest.raises(ValueError, match=r"candidates\['x'\].layers"):
        layers = {"x": dataclasses.replace(TRIED["window"], layers=[0])}
        analyze(_model("bert"), TEXTS, CONFIG, candidates=layers, tokenizer=_Numbers())
    with pytest.raises(ValueError, match="max_length=8 is less than length=9"):
        AnalyzeConfig(length=9, max_length=8)
    with pytest.raises(ValueError, match="length=0 must be"):
        AnalyzeConfig(length=0)
    with pytest.raises(ValueError, match="feature_error=2"):
        AnalyzeConfig(feature_error=2)


def test_a_window_alone_is_one_in_decoders_too() -> None:
    # as long as max_length, of which a causal Linformer without an ended segment would see everything exactly
    for family, known in (("bert", CANDIDATES), ("gpt2", DECODER_CANDIDATES)):
        assert candidates_for(family) is known
    base = _model("gpt2")
    settings = {"window 16": DECODER_CANDIDATES["window 16"]}
    (candidate,) = analyze(base, TEXTS, CONFIG, candidates=settings, tokenizer=_Numbers()).candidates
    assert candidate.uniform_loss > 1e-5 and min(candidate.errors[0]) > 1e-3


def test_memory_is_what_lives_at_once() -> None:
    x = torch.zeros(1000)

    def run() -> torch.Tensor:
        first = x + 1
        second = first[:500] * 2
        del first
        return second + 1

    assert measure(run, x.device, 0.0).memory == 6000
    assert set(CANDIDATES) and all(settings.layers is None for settings in CANDIDATES.values())
