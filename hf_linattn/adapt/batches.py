"""Training batches from documents: cut, shuffled, grouped by length, and the same for every number of processes.

Which texts make the batch of a step depends on the settings and the step alone. Every process plans the
same batches and takes its own rows, and a resumed run goes on with the next step, so that nothing about
the order of the data has to be saved.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.documents import DataConfig, load_documents, stream_documents
from .stages import Batch

# Batches that are sorted by length together: rows of like length meet, and the order stays random.
_GROUPED = 32
# Documents, and characters of each, from which the characters per token are estimated.
_SAMPLED, _SAMPLE = 32, 2_000
# Texts shorter than this many characters teach nothing.
_LEAST_CHARACTERS = 32


class Example(NamedTuple):
    """A text of about one sequence, and its label if it has one."""

    text: str
    label: str | None = None


@dataclass(frozen=True)
class Sequences:
    """Where the batches of one stage come from.

    Args:
        data: the documents.
        tokenizer: of the model.
        length: longest sequence in tokens.
        seed: seed of the order.
        pool: with streaming, how many examples are read ahead and shuffled.
        held_out: how many examples of the first pool are kept for evaluation.
        whole: take the start of each document as it is, with its label; otherwise cut documents to pieces.
    """

    data: DataConfig
    tokenizer: Any
    length: int
    seed: int = 0
    pool: int = 4096
    held_out: int = 0
    whole: bool = False

    def evaluation(self) -> list[Example]:
        """The examples that are held out; they are in no batch."""
        return self._parted(next(self._pools(), []), first=True)[0]

    def digest(self) -> str | None:
        """What tells these examples from others; of a stream, which nobody has read yet, None."""
        if self.data.resolved().streaming:
            return None
        digest = hashlib.sha256()
        for example in self._all_examples:
            digest.update(repr(example).encode(errors="surrogatepass"))
        return digest.hexdigest()

    def first(self) -> list[Example]:
        """`held_out` examples, or all if they are fewer."""
        return list(itertools.islice(itertools.chain.from_iterable(self._pools()), self.held_out))

    def batches(self, batch_size: int, start: int = 0) -> Iterator[list[Example]]:
        """Batches without end, from that of step `start` on.

        Raises:
            ValueError: there are fewer examples than one batch takes.
        """
        step = 0
        for epoch in itertools.count():
            found = False
            for number, examples in enumerate(self._pools()):
                examples = self._parted(examples, first=number == 0)[1]
                # strings as seeds: the same on every machine and version
                order = random.Random(f"{self.seed} {epoch} {number}")
                planned = _plan([len(example.text) for example in examples], batch_size, order)
                found = found or bool(planned)
                for batch in planned[max(start - step, 0) :]:
                    yield [examples[index] for index in batch]
                step += len(planned)
            if not found:
                raise ValueError(
                    f"batch_size={batch_size}: {self.data.dataset!r} gives fewer sequences of {self.length} tokens "
                    f"beside those held out for evaluation, at most eval_sequences={self.held_out} and half of all."
                )

    def _parted(self, examples: list[Example], *, first: bool) -> tuple[list[Example], list[Example]]:
        """What is held out, and what is trained on."""
        if not self.held_out or not first:
            return [], examples
        chosen = set(random.Random(f"{self.seed} held out").sample(range(len(examples)), self._held_out(len(examples))))
        return (
            [example for index, example in enumerate(examples) if index in chosen],
            [example for index, example in enumerate(examples) if index not in chosen],
        )

    def _held_out(self, available: int) -> int:
        # of very few, not all
        return min(self.held_out, available // 2)

    def _pools(self) -> Iterator[list[Example]]:
        """All examples at once, or of a stream as many at a time as `pool` says."""
        if not self.data.resolved().streaming:
            yield self._all_examples
            return
        examples: list[Example] = []
        for example in self._cut((d.text, d.label) for d in stream_documents(self.data)):
            examples.append(example)
            if len(examples) == self.pool:
                yield examples
                examples = []
        if examples:
            yield examples

    @cached_property
    def _all_examples(self) -> list[Example]:
        return list(self._cut((d.text, d.label) for d in load_documents(self.data)))

    def _cut(self, documents: Iterator[tuple[str, str | None]]) -> Iterator[Example]:
        """Pieces of documents that fill a sequence, cut at white space; the rest of a document stays shorter."""
        if self.whole:
            yield from itertools.starmap(Example, documents)
            return
        first = list(itertools.islice(documents, _SAMPLED))
        size = max(int(self.length * _characters_per_token(self.tokenizer, [text for text, _ in first])), 1)
        for text, label in itertools.chain(first, documents):
            begin = 0
            while begin < len(text):
                end = begin + size
                if end < len(text):
                    half = begin + size // 2
                    end = max(text.rfind(" ", half, end), text.rfind("\n", half, end)) + 1 or end
                piece = text[begin:end].strip()
                if len(piece) >= _LEAST_CHARACTERS or (begin == 0 and piece):
                    yield Example(piece, label)
                begin = end


def _characters_per_token(tokenizer: Any, texts: Sequence[str]) -> float:
    """Estimated from some documents, and a little more, so that pieces rather fill a sequence than not."""
    samples = [text[:_SAMPLE] for text in texts]
    tokens = [len(tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]) for sample in samples]
    return 1.05 * sum(map(len, samples)) / max(sum(tokens), 1)


def _plan(lengths: Sequence[int], batch_size: int, order: random.Random) -> list[list[int]]:
    """Indices of each batch: shuffled, rows of like length together; an incomplete last batch is left out."""
    indices = list(range(len(lengths)))
    order.shuffle(indices)
    group = _GROUPED * batch_size
    batches = []
    for begin in range(0, len(indices), group):
        some = sorted(indices[begin : begin + group], key=lambda index: lengths[index], reverse=True)
        batches += [some[i : i + batch_size] for i in range(0, len(some) - batch_size + 1, batch_size)]
    order.shuffle(batches)
    return batches


def tokenize(
    examples: Sequence[Example],
    tokenizer: Any,
    length: int,
    label_ids: dict[str, int] | None = None,
) -> list[dict[str, list[int]]]:
    """Token ids of each example, cut to `length`, and the ids of their labels if `label_ids` is given.

    Raises:
        ValueError: a label has no id.
    """
    # tokenizers refuse an empty list
    if not examples:
        return []
    texts = [example.text for example in examples]
    rows: list[dict[str, Any]] = [
        {"input_ids": ids} for ids in tokenizer(texts, truncation=True, max_length=length, verbose=False)["input_ids"]
    ]
    for row, example in zip(rows, examples, strict=True):
        if not row["input_ids"]:
            raise ValueError(f"tokenizer: it makes no token of {example.text[:40]!r}.")
    if label_ids is not None:
        for row, example in zip(rows, examples, strict=True):
            if example.label not in label_ids:
                raise ValueError(f"label {example.label!r} is not one of {', '.join(map(repr, label_ids))}.")
            row["labels"] = label_ids[example.label]
    return rows


def collate(rows: Sequence[dict[str, Any]], padding_id: int, device: torch.device) -> Batch:
    """Rows as tensors, padded at the end to the longest; no mask where nothing is padded."""
    width = max(len(row["input_ids"]) for row in rows)
    batch = {"input_ids": _padded([row["input_ids"] for row in rows], padding_id, width)}
    if any(len(row["input_ids"]) < width for row in rows):
        batch["attention_mask"] = _padded([[1] * len(row["input_ids"]) for row in rows], 0, width)
    if "labels" in rows[0]:
        labels = [row["labels"] for row in rows]
        # one label for each token, of which padding has none, or one for each row
        batch["labels"] = _padded(labels, -100, width) if isinstance(labels[0], list) else torch.tensor(labels)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _padded(rows: Sequence[Sequence[int]], value: int, width: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
