"""Document classification by a linear classifier on a frozen encoder, cross-validated."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import BaseCrossValidator, StratifiedGroupKFold, StratifiedKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import PreTrainedTokenizerBase

from ...data.documents import DataConfig, Documents, load_documents
from ...modeling.validation import check_integer, check_number
from ..runner import Runner
from .base import DocumentTask, Metric, Outcomes, TaskOptions, metric, most_frequent
from .embeddings import EmbeddingOptions


@dataclass(kw_only=True)
class CrossValidationOptions(TaskOptions):
    """Options of tasks that train a linear probe."""

    folds: int = field(default=5, metadata={"help": "probe, pairs, passkey-probe: folds of the cross-validation."})
    regularization: float = field(
        default=1.0, metadata={"help": "probe, pairs, passkey-probe: C of the logistic regression."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(type(self).__name__, "folds", self.folds, 2)
        check_number(type(self).__name__, "regularization", self.regularization, 0, above=True)


@dataclass(kw_only=True)
class ProbeOptions(EmbeddingOptions, CrossValidationOptions):
    """Options of the probe."""

    test_dataset: str | None = field(
        default=None,
        metadata={"help": "probe: another source with the same columns and classes, on which the probe is tested too."},
    )
    test_split: str | None = field(default=None, metadata={"help": "probe: split of the other source, or of the same."})


def linear_probe(regularization: float) -> Pipeline:
    """Logistic regression on standardized features."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=regularization, max_iter=2000))


def cross_validated(
    features: np.ndarray, labels: Sequence[str], folds: BaseCrossValidator, groups: Sequence[Any] | None, C: float
) -> np.ndarray:
    """Each document's class as a probe tells it that was trained on the other folds: (documents,) of str."""
    predictions = np.empty(len(labels), dtype=object)
    classes = np.asarray(labels, dtype=object)
    for train, test in folds.split(features, classes, groups):
        predictions[test] = linear_probe(C).fit(features[train], classes[train]).predict(features[test])
    return predictions


class Probe(DocumentTask):
    """Document classification by a linear probe on the frozen encoder, cross-validated.

    Documents of all groups are mixed ("accuracy"); with a group column also with each group whole in one fold, so
    that the probe is tested on groups that it never saw ("accuracy, unseen groups"); with a test source also on that.
    """

    name = "probe"
    reads_embeddings = True
    used = ("pooling", "folds", "regularization", "seed", "test_dataset", "test_split")
    config: ProbeOptions

    def __init__(self, config: ProbeOptions, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, data, tokenizer)
        self._labels = [str(document.label) for document in self._documents]
        self._groups = [document.group for document in self._documents] if self.data.group_column else None  # type: ignore[union-attr]
        check_classes(self._labels, config.folds)
        if self._groups is not None and len(set(self._groups)) < config.folds:
            raise ValueError(f"folds={config.folds}: there are only {len(set(self._groups))} groups.")
        self._test: Documents | None = None
        if config.test_dataset is not None or config.test_split is not None:
            self._test = self._load_test()
            self._test_ids = self.tokenize([document.text for document in self._test])

    def _load(self) -> Documents:
        assert self.data is not None
        # a preset brings its own label column
        self.data = self.data.resolved()
        if self.data.label_column is None:
            raise ValueError("label_column is missing; a probe needs the class of each document.")
        return super()._load()

    def _load_test(self) -> Documents:
        assert self.data is not None
        fields = {name: getattr(self.data, name) for name in self.data.__dataclass_fields__}
        fields["dataset"] = self.config.test_dataset or fields["dataset"]
        fields["split"] = self.config.test_split
        test = load_documents(DataConfig(**fields))
        known = set(self._labels)
        if unknown := sorted({str(document.label) for document in test} - known):
            raise ValueError(
                f"The test documents have classes that the probe never saw: {', '.join(map(repr, unknown[:5]))}; "
                f"known are {', '.join(map(repr, sorted(known)[:10]))}."
            )
        return test

    def metrics(self) -> list[Metric]:
        guess = most_frequent(self._labels)
        result = [metric("accuracy", ("mixed", "label"), guess=guess)]
        if self._groups is not None:
            result.append(metric("accuracy", ("unseen", "label"), called="accuracy, unseen groups", guess=guess))
        if self._test is not None:
            guess = most_frequent([str(document.label) for document in self._test])
            result.append(metric("accuracy", ("test", "test_label"), called="accuracy, other source", guess=guess))
        return [*result, metric("f1", ("mixed", "label"), called="macro F1")]

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        config = self.config
        features = runner.embed(self.at_length(length, runner.limit), config.pooling)
        mixed = StratifiedKFold(config.folds, shuffle=True, random_state=config.seed)
        outcomes: Outcomes = {
            "label": self._labels,
            "mixed": list(cross_validated(features, self._labels, mixed, None, config.regularization)),
        }
        if self._groups is not None:
            apart = StratifiedGroupKFold(config.folds, shuffle=True, random_state=config.seed)
            outcomes["unseen"] = list(
                cross_validated(features, self._labels, apart, self._groups, config.regularization)
            )
        if self._test is not None:
            test = runner.embed(self.at_length(length, runner.limit, self._test_ids), config.pooling)
            outcomes["test"] = list(linear_probe(config.regularization).fit(features, self._labels).predict(test))
            outcomes["test_label"] = [str(document.label) for document in self._test]
        return outcomes

    def documents(self) -> dict[str, Any]:
        result = super().documents() | {"classes": len(set(self._labels))}
        if self._groups is not None:
            result["groups"] = len(set(self._groups))
        if self._test is not None:
            result["test_documents"] = len(self._test)
        return result

    def fingerprint(self) -> Any:
        test = [] if self._test is None else [[(d.id, d.label) for d in self._test], self._test_ids]
        return [*super().fingerprint(), test]


def check_classes(labels: Sequence[str], folds: int) -> None:
    """Whether there are two classes, each with a document for each fold.

    Raises:
        ValueError: there are not.
    """
    counts = {label: labels.count(label) for label in sorted(set(labels))}
    if len(counts) < 2:
        raise ValueError(f"All documents have the class {labels[0]!r}; there is nothing to tell apart.")
    label, fewest = min(counts.items(), key=lambda item: item[1])
    if fewest < folds:
        raise ValueError(f"folds={folds}: the class {label!r} has only {fewest} documents, and each fold needs one.")
