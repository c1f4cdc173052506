"""Tasks of known answer that need tokens from far away: copy, passkey, associative recall, ListOps.

    config = SyntheticConfig(task="passkey", length=4096)
    examples = make_examples(config, tokenizer, documents=texts)

Every task is a text some tokens of which are the answer, and all of them take the one shape of an `Example`.
The draws use `random.Random.random()` alone, which Python promises to keep as it is: the same config gives the
same examples on every machine, and an example does not depend on how many are made.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ..modeling.validation import check_choice, check_integer
from .listops import DIGITS, WORDS, draw_expression, largest_size
from .vocabulary import Vocabulary

TASKS = ("copy", "passkey", "recall", "listops")
READINGS = ("causal", "masked")
#: label of a position that nothing is read off
IGNORED = -100
# how many expressions are drawn before their length is given up as out of reach
_MOST_DRAWS = 100_000

_T = TypeVar("_T")


@dataclass(kw_only=True)
class SyntheticConfig:
    """Which task, how long, how many examples.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """

    task: str = field(
        metadata={
            "help": "copy (random tokens, and the same again), passkey (a number in running text, asked for at the "
            "end), recall (multi-query associative recall), listops (nested operations on digits).",
            "choices": TASKS,
        }
    )
    length: int = field(metadata={"help": "Tokens of an example, special tokens included; of listops, the most."})
    count: int = field(default=100, metadata={"help": "Number of examples."})
    seed: int = field(default=0, metadata={"help": "Seed of the examples."})
    reading: str = field(
        default="causal",
        metadata={
            "help": "causal: an answer is predicted from the tokens before it. masked: an answer is hidden by the "
            "mask token, and predicted in its place.",
            "choices": READINGS,
        },
    )
    min_distance: int = field(
        default=0,
        metadata={"help": "passkey, recall: at least this many tokens between what is to be found and its query."},
    )
    depth: float | None = field(
        default=None,
        metadata={"help": "passkey: share of the running text before the key, 0 to 1. Default: drawn evenly."},
    )
    digits: int = field(default=5, metadata={"help": "passkey: digits of the key."})
    pairs: int | None = field(
        default=None, metadata={"help": "recall: pairs of key and value. Default: a sixteenth of the length."}
    )
    power: float = field(
        default=0.01,
        metadata={
            "help": "recall: queries come soon after the pairs, by a power law of this exponent less one; 1: evenly."
        },
    )
    min_length: int | None = field(
        default=None, metadata={"help": "listops: fewest tokens of an expression. Default: a quarter of the length."}
    )
    max_depth: int = field(default=10, metadata={"help": "listops: most levels of an expression."})
    max_args: int = field(default=10, metadata={"help": "listops: most arguments of an operator."})

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name, choices in (("task", TASKS), ("reading", READINGS)):
            check_choice(owner, name, getattr(self, name), choices)
        least = {"length": 1, "count": 1, "seed": 0, "min_distance": 0, "digits": 1, "max_depth": 2, "max_args": 2}
        least |= {name: 1 for name in ("pairs", "min_length") if getattr(self, name) is not None}
        for name, minimum in least.items():
            check_integer(owner, name, getattr(self, name), minimum)
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise ValueError(f"depth={self.depth!r} must be from 0, the start of the text, to 1, its end.")
        if not 0 < self.power <= 1:
            raise ValueError(f"power={self.power!r} must be above 0 and at most 1.")


@dataclass(frozen=True)
class Example:
    """One sequence, and what is to be read off it.

    Attributes:
        input_ids: token ids (length).
        labels: the token that the logits at this very position must name (length); -100 where nothing is asked.
            They are not shifted: a causal model's logits at i are to name the token that comes at i + 1.
        planted: of a passkey, the positions of the tokens that the answer repeats, in their order.
    """

    input_ids: list[int]
    labels: list[int]
    planted: tuple[int, ...] = ()


def make_examples(
    config: SyntheticConfig, vocabulary: Any, documents: Sequence[str | Sequence[int]] | None = None
) -> list[Example]:
    """The examples of one task.

    Args:
        config: task, length, number, seed and reading.
        vocabulary: the model's tokenizer, or a `Vocabulary`.
        documents: for passkey, the running text: texts, or their token ids. An example starts anywhere in
            one of them, and goes on with the next ones.

    Sources: copy, as in Graves et al. 2014 (arXiv:1410.5401); passkey, Mohtashami and Jaggi 2023 (arXiv:2305.16300);
    recall, Arora et al. 2023 (Zoology, arXiv:2312.04927), where what fills the gaps is here never one of the keys,
    so that every answer is certain; ListOps, Tay et al. 2020 (Long Range Arena, arXiv:2011.04006).

    Raises:
        ValueError: the length is too small for the task, the reading needs a mask token and there is none, the
            vocabulary is too small, or documents are missing.
    """
    words = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary.from_tokenizer(vocabulary)
    causal, mask = config.reading == "causal", words.mask
    if not causal and mask is None:
        raise ValueError("reading='masked' needs a mask token, and the tokenizer has none; use 'causal'.")
    # nothing follows the last token that a causal model predicts, and that token itself is no input
    suffix, tokens = ((), config.length + 1) if causal else (words.suffix, config.length)
    room = tokens - len(words.prefix) - len(suffix)
    texts = _running_text(words, documents) if config.task == "passkey" else []
    tasks: dict[str, Callable[[SyntheticConfig, Vocabulary, Draw, int], Text]] = {
        "copy": _copy,
        "passkey": partial(passkey, texts),
        "recall": _recall,
        "listops": _listops,
    }
    examples = []
    for index in range(config.count):
        # a seed for each example: how many are made changes none of them
        text = tasks[config.task](config, words, Draw(f"{config.task} {config.seed} {index}"), room)
        ids = [*words.prefix, *text.ids, *suffix]
        answers = [*[False] * len(words.prefix), *text.answers, *[False] * len(suffix)]
        example = _causal(ids, answers) if mask is None or causal else _masked(ids, answers, mask)
        examples.append(replace(example, planted=tuple(len(words.prefix) + place for place in text.planted)))
    return examples


def _causal(ids: list[int], answers: list[bool]) -> Example:
    following = zip(ids[1:], answers[1:], strict=True)
    return Example(ids[:-1], [token if answer else IGNORED for token, answer in following])


def _masked(ids: list[int], answers: list[bool], mask: int) -> Example:
    both = list(zip(ids, answers, strict=True))
    return Example(
        [mask if answer else token for token, answer in both], [token if answer else IGNORED for token, answer in both]
    )


class Text:
    """Token ids, which of them are the answer, and where what it repeats is planted."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.answers: list[bool] = []
        self.planted = range(0)

    def add(self, ids: Sequence[int], *, answer: bool = False) -> None:
        self.ids.extend(ids)
        self.answers.extend([answer] * len(ids))


class Draw:
    """Random draws that are the same in every version of Python."""

    def __init__(self, seed: str) -> None:
        self.generator = random.Random(seed)

    def below(self, stop: int) -> int:
        return int(self.generator.random() * stop)

    def choices(self, values: Sequence[_T], count: int) -> list[_T]:
        draw, stop = self.generator.random, len(values)
        return [values[int(draw() * stop)] for _ in range(count)]

    def sample(self, values: Sequence[_T], count: int) -> list[_T]:
        """`count` different ones: a shuffle that stops early, and remembers what it moved only."""
        moved: dict[int, _T] = {}
        result = []
        for i in range(count):
            j = i + self.below(len(values) - i)
            result.append(moved.get(j, values[j]))
            moved[j] = moved.get(i, values[i])
        return result

    def weighted_sample(self, weights: Sequence[float], count: int) -> list[int]:
        """`count` different indices, one after the other, each with a probability in proportion to its weight."""
        # of exponential clocks with these rates, the first to ring is such a draw, and so is each one after it
        rings = [-math.log(1 - self.generator.random()) / weight for weight in weights]
        return sorted(range(len(weights)), key=rings.__getitem__)[:count]


def _check_room(config: SyntheticConfig, room: int, least: int, what: str) -> None:
    if room < least:
        raise ValueError(
            f"length={config.length} is too small for task='{config.task}' with {what}: "
            f"it takes at least {config.length + least - room}."
        )


def _word(words: Vocabulary, word: str) -> tuple[list[int], list[int]]:
    """Token ids of the space before a word, where it is a token of its own, and those of the word."""
    ids, space = words.encode(f" {word}"), words.encode(" ")
    start = len(space) if ids[: len(space)] == space else 0
    return ids[:start], ids[start:]


def _copy(config: SyntheticConfig, words: Vocabulary, draw: Draw, room: int) -> Text:
    separators = 2 * len(words.separator)
    _check_room(config, room, separators + 2, "one token to copy")
    count, rest = divmod(room - separators, 2)
    symbols = draw.choices(words.symbols, count)
    text = Text()
    # an odd token goes first; both times the symbols follow a separator, so that it tells what the first one is
    text.add([*draw.choices(words.symbols, rest), *words.separator, *symbols, *words.separator])
    text.add(symbols, answer=True)
    return text


def _recall(config: SyntheticConfig, words: Vocabulary, draw: Draw, room: int) -> Text:
    pairs = max(config.length // 16, 1) if config.pairs is None else config.pairs
    least = 4 * pairs + config.min_distance
    _check_room(config, room, least, f"pairs={pairs} and min_distance={config.min_distance}")
    half = len(words.symbols) // 2
    if half < pairs:
        raise ValueError(f"pairs={pairs}: the vocabulary has {half} symbols for keys, and each key is another one.")
    keys, values = draw.sample(words.symbols[:half], pairs), draw.choices(words.symbols[half:], pairs)
    # a query and its answer fill a slot of two tokens; which slots, Zoology draws by a power law
    slots = (room - 2 * pairs - config.min_distance) // 2
    places = draw.weighted_sample([(slot + 1) ** (config.power - 1) for slot in range(slots)], pairs)
    queries = dict(zip(places, zip(keys, values, strict=True), strict=True))
    taken = set(keys)

    def filler() -> int:
        # never a key: each stands once before its query, so that the answer is certain
        while (token := draw.choices(words.symbols, 1)[0]) in taken:
            pass
        return token

    text = Text()
    for key, value in zip(keys, values, strict=True):
        text.add([key, value])
    text.add([filler() for _ in range(room - 2 * pairs - 2 * slots)])
    for slot in range(slots):
        if slot in queries:
            key, value = queries[slot]
            text.add([key])
            text.add([value], answer=True)
        else:
            text.add([filler(), filler()])
    return text


def _running_text(words: Vocabulary, documents: Sequence[str | Sequence[int]] | None) -> list[Sequence[int]]:
    if documents is None:
        raise ValueError("documents=None: task='passkey' hides its key in documents; give texts or token ids.")
    texts = [words.encode(document) if isinstance(document, str) else document for document in documents]
    texts = [text for text in texts if len(text)]
    if not texts:
        raise ValueError("documents: there is none with text.")
    return texts


@dataclass(frozen=True, kw_only=True)
class Wording:
    """What stands before and after a planted key, and asks for it."""

    before: str = " The pass key is"
    after: str = ". Remember it."
    question: str = " What is the pass key? The pass key is"


def passkey(
    texts: Sequence[Sequence[int]],
    config: SyntheticConfig,
    words: Vocabulary,
    draw: Draw,
    room: int,
    wording: Wording = Wording(),
) -> Text:
    """A number planted in running text, and asked for at the end: `room` tokens.

    texts: token ids of the running text, without special tokens.
    """
    first = 10 ** (config.digits - 1)
    # encoded by itself and used in both places: beside other text, a tokenizer might cut it in another way
    space, key = _word(words, str(first + draw.below(9 * first)))
    before, after = [*words.encode(wording.before), *space], words.encode(wording.after)
    question = [*words.encode(wording.question), *space]
    # an encoder sees that the sentence ends
    end = words.encode(".") if config.reading == "masked" else []
    filler = room - len([*before, *key, *after, *question, *key, *end])
    last = filler - max(config.min_distance - len(after), 0)
    _check_room(config, last, 0, f"digits={config.digits} and min_distance={config.min_distance}")
    place = draw.below(last + 1) if config.depth is None else min(round(config.depth * filler), last)

    number = draw.below(len(texts))
    start = draw.below(len(texts[number]))
    ids: list[int] = []
    while len(ids) < filler:
        ids.extend(texts[number][start : start + filler - len(ids)])
        number, start = (number + 1) % len(texts), 0

    text = Text()
    begin = place + len(before)
    text.planted = range(begin, begin + len(key))
    text.add([*ids[:place], *before, *key, *after, *ids[place:], *question])
    text.add(key, answer=True)
    text.add(end)
    return text


def _listops(config: SyntheticConfig, words: Vocabulary, draw: Draw, room: int) -> Text:
    ids = {word: words.encode(f" {word}") for word in WORDS}
    # what is left beside the separator and the longest answer
    most = room - len(words.separator) - max(len(ids[digit]) for digit in DIGITS)
    least = max(config.length // 4, 1) if config.min_length is None else config.min_length
    _check_room(config, most, least, f"min_length={least}")
    longest = max(map(len, ids.values())) * largest_size(config.max_depth, config.max_args)
    if longest < least:
        raise ValueError(
            f"min_length={least}: expressions of max_depth={config.max_depth} and max_args={config.max_args} have at "
            f"most {longest} tokens."
        )
    for _ in range(_MOST_DRAWS):
        drawn = draw_expression(draw.generator, max_words=most, max_depth=config.max_depth, max_args=config.max_args)
        if drawn is None:
            continue
        expression = [token for word in drawn[0] for token in ids[word]]
        if least <= len(expression) <= most:
            space, answer = _word(words, DIGITS[drawn[1]])
            text = Text()
            text.add([*expression, *words.separator, *space])
            text.add(answer, answer=True)
            return text
    raise ValueError(
        f"min_length={least}: of {_MOST_DRAWS:,} expressions of max_depth={config.max_depth} and "
        f"max_args={config.max_args}, none had {least} to {most} tokens."
    )
