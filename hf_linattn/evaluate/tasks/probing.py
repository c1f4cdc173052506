"""What a linear classifier reads off a frozen encoder: classes, pairs, and a key planted far away."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import BaseCrossValidator, StratifiedGroupKFold, StratifiedKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import PreTrainedTokenizerBase

from ...data.documents import DataConfig, Document, Documents, load_documents, load_rows
from ..runner import Runner
from .base import DocumentTask, Metric, Outcomes, TaskConfig, metric, most_frequent
from .vocabulary import Vocabulary


def probe(regularization: float) -> Pipeline:
    """Logistic regression on standardised features."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=regularization, max_iter=2000))


def cross_validated(
    features: np.ndarray, labels: Sequence[str], folds: BaseCrossValidator, groups: Sequence[Any] | None, C: float
) -> np.ndarray:
    """Each document's class as a probe tells it that was trained on the other folds: (documents,) of str."""
    predictions = np.empty(len(labels), dtype=object)
    classes = np.asarray(labels, dtype=object)
    for train, test in folds.split(features, classes, groups):
        predictions[test] = probe(C).fit(features[train], classes[train]).predict(features[test])
    return predictions


class Probe(DocumentTask):
    """Document classification by a linear probe on the frozen encoder, cross-validated.

    Documents of all groups are mixed ("accuracy"); with a group column also with each group whole in one fold, so
    that the probe is tested on groups that it never saw ("accuracy, unseen groups"); with a test source also on that.
    """

    name = "probe"

    def __init__(self, config: TaskConfig, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, data, tokenizer)
        self._labels = [str(document.label) for document in self._documents]
        self._groups = [document.group for document in self._documents] if self.data.group_column else None  # type: ignore[union-attr]
        _check_classes(self._labels, config.folds)
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
            outcomes["test"] = list(probe(config.regularization).fit(features, self._labels).predict(test))
            outcomes["test_label"] = [str(document.label) for document in self._test]
        return outcomes

    def settings(self) -> dict[str, Any]:
        names = ("pooling", "folds", "regularization", "seed", "test_dataset", "test_split")
        return {name: getattr(self.config, name) for name in names}

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


class Pairs(DocumentTask):
    """Whether two documents belong together: by their cosine alone, and by a probe on both embeddings.

    The probe reads |a - b| and a * b, and is cross-validated with all pairs of one first document in one fold.
    """

    name = "pairs"

    def _load(self) -> Documents:
        """The texts that the pairs name; the pairs themselves are kept as indices of them."""
        assert self.data is not None
        config, self.data = self.config, self.data.resolved()
        columns = list(config.pair_columns)
        if self.data.label_column is None:
            raise ValueError("label_column is missing; it tells whether a pair belongs together (1) or not (0).")
        rows = list(load_rows(self.data, columns))
        # in an order of the seed's, but all pairs of one first document together: few texts then have many pairs
        firsts = list(dict.fromkeys(str(row[columns[0]]) for row in rows))
        random.Random(self.data.data_seed).shuffle(firsts)
        place = {first: index for index, first in enumerate(firsts)}
        rows.sort(key=lambda row: place[str(row[columns[0]])])
        pairs = [(str(row[columns[0]]), str(row[columns[1]]), _truth(row[self.data.label_column])) for row in rows]
        texts = {name: name for a, b, _ in pairs for name in (a, b)}
        if config.pair_texts is not None:
            known = load_documents(
                DataConfig(
                    dataset=config.pair_texts, text_column=self.data.text_column, id_column=self.data.id_column or "id"
                )
            )
            texts = {document.id: document.text for document in known}
            if missing := sorted({name for a, b, _ in pairs for name in (a, b)} - set(texts)):
                raise ValueError(
                    f"pair_texts={config.pair_texts!r} has no document {missing[0]!r}, which a pair names."
                )
        pairs = _few_texts(pairs, config.max_pair_texts or len(texts), self.data.max_documents or len(pairs))
        names = sorted({name for a, b, _ in pairs for name in (a, b)})
        index = {name: i for i, name in enumerate(names)}
        self._pairs = [(index[a], index[b], truth) for a, b, truth in pairs]
        first, labels = [a for a, _, _ in self._pairs], [truth for _, _, truth in self._pairs]
        if len(set(labels)) < 2:
            raise ValueError("All pairs have the same label; there is nothing to tell apart.")
        if len(set(first)) < config.folds or any(
            len({labels[i] for i in train}) < 2 for train, _ in self._folds().split(first, labels, first)
        ):
            raise ValueError(
                f"folds={config.folds}: {len(labels)} pairs of {len(set(first))} first documents are too few to part."
            )
        return Documents([Document(id=name, text=texts[name]) for name in names], 0)

    def _folds(self) -> StratifiedGroupKFold:
        return StratifiedGroupKFold(self.config.folds, shuffle=True, random_state=self.config.seed)

    def metrics(self) -> list[Metric]:
        return [
            metric("roc_auc", ("cosine", "label"), called="ROC AUC of the cosine", guess=0.5),
            metric("roc_auc", ("probe", "label"), called="ROC AUC of a probe", guess=0.5),
        ]

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        embeddings = normalized(runner.embed(self.at_length(length, runner.limit), self.config.pooling))
        first = np.array([a for a, _, _ in self._pairs])
        second = np.array([b for _, b, _ in self._pairs])
        labels = np.array([truth for _, _, truth in self._pairs])
        a, b = embeddings[first], embeddings[second]
        features = np.concatenate([np.abs(a - b), a * b], axis=1)
        scores = np.empty(len(labels))
        for train, test in self._folds().split(features, labels, first):
            fitted = probe(self.config.regularization).fit(features[train], labels[train])
            scores[test] = fitted.predict_proba(features[test])[:, 1]
        return {"label": labels.tolist(), "cosine": (a * b).sum(1).tolist(), "probe": scores.tolist()}

    def settings(self) -> dict[str, Any]:
        names = ("pooling", "folds", "regularization", "seed", "pair_columns", "pair_texts", "max_pair_texts")
        return {name: getattr(self.config, name) for name in names}

    def documents(self) -> dict[str, Any]:
        return super().documents() | {"pairs": len(self._pairs)}

    def fingerprint(self) -> Any:
        return [*super().fingerprint(), self._pairs]


#: What a passkey is one of; each is one token of most vocabularies.
_KEYS = ("apple", "river", "castle", "violin", "doctor", "winter", "copper", "tiger", "engine", "garden")


class PasskeyProbe(DocumentTask):
    """A key word planted in running documents, read off the first token's state by a linear probe, cross-validated.

    For encoders, which need no training for it: what the first token tells of the key has come through attention.
    Chance is one in ten.
    """

    name = "passkey-probe"

    def __init__(self, config: TaskConfig, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, data, tokenizer)
        self._running = [token for document in self._ids for token in document]
        words = Vocabulary.from_tokenizer(tokenizer)
        self._needles = [
            list(words.encode(f" The pass key is {key}. Remember it: {key} is the pass key.")) for key in _KEYS
        ]
        self._keys = [_KEYS[index % len(_KEYS)] for index in range(config.examples)]
        _check_classes(self._keys, config.folds)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        # running text: there is no document that could be too long
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def metrics(self) -> list[Metric]:
        return [metric("accuracy", ("found", "key"), guess=most_frequent(self._keys))]

    def examples(self, length: int) -> list[list[int]]:
        """Token ids of each example, exactly `length` of them, special tokens included."""
        result = []
        for index in range(self.config.examples):
            # a seed for each: how many are made changes none of them
            draw = random.Random(f"{self.config.seed} {length} {index}")
            needle = self._needles[index % len(_KEYS)]
            room = length - self.special_tokens - len(needle)
            if room < 0:
                raise ValueError(f"lengths: {length} tokens have no room for a key; at least {length - room} have.")
            start = int(draw.random() * len(self._running))
            text = [self._running[(start + i) % len(self._running)] for i in range(room)]
            nearest = min(self.config.min_distance, room)
            place = nearest + int(draw.random() * (room - nearest + 1))
            if self.config.depth is not None:
                place = max(round(self.config.depth * room), nearest)
            result.append(self.with_special_tokens([*text[:place], *needle, *text[place:]]))
        return result

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        examples = [ids[: runner.limit] for ids in self.examples(length)]
        features = runner.embed(examples, "cls")
        folds = StratifiedKFold(self.config.folds, shuffle=True, random_state=self.config.seed)
        found = cross_validated(features, self._keys, folds, None, self.config.regularization)
        return {"key": self._keys, "found": list(found)}

    def settings(self) -> dict[str, Any]:
        names = ("examples", "depth", "min_distance", "folds", "regularization", "seed")
        return {name: getattr(self.config, name) for name in names}

    def documents(self) -> dict[str, Any]:
        return super().documents() | {"examples": self.config.examples}

    def cut(self, length: int) -> int:
        return 0


def normalized(embeddings: np.ndarray) -> np.ndarray:
    """Rows of length one: (documents, dim)."""
    return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)


def _check_classes(labels: Sequence[str], folds: int) -> None:
    counts = {label: labels.count(label) for label in sorted(set(labels))}
    if len(counts) < 2:
        raise ValueError(f"All documents have the class {labels[0]!r}; there is nothing to tell apart.")
    label, fewest = min(counts.items(), key=lambda item: item[1])
    if fewest < folds:
        raise ValueError(f"folds={folds}: the class {label!r} has only {fewest} documents, and each fold needs one.")


def _truth(label: Any) -> int:
    if str(label) not in ("0", "1", "True", "False"):
        raise ValueError(f"label={label!r} of a pair is not one of 0, 1, True, False.")
    return int(str(label) in ("1", "True"))


def _few_texts(pairs: list[tuple[str, str, int]], most_texts: int, most_pairs: int) -> list[tuple[str, str, int]]:
    """The first pairs that have no more than so many texts among them, and all others of these texts."""
    kept: list[tuple[str, str, int]] = []
    texts: set[str] = set()
    for pair in pairs:
        if len(kept) < most_pairs and len(texts | set(pair[:2])) <= most_texts:
            kept.append(pair)
            texts |= set(pair[:2])
    if not kept:
        raise ValueError(f"max_pair_texts={most_texts}: a pair has two texts.")
    return kept
