"""The model card: its metadata reads back, its numbers are the report's, and its snippets run."""

import copy
import dataclasses
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification

import hf_linattn.publish.upload
from hf_linattn import LinformerConfig, convert_checkpoint
from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.publish.card import model_card, named_datasets, read_report
from hf_linattn.publish.upload import PushConfig, push

from ..adapt.runs import SHORT, write_documents
from ..helpers import converted_model, save_tokenizer, tiny_model
from .hub_server import Hub
from .test_upload import LOCAL, client, hub  # noqa: F401

CONFIG = LinformerConfig(projection="learned", projection_length=8, window_size=4, global_tokens=1)
TRAINING: dict[str, Any] = {
    "stages": [{"stage": "transfer", "steps": 200, "chosen_step": 200}],
    "data": {"dataset": "topics"},
}
REPOSITORY: dict[str, Any] = {"repo_id": "me/model", "base_model": "org/base", "metadata": {"license": "mit"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_tokenizer(folder)
    converted_model(CONFIG, auto="AutoModelForSequenceClassification").save_pretrained(folder)
    return folder


def set_config(folder: Path, **values: object) -> dict[str, Any]:
    config = {**json.loads((folder / "config.json").read_text()), **values}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def cell(column: str, length: int, value: float, difference: float | None = None) -> dict[str, Any]:
    """A cell whose intervals reach 0.02 to both sides."""
    numbers = {"value": value, "low": value - 0.02, "high": value + 0.02, "difference": difference}
    for name, shift in (("difference_low", -0.02), ("difference_high", 0.02)):
        numbers[name] = None if difference is None else difference + shift
    return {"column": column, "length": length, "documents": 50, "cut": 0, "metrics": {"accuracy": numbers}}


def make_report(linattn: dict[str, Any]) -> dict[str, Any]:
    """A report on a conversion before and after its training."""

    def column(name: str, kind: str, branches: str = "both", training: object = None) -> dict[str, Any]:
        attention = linattn if kind == "converted" else None
        return {
            "name": name,
            "kind": kind,
            "branches": branches,
            "attention": attention,
            "seeds": 1,
            "training": training,
        }

    return {
        "format_version": 1,
        "created": "2026-01-02",
        "commands": [
            "hf-linattn evaluate org/base --task classification --dataset /home/somebody/pages.jsonl "
            "--converted swap=/home/somebody/swap --output ~/somebody/report"
        ],
        "machine": {"cpu": "a CPU", "cores": 2},
        "base": {"name": "org/base", "model_type": "bert", "max_length": 64},
        "columns": [
            column("softmax truncated", "truncated"),
            column("softmax extended", "extended"),
            column("swap", "converted"),
            column("adapted", "converted", training=TRAINING),
            column("adapted, near only", "converted", "near", TRAINING),
        ],
        "tasks": [
            {
                "name": "topics",
                "task": "classification",
                "metric": "accuracy",
                "higher_is_better": {"accuracy": True},
                "data": {"dataset": "/home/somebody/secret/pages.jsonl", "split": "test"},
                "settings": {},
                "cells": [
                    cell("softmax truncated", 64, 0.9),
                    cell("softmax truncated", 128, 0.9),
                    cell("softmax extended", 64, 0.9),
                    cell("softmax extended", 128, 0.8),
                    cell("swap", 64, 0.5, -0.4),
                    cell("adapted", 64, 0.85, -0.05),
                    cell("adapted", 128, 0.805, 0.005),
                    cell("adapted, near only", 64, 0.4, -0.5),
                ],
            }
        ],
        "footprint": [
            {"column": "softmax extended", "length": 64, "seconds": 0.1, "tokens_per_second": 640, "peak_bytes": 2**20},
            {"column": "adapted", "length": 64, "seconds": 0.15, "tokens_per_second": 427, "peak_bytes": 2**21},
            {"column": "softmax extended", "length": 128, "seconds": 0.4, "tokens_per_second": 320, "peak_bytes": 4e6},
            {"column": "adapted", "length": 128, "seconds": 0.3, "tokens_per_second": 427, "peak_bytes": 3e6},
        ],
        "fidelity": [],
    }


@pytest.fixture
def report(folder: Path, tmp_path: Path) -> Path:
    """A report on the folder's model, which it makes an adapted one, with one plot."""
    linattn = set_config(folder, linattn_training=TRAINING)["linattn"]
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.json").write_text(json.dumps(make_report(linattn)))
    (tmp_path / "report" / "accuracy.png").write_bytes(b"a plot")
    return tmp_path / "report"


def test_the_metadata_reads_back(folder: Path) -> None:
    card = ModelCard(str(model_card(folder, revision="a" * 40, **REPOSITORY)))
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "license": "mit",
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "pipeline_tag": "text-classification",
        "tags": ["linear-attention", "linformer", "long-context", "hf-linattn"],
    }
    for part in ("converted layers: all 2", "`projection_length` | 8", "No training is recorded", "Not evaluated"):
        assert part in card.text
    assert f'"me/model", "{"a" * 40}"' in card.text
    # no piece of the template is left, and no value that was not there
    assert not re.search(r"{{|{%|\bNone\b(?! \|)|Undefined", card.text)


def fine_tuned(root: Path, **options: Any) -> Path:
    """A classifier that `adapt` trained from a converted sentence encoder."""
    config = AdaptConfig(
        **{**SHORT, "transfer_steps": 0, "distil_steps": 0}, task_steps=4, task="sequence-classification"
    )
    data = dataclasses.replace(write_documents(root / "documents.jsonl"), label_column="kind")
    adapt(sentence_encoder(root), root / "classifier", config, data=data, **options)
    return root / "classifier"


def test_the_card_of_a_classifier_that_was_a_sentence_encoder(tmp_path: Path) -> None:
    folder = fine_tuned(tmp_path)
    assert not (folder / "modules.json").exists() and not (folder / "1_Pooling").exists()
    card = ModelCard(str(model_card(folder, **REPOSITORY)))
    assert card.data.pipeline_tag == "text-classification"
    assert not {"sentence-transformers", "feature-extraction"}.intersection(card.data.tags or [])
    assert "SentenceTransformer" not in card.text
    stage = json.loads((folder / "config.json").read_text())["linattn_training"]["stages"][0]
    before, after = stage["eval_metrics_before"]["accuracy"], stage["eval_metrics"]["accuracy"]
    assert f"|  |  | accuracy | {before:.3g} | {after:.3g} |" in card.text
    assert "| task | 4 | loss |" in card.text and "Evaluated in training only" in card.text
    assert "label = model.config.id2label" in card.text
    # nothing of this machine, in the card and beside it
    for path in folder.rglob("*.json"):
        if path.parent.name != "training":
            assert str(tmp_path) not in path.read_text(), path
    assert str(tmp_path) not in str(card)


def test_results_of_the_training_are_in_the_index_where_their_data_are_on_the_hub(folder: Path) -> None:
    stage = {
        "stage": "task",
        "steps": 4,
        "chosen_step": 4,
        "eval_loss_before": 0.7,
        "eval_loss": 0.2,
        "eval_metrics_before": {"accuracy": 0.5},
        "eval_metrics": {"accuracy": 0.9},
    }
    # of a preset, what it stands for
    training = {"stages": [stage], "data": {"dataset": "org/train"}, "eval_data": {"dataset": "imdb", "split": None}}
    set_config(folder, linattn_training=training)
    known = named_datasets(folder)
    assert known == {"org/train", "stanfordnlp/imdb"}
    card = ModelCard(str(model_card(folder, datasets=known, **REPOSITORY)))
    assert card.data.datasets == ["org/train"]
    (result,) = card.data.eval_results or []
    assert (result.dataset_type, result.dataset_split) == ("stanfordnlp/imdb", "test")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.9)
    # of a Hub that has none of them, no index
    assert ModelCard(str(model_card(folder, **REPOSITORY))).data.eval_results is None


def test_weights_that_were_trained_outside_are_told_from_those_of_the_conversion(folder: Path) -> None:
    def training_section() -> str:
        return model_card(folder, **REPOSITORY).text.split("## Training")[1].split("## Evaluation")[0]

    assert "a direct swap" in training_section()
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    # written again as it is
    model.save_pretrained(folder)
    assert "a direct swap" in training_section()
    with torch.no_grad():
        model.classifier.weight.add_(0.1)
    model.save_pretrained(folder)
    assert "trained or changed outside hf-linattn" in training_section() and "swap" not in training_section()
    set_config(folder, linattn_training=TRAINING)
    assert "have been changed since, outside hf-linattn" in training_section()
    # of a version that left no digest
    set_config(folder, linattn_training=None, linattn_digest=None)
    assert "is not known" in training_section() and "swap" not in training_section()


@pytest.mark.parametrize(
    ("auto", "tag"),
    [
        ("AutoModel", "feature-extraction"),
        ("AutoModelForQuestionAnswering", "question-answering"),
        # the Hub has none for it
        ("AutoModelForNextSentencePrediction", None),
    ],
)
def test_the_tag_is_that_of_the_head(auto: str, tag: str | None, tmp_path: Path) -> None:
    converted_model(CONFIG, auto=auto).save_pretrained(tmp_path)
    assert model_card(tmp_path, **REPOSITORY).data.pipeline_tag == tag


def test_chosen_layers_are_named(tmp_path: Path) -> None:
    converted_model(LinformerConfig(projection="learned", projection_length=8, layers=[1])).save_pretrained(tmp_path)
    text = model_card(tmp_path, **REPOSITORY).text
    assert "converted layers: 1 of 2" in text
    # there is no tokenizer to load
    assert "AutoTokenizer" not in text
    assert "A pure Linformer without training loses most" in text


def test_numbers_come_from_the_report(folder: Path, report: Path) -> None:
    found = read_report(report)
    # of a file, and of a data set that is not on the Hub, the numbers are in the text alone
    for dataset in ("/home/somebody/secret/pages.jsonl", "data/pages"):
        found["tasks"][0]["data"]["dataset"] = dataset
        card = ModelCard(str(model_card(folder, report=found, datasets={"org/pages"}, **REPOSITORY)))
        assert card.data.eval_results is None and "0.85 (0.83 to 0.87)" in card.text
    assert named_datasets(folder, found) == {"data/pages"}
    found["tasks"][0]["data"]["dataset"] = "org/pages"
    card = ModelCard(str(model_card(folder, report=found, datasets={"org/pages"}, **REPOSITORY)))
    results = card.data.eval_results
    assert results is not None
    assert [(r.metric_value, r.metric_args) for r in results] == [
        (0.5, {"length": 64, "documents": 50, "low": 0.48, "high": 0.52}),
        (0.85, {"length": 64, "documents": 50, "low": 0.85 - 0.02, "high": 0.85 + 0.02}),
        (0.805, {"length": 128, "documents": 50, "low": 0.805 - 0.02, "high": 0.805 + 0.02}),
    ]
    assert [str(r.metric_name).split(" (")[0] for r in results] == [
        "accuracy at 64 tokens, direct swap, no training",
        "accuracy at 64 tokens, adapted",
        "accuracy at 128 tokens, adapted",
    ]
    assert {(r.dataset_type, r.dataset_split, r.task_type, r.metric_type) for r in results} == {
        ("org/pages", "test", "text-classification", "accuracy")
    }
    for part in (
        "| **adapted** (this model) | 0.85 (0.83 to 0.87) | 0.805 (0.785 to 0.825) |",
        "| softmax extended | 0.9 (0.88 to 0.92) | 0.8 (0.78 to 0.82) |",
        "| transfer | 200 | not evaluated |",
        "cpu a CPU; cores 2",
        "hf-linattn evaluate org/base --task classification --dataset pages.jsonl --converted swap=swap "
        "--output report",
        "![plots/accuracy.png](plots/accuracy.png)",
    ):
        assert part in card.text
    # paths of the machine stay there
    assert "somebody" not in str(card)


def test_where_it_is_worse_is_said_and_only_there(folder: Path, report: Path) -> None:
    text = model_card(folder, report=read_report(report), **REPOSITORY).text
    section = text.split("### Where it is worse than softmax")[1].split("###")[0]
    assert [line for line in section.splitlines() if line] == [
        "- topics, accuracy at 64 tokens: -0.05 against extended softmax (-0.07 to -0.03)",
        "- topics, accuracy at 128 tokens: 0.805, where the base model gets 0.9 from what it can read",
        "- time at 64 tokens: 1.50 times that of softmax",
        "- peak memory at 64 tokens: 2.00 times that of softmax",
    ]


def test_lower_can_be_better(folder: Path, report: Path) -> None:
    found = json.loads((report / "report.json").read_text())
    found["tasks"][0]["higher_is_better"] = {"accuracy": False}
    found["footprint"] = []
    (report / "report.json").write_text(json.dumps(found))
    text = model_card(folder, report=read_report(report), **REPOSITORY).text
    assert "Nowhere beyond the intervals" in text and "Not measured." in text


def test_a_report_on_something_else_is_refused(folder: Path, report: Path) -> None:
    found = read_report(report)
    other = copy.deepcopy(found)
    for column in other["columns"]:
        if column["attention"]:
            column["attention"]["window_size"] = 99
    with pytest.raises(ValueError, match=r"not about this checkpoint.*softmax truncated"):
        model_card(folder, report=other, **REPOSITORY)
    # the same attention, but the model was trained otherwise
    set_config(folder, linattn_training={**TRAINING, "seed": 7})
    with pytest.raises(ValueError, match="not about this checkpoint"):
        model_card(folder, report=found, **REPOSITORY)
    # of a model without training, the column without any is its own
    set_config(folder, linattn_training=None)
    assert "**swap** (this model)" in model_card(folder, report=found, **REPOSITORY).text


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        (None, FileNotFoundError, r"no report\.json"),
        ("{", ValueError, "is damaged"),
        ("[]", ValueError, "is damaged"),
        ('{"format_version": 1, "columns": []}', ValueError, "it has no tasks"),
        ('{"format_version": 2, "columns": [], "tasks": []}', ValueError, "format_version=2 is newer"),
    ],
)
def test_a_report_that_cannot_be_read_is_named(
    tmp_path: Path, content: str | None, error: type[Exception], told: str
) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(error, match=told):
        read_report(tmp_path)


RUN = """
import sys
sys.modules["hf_linattn"] = None  # any import of it fails
import re
from pathlib import Path
for file in map(Path, sys.argv[1:]):
    blocks = re.findall(r"```python\\n(.*?)```", file.read_text(), re.DOTALL)
    assert blocks, file
    for block in blocks:
        found = {}
        exec(block, found)
        assert "outputs" in found or "embedding" in found, block
"""


@pytest.mark.usefixtures("hub")
def test_the_snippets_run_without_the_package(
    hub: Hub,  # noqa: F811
    folder: Path,
    report: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hf_linattn.publish.upload, "load_afresh", lambda folder: None)
    folders = {"classifier": folder}
    for name, family, auto in (
        ("choices", "bert", "AutoModelForMultipleChoice"),
        ("causal", "gpt2", "AutoModelForCausalLM"),
    ):
        folders[name] = tmp_path / name
        save_tokenizer(folders[name])
        if family == "gpt2":
            # of a BERT, which GPT-2 does not read
            settings = folders[name] / "tokenizer_config.json"
            values = json.loads(settings.read_text())
            settings.write_text(json.dumps({**values, "model_input_names": ["input_ids", "attention_mask"]}))
        converted_model(CONFIG, family, auto).save_pretrained(folders[name])
    if importlib.util.find_spec("sentence_transformers") is not None:
        folders["sentences"] = sentence_encoder(tmp_path)
    cards = []
    for name, path in folders.items():
        told = str(report) if name == "classifier" else None
        pushed = push(path, PushConfig(repo=f"me/{name}", report=told, **LOCAL))
        cards.append(tmp_path / f"{name}.md")
        cards[-1].write_text(pushed.card)
    assert hub.files("me/classifier")["plots/accuracy.png"] == b"a plot"
    done = client(RUN, *cards, cwd=tmp_path, hub=hub)
    assert done.returncode == 0, done.stderr


def sentence_encoder(root: Path) -> Path:
    """A converted sentence encoder, with mean pooling."""
    save_tokenizer(root / "words")
    tiny_model().save_pretrained(root / "words")
    from sentence_transformers import SentenceTransformer, models

    modules = [models.Transformer(str(root / "words")), models.Pooling(32)]
    SentenceTransformer(modules=modules).save(str(root / "base encoder"))
    (root / "base encoder" / "README.md").unlink(missing_ok=True)
    convert_checkpoint(root / "base encoder", root / "encoder", CONFIG, max_length=256)
    shutil.rmtree(root / "words")
    return root / "encoder"
