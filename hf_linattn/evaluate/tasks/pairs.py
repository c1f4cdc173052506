"""Whether two documents belong together."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

from ...data.documents import DataConfig, Document, Documents, load_documents, load_rows
from ...modeling.validation import check_integer
from ..runner import Runner
from .base import DocumentTask, Metric, Outcomes, metric
from .embeddings import EmbeddingOptions, normalized
from .probe import CrossValidationOptions, linear_probe


@dataclass(kw_only=True)
class PairsOptions(EmbeddingOptions, CrossValidationOptions):
    """Options of tasks on pairs of documents."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(type(self).__name__, "max_pair_texts", self.max_pair_texts, 1, optional=True)
        if len(self.pair_columns) != 2:
            raise ValueError(f"{type(self).__name__}: pair_columns={self.pair_columns!r} must be two names.")


class Pairs(DocumentTask):
    """Whether two documents belong together: by their cosine alone, and by a probe on both embeddings.

    The probe reads |a - b| and a * b, and is cross-validated with all pairs of one first document in one fold.
    """

    name = "pairs"
    reads_embeddings = True
    used = ("pooling", "folds", "regularization", "seed", "pair_columns", "pair_texts", "max_pair_texts")
    config: PairsOptions

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
            fitted = linear_probe(self.config.regularization).fit(features[train], labels[train])
            scores[test] = fitted.predict_proba(features[test])[:, 1]
        return {"label": labels.tolist(), "cosine": (a * b).sum(1).tolist(), "probe": scores.tolist()}

    def documents(self) -> dict[str, Any]:
        return super().documents() | {"pairs": len(self._pairs)}

    def fingerprint(self) -> Any:
        return [*super().fingerprint(), self._pairs]


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
