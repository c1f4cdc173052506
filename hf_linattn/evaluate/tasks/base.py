"""What every task of a comparison has: its options, its documents cut to a length, and outcomes that metrics read."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from ...data.documents import DataConfig, Documents, load_documents
from ...data.tokenizers import special_tokens_of
from ...modeling.validation import check_bool, check_integer, check_integers, check_number
from ..metrics import MetricFunction, load_metric, metric_function
from ..runner import Runner

#: One list per name, all with one entry per document.
Outcomes = dict[str, list[Any]]


@dataclass(kw_only=True)
class TaskOptions:
    """Options of every task; a task that has more has a subclass beside it.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """

    lengths: list[int] = field(
        default_factory=lambda: [512], metadata={"help": "Lengths in tokens to which documents are cut. Default: 512."}
    )
    truncate: bool = field(
        default=False,
        metadata={"help": "Cut documents that are longer than the greatest length, instead of refusing them."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of folds, masks and generated examples."})

    def __post_init__(self) -> None:
        check_integers(type(self).__name__, "lengths", self.lengths, 8)
        self.lengths = sorted(set(self.lengths))
        check_bool(type(self).__name__, "truncate", self.truncate)
        check_integer(type(self).__name__, "seed", self.seed, 0)


@dataclass(kw_only=True)
class ExampleOptions(TaskOptions):
    """Options of tasks whose examples are generated."""

    examples: int = field(default=100, metadata={"help": "passkey-probe and generated tasks: number of examples."})
    depth: float | None = field(
        default=None,
        metadata={"help": "Passkeys: where the key is, 0 (start) to 1 (end). Default: anywhere."},
    )
    min_distance: int = field(
        default=0,
        metadata={"help": "Passkeys, recall: fewest tokens between the answer and where it is asked for."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(type(self).__name__, "examples", self.examples, 1)
        check_integer(type(self).__name__, "min_distance", self.min_distance, 0)
        if self.depth is not None:
            check_number(type(self).__name__, "depth", self.depth, 0)
            if self.depth > 1:
                raise ValueError(f"{type(self).__name__}: depth={self.depth!r} must be from 0 to 1.")


@dataclass(frozen=True)
class Metric:
    """A metric of a task: which outcomes it reads, in the order of the metric's arguments."""

    name: str
    function: MetricFunction
    reads: tuple[str, ...]
    higher_is_better: bool
    guess: float | None = None

    def arrays(self, outcomes: Outcomes) -> list[list[Any]]:
        """The arguments of the metric, one entry per document each."""
        return [outcomes[name] for name in self.reads]

    def compute(self, outcomes: Outcomes) -> float:
        """The metric by its module of `evaluate`; NaN where it is not defined."""
        arguments = dict(zip(("predictions", "references"), self.arrays(outcomes), strict=False))
        # loaded anew: a module keeps the type of its first inputs
        return float(load_metric(self.function.name).compute(**arguments)[self.function.name])


def metric(
    name: str,
    reads: Sequence[str],
    *,
    called: str | None = None,
    higher_is_better: bool | None = None,
    guess: float | None = None,
) -> Metric:
    """A metric of `metrics` under the name that the report shows; `guess` is what one gets without reading."""
    function = metric_function(name)
    better = function.higher_is_better if higher_is_better is None else higher_is_better
    return Metric(called or name, function, tuple(reads), better, guess)


def most_frequent(labels: Sequence[Any]) -> float:
    """What accuracy one gets by always naming the class that occurs most."""
    return max(labels.count(label) for label in set(labels)) / len(labels)


class Task:
    """One task. A subclass says how outcomes come from a model; the first of its metrics is the one that is plotted.

    Args:
        config: options.
        data: the documents; None for tasks that are generated.
        tokenizer: the base model's, which cuts nothing by itself.

    Raises:
        ValueError: the documents do not have what the task needs.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str] = "AutoModel"
    needs_data: ClassVar[bool] = True
    #: whether a document is read as one embedding, which may be the average of those of its chunks
    reads_embeddings: ClassVar[bool] = False
    #: names of the options that the outcomes depend on, beside the lengths
    used: ClassVar[tuple[str, ...]] = ()
    #: what the tokenizer puts before and after a document; nothing where examples are made as they are read
    special_ids: tuple[list[int], list[int]] = ([], [])
    config: TaskOptions

    def __init__(self, config: TaskOptions, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.needs_data and data is None:
            raise ValueError(f"task={self.name!r} needs a dataset.")
        self.config, self.data, self.tokenizer = config, data, tokenizer

    def metrics(self) -> list[Metric]:
        """The metrics, the main one first."""
        raise NotImplementedError

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        """What the metrics read: one entry per document.

        Args:
            runner: the model to be measured.
            reference: extended softmax.
            length: tokens to which documents are cut.
        """
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """The options that this task uses, for the report and to tell whether a finished cell is still valid."""
        return {name: getattr(self.config, name) for name in self.used}

    def documents(self) -> dict[str, Any]:
        """How many documents there are, and how many were left out: for the report."""
        raise NotImplementedError

    def cut(self, length: int) -> int:
        """How many documents are longer than `length` tokens."""
        raise NotImplementedError

    def fingerprint(self) -> Any:
        """Changes when the task or its documents change: what was measured is then no longer valid."""
        return [self.name, self.settings(), self.documents()]


class DocumentTask(Task):
    """A task on the documents of a dataset, which are tokenized once."""

    def __init__(self, config: TaskOptions, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, data, tokenizer)
        self.special_ids = special_tokens_of(tokenizer)
        self._documents = self._load()
        self._ids = self.tokenize([document.text for document in self._documents])

    def _load(self) -> Documents:
        assert self.data is not None
        return load_documents(self.data)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids without special tokens.

        Raises:
            ValueError: some are longer than the greatest length, and cutting was not asked for.
        """
        ids = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        room = self.config.lengths[-1] - self.special_tokens
        longer = [len(document) + self.special_tokens for document in ids if len(document) > room]
        if longer and not self.config.truncate:
            raise ValueError(
                f"{len(longer)} of {len(ids)} documents have more than {self.config.lengths[-1]:,} tokens (the longest "
                f"{max(longer):,}). Give greater lengths, or truncate=True (--truncate) to cut them."
            )
        return ids

    @property
    def special_tokens(self) -> int:
        """How many tokens the tokenizer adds to a document."""
        return sum(map(len, self.special_ids))

    def at_length(self, length: int, limit: int | None, ids: Sequence[list[int]] | None = None) -> list[list[int]]:
        """The documents with special tokens, cut at the end to `length` tokens, or to `limit` if that is less."""
        most = min(length, limit or length) - self.special_tokens
        return [self.with_special_tokens(document[:most]) for document in (self._ids if ids is None else ids)]

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """Token ids as the tokenizer would have given them for a whole text."""
        before, after = self.special_ids
        return [*before, *ids, *after]

    def documents(self) -> dict[str, Any]:
        lengths = [len(document) + self.special_tokens for document in self._ids]
        return {
            "documents": len(lengths),
            "empty_left_out": self._documents.empty,
            "longest_tokens": max(lengths),
            "median_tokens": sorted(lengths)[len(lengths) // 2],
        }

    def fingerprint(self) -> Any:
        labels = [(document.id, document.label, document.group) for document in self._documents]
        content = json.dumps([labels, self._ids])
        return [*super().fingerprint(), hashlib.sha256(content.encode()).hexdigest()]

    def cut(self, length: int) -> int:
        return sum(len(document) + self.special_tokens > length for document in self._ids)
