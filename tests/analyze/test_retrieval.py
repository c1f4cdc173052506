"""Retrieval scores are shares of the model's own attention, and the heads that are chosen by them stay softmax."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertTokenizerFast

from hf_linattn.analyze import Analysis, AnalyzeConfig, suggest
from hf_linattn.analyze.retrieval import heads_for, planted_examples, retrieval_scores
from hf_linattn.cli.main import main
from hf_linattn.data.synthetic import IGNORED, Example

from ..helpers import POSITIONS, VOCABULARY, tiny_model, tokens
from .test_suggest import _analysis

WORDS = ["the", "pass", "key", "is", "remember", "it", "what", ".", "?", *"0123456789", *(f"##{i}" for i in range(10))]


def save_words(folder: Path) -> BertTokenizerFast:
    """A tokenizer that knows the words of the passkey task, and some more."""
    folder.mkdir(exist_ok=True)
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    letters = [f"{a}{b}" for a in "qxz" for b in "abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join([*words, *letters][:VOCABULARY]))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=POSITIONS)
    tokenizer.save_pretrained(folder)
    return tokenizer


def planted(tmp_path: Path, *, causal: bool, count: int = 3) -> list[Example]:
    text = "qa qb qc qd qe qf qg qh"
    return planted_examples([text] * 2, save_words(tmp_path), causal=causal, length=60, count=count, seed=0)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_planted_is_what_the_answer_repeats(causal: bool, tmp_path: Path) -> None:
    for example in planted(tmp_path, causal=causal):
        answer = [label for label in example.labels if label != IGNORED]
        assert len(answer) == len(example.planted) == 5
        assert [example.input_ids[place] for place in example.planted] == answer
        assert max(example.planted) < example.labels.index(answer[0])


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_scores_are_shares_of_the_attention(family: str) -> None:
    model = tiny_model(family, "AutoModel")
    labels = [IGNORED] * 24
    labels[20], labels[22] = 7, 8
    example = Example(tokens(24, seed=3)[0].tolist(), labels, (5, 11))
    found = torch.tensor(retrieval_scores(model, [example, example]))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([example.input_ids]), output_attentions=True).attentions
    expected = torch.stack([(layer[0, :, 20, 5] + layer[0, :, 22, 11]) / 2 for layer in weights])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_fewest_heads_have_the_share() -> None:
    scores = ((0.1, 0.5, 0.0), (0.3, 0.05, 0.05))
    assert heads_for(scores, 0.5) == {0: [1]}
    assert heads_for(scores, 0.51) == heads_for(scores, 0.8) == {0: [1], 1: [0]}
    assert heads_for(scores, 0.9) == {0: [0, 1], 1: [0]}
    assert heads_for(scores, 1.0) == {0: [0, 1], 1: [0, 1, 2]}


def test_from_scores_to_a_checkpoint_with_softmax_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, report, output = tmp_path / "base", tmp_path / "report", tmp_path / "converted"
    tiny_model("bert").save_pretrained(folder)
    save_words(folder)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "qa qb qc qd " * 30}) + "\n")
    options = ["--output", str(report), "--operations", "0.99", "--retrieval", "0.4"]
    common = [
        "--length",
        "60",
        "--documents",
        "1",
        "--spectrum-length",
        "16",
        "--candidates",
        "window 8",
    ]
    assert main(["analyze", str(folder), "--dataset", str(texts), *options, *common]) == 0
    told = capsys.readouterr().out
    analysis = Analysis.load(report)
    chosen = heads_for(analysis.retrieval, 0.4)
    suggested = json.loads((report / "suggestion.json").read_text())
    assert analysis.config.retrieval_texts == 16 and [len(heads) for heads in analysis.retrieval] == [4, 4]
    by_layer = suggested["config"]["by_layer"]
    assert suggested["config"]["softmax_heads"] == {str(x): heads for x, heads in chosen.items() if str(x) in by_layer}
    assert "with all n tokens (softmax_heads)" in told and suggested["operations"] <= 0.99
    assert "## Retrieval heads" in (report / "report.md").read_text() and (report / "retrieval.png").exists()
    assert main(["convert", str(folder), "--config", str(report), "--output", str(output)]) == 0
    model = AutoModel.from_pretrained(output)
    kept = [getattr(module.split, "exact", []) for _, module in model.linear_attentions()]
    assert kept == [chosen.get(int(layer), []) for layer in by_layer]


def test_scores_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["analyze", str(tmp_path), "--output", str(tmp_path / "report"), "--retrieval", "0.5"]
    assert main(call) == 1
    assert "--retrieval 0.5 needs a budget or a fidelity" in capsys.readouterr().err
    with pytest.raises(ValueError, match="retrieval_texts=-1 must be an integer of at least 0"):
        AnalyzeConfig(retrieval_texts=-1)
    with pytest.raises(ValueError, match=r"retrieval=0\.5: the analysis has no retrieval scores"):
        suggest(_analysis(), operations=0.9, retrieval=0.5)
    with pytest.raises(ValueError, match=r"retrieval=1\.5 must be a share"):
        suggest(_analysis(), operations=0.9, retrieval=1.5)
