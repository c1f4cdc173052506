"""Documents from files of all kinds, their selection, and what is said of those that cannot be had."""

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, IterableDataset, Sequence, Value

from hf_linattn.data import documents as module
from hf_linattn.data.documents import TOPICS, DataConfig, Document, load_documents, load_rows
from hf_linattn.data.presets import PRESETS

ROWS: list[dict[str, Any]] = [
    {"id": "r0", "text": "The first text.", "label": "b", "book": "x", "part": "train"},
    {"id": "r1", "text": "A second one,\nof two lines.", "label": "a", "book": "x", "part": "test"},
    {"id": "r2", "text": "Third.", "label": "b", "book": "y", "part": "test"},
    {"id": "r3", "text": "And, at last, the fourth.", "label": "c", "book": "z", "part": "test"},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def _jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(text)
    return str(path)


def _csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


def _array(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def _parquet(path: Path) -> None:
    Dataset.from_list(ROWS).to_parquet(path)


_WRITERS: dict[str, Callable[[Path], Any]] = {
    "jsonl": _jsonl,
    "jsonl.gz": _jsonl,
    "json": _array,
    "csv": _csv,
    "parquet": _parquet,
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", _WRITERS)
def test_files_of_all_kinds(kind: str, streaming: bool, tmp_path: Path) -> None:
    path = tmp_path / "a folder with spaces" / f"my file.{kind}"
    path.parent.mkdir()
    _WRITERS[kind](path)
    config = DataConfig(
        dataset=str(path), id_column="id", label_column="label", group_column="book", streaming=streaming
    )
    expected = [Document(row["id"], row["text"], row["label"], row["book"]) for row in ROWS]
    assert list(load_documents(config)) == expected


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_a_text_file_is_one_document(ending: str, streaming: bool, tmp_path: Path) -> None:
    texts = ["First line.\n\nThird line.\n", "Another text."]
    for index, text in enumerate(texts):
        with (gzip.open if ending == "txt.gz" else open)(tmp_path / f"{index}.{ending}", "wt") as file:
            file.write(text)
    found = load_documents(DataConfig(dataset=str(tmp_path), streaming=streaming))
    assert [document.text.strip() for document in found] == [text.strip() for text in texts]


def test_a_folder_of_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    _jsonl(tmp_path / "b.jsonl", ROWS[2:])
    _jsonl(tmp_path / "a.jsonl.gz", ROWS[:2])
    (tmp_path / "README.md").write_text("not data")
    assert [d.id for d in load_documents(DataConfig(dataset=str(tmp_path), id_column="id"))] == ["r0", "r1", "r2", "r3"]


def test_folder_of_several_kinds(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl")
    _csv(tmp_path / "b.csv")
    with pytest.raises(ValueError, match="several kinds"):
        load_documents(DataConfig(dataset=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "message"),
    [("no_such.jsonl", "There is no file or folder"), (".", "holds no file of .jsonl"), ("a.docx", "is not one of")],
)
def test_paths_without_data(name: str, message: str, tmp_path: Path) -> None:
    if name == "a.docx":
        (tmp_path / name).write_text("x")
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        load_documents(DataConfig(dataset=str(tmp_path / name)))


def test_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "whole"}\n{"text": "half')
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"half\.jsonl', line 2: '{\"text\": \"half' is no JSON"):
            load_documents(DataConfig(dataset=str(path), streaming=streaming))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "one"}\n\n{"text": "café"}\n'.encode("latin-1"), "line 3: byte 0xe9 is no UTF-8; save"),
        ("a.jsonl", '{"text": "one"}\n'.encode("utf-16"), "line 1: byte 0xff is no UTF-8"),
        ("a.csv", "text\none\ncafé\n".encode("latin-1"), "line 3: byte 0xe9 is no UTF-8"),
        ("a.txt", "one\ncafé\n".encode("latin-1"), "line 2: byte 0xe9 is no UTF-8"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "two"\n', 'line 2: \'{"text": "two"\' is no JSON'),
        ("a.jsonl", b'{"text": "one"}\n{"text": 3}\n', "line 2: text_column='text' holds int '3'"),
        ("a.jsonl", b'\n{"text": 3}\n', "line 2: text_column='text' holds int '3'"),
        # blank lines and columns of several types are more than datasets reads
        ("a.jsonl", b'{"text": "one"}\n\n{"text": 3}\n', "a.jsonl'"),
        ("a.jsonl", b"", "a.jsonl' has no rows"),
        ("a.jsonl", b"\n\n", "a.jsonl' has no rows"),
        ("a.jsonl", b"{}\n{}\n", "a.jsonl' has no rows"),
        ("a.csv", b"text\n", "a.csv' has no rows"),
        ("a.csv", b"", "a.csv' cannot be read: No columns"),
        ("a.jsonl", b'{"body": "one"}\n', "a.jsonl: there is no column 'text'; there are 'body'"),
        ("a.jsonl", b'{"text": ""}\n{"text": null}\n', "no document with text is left (2 without any)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_wrong_is_named_by_its_line(
    streaming: bool, name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    for dataset in (tmp_path / name, tmp_path):
        with pytest.raises(ValueError) as error:
            load_documents(DataConfig(dataset=str(dataset), streaming=streaming))
        if dataset.is_file():
            assert message in str(error.value)


def test_a_mark_of_utf_8_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "café"}\n'.encode("utf-8-sig"))
    assert [d.text for d in load_documents(DataConfig(dataset=str(tmp_path / "a.jsonl")))] == ["café"]


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_columns_list_those_that_are_there(streaming: bool, tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl")
    config = DataConfig(dataset=path, text_column="body", label_column="topic", streaming=streaming)
    with pytest.raises(ValueError, match="no column 'body', 'topic'; there are 'id', 'text', 'label', 'book', 'part'"):
        load_documents(config)
    with pytest.raises(ValueError, match="no column 'a'; there are"):
        load_rows(DataConfig(dataset=path, streaming=streaming), ["a"])


def test_empty_documents_are_counted(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("", "one", " \n\t", None, "two")]
    found = load_documents(DataConfig(dataset=_jsonl(tmp_path / "a.jsonl", rows)))
    assert ([d.text for d in found], found.empty, len(found)) == (["one", "two"], 3, 2)
    # numbered as in the dataset
    assert [d.id for d in found] == ["1", "4"]
    with pytest.raises(ValueError, match=r"no document with text is left \(3 without any\)"):
        load_documents(
            DataConfig(dataset=_jsonl(tmp_path / "b.jsonl", [row for row in rows if not (row["text"] or "").strip()]))
        )


def test_parts_of_a_text_are_joined(tmp_path: Path) -> None:
    rows = [{"text": ["1. One.", "2. Two."]}, {"text": []}]
    found = load_documents(DataConfig(dataset=_jsonl(tmp_path / "a.jsonl", rows)))
    assert ([d.text for d in found], found.empty) == (["1. One.\n2. Two."], 1)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [{"text": 3}])
    with pytest.raises(ValueError, match=r"a\.jsonl', line 1: text_column='text' holds int '3'; it must be a text"):
        load_documents(DataConfig(dataset=path))


@pytest.mark.parametrize("streaming", [False, True])
def test_names_of_classes(streaming: bool, tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"]), "stars": Value("int64")})
    rows = [{"text": "x", "label": 1, "stars": 4}, {"text": "y", "label": 0, "stars": 2}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    config = DataConfig(dataset=str(tmp_path / "a.parquet"), label_column="label", streaming=streaming)
    assert [d.label for d in load_documents(config)] == ["yes", "no"]
    config = DataConfig(dataset=str(tmp_path / "a.parquet"), label_column="stars", streaming=streaming)
    assert [d.label for d in load_documents(config)] == ["4", "2"]


def test_documents_with_several_classes(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "labels": Sequence(ClassLabel(names=["3", "6", "8"]))})
    rows = [{"text": "x", "labels": [0, 1]}, {"text": "y", "labels": []}, {"text": "z", "labels": [1]}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    options = {"dataset": str(tmp_path / "a.parquet"), "label_column": "labels"}
    with pytest.raises(
        ValueError, match=r"row 0: label_column='labels' has the classes '3', '6'; it must be one.*label_value"
    ):
        load_documents(DataConfig(**options))
    found = load_documents(DataConfig(**options, label_value="3"))
    assert [d.label for d in found] == ["yes", "no", "no"]
    with pytest.raises(ValueError, match="label_value='8': column 'labels' has '3', '6'"):
        load_documents(DataConfig(**options, label_value="8"))


@pytest.mark.parametrize("label", [None, -1])
def test_documents_without_a_class(label: Any, tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    rows = [{"text": "x", "label": 1}, {"text": "y", "label": label}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="row 1: label_column='label' has no class"):
        load_documents(DataConfig(dataset=str(tmp_path / "a.parquet"), label_column="label"))


def test_one_class_against_the_others(tmp_path: Path) -> None:
    config = DataConfig(dataset=_jsonl(tmp_path / "a.jsonl"), label_column="label", label_value="b")
    assert [d.label for d in load_documents(config)] == ["yes", "no", "yes", "no"]


@pytest.mark.parametrize("streaming", [False, True])
def test_split_column(streaming: bool, tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl")
    config = DataConfig(dataset=path, id_column="id", split_column="part", split="test", streaming=streaming)
    assert [d.id for d in load_documents(config)] == ["r1", "r2", "r3"]
    message = "no document with text" if streaming else "split='valid': column 'part' has 'test', 'train'"
    with pytest.raises(ValueError, match=message):
        load_documents(DataConfig(dataset=path, split_column="part", split="valid", streaming=streaming))


def test_split_that_does_not_exist(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"test.*train"):
        load_documents(DataConfig(dataset=path, split="test"))
    with pytest.raises(ValueError, match="topics has no splits"):
        load_documents(DataConfig(dataset=TOPICS, split="test"))


def _many(tmp_path: Path) -> dict[str, Any]:
    """24 documents of 3 classes; those of a class are 6 of book 0 and 2 of book 1, in this order."""
    rows = [
        {"id": f"{label}{n}", "text": "x", "label": label, "book": f"{label}{n // 6}"}
        for n in range(8)
        for label in "cab"
    ]
    return {
        "dataset": _jsonl(tmp_path / "many.jsonl", rows),
        "id_column": "id",
        "label_column": "label",
        "group_column": "book",
    }


def test_classes_that_come_first_in_the_alphabet(tmp_path: Path) -> None:
    found = load_documents(DataConfig(**_many(tmp_path), max_classes=2))
    assert len(found) == 16
    assert {d.label for d in found} == {"a", "b"}


def test_documents_of_each_class_from_its_groups_in_turn(tmp_path: Path) -> None:
    found = load_documents(DataConfig(**_many(tmp_path), max_per_class=5))
    assert [d.id for d in found if d.label == "b"] == ["b0", "b6", "b1", "b7", "b2"]
    assert len(found) == 15


def test_drawn_documents_depend_on_the_seed_alone(tmp_path: Path) -> None:
    options = _many(tmp_path)
    drawn = [
        [d.id for d in load_documents(DataConfig(**options, max_documents=8, data_seed=seed))] for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    every = [d.id for d in load_documents(DataConfig(**options))]
    # in the order of the dataset, and none twice
    assert drawn[0] == [i for i in every if i in drawn[0]] != every[:8]
    assert len(drawn[0]) == 8


def test_of_a_stream_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def endless() -> Iterator[dict[str, Any]]:
        number = 0
        while True:
            read.append(number)
            yield {"text": "x" if number % 2 else "", "label": str(number)}
            number += 1

    monkeypatch.setattr(module, "load_dataset", lambda **options: IterableDataset.from_generator(endless))
    found = load_documents(DataConfig(dataset="some/set", streaming=True, max_documents=5))
    assert (len(found), found.empty) == (5, 5)
    # and one that tells the columns
    assert max(read) == 9


def test_classes_are_chosen_from_a_whole_stream(tmp_path: Path) -> None:
    options = _many(tmp_path)
    found = load_documents(DataConfig(**options, streaming=True, max_classes=1, max_documents=4))
    assert {d.label for d in found} == {"a"}
    assert found.documents == load_documents(DataConfig(**options, max_classes=1, max_documents=4)).documents


def test_topics_need_no_network() -> None:
    found = load_documents(DataConfig(dataset=TOPICS, id_column="id"))
    assert len(found) >= 70
    assert "assert" in {d.id for d in found}


def test_hub_that_cannot_be_reached() -> None:
    for dataset in ("imdb", "nobody/nothing"):
        with pytest.raises(ConnectionError, match=r"is no file or folder here, and the Hub cannot be reached.*topics"):
            load_documents(DataConfig(dataset=dataset))


def test_dataset_that_is_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> Any:
        raise RuntimeError("Dataset scripts are no longer supported, but found old.py")

    monkeypatch.setattr(module, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"'some/old' cannot be loaded: Dataset scripts are no longer supported"):
        load_documents(DataConfig(dataset="some/old"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every preset is a valid config of a Hub dataset, and asks `datasets` for it and for its columns."""
    config = DataConfig(dataset=name)
    resolved = config.resolved()
    assert resolved.dataset.count("/") == 1 and resolved == resolved.resolved()
    for field, value in PRESETS[name].fields.items():
        assert getattr(resolved, field) == value
    asked: dict[str, Any] = {}
    row = {resolved.text_column: ["a", "b"], resolved.label_column: [resolved.label_value], resolved.id_column: "7"}
    if resolved.label_value is None:
        row[resolved.label_column] = "c"

    def fake(**options: Any) -> Dataset:
        asked.update(options)
        return Dataset.from_list([{key: value for key, value in row.items() if key is not None}])

    monkeypatch.setattr(module, "load_dataset", fake)
    (document,) = load_documents(config)
    assert asked == {
        "path": resolved.dataset,
        "name": resolved.dataset_config,
        "revision": None,
        "split": resolved.split,
        "streaming": bool(resolved.streaming),
    }
    expected = None if resolved.label_column is None else "c" if resolved.label_value is None else "yes"
    assert (document.text, document.label) == ("a\nb", expected)


def test_given_fields_win_over_a_preset() -> None:
    config = DataConfig(dataset="pg19", split="validation", streaming=False, max_documents=3).resolved()
    assert (config.dataset, config.split, config.streaming, config.max_documents) == (
        "emozilla/pg19",
        "validation",
        False,
        3,
    )
    assert config.id_column == "short_book_title"
    # a preset's class is of its own column
    assert DataConfig(dataset="ecthr", label_column="other").resolved().label_value is None
    assert DataConfig(dataset="ecthr", label_value="3").resolved().label_value == "3"
    # the preset has the labels that this needs
    assert DataConfig(dataset="imdb", max_classes=1).resolved().max_classes == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": ""}, "dataset='' must be"),
        ({"max_documents": 0}, "max_documents=0 must be an integer of at least 1"),
        ({"max_per_class": True, "label_column": "label"}, "max_per_class=True must be an integer"),
        ({"max_classes": 2}, "max_classes=2 needs a label_column"),
        ({"label_value": "x"}, "label_value='x' needs a label_column"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"dataset": "some/set", **options})
