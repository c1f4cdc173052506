"""Documents from any `datasets` dataset: a Hub id, local files, a named preset, or the help texts of Python itself."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub.errors import OfflineModeIsEnabled
from pandas.errors import EmptyDataError
from pyarrow import ArrowInvalid

from ..modeling.validation import check_integer
from .faults import ending_of, fault_of, place_of
from .presets import PRESETS

#: The name of the help texts of Python itself, documents that every machine has.
TOPICS = "topics"

# what datasets raises where a file is damaged, at once or, of a stream, as it is read
_CANNOT_BE_READ = (DatasetGenerationError, UnicodeDecodeError, ArrowInvalid, EmptyDataError)

# file name ending, without .gz -> name of the loader in `datasets`
_LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}


@dataclass(kw_only=True)
class DataConfig:
    """Where documents come from, and which of them are used.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """

    dataset: str = field(
        metadata={
            "help": f"Hub id, file (jsonl, json, csv, parquet, arrow; gzipped too; txt is one document) or folder of "
            f"such files, '{TOPICS}' (the help texts of Python itself), or a preset: {', '.join(sorted(PRESETS))}."
        }
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of the dataset on the Hub. Default: its only one."}
    )
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the dataset on the Hub. Default: the newest."}
    )
    split: str | None = field(
        default=None,
        metadata={"help": "Split to use. With --split-column, the value of that column. Default: the only one."},
    )
    split_column: str | None = field(
        default=None, metadata={"help": "Column that tells the split, for files without splits of their own."}
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds the text, or a list of its parts."})
    label_column: str | None = field(default=None, metadata={"help": "Column that holds the class of a document."})
    label_value: str | None = field(
        default=None,
        metadata={
            "help": "Make two classes, yes and no: whether this is the document's class, or is among its classes where "
            "the column holds lists."
        },
    )
    group_column: str | None = field(
        default=None,
        metadata={"help": "Column whose values are kept together when documents are parted, such as a book or author."},
    )
    id_column: str | None = field(
        default=None, metadata={"help": "Column that names a document. Default: its number in the dataset."}
    )
    max_documents: int | None = field(
        default=None,
        metadata={
            "help": "Use at most this many documents, drawn with --data-seed; of a stream the first ones. Default: all."
        },
    )
    max_classes: int | None = field(
        default=None, metadata={"help": "Use the classes that come first in the alphabet. Default: all."}
    )
    max_per_class: int | None = field(
        default=None,
        metadata={"help": "Use at most this many documents of each class, its groups in turn. Default: all."},
    )
    data_seed: int = field(default=0, metadata={"help": "Seed of the draw of documents."})
    streaming: bool | None = field(
        default=None,
        metadata={
            "help": "Read the dataset as it is used, without a copy on the disk. Default: of large presets only."
        },
    )

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError("dataset='' must be a Hub id, a path, a preset, or 'topics'.")
        for name in ("max_documents", "max_classes", "max_per_class"):
            check_integer(type(self).__name__, name, getattr(self, name), 1, optional=True)
        for name in ("max_classes", "max_per_class", "label_value"):
            if getattr(self, name) is not None and self.resolved().label_column is None:
                raise ValueError(f"{name}={getattr(self, name)!r} needs a label_column.")

    def resolved(self) -> "DataConfig":
        """This config with a preset's name replaced by what it stands for; fields that were given win."""
        if self.dataset not in PRESETS:
            return self
        defaults = {f.name: f.default for f in fields(self)}
        preset = PRESETS[self.dataset].fields
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != defaults[f.name]}
        if "label_column" in given:
            # a value of the preset's own column
            preset = {name: value for name, value in preset.items() if name != "label_value"}
        return replace(self, **{**preset, **given, "dataset": preset["dataset"]})


@dataclass(frozen=True)
class Document:
    """One text, with what the dataset tells about it."""

    id: str
    text: str
    label: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class Documents:
    """The documents of one `DataConfig`, and how many were left out because they have no text."""

    documents: Sequence[Document]
    empty: int

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents)


def load_rows(config: DataConfig, columns: Sequence[str] = ()) -> Dataset | IterableDataset:
    """The rows of a dataset as `datasets` gives them; with `streaming`, one after the other as they are read.

    Args:
        config: what to load. Of its selection, only the split is applied.
        columns: names of columns that must be there, beside those that the config names.

    Raises:
        FileNotFoundError: there is no such file or folder, or it holds no data file.
        ConnectionError: it is a Hub id, and the Hub cannot be reached.
        ValueError: the split or a column that is asked for does not exist (the message lists those that do), there are
            no rows, or a file cannot be read (the message names its line).
    """
    config = config.resolved()
    try:
        return _load_rows(config, columns)
    except _CANNOT_BE_READ as error:
        raise _unreadable(config, error) from error


def _load_rows(config: DataConfig, columns: Sequence[str]) -> Dataset | IterableDataset:
    if config.dataset == TOPICS:
        if config.split is not None:
            raise ValueError(f"split={config.split!r}: {TOPICS} has no splits.")
        rows: Any = _topics()
    else:
        rows = _load(config)
    wanted = [config.text_column] if not columns else list(columns)
    wanted += [
        name for name in (config.label_column, config.group_column, config.id_column, config.split_column) if name
    ]
    present = rows.column_names or list(next(iter(rows), {}))
    if not present:
        raise ValueError(f"{config.dataset!r} has no rows.")
    if missing := [name for name in wanted if name not in present]:
        raise ValueError(
            f"{config.dataset}: there is no column {', '.join(map(repr, missing))}; there are "
            f"{', '.join(map(repr, present))}."
        )
    if config.split_column is not None and config.split is not None:
        column, value = config.split_column, config.split
        if config.streaming:
            return rows.filter(lambda row: str(row[column]) == value)
        values = [str(x) for x in rows[column]]
        rows = rows.select([index for index, x in enumerate(values) if x == value])
        if not len(rows):
            raise ValueError(f"split={value!r}: column {column!r} has {', '.join(map(repr, sorted(set(values))))}.")
    return rows


def load_documents(config: DataConfig) -> Documents:
    """The documents that a config selects, in memory; those without any text are left out and counted.

    Raises:
        ValueError: as `load_rows`; a text is no text; a document has no class, or several; or no document is left.
    """
    config = config.resolved()
    # of a stream only what comes first is read, unless classes are chosen, which may begin late
    enough = config.max_documents if config.streaming else None
    if config.max_classes is not None or config.max_per_class is not None:
        enough = None
    documents: list[Document] = []
    classes: set[str] = set()
    empty = 0
    for document, its_classes in _read(config):
        if document is None:
            empty += 1
            continue
        classes.update(its_classes)
        documents.append(document)
        if len(documents) == enough:
            break
    if not documents:
        split = "" if config.split is None else f" split={config.split!r}:"
        raise ValueError(f"{config.dataset}:{split} no document with text is left ({empty} without any).")
    if config.label_value is not None and config.label_value not in classes:
        raise ValueError(
            f"label_value={config.label_value!r}: column {config.label_column!r} has "
            f"{', '.join(map(repr, sorted(classes)))}."
        )
    return Documents(_selected(documents, config), empty)


def stream_documents(config: DataConfig) -> Iterator[Document]:
    """The documents that a config selects, one after the other as they are read; those without any text are left out.

    Raises:
        ValueError: as `load_documents`; or classes are to be chosen, for which all documents must be known.
    """
    config = config.resolved()
    for name in ("max_classes", "max_per_class"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name}={getattr(config, name)!r} needs all documents; leave out streaming.")
    documents = (document for document, _ in _read(config) if document is not None)
    return itertools.islice(documents, config.max_documents)


def _read(config: DataConfig) -> Iterator[tuple[Document | None, list[str]]]:
    """Each row's document, or None for one without text, and the classes that the row names."""
    rows = load_rows(config)
    names = _class_names((rows.features or {}).get(config.label_column))
    for index, row in enumerate(_readable(rows, config)):
        text = _text(row[config.text_column], config, index)
        if not text.strip():
            yield None, []
            continue
        classes, label = [], None
        if config.label_column is not None:
            classes = _classes(row[config.label_column], names)
            label = _label(classes, config, index)
        document = Document(
            id=str(index if config.id_column is None else row[config.id_column]),
            text=text,
            label=label,
            group=None if config.group_column is None else str(row[config.group_column]),
        )
        yield document, classes


def _readable(rows: Any, config: DataConfig) -> Iterator[dict[str, Any]]:
    """The rows; a stream is read here."""
    try:
        yield from rows
    except _CANNOT_BE_READ as error:
        raise _unreadable(config, error) from error


def _unreadable(config: DataConfig, error: Exception) -> ValueError:
    path = Path(config.dataset).expanduser()
    for file in _files(path) if path.exists() else []:
        if fault := fault_of(Path(file)):
            return ValueError(fault)
    return ValueError(f"{config.dataset!r} cannot be read: {error.__cause__ or error}")


def _text(value: Any, config: DataConfig, index: int) -> str:
    """The text of a row; parts, such as paragraphs, are joined by line breaks, and none is an empty text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "\n".join(value)
    raise ValueError(
        f"{place_of(Path(config.dataset).expanduser(), index)}: text_column={config.text_column!r} holds "
        f"{type(value).__name__} {str(value)[:60]!r}; it must be a text or a list of texts."
    )


def _class_names(feature: Any) -> Sequence[str] | None:
    """The names of the classes of a column of ClassLabels, or of lists of them."""
    return getattr(getattr(feature, "feature", feature), "names", None)


def _classes(value: Any, names: Sequence[str] | None) -> list[str]:
    """The names of a document's classes: of a ClassLabel its own, else the value as it is written."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if names is None:
        return [str(x) for x in values]
    # a negative ClassLabel stands for none
    return [names[x] for x in values if x >= 0]


def _label(classes: list[str], config: DataConfig, index: int) -> str:
    if config.label_value is not None:
        return "yes" if config.label_value in classes else "no"
    if len(classes) != 1:
        found = f"the classes {', '.join(map(repr, classes))}" if classes else "no class"
        raise ValueError(
            f"{place_of(Path(config.dataset).expanduser(), index)}: label_column={config.label_column!r} has {found}; "
            "it must be one. Choose a column with one class per document, or with label_value a class that documents "
            "have or have not."
        )
    return classes[0]


def _selected(documents: list[Document], config: DataConfig) -> list[Document]:
    if config.max_classes is not None:
        kept = sorted({str(document.label) for document in documents})[: config.max_classes]
        documents = [document for document in documents if document.label in kept]
    if config.max_per_class is not None:
        documents = [
            document
            for label in sorted({str(document.label) for document in documents})
            for document in _in_turn([d for d in documents if d.label == label], config.max_per_class)
        ]
    if config.max_documents is not None and len(documents) > config.max_documents:
        chosen = random.Random(config.data_seed).sample(range(len(documents)), config.max_documents)
        documents = [documents[index] for index in sorted(chosen)]
    return documents


def _in_turn(documents: list[Document], count: int) -> list[Document]:
    """`count` of the documents, one from each group after the other, spread evenly within each."""
    by_group: dict[str | None, list[Document]] = {}
    for document in documents:
        by_group.setdefault(document.group, []).append(document)
    ranks = [(rank, group, d) for group, members in by_group.items() for rank, d in enumerate(members)]
    return [document for _, _, document in sorted(ranks, key=lambda item: (item[0], str(item[1])))[:count]]


def _topics() -> Dataset:
    from pydoc_data.topics import topics

    names = sorted(topics)
    return Dataset.from_dict({"id": names, "text": [topics[name] for name in names]})


def _load(config: DataConfig) -> Dataset | IterableDataset:
    path = Path(config.dataset).expanduser()
    options: dict[str, Any]
    if path.exists() or config.dataset.startswith(("/", ".", "~")):
        options = {"path": _loader(path), "data_files": _files(path)}
        if options["path"] == "text":
            # not one for each line
            options["sample_by"] = "document"
    else:
        options = {"path": config.dataset, "name": config.dataset_config, "revision": config.dataset_revision}
    # with a split column, the rows are parted here; a file without splits is called "train" by datasets
    split = None if config.split_column is not None else config.split
    try:
        loaded = load_dataset(split=split, streaming=bool(config.streaming), **options)
    except (ConnectionError, OfflineModeIsEnabled) as error:
        raise ConnectionError(
            f"{config.dataset!r} is no file or folder here, and the Hub cannot be reached: give a local file, or "
            f"'{TOPICS}', which needs no network."
        ) from error
    except DatasetNotFoundError as error:
        raise FileNotFoundError(
            f"{config.dataset!r} is no file or folder here, and no dataset on the Hub that can be read: {error}"
        ) from error
    except _CANNOT_BE_READ:
        raise
    except ValueError as error:
        # what datasets makes of rows without any column
        if "corresponds to no data" in str(error):
            raise ValueError(f"{config.dataset!r} has no rows.") from error
        raise ValueError(f"{config.dataset!r}: {error}") from error
    except StopIteration as error:
        # what datasets makes of an empty file
        raise ValueError(f"{config.dataset!r} has no rows.") from error
    except RuntimeError as error:
        # datasets that are scripts
        raise ValueError(f"{config.dataset!r} cannot be loaded: {error}") from error
    if isinstance(loaded, (Dataset, IterableDataset)):
        return loaded
    if len(loaded) > 1:
        raise ValueError(f"{config.dataset}: split is missing; there are {', '.join(map(repr, loaded))}.")
    return next(iter(loaded.values()))


def _files(path: Path) -> list[str]:
    if path.is_file():
        return [str(path)]
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {str(path)!r}.")
    files = sorted(str(file) for file in path.iterdir() if ending_of(file) in _LOADERS)
    if not files:
        raise FileNotFoundError(f"The folder {str(path)!r} holds no file of {', '.join(_LOADERS)}.")
    if len({_LOADERS[ending_of(Path(file))] for file in files}) > 1:
        raise ValueError(f"The folder {str(path)!r} holds files of several kinds; name one.")
    return files


def _loader(path: Path) -> str:
    first = Path(_files(path)[0])
    if ending_of(first) not in _LOADERS:
        raise ValueError(f"{str(first)!r} is not one of {', '.join(_LOADERS)} (each also with .gz).")
    return _LOADERS[ending_of(first)]
