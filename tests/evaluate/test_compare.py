"""The comparison from end to end on tiny models: columns, tasks, kept cells, report."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModel, BertTokenizerFast

from hf_linattn import LinformerConfig, PerformerConfig, convert, convert_checkpoint
from hf_linattn.cli.main import main
from hf_linattn.data.documents import DataConfig
from hf_linattn.evaluate.batches import run_batches
from hf_linattn.evaluate.compare import CompareConfig, compare
from hf_linattn.evaluate.footprint import Footprint
from hf_linattn.evaluate.metrics import load_metric
from hf_linattn.evaluate.models import (
    CHUNKS,
    EXTENDED,
    TRUNCATED,
    ComparedModel,
    compared_models,
    load_model,
    load_tokenizer,
)
from hf_linattn.evaluate.report import card_section, crossovers, load_report, markdown
from hf_linattn.evaluate.runner import Runner, in_chunks
from hf_linattn.evaluate.tasks import TASKS, TaskConfig
from hf_linattn.evaluate.tasks.base import Metric
from hf_linattn.evaluate.tasks.embeddings import neighbor_correlation, normalized
from hf_linattn.evaluate.tasks.language_modeling import token_nll, windows
from hf_linattn.evaluate.tasks.passkey_probe import PasskeyProbe
from hf_linattn.evaluate.tasks.retrieval import ranking_quality
from hf_linattn.evaluate.tasks.token_loss import detokenized
from hf_linattn.publish.card import model_card, read_report
from hf_linattn.utils.memory import PeakMemory

from ..helpers import POSITIONS, VOCABULARY, save_tokenizer, tiny_model

JOINED = LinformerConfig(projection="learned", projection_length=4, window_size=8, global_tokens=1)
NO_FOOTPRINT = CompareConfig(footprint=False, resamples=50)


SOFTMAX = (TRUNCATED, CHUNKS, EXTENDED)


def words(count: int, seed: int, low: int = 5, high: int = VOCABULARY) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(low, high)}" for _ in range(count))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny bert"
    tiny_model("bert", "AutoModelForMaskedLM").save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    tiny_model("gpt2", "AutoModelForCausalLM").save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes with words of their own, four groups, 24 documents of 20 to 130 words, and one without text."""
    path = tmp_path_factory.mktemp("data") / "corpus.jsonl"
    rows = [
        {
            "id": f"d{i}",
            "kind": ("low", "high")[i % 2],
            "book": f"b{i % 4}",
            "text": words(20 + 5 * i, i, *((5, 50), (50, VOCABULARY))[i % 2]),
        }
        for i in range(24)
    ]
    rows.append({"id": "none", "kind": "low", "book": "b0", "text": "  "})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def data(corpus: Path, **fields: Any) -> DataConfig:
    return DataConfig(**{"dataset": str(corpus), "label_column": "kind", "id_column": "id", **fields})


def values(report: dict[str, Any], metric: str, task: int = 0) -> dict[tuple[str, int], float]:
    return {(c["column"], c["length"]): c["metrics"][metric]["value"] for c in report["tasks"][task]["cells"]}


def test_columns_of_a_probe(encoder: str, corpus: Path, tmp_path: Path) -> None:
    config = TaskConfig(lengths=[32, 128], truncate=True, folds=2)
    report = compare(
        encoder,
        {"pure": LinformerConfig(projection="learned", projection_length=8), "joined": JOINED},
        "probe",
        tmp_path,
        data=data(corpus, group_column="book"),
        task_config=config,
        config=NO_FOOTPRINT,
    )
    columns = [column["name"] for column in report["columns"]]
    assert columns == [TRUNCATED, CHUNKS, EXTENDED, "pure", "joined", "joined, near only", "joined, far only"]
    task = report["tasks"][0]
    assert set(task["higher_is_better"]) == {"accuracy", "macro F1", "accuracy, unseen groups"}
    assert task["data"]["documents"] == 24 and task["data"]["empty_left_out"] == 1
    cut = {cell["length"]: cell["cut"] for cell in task["cells"]}
    # 20 + 5 i words and two special tokens
    assert cut == {32: 21, 128: 2}
    accuracy = values(report, "accuracy")
    # the classes share no words, and so even random weights tell them apart
    assert min(accuracy.values()) > 0.6 and np.mean(list(accuracy.values())) > 0.75
    # up to the checkpoint's own length truncated and extended are the same model
    assert accuracy[TRUNCATED, 32] == accuracy[EXTENDED, 32] == accuracy[CHUNKS, 32]
    for cell in task["cells"]:
        for numbers in cell["metrics"].values():
            assert numbers["low"] <= numbers["value"] <= numbers["high"]
            assert (numbers["difference"] is None) == (cell["column"] == EXTENDED)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "report.json",
        "report.md",
        "report.html",
        "quality-probe.png",
    }
    assert json.loads((tmp_path / "report.json").read_text()) == report
    page = (tmp_path / "report.md").read_text()
    assert "Not measured: time and memory, error by layer." in page
    for part in ("21 at 32", "none (direct swap)", "empty left out 1", "A guess gets 0.500 (accuracy)"):
        assert part in page


def test_branches_differ_and_are_those_of_the_model(encoder: str) -> None:
    columns = {column.name: column for column in compared_models(encoder, {"joined": JOINED})}
    ids = torch.arange(5, 60)[None]
    outputs = {}
    for name in ("joined", "joined, near only", "joined, far only"):
        model = load_model(columns[name], encoder, auto_class="AutoModel", max_length=POSITIONS)
        outputs[name] = model(input_ids=ids).last_hidden_state
    expected = convert(encoder, JOINED, auto_class="AutoModel")
    assert torch.equal(outputs["joined"], expected(input_ids=ids).last_hidden_state)
    expected.set_branches(far=False)
    assert torch.equal(outputs["joined, near only"], expected(input_ids=ids).last_hidden_state)
    expected.set_branches(near=False)
    assert torch.equal(outputs["joined, far only"], expected(input_ids=ids).last_hidden_state)


def test_extended_softmax_reads_on(encoder: str) -> None:
    columns = {column.name: column for column in compared_models(encoder, {})}
    own = load_model(columns[TRUNCATED], encoder, auto_class="AutoModel", max_length=POSITIONS)
    longer = load_model(columns[EXTENDED], encoder, auto_class="AutoModel", max_length=3 * POSITIONS)
    ids = torch.arange(5, 60)[None]
    assert torch.equal(own(input_ids=ids).last_hidden_state, longer(input_ids=ids).last_hidden_state)
    assert longer(input_ids=ids.repeat(1, 3)).last_hidden_state.shape[1] == 165


def test_finished_cells_are_kept(encoder: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TaskConfig(lengths=[16], truncate=True)
    call: dict[str, Any] = {"data": data(corpus), "task_config": config, "config": NO_FOOTPRINT}
    first = compare(encoder, {}, "embeddings", tmp_path, **call)
    monkeypatch.setattr("hf_linattn.evaluate.runner.run_batches", None)
    again = compare(encoder, {}, "embeddings", tmp_path, **call)
    assert again["tasks"] == first["tasks"]
    # other documents are another cell, though their embeddings are known; another length is read anew
    few = compare(encoder, {}, "embeddings", tmp_path, **{**call, "data": data(corpus, max_documents=5)})
    assert few["tasks"][0]["data"]["documents"] == 5
    with pytest.raises(TypeError, match="not callable"):
        compare(encoder, {}, "embeddings", tmp_path, **{**call, "task_config": TaskConfig(lengths=[24], truncate=True)})


def test_a_changed_checkpoint_is_measured_again(decoder: str, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    config = TaskConfig(lengths=[32], truncate=True)
    call: dict[str, Any] = {"data": data(corpus), "task_config": config, "config": NO_FOOTPRINT}
    results = []
    for window in (4, 8):
        convert_checkpoint(
            decoder,
            folder,
            LinformerConfig(projection="learned", projection_length=4, window_size=window),
            overwrite=True,
        )
        report = compare(decoder, {"joined": str(folder)}, "language-modeling", tmp_path / "report", **call)
        results.append(values(report, "perplexity")["joined", 32])
    assert results[0] != results[1]


def test_tasks_are_added_to_a_report_and_a_card_is_made_from_it(encoder: str, corpus: Path, tmp_path: Path) -> None:
    config = TaskConfig(lengths=[16], truncate=True)
    folder, output = tmp_path / "converted", tmp_path / "report"
    convert_checkpoint(encoder, folder, JOINED)
    for task in ("embeddings", "masked-lm"):
        report = compare(
            encoder,
            {"joined": str(folder)},
            task,
            output,
            data=data(corpus),
            task_config=config,
            config=NO_FOOTPRINT,
            command=f"hf-linattn evaluate {task}",
        )
    assert [task["name"] for task in report["tasks"]] == ["embeddings", "masked-lm"]
    assert report["commands"] == ["hf-linattn evaluate embeddings", "hf-linattn evaluate masked-lm"]
    assert values(report, "cosine to extended softmax")[EXTENDED, 16] == pytest.approx(1)
    section = card_section(report, "joined")
    assert "softmax extended" in section and "masked-lm" in section
    with pytest.raises(ValueError, match="'other' is not in the report"):
        card_section(report, "other")

    found = read_report(output)
    # documents of a file are no data set that the Hub has
    assert model_card(folder, repo_id="me/joined", report=found).data.eval_results is None
    found["tasks"][1]["data"]["dataset"] = "org/texts"
    card = model_card(folder, repo_id="me/joined", report=found, datasets={"org/texts"})
    perplexity = report["tasks"][1]["cells"][2]["metrics"]["perplexity"]
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    name = next(name for name in results if name.startswith("perplexity at 16 tokens, direct swap"))
    assert results[name] == perplexity["value"]
    assert "perplexity (lower is better; 24 documents)" in card.text
    assert "**joined** (this model)" in card.text and "hf-linattn evaluate masked-lm" in card.text


def test_columns_and_lengths_are_added_to_a_task(encoder: str, corpus: Path, tmp_path: Path) -> None:
    def run(name: str, lengths: list[int], **fields: Any) -> dict[str, Any]:
        return compare(
            encoder,
            {name: JOINED},
            "embeddings",
            tmp_path,
            data=data(corpus, **fields),
            task_config=TaskConfig(lengths=lengths, truncate=True),
            config=replace(NO_FOOTPRINT, branches=False),
        )

    run("one", [16])
    report = run("two", [16, 24])
    assert len(report["tasks"]) == 1 and report["tasks"][0]["lengths"] == [16, 24]
    found = values(report, "cosine to extended softmax")
    assert set(found) == {("one", 16)} | {(name, n) for name in (*SOFTMAX, "two") for n in (16, 24)}
    assert found["one", 16] == found["two", 16]
    # other documents: what was measured before no longer stands beside them
    fewer = values(run("three", [16], max_documents=9), "cosine to extended softmax")
    assert set(fewer) == {(name, 16) for name in (*SOFTMAX, "three")}


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_chunks_are_averaged_by_tokens(encoder: str, tmp_path: Path, pooling: str) -> None:
    columns = {column.name: column for column in compared_models(encoder, {}, chunks=True)}
    options: dict[str, Any] = {"seed": 0, "auto_class": "AutoModel", "max_length": 200, "batch_tokens": 256}
    options |= {"pad_token_id": 0, "special_tokens": ([2], [3]), "folder": tmp_path}
    chunks, whole = (Runner(columns[name], encoder, **options) for name in (CHUNKS, TRUNCATED))
    text = [5 + i % 20 for i in range(150)]
    room = POSITIONS - 2
    parts = [[2, *text[start : start + room], 3] for start in range(0, 150, room)]
    assert in_chunks([2, *text, 3], POSITIONS, ([2], [3])) == parts and len(parts) > 2
    short = [2, *text[:10], 3]
    embedded = chunks.embed([short, [2, *text, 3]], pooling)
    expected = np.average(whole.embed(parts, pooling), axis=0, weights=[len(part) for part in parts])
    assert np.allclose(embedded[1], expected, atol=1e-5)
    # what fits is read as it is
    assert np.allclose(embedded[0], whole.embed([short], pooling)[0], atol=1e-6)


def test_chunks_can_be_left_out_and_need_embeddings(encoder: str, corpus: Path, tmp_path: Path) -> None:
    settings = {"data": data(corpus), "task_config": TaskConfig(lengths=[16], truncate=True)}
    config = replace(NO_FOOTPRINT, chunks=False)
    report = compare(encoder, {}, "embeddings", tmp_path / "left out", config=config, **settings)
    assert [column["name"] for column in report["columns"]] == [TRUNCATED, EXTENDED]
    report = compare(encoder, {}, "masked-lm", tmp_path / "masked", config=NO_FOOTPRINT, **settings)
    assert [column["name"] for column in report["columns"]] == [TRUNCATED, EXTENDED]


def test_crowding_is_the_mean_cosine_to_the_others(encoder: str, corpus: Path, tmp_path: Path) -> None:
    report = compare(
        encoder, {}, "embeddings", tmp_path, data=data(corpus), task_config=TaskConfig(lengths=[16], truncate=True),
        config=NO_FOOTPRINT,
    )  # fmt: skip
    (path,) = [p for p in (tmp_path / "embeddings").iterdir() if len(load_file(p)) > 1][:1]
    vectors = normalized(np.stack(list(load_file(path).values())))
    pairs = (vectors @ vectors.T)[~np.eye(len(vectors), dtype=bool)]
    found = values(report, "mean cosine to the other documents")
    # within their own length all three are the same model
    assert found[TRUNCATED, 16] == pytest.approx(float(pairs.mean()), abs=1e-4)
    assert found[TRUNCATED, 16] == pytest.approx(found[EXTENDED, 16], abs=1e-5)


def test_seeds_are_one_column(encoder: str, corpus: Path, tmp_path: Path) -> None:
    sources = [PerformerConfig(num_features=8, seed=seed) for seed in (0, 1)]
    report = compare(
        encoder, {"performer": sources}, "embeddings", tmp_path, data=data(corpus),
        task_config=TaskConfig(lengths=[16], truncate=True), config=NO_FOOTPRINT,
    )  # fmt: skip
    assert report["columns"][-1]["seeds"] == 2
    single = [
        compare(
            encoder, {"performer": source}, "embeddings", tmp_path / str(source.seed), data=data(corpus),
            task_config=TaskConfig(lengths=[16], truncate=True), config=NO_FOOTPRINT,
        )
        for source in sources
    ]  # fmt: skip
    name = "cosine to extended softmax"
    both = [values(report, name)["performer", 16] for report in single]
    assert values(report, name)["performer", 16] == pytest.approx(sum(both) / 2)
    assert both[0] != both[1]


def test_language_modeling_is_the_models_own_loss(decoder: str, corpus: Path, tmp_path: Path) -> None:
    report = compare(
        decoder, {"joined": JOINED}, "language-modeling", tmp_path, data=data(corpus, max_documents=3),
        task_config=TaskConfig(lengths=[48, 100], truncate=True), config=NO_FOOTPRINT,
    )  # fmt: skip
    job = TASKS["language-modeling"](
        TaskConfig(lengths=[48], truncate=True), data(corpus, max_documents=3), load_tokenizer(decoder)
    )
    model = convert(decoder, JOINED, max_length=100)
    nll = tokens = 0.0
    for ids in job.at_length(48, None):  # type: ignore[attr-defined]
        batch = torch.tensor([ids])
        nll += model(input_ids=batch, labels=batch).loss.item() * (len(ids) - 1)
        tokens += len(ids) - 1
    perplexity = values(report, "perplexity")
    assert log(perplexity["joined", 48]) == pytest.approx(nll / tokens, rel=1e-5)
    # within its own length softmax is read at once, in both columns
    assert perplexity[TRUNCATED, 48] == pytest.approx(perplexity[EXTENDED, 48])
    assert perplexity[TRUNCATED, 100] != perplexity[EXTENDED, 100]
    cells = {(cell["column"], cell["length"]): cell for cell in report["tasks"][0]["cells"]}
    counted = [sum(row["tokens"] for row in cells[name, 100]["by_position"]) for name in (TRUNCATED, "joined")]
    assert counted[0] == counted[1]
    assert (tmp_path / "position-language-modeling.png").is_file()


@pytest.mark.parametrize(("length", "window", "stride"), [(10, 4, 2), (10, 4, 4), (10, 4, 1), (3, 8, 4), (1, 8, 4)])
def test_windows_predict_each_token_once(length: int, window: int, stride: int) -> None:
    predicted = [
        token for start, end, first in windows(length, window, stride) for token in range(first, end) if token > start
    ]
    assert predicted == list(range(1, length))


def test_token_nll_of_a_padded_batch(decoder: str) -> None:
    model = tiny_model("gpt2", "AutoModelForCausalLM")
    ids = torch.arange(5, 45)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    nll = token_nll(model, ids, mask)
    logits = model(input_ids=ids[:1]).logits
    expected = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    torch.testing.assert_close(nll[0], expected)
    torch.testing.assert_close(nll[1, :19], expected[:19])


def test_masked_lm_hides_the_same_tokens_everywhere(encoder: str, corpus: Path, tmp_path: Path) -> None:
    report = compare(
        encoder, {"exact": LinformerConfig(
            projection="learned", projection_length=4, window_size=128)}, "masked-lm", tmp_path,
        data=data(corpus), task_config=TaskConfig(lengths=[32], truncate=True), config=NO_FOOTPRINT,
    )  # fmt: skip
    perplexity = values(report, "perplexity")
    # a window over everything is softmax
    assert perplexity["exact", 32] == pytest.approx(perplexity[EXTENDED, 32], rel=1e-4)
    assert perplexity[TRUNCATED, 32] == pytest.approx(perplexity[EXTENDED, 32])


def test_classification_by_the_models_head(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "classifier"
    model = tiny_model("bert", "AutoModelForSequenceClassification", num_labels=2)
    model.config.label2id, model.config.id2label = {"low": 0, "high": 1}, {0: "low", 1: "high"}
    model.save_pretrained(folder)
    save_tokenizer(folder)
    report = compare(
        str(folder), {"exact": LinformerConfig(
            projection="learned", projection_length=4, window_size=128)}, "classification",
        tmp_path / "report", data=data(corpus), task_config=TaskConfig(lengths=[32], truncate=True),
        config=NO_FOOTPRINT,
    )  # fmt: skip
    accuracy = values(report, "accuracy")
    assert accuracy["exact", 32] == accuracy[EXTENDED, 32]
    unknown = tmp_path / "unknown.jsonl"
    unknown.write_text(json.dumps({"text": "w7 w8", "kind": "middle"}))
    with pytest.raises(ValueError, match="label='middle' is no class of the model; it knows "):
        compare(
            str(folder),
            {},
            "classification",
            tmp_path / "x",
            data=DataConfig(dataset=str(unknown), label_column="kind"),
        )


@pytest.mark.parametrize("texts", [False, True])
def test_pairs_and_retrieval(encoder: str, corpus: Path, tmp_path: Path, texts: bool) -> None:
    rows = [json.loads(line) for line in corpus.read_text().splitlines()[:-1]]
    # documents of one class belong together; ids as in the corpus, or the texts themselves
    name = "text" if texts else "id"
    pairs = [
        {"a": a[name], "b": b[name], "label": int(a["kind"] == b["kind"])}
        for i, a in enumerate(rows) for b in rows[i + 1 : i + 5]
    ]  # fmt: skip
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, pairs)))
    config = TaskConfig(lengths=[32], truncate=True, folds=2, pair_texts=None if texts else str(corpus))
    chosen = DataConfig(dataset=str(path), label_column="label")
    auc = compare(encoder, {}, "pairs", tmp_path, data=chosen, task_config=config, config=NO_FOOTPRINT)
    assert auc["tasks"][0]["data"]["pairs"] == len(pairs)
    assert values(auc, "ROC AUC of the cosine")[EXTENDED, 32] > 0.75
    few = replace(config, max_pair_texts=9)
    less = compare(encoder, {}, "pairs", tmp_path / "few", data=chosen, task_config=few, config=NO_FOOTPRINT)
    # each text has pairs with the next four
    assert less["tasks"][0]["data"]["documents"] <= 9 and less["tasks"][0]["data"]["pairs"] >= 8
    with pytest.raises(ValueError, match="3 pairs of 2 first documents are too few to part"):
        few = replace(config, max_pair_texts=3)
        compare(encoder, {}, "pairs", tmp_path / "few", data=chosen, task_config=few, config=NO_FOOTPRINT)
    found = compare(encoder, {}, "retrieval", tmp_path, data=chosen, task_config=config, config=NO_FOOTPRINT)
    assert values(found, "nDCG@10", task=1)[EXTENDED, 32] > 0.3


def test_probe_on_another_source(encoder: str, corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    rows = [json.loads(line) for line in corpus.read_text().splitlines()[:6]]
    other.write_text("\n".join(json.dumps(row) for row in rows))
    config = TaskConfig(lengths=[64], truncate=True, folds=2, test_dataset=str(other))
    report = compare(encoder, {}, "probe", tmp_path, data=data(corpus), task_config=config, config=NO_FOOTPRINT)
    assert values(report, "accuracy, other source")[EXTENDED, 64] == 1
    assert report["tasks"][0]["data"]["test_documents"] == 6
    rows[0]["kind"] = "middle"
    other.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(ValueError, match="classes that the probe never saw: 'middle'"):
        compare(encoder, {}, "probe", tmp_path, data=data(corpus), task_config=config, config=NO_FOOTPRINT)


@pytest.mark.parametrize("task", ["copy", "recall"])
def test_generated_tasks(task: str, tmp_path: Path) -> None:
    decoder = str(tmp_path / "decoder")
    tiny_model("gpt2", "AutoModelForCausalLM").save_pretrained(decoder)
    # words of letters, which these tasks are made of
    vocabulary = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", ".", *(a + b for a in "bcdfghk" for b in "aeiou")]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(decoder)
    config = TaskConfig(lengths=[40], examples=6)
    report = compare(decoder, {"joined": JOINED}, task, tmp_path, task_config=config, config=NO_FOOTPRINT)
    # random weights know no answer
    assert all(value < 0.2 for value in values(report, "answer tokens right").values())
    assert report["tasks"][0]["cells"][0]["cut"] == 0


def test_passkey_probe_plants_one_key_of_ten(minilm: Path) -> None:
    tokenizer = load_tokenizer(str(minilm))
    config = TaskConfig(lengths=[96], examples=50, min_distance=20)
    job = TASKS["passkey-probe"](config, DataConfig(dataset="topics", max_documents=3), tokenizer)
    assert isinstance(job, PasskeyProbe)
    texts = [tokenizer.decode(ids) for ids in job.examples(96)]
    assert all(len(ids) == 96 for ids in job.examples(96))
    keys = [text.split("the pass key is ")[1].split(".")[0].strip() for text in texts]
    assert len(set(keys)) == 10
    # at least so many tokens between the first token and the key
    starts = [len(tokenizer(text.split("the pass key is")[0], add_special_tokens=False)["input_ids"]) for text in texts]
    assert min(starts) >= 20
    with pytest.raises(ValueError, match="8 tokens have no room"):
        job.examples(8)


def test_the_base_of_an_adapter_is_one_that_was_named(encoder: str, tmp_path: Path) -> None:
    """A path in an adapter's file is not followed out of its folder, but to a checkpoint that the caller names too."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    converted = tmp_path / "converted"
    convert(encoder, JOINED).save_pretrained(converted)
    for name in (str(converted), "../converted", "converted"):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
        if name == "../converted":
            continue
        models = compared_models(encoder, {"lora": str(adapter), "swap": str(converted)}, branches=False)
        assert [model.adapted for model in models if model.name == "lora"] == [(str(converted),)]
    for name in (str(converted), "../converted"):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
        with pytest.raises(ValueError, match=r"base_model_name_or_path='.*' leads out of the folder.*compare that"):
            compared_models(encoder, {"lora": str(adapter)})


def test_adapter_is_a_column(encoder: str, corpus: Path, tmp_path: Path) -> None:
    convert_checkpoint(encoder, tmp_path / "converted", JOINED, auto_class="AutoModel")
    base = AutoModel.from_pretrained(tmp_path / "converted")
    adapted = get_peft_model(base, LoraConfig(target_modules=["query", "value"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    report = compare(
        encoder, {"swap": str(tmp_path / "converted"), "lora": str(tmp_path / "adapter")}, "embeddings",
        tmp_path / "report", data=data(corpus), task_config=TaskConfig(lengths=[32], truncate=True),
        config=NO_FOOTPRINT,
    )  # fmt: skip
    cosine = values(report, "cosine to extended softmax")
    assert cosine["swap", 32] != cosine["lora", 32]
    assert ("lora, near only", 32) in cosine


def test_footprint_and_fidelity(encoder: str, corpus: Path, tmp_path: Path) -> None:
    config = CompareConfig(resamples=20, fidelity_documents=2, fidelity_length=24)
    report = compare(
        encoder, {"joined": JOINED}, "embeddings", tmp_path, data=data(corpus),
        task_config=TaskConfig(lengths=[16], truncate=True), config=config,
    )  # fmt: skip
    measured = [(row["column"], row["length"]) for row in report["footprint"]]
    assert sorted(measured) == sorted([*((name, 16) for name in SOFTMAX), ("joined", 16)])
    assert all(row["seconds"] > 0 for row in report["footprint"])
    assert [row["layer"] for row in report["fidelity"]] == list(range(len(report["fidelity"])))
    assert (tmp_path / "footprint.png").is_file() and (tmp_path / "fidelity.png").is_file()
    assert "How near each layer stays" in (tmp_path / "report.md").read_text()


def test_crossover_on_logarithmic_axes() -> None:
    def rows(column: str, *seconds: float) -> list[dict[str, Any]]:
        return [{"column": column, "length": n, "seconds": s} for n, s in zip((256, 1024, 4096), seconds, strict=True)]

    footprint = [
        *rows(EXTENDED, 1, 4, 64), *rows("late", 2, 8, 32), *rows("always", 0.5, 1, 2), *rows("never", 2, 8, 80),
    ]  # fmt: skip
    # twice as slow at 1,024 and twice as fast at 4,096: equal in the middle
    assert crossovers({"footprint": footprint}) == {"late": pytest.approx(2048), "always": 256, "never": None}


def test_neighbor_correlation_and_ndcg() -> None:
    angles = np.array([0.0, 0.1, 0.3, 0.7])
    ours = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert neighbor_correlation(ours, ours) == pytest.approx(np.ones(4))
    with pytest.raises(ValueError, match="2 documents"):
        neighbor_correlation(ours[:2], ours[:2])
    similarity = np.array([1.0, 0.9, 0.8, 0.1])
    assert ranking_quality(similarity, 0, {1}) == 1
    assert ranking_quality(similarity, 0, {2}) == pytest.approx(1 / np.log2(3))
    assert ranking_quality(similarity, 0, {1, 3}) == pytest.approx((1 + 0.5) / (1 + 1 / np.log2(3)))


def test_detokenized() -> None:
    text = " The 35 @-@ year old won 1 @,@ 200 games , but did n't stop ( again ) . "
    assert detokenized(text, "wikitext") == "The 35-year old won 1,200 games, but didn't stop (again)."
    assert detokenized(text, "none") == text


def test_batches_keep_the_order() -> None:
    documents = [[i] * length for i, length in enumerate((3, 9, 1, 4, 9, 2))]
    sizes: list[tuple[int, int]] = []

    def read(
        model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, indices: list[int]
    ) -> list[tuple[int, int]]:
        sizes.append(tuple(ids.shape))  # type: ignore[arg-type]
        return [(int(row[0]), int(row_mask.sum())) for row, row_mask in zip(ids, mask, strict=True)]

    model = torch.nn.Linear(1, 1)
    results = run_batches(model, documents, read, batch_tokens=10, pad_token_id=0)
    assert results == [(0, 3), (1, 9), (2, 1), (3, 4), (4, 9), (5, 2)]
    assert all(rows * length <= 10 for rows, length in sizes) and len(sizes) == 4


def test_peak_memory_sees_what_is_held_for_a_moment() -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(64 * 1024 * 1024 // 4).sum()
    assert 60 * 1024 * 1024 < memory.bytes < 200 * 1024 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "nothing"}, "task='nothing' is not one of 'probe'"),
        ({"data": None}, "task='probe' needs a dataset"),
        ({"data": {"label_column": "nope"}}, "there is no column 'nope'; there are 'id', 'kind', 'book', 'text'"),
        ({"data": {"label_column": None}}, "label_column is missing"),
        ({"task_config": TaskConfig(lengths=[32])}, "21 of 24 documents have more than 32 tokens .the longest 137."),
        ({"task_config": TaskConfig(lengths=[256], folds=13)}, "folds=13: the class 'high' has only 12 documents"),
        ({"converted": {"x": "softmax"}}, "model_type='bert', which is no converted model"),
        ({"converted": {"x": "itself"}}, "is the base model itself"),
        ({"converted": {EXTENDED: JOINED}}, "is not a new, non-empty name"),
        ({"converted": {"x": "short"}}, "x: takes documents of at most max_length=64 tokens; lengths up to 256"),
        ({"task": "language-modeling"}, "bert is an encoder; use .masked-lm."),
    ],
)  # fmt: skip
def test_refusals(encoder: str, corpus: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if source := changes.get("converted", {}).get("x"):
        folder = encoder if source == "itself" else str(tmp_path / source)
        if source == "softmax":
            tiny_model("bert").save_pretrained(folder)
        elif source == "short":
            convert(encoder, JOINED, auto_class="AutoModel").save_pretrained(folder)
        changes = {**changes, "converted": {"x": folder}}
    call: dict[str, Any] = {"converted": {}, "task": "probe", "task_config": TaskConfig(lengths=[256]), **changes}
    fields = changes.get("data", {})
    call["data"] = None if fields is None else data(corpus, **fields)
    with pytest.raises(ValueError, match=message):
        compare(encoder, call.pop("converted"), call.pop("task"), tmp_path / "report", config=NO_FOOTPRINT, **call)


def test_a_head_without_weights_is_refused(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "body"
    tiny_model("bert").save_pretrained(folder)
    save_tokenizer(folder)
    with pytest.raises(ValueError, match="has no trained weights for BertForMaskedLM"):
        compare(
            str(folder), {}, "masked-lm", tmp_path / "report", data=data(corpus),
            task_config=TaskConfig(lengths=[32], truncate=True), config=NO_FOOTPRINT,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": []}, "lengths="),
        ({"lengths": [4]}, r"lengths=\[4\] must be integers of at least 8"),
        ({"folds": 1}, "folds=1 must be an integer of at least 2"),
        ({"pooling": "max"}, "pooling='max' is not one of 'mean', 'cls'"),
        ({"mask_fraction": 1.0}, "mask_fraction=1.0 must be between 0 and 1"),
        ({"stride": 0}, "stride=0"),
        ({"pair_columns": ["a"]}, "must be two names"),
        ({"regularization": 0.0}, "regularization=0.0 must be a number above 0"),
    ],
)
def test_options_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskConfig(**fields)


def test_reports_of_other_bases_and_versions(encoder: str, decoder: str, corpus: Path, tmp_path: Path) -> None:
    config = TaskConfig(lengths=[16], truncate=True)
    call: dict[str, Any] = {"data": data(corpus), "task_config": config, "config": NO_FOOTPRINT}
    report = compare(encoder, {}, "embeddings", tmp_path, **call)
    with pytest.raises(ValueError, match="is about 'tiny bert' and not 'gpt2'"):
        compare(decoder, {}, "embeddings", tmp_path, **call)
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**report, "format_version": 99}))
    with pytest.raises(ValueError, match="format_version=99 is newer"):
        load_report(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not a report"):
        load_report(path)
    assert markdown(report).startswith("# tiny bert")


def test_command(encoder: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert_checkpoint(encoder, tmp_path / "with spaces", JOINED, auto_class="AutoModel")
    call = ["evaluate", encoder, "--task", "probe", "--dataset", str(corpus), "--label-column", "kind"]
    call += ["--lengths", "16", "64", "--truncate", "--folds", "2", "--no-footprint", "--resamples", "20"]
    call += ["--output", str(tmp_path / "report"), "--converted", f"joined={tmp_path / 'with spaces'}"]
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "| softmax extended |" in out and "| joined, far only |" in out
    assert load_report(tmp_path / "report" / "report.json")["commands"][0].startswith("hf-linattn evaluate")
    assert main([*call, "--converted", "joined"]) == 1
    assert "--converted 'joined' must be NAME=FOLDER" in capsys.readouterr().err
    assert main(["evaluate", encoder, "--task", "copy", "--split", "x", "--output", str(tmp_path / "r")]) == 1
    assert "--split needs --dataset" in capsys.readouterr().err


def test_values_are_those_of_evaluate(
    encoder: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the fast functions the report has the intervals alone."""
    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        return load_metric(name)

    monkeypatch.setattr("hf_linattn.evaluate.tasks.base.load_metric", load)
    call: dict[str, Any] = {
        "data": data(corpus),
        "task_config": TaskConfig(lengths=[32], truncate=True, folds=2),
        "config": NO_FOOTPRINT,
    }
    report = compare(encoder, {}, "probe", tmp_path, **call)
    assert set(loaded) == {"accuracy", "f1"}
    # a module that names another value
    monkeypatch.setattr(Metric, "compute", lambda self, outcomes: 7.0)
    changed = compare(encoder, {}, "probe", tmp_path, **call)
    assert set(values(changed, "accuracy").values()) == {7.0}
    before, after = (r["tasks"][0]["cells"][0]["metrics"]["accuracy"] for r in (report, changed))
    assert (before["low"], before["high"]) == (after["low"], after["high"])


def test_without_matplotlib_the_extra_is_named(
    encoder: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_linattn.evaluate.report.has_matplotlib", lambda: False)
    call = ["evaluate", encoder, "--task", "embeddings", "--dataset", str(corpus), "--lengths", "16", "--truncate"]
    assert main([*call, "--no-footprint", "--resamples", "20", "--output", str(tmp_path / "report")]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.endswith("report.md, report.html and report.json; for plots: pip install 'hf-linattn[plots]'.")
    assert not list((tmp_path / "report").glob("*.png"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_while_time_is_measured(
    error: type[BaseException], encoder: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has the quality, and what there is of the rest; the same call adds what is missing."""
    calls: list[str] = []

    def measured(compared: ComparedModel, base: str, length: int, **options: Any) -> Footprint:
        calls.append(compared.name)
        if len(calls) == 2:
            raise error
        return Footprint(compared.name, length, 1.0, length / 1.0, 1024)

    monkeypatch.setattr(sys.modules["hf_linattn.evaluate.compare"], "footprint", measured)
    call: dict[str, Any] = {"data": data(corpus), "task_config": TaskConfig(lengths=[16], truncate=True)}
    with pytest.raises(error):
        compare(encoder, {}, "embeddings", tmp_path, config=CompareConfig(resamples=20), **call)
    report = load_report(tmp_path / "report.json")
    assert len(values(report, "rank correlation")) == 3
    assert [row["column"] for row in report["footprint"]] == [EXTENDED]
    assert (tmp_path / "report.md").is_file()
    again = compare(encoder, {}, "embeddings", tmp_path, config=CompareConfig(resamples=20), **call)
    assert {row["column"] for row in again["footprint"]} == set(SOFTMAX)
    assert calls == [EXTENDED, TRUNCATED, TRUNCATED, CHUNKS]


# Interrupted in the second cell, in a process of its own.
_SLOW = """
import signal, sys, time
# a process that a shell started in the background ignores it
signal.signal(signal.SIGINT, signal.default_int_handler)
import hf_linattn.evaluate.tasks.probe as probe
original, calls = probe.Probe.outcomes, []
def slow(self, runner, reference, length):
    calls.append(length)
    if len(calls) == 2:
        print("second", flush=True)
        time.sleep(60)
    return original(self, runner, reference, length)
probe.Probe.outcomes = slow
from hf_linattn.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_interrupted_and_resumed(
    encoder: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["evaluate", encoder, "--task", "probe", "--dataset", str(corpus), "--label-column", "kind"]
    call += ["--lengths", "64", "--truncate", "--folds", "2", "--no-footprint", "--resamples", "20"]
    call += ["--output", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, *call], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "second"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; what is finished is kept, and the same command goes on from there" in error
    kept = list((tmp_path / "cells").rglob("*.json"))
    assert len(kept) == 1 and not (tmp_path / "report.json").exists()
    written = kept[0].stat().st_mtime_ns
    time.sleep(0.01)
    assert main(call) == 0
    assert kept[0].stat().st_mtime_ns == written
    assert (tmp_path / "report.json").is_file()


def test_two_processes_agree_with_one(encoder: str, corpus: Path, tmp_path: Path) -> None:
    call = ["evaluate", encoder, "--task", "probe", "--dataset", str(corpus), "--label-column", "kind"]
    call += ["--lengths", "64", "--truncate", "--folds", "2", "--no-footprint", "--resamples", "20"]
    assert main([*call, "--output", str(tmp_path / "one")]) == 0
    root = Path(__file__).parents[2]
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += [
        "--config_file",
        str(root / "scripts" / "accelerate_configs" / "multi_cpu.yaml"),
        "--main_process_port",
        "0",
    ]
    launch += ["--num_cpu_threads_per_process", "1", str(root / "scripts" / "evaluate_checkpoint.py"), *call[1:]]
    done = subprocess.run(
        [*launch, "--output", str(tmp_path / "two")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert one["tasks"] == two["tasks"]
    assert two["machine"]["processes"] == 2
