"""Every script of `examples/` runs from beginning to end, with tiny models."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_linattn.modeling.feature_maps import FEATURE_MAPS
from hf_linattn.modeling.modeling_linattn import LinAttnPreTrainedModel

from .helpers import POSITIONS, save_tokenizer, tiny_model

EXAMPLES = Path(__file__).parents[1] / "examples"
#: longer than the tiny models could read
LENGTH = 96


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Ten documents of two classes, each with words of its own."""
    rows = [
        {"text": " ".join(f"w{5 + (number * 9 + i) % 90}" for i in range(80 + number)), "kind": "ab"[number % 2]}
        for number in range(10)
    ]
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path / "encoder")
    tiny_model().save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def test_the_readme_names_every_script() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f"`{path.name}" not in text] == []


@pytest.mark.parametrize("rank", [0, 2])
def test_classifier(encoder: Path, documents: Path, tmp_path: Path, rank: int) -> None:
    arguments = ["--dataset", str(documents), "--label-column", "kind", "--max-length", str(LENGTH), "--epochs", "1"]
    output = tmp_path / "out"
    metrics = example("classifier").main(
        [str(encoder), *arguments, "--batch-size", "4", "--lora-rank", str(rank), "--output", str(output)]
    )
    assert 0 <= metrics["eval_accuracy"] <= 1
    model = AutoModelForSequenceClassification.from_pretrained(output)
    assert isinstance(model, LinAttnPreTrainedModel) and model.config.num_labels == 2
    assert AutoTokenizer.from_pretrained(output).model_max_length == LENGTH


def test_sentence_encoder(encoder: Path, documents: Path, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    body = models.Transformer(str(encoder))
    sentence_transformers.SentenceTransformer(modules=[body, models.Pooling(32)]).save(str(tmp_path / "original"))
    arguments = ["--dataset", str(documents), "--max-length", str(LENGTH), "--max-steps", "2", "--batch-size", "4"]
    output = tmp_path / "out"
    trained = example("sentence_encoder").main([str(tmp_path / "original"), *arguments, "--output", str(output)])
    converted, again = (
        sentence_transformers.SentenceTransformer(str(output / name)) for name in ("converted", "trained")
    )
    text = json.loads(documents.read_text().splitlines()[0])["text"]
    assert again.max_seq_length == LENGTH > POSITIONS
    found = [torch.tensor(model.encode(text)) for model in (trained, again, converted)]
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[1], found[2], atol=1e-5)
    # no more is read than max_seq_length says, of this model or of one that it is set of
    for length in (LENGTH, 20):
        again.max_seq_length = length
        assert again.tokenize([text * 3])["input_ids"].shape[1] == length


def test_cross_encoder(encoder: Path, documents: Path, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    arguments = ["--dataset", str(documents), "--max-length", str(LENGTH), "--max-steps", "2", "--batch-size", "4"]
    output = tmp_path / "out"
    trained = example("cross_encoder").main([str(encoder), *arguments, "--output", str(output)])
    again = sentence_transformers.CrossEncoder(str(output / "trained"))
    assert isinstance(again.model, LinAttnPreTrainedModel)
    # without being told: the folder says how much it reads
    assert again.max_length == LENGTH
    text = json.loads(documents.read_text().splitlines()[0])["text"]
    pairs = [(text, "w7 w8"), (text * 3, "w9")]
    torch.testing.assert_close(torch.tensor(again.predict(pairs)), torch.tensor(trained.predict(pairs)))


def test_chat(tmp_path: Path) -> None:
    """Answers that go on from a state are those to the whole conversation."""
    save_tokenizer(tmp_path / "chat")
    tiny_model("llama", "AutoModelForCausalLM").save_pretrained(tmp_path / "chat")
    file = tmp_path / "chat" / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(file.read_text())
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    settings["eos_token"] = "w99"
    settings["chat_template"] = "{% for message in messages %}w5 {{ message['content'] }} w6 {% endfor %}"
    file.write_text(json.dumps(settings))
    arguments = ["--max-length", str(POSITIONS), "--max-new-tokens", "4"]
    chat = example("chat")
    first = chat.main([str(tmp_path / "chat"), "--message", "w7 w8", *arguments])
    both = chat.main([str(tmp_path / "chat"), "--message", "w7 w8", "--message", "w9", *arguments])
    assert len(both) == 2 and both[0] == first[0]
    assert all(len(answer.split()) <= 4 for answer in both)


def test_feature_map(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_linattn.modeling.feature_maps.FEATURE_MAPS", FEATURE_MAPS)
    try:
        assert 0.5 < example("feature_map").main([str(encoder), "--num-features", "16"]) <= 1
    finally:
        FEATURE_MAPS.pop("softplus", None)
