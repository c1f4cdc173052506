"""A key planted in running text, read off a frozen encoder by a linear classifier, cross-validated."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sklearn.model_selection import StratifiedKFold
from transformers import PreTrainedTokenizerBase

from ...data.documents import DataConfig
from ...data.vocabulary import Vocabulary
from ..runner import Runner
from .base import DocumentTask, ExampleOptions, Metric, Outcomes, metric, most_frequent
from .probe import CrossValidationOptions, check_classes, cross_validated


@dataclass(kw_only=True)
class PasskeyProbeOptions(ExampleOptions, CrossValidationOptions):
    """Options of the passkey probe."""


#: What a passkey is one of; each is one token of most vocabularies.
_KEYS = ("apple", "river", "castle", "violin", "doctor", "winter", "copper", "tiger", "engine", "garden")


class PasskeyProbe(DocumentTask):
    """A key word planted in running documents, read off the first token's state by a linear probe, cross-validated.

    For encoders, which need no training for it: what the first token tells of the key has come through attention.
    Chance is one in ten.
    """

    name = "passkey-probe"
    reads_embeddings = True
    used = ("examples", "depth", "min_distance", "folds", "regularization", "seed")
    config: PasskeyProbeOptions

    def __init__(
        self, config: PasskeyProbeOptions, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        super().__init__(config, data, tokenizer)
        self._running = [token for document in self._ids for token in document]
        words = Vocabulary.from_tokenizer(tokenizer)
        self._needles = [
            list(words.encode(f" The pass key is {key}. Remember it: {key} is the pass key.")) for key in _KEYS
        ]
        self._keys = [_KEYS[index % len(_KEYS)] for index in range(config.examples)]
        check_classes(self._keys, config.folds)

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
        predictions = cross_validated(features, self._keys, folds, None, self.config.regularization)
        # finished cells of earlier versions have this name
        return {"key": self._keys, "found": list(predictions)}

    def documents(self) -> dict[str, Any]:
        return super().documents() | {"examples": self.config.examples}

    def cut(self, length: int) -> int:
        return 0
