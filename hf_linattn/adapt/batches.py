"""Training batches from documents: cut, shuffled, grouped by length, and the same for every number of processes.

Which sequences make the batch of a step depends on the settings and the step alone. Every process draws the
same batches and takes its own rows, and a resumed run goes on with the next step, so that nothing about
the order of the data has to be saved.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..data.documents import DataConfig, load_documents, stream_documents
from .stages import Batch

#: One sequence: its "input_ids", and "labels" if it has any.
Row = dict[str, Any]

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
        whole: take the start of each document as it is, with its label; otherwise cut documents into chunks.
        label_ids: label -> its id, which becomes the row's "labels". Default: rows without labels.
    """

    data: DataConfig
    tokenizer: Any
    length: int
    seed: int = 0
    pool: int = 4096
    held_out: int = 0
    whole: bool = False
    label_ids: dict[str, int] | None = None

    def batches(self, batch_size: int, start: int = 0) -> Iterator[list[Row]]:
        """The rows of each batch, without end, from that of step `start` on.

        Raises:
            ValueError: there are fewer examples than one batch takes.
        """
        # a generator of its own: a loader draws a number from the one that everything else draws from
        options: dict[str, Any] = {"collate_fn": list, "generator": torch.Generator()}
        if self._streaming:
            loader = DataLoader(StreamBatches(self, batch_size, start), batch_size=None, **options)
        else:
            dataset = TokenizedExamples(self.training_examples(), self.rows)
            sampler = StepBatchSampler(dataset.characters, batch_size, self.seed, start)
            if not sampler.batches_per_epoch:
                raise ValueError(self.too_few(batch_size))
            loader = DataLoader(dataset, batch_sampler=sampler, **options)
        return iter(loader)

    def evaluation(self) -> list[Row]:
        """The rows that are held out; they are in no batch."""
        return self.rows(self.held_out_examples())

    def first(self) -> list[Row]:
        """`held_out` rows, or all if they are fewer."""
        return self.rows(list(itertools.islice(itertools.chain.from_iterable(self.pools()), self.held_out)))

    def digest(self) -> str | None:
        """What tells these examples from others; of a stream, which nobody has read yet, None."""
        if self._streaming:
            return None
        digest = hashlib.sha256()
        for example in self._all_examples:
            digest.update(repr(example).encode(errors="surrogatepass"))
        return digest.hexdigest()

    def held_out_examples(self) -> list[Example]:
        """Drawn from the first pool."""
        return self.split(next(self.pools(), []))[0]

    def training_examples(self) -> list[Example]:
        """All others of the first pool, which is everything where the data are not streamed."""
        return self.split(next(self.pools(), []))[1]

    def pools(self) -> Iterator[list[Example]]:
        """All examples at once, or of a stream as many at a time as `pool` says."""
        if not self._streaming:
            yield self._all_examples
            return
        examples = self._cut((d.text, d.label) for d in stream_documents(self.data))
        while pool := list(itertools.islice(examples, self.pool)):
            yield pool

    @property
    def _streaming(self) -> bool:
        return bool(self.data.resolved().streaming)

    def split(self, examples: list[Example]) -> tuple[list[Example], list[Example]]:
        """What is held out of the first pool, and what is trained on."""
        # of very few, not all
        count = min(self.held_out, len(examples) // 2)
        chosen = set(random.Random(f"{self.seed} held out").sample(range(len(examples)), count))
        return (
            [example for index, example in enumerate(examples) if index in chosen],
            [example for index, example in enumerate(examples) if index not in chosen],
        )

    @cached_property
    def _all_examples(self) -> list[Example]:
        return list(self._cut((d.text, d.label) for d in load_documents(self.data)))

    def _cut(self, documents: Iterator[tuple[str, str | None]]) -> Iterator[Example]:
        """Chunks of documents that fill a sequence, cut at white space; the rest of a document stays shorter."""
        if self.whole:
            yield from itertools.starmap(Example, documents)
            return
        first = list(itertools.islice(documents, _SAMPLED))
        size = max(int(self.length * _characters_per_token(self.tokenizer, [text for text, _ in first])), 1)
        for text, label in itertools.chain(first, documents):
            for chunk in _chunks(text, size):
                yield Example(chunk, label)

    def rows(self, examples: Sequence[Example]) -> list[Row]:
        """Their token ids, and the ids of their labels."""
        return tokenize(examples, self.tokenizer, self.length, self.label_ids)

    def too_few(self, batch_size: int) -> str:
        """The message of the error that a batch cannot be filled."""
        return (
            f"batch_size={batch_size}: {self.data.dataset!r} gives fewer sequences of {self.length} tokens "
            f"beside those held out for evaluation, at most eval_sequences={self.held_out} and half of all."
        )


class TokenizedExamples(Dataset):
    """The rows of examples, each tokenized once, when it is first drawn."""

    def __init__(self, examples: Sequence[Example], tokenize: Callable[[Sequence[Example]], list[Row]]) -> None:
        self.characters = [len(example.text) for example in examples]
        self._examples, self._tokenize = examples, tokenize
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """The rows of a batch, which a `DataLoader` asks for at once."""
        missing = [index for index in indices if index not in self._rows]
        rows = self._tokenize([self._examples[index] for index in missing])
        self._rows.update(zip(missing, rows, strict=True))
        return [self._rows[index] for index in indices]


class StepBatchSampler(Sampler[list[int]]):
    """Indices of the batch of each step, without end; a pure function of the step.

    Args:
        lengths: of each example, in any unit.
        batch_size: examples of a batch. An incomplete last batch of an epoch is left out.
        seed: seed of the order.
        start: the step to begin with.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, start: int = 0) -> None:
        self.lengths, self.batch_size, self.seed, self.start = lengths, batch_size, seed, start
        self.batches_per_epoch = len(lengths) // batch_size
        self._epoch, self._plan = -1, list[list[int]]()

    def batch(self, step: int) -> list[int]:
        """The batch of a step."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, plan_pool(self.lengths, self.batch_size, self.seed, epoch)
        return self._plan[index]

    def __iter__(self) -> Iterator[list[int]]:
        for step in itertools.count(self.start):
            yield self.batch(step)


class StreamBatches(IterableDataset):
    """The rows of each batch of a stream, without end: one pool after the other is read, shuffled and batched.

    What comes before `start` is read again, but not tokenized.
    """

    def __init__(self, sequences: Sequences, batch_size: int, start: int = 0) -> None:
        self.sequences, self.batch_size, self.start = sequences, batch_size, start

    def __iter__(self) -> Iterator[list[Row]]:
        step = 0
        for epoch in itertools.count():
            begin = step
            for number, examples in enumerate(self.sequences.pools()):
                if number == 0:
                    examples = self.sequences.split(examples)[1]
                lengths = [len(example.text) for example in examples]
                plan = plan_pool(lengths, self.batch_size, self.sequences.seed, epoch, number)
                for batch in plan[max(self.start - step, 0) :]:
                    yield self.sequences.rows([examples[index] for index in batch])
                step += len(plan)
            if step == begin:
                raise ValueError(self.sequences.too_few(self.batch_size))


def plan_pool(lengths: Sequence[int], batch_size: int, seed: int, epoch: int, pool: int = 0) -> list[list[int]]:
    """Indices of each batch: shuffled, rows of like length together; an incomplete last batch is left out.

    Args:
        lengths: of the examples of the pool.
        batch_size: examples of a batch.
        seed, epoch, pool: of these the order is a function.
    """
    # a string as seed: the same on every machine and version
    order = random.Random(f"{seed} {epoch} {pool}")
    indices = list(range(len(lengths)))
    order.shuffle(indices)
    group = _GROUPED * batch_size
    batches = []
    for begin in range(0, len(indices), group):
        some = sorted(indices[begin : begin + group], key=lambda index: lengths[index], reverse=True)
        batches += [some[i : i + batch_size] for i in range(0, len(some) - batch_size + 1, batch_size)]
    order.shuffle(batches)
    return batches


def _characters_per_token(tokenizer: Any, texts: Sequence[str]) -> float:
    """Estimated from some documents, and a little more, so that chunks rather fill a sequence than not."""
    samples = [text[:_SAMPLE] for text in texts]
    tokens = [len(tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]) for sample in samples]
    return 1.05 * sum(map(len, samples)) / max(sum(tokens), 1)


def _chunks(text: str, size: int) -> Iterator[str]:
    """Chunks of at most `size` characters, each cut at the last white space of its second half, if it has any."""
    begin = 0
    while begin < len(text):
        end = begin + size
        if end < len(text):
            half = begin + size // 2
            end = max(text.rfind(" ", half, end), text.rfind("\n", half, end)) + 1 or end
        chunk = text[begin:end].strip()
        if len(chunk) >= _LEAST_CHARACTERS or (begin == 0 and chunk):
            yield chunk
        begin = end


def tokenize(
    examples: Sequence[Example],
    tokenizer: Any,
    length: int,
    label_ids: dict[str, int] | None = None,
) -> list[Row]:
    """Token ids of each example, cut to `length`, and the ids of their labels if `label_ids` is given.

    Raises:
        ValueError: the tokenizer makes no token of a text, or a label has no id.
    """
    # tokenizers refuse an empty list
    if not examples:
        return []
    texts = [example.text for example in examples]
    rows: list[Row] = [
        {"input_ids": ids} for ids in tokenizer(texts, truncation=True, max_length=length, verbose=False)["input_ids"]
    ]
    for row, example in zip(rows, examples, strict=True):
        if not row["input_ids"]:
            raise ValueError(f"tokenizer: it makes no token of {example.text[:40]!r}.")
        if label_ids is not None:
            if example.label not in label_ids:
                raise ValueError(f"label {example.label!r} is not one of {', '.join(map(repr, label_ids))}.")
            row["labels"] = label_ids[example.label]
    return rows


def collate(rows: Sequence[Row], padding_id: int, device: torch.device) -> Batch:
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
