"""What every task of a comparison has: its options, its documents cut to a length, and outcomes that metrics read."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from ...data.documents import DataConfig, Documents, load_documents
from ..metrics import MetricFunction, load_metric, metric_function
from ..runner import POOLINGS, Runner

#: One list per name, all with one entry per document.
Outcomes = dict[str, list[Any]]
DETOKENIZERS = ("none", "wikitext")


@dataclass(kw_only=True)
class TaskConfig:
    """Options of the tasks; each tells which of them use it.

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
    pooling: str = field(
        default="mean",
        metadata={"help": "probe, pairs, embeddings: how states become one embedding.", "choices": POOLINGS},
    )
    folds: int = field(default=5, metadata={"help": "probe, pairs, passkey-probe: folds of the cross-validation."})
    regularization: float = field(
        default=1.0, metadata={"help": "probe, pairs, passkey-probe: C of the logistic regression."}
    )
    test_dataset: str | None = field(
        default=None,
        metadata={"help": "probe: another source with the same columns and classes, on which the probe is tested too."},
    )
    test_split: str | None = field(default=None, metadata={"help": "probe: split of the other source, or of the same."})
    pair_columns: list[str] = field(
        default_factory=lambda: ["a", "b"],
        metadata={"help": "pairs, retrieval: the columns of both texts, or of their ids. Default: a b."},
    )
    pair_texts: str | None = field(
        default=None,
        metadata={"help": "pairs, retrieval: file or Hub id with the texts of the ids. Default: the pairs hold texts."},
    )
    max_pair_texts: int | None = field(
        default=None, metadata={"help": "pairs, retrieval: use pairs of at most this many texts. Default: all."}
    )
    stride: int | None = field(
        default=None,
        metadata={
            "help": "language-modeling: new tokens per window, of a document read in windows. Default: half of one."
        },
    )
    detokenizer: str = field(
        default="none",
        metadata={
            "help": "language-modeling, masked-lm: undo the tokenization of a dataset first.",
            "choices": DETOKENIZERS,
        },
    )
    mask_fraction: float = field(default=0.15, metadata={"help": "masked-lm: share of tokens to be predicted."})
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
        if not self.lengths or any(isinstance(n, bool) or not isinstance(n, int) or n < 8 for n in self.lengths):
            raise ValueError(f"lengths={self.lengths!r} must be integers of at least 8.")
        self.lengths = sorted(set(self.lengths))
        for name, least in {"folds": 2, "examples": 1, "min_distance": 0, "seed": 0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")
        for name in ("stride", "max_pair_texts"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        for name, allowed in {"pooling": POOLINGS, "detokenizer": DETOKENIZERS}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, allowed))}.")
        if self.regularization <= 0:
            raise ValueError(f"regularization={self.regularization!r} must be above 0.")
        if not 0 < self.mask_fraction < 1:
            raise ValueError(f"mask_fraction={self.mask_fraction!r} must be between 0 and 1.")
        if len(self.pair_columns) != 2:
            raise ValueError(f"pair_columns={self.pair_columns!r} must be two names.")


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

    def __init__(self, config: TaskConfig, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.needs_data and data is None:
            raise ValueError(f"task={self.name!r} needs a dataset.")
        self.config, self.data, self.tokenizer = config, data, tokenizer

    def metrics(self) -> list[Metric]:
        """The metrics, the main one first."""
        raise NotImplementedError

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        """What the metrics read: one entry per document.

        Args:
            runner: the column to be measured.
            reference: the column of extended softmax.
            length: tokens to which documents are cut.
        """
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """The options that this task uses, for the report and to tell whether a finished cell still holds."""
        raise NotImplementedError

    def documents(self) -> dict[str, Any]:
        """How many documents there are, and how many were left out: for the report."""
        raise NotImplementedError

    def cut(self, length: int) -> int:
        """How many documents are longer than `length` tokens."""
        raise NotImplementedError

    def fingerprint(self) -> Any:
        """Changes when the task or its documents change: what was measured then no longer holds."""
        return [self.name, self.settings(), self.documents()]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    inner = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next(i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
    return whole[:start], whole[start + len(inner) :]


class DocumentTask(Task):
    """A task on the documents of a dataset, which are tokenized once."""

    def __init__(self, config: TaskConfig, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, data, tokenizer)
        self._prefix, self._suffix = _special_tokens(tokenizer)
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
        return len(self._prefix) + len(self._suffix)

    def at_length(self, length: int, limit: int | None, ids: Sequence[list[int]] | None = None) -> list[list[int]]:
        """The documents with special tokens, cut at the end to `length` tokens, or to `limit` if that is less."""
        most = min(length, limit or length) - self.special_tokens
        return [self.with_special_tokens(document[:most]) for document in (self._ids if ids is None else ids)]

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """Token ids as the tokenizer would have given them for a whole text."""
        return [*self._prefix, *ids, *self._suffix]

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
