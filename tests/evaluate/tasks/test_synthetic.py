"""Tasks of known answer: what is asked, that it is the same everywhere, and how it is scored."""

import random
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from hf_linattn import LinformerConfig
from hf_linattn.data.listops import DIGITS, WORDS, draw_expression, largest_size, median
from hf_linattn.data.synthetic import IGNORED, READINGS, TASKS, Example, SyntheticConfig, make_examples
from hf_linattn.data.vocabulary import Vocabulary
from hf_linattn.evaluate.tasks.synthetic import Outcome, score

from ...helpers import converted_model, prompts, tiny_model

SYMBOLS = Vocabulary.from_words([str(number) for number in range(64)])
BYTES = Vocabulary.from_bytes()
LISTOPS = Vocabulary.from_words(WORDS)
VOCABULARIES = {"copy": SYMBOLS, "recall": SYMBOLS, "passkey": BYTES, "listops": LISTOPS}
DOCUMENTS = ["It was a dark and stormy night; the rain fell in torrents. " * 20, "Call me Ishmael. " * 9]


def examples_of(task: str, vocabulary: Any = None, documents: Any = DOCUMENTS, **settings: Any) -> list[Example]:
    config = SyntheticConfig(task=task, **{"length": 200, "count": 10, **settings})
    return make_examples(config, vocabulary or VOCABULARIES[task], documents)


def full_text(example: Example, reading: str) -> list[int]:
    """All tokens of an example with its answer in place."""
    if reading == "masked":
        return [i if label == IGNORED else label for i, label in zip(example.input_ids, example.labels, strict=True)]
    # what is read off a position comes after it; what is asked and is no input as well comes last
    return example.input_ids[:1] + [
        given if label == IGNORED else label
        for given, label in zip([*example.input_ids[1:], None], example.labels, strict=True)
        if given is not None or label != IGNORED
    ]


def answer(example: Example) -> list[int]:
    return [label for label in example.labels if label != IGNORED]


def say(ids: list[int]) -> str:
    return bytes(index - 3 for index in ids).decode()


def value_of(words: list[str]) -> int:
    """An evaluator of its own: operators and arguments on a stack."""
    stack: list[Any] = []
    for word in words:
        stack.append(int(word) if word.isdigit() else word)
        if word == "]":
            stack.pop()
            values = []
            while isinstance(stack[-1], int):
                values.append(stack.pop())
            stack.append(
                {
                    "[MIN": lambda v: min(v),
                    "[MAX": lambda v: max(v),
                    "[MED": lambda v: int(statistics.median(v)),
                    "[SM": lambda v: sum(v) % 10,
                }[stack.pop()](values)
            )
    assert len(stack) == 1
    return stack[0]


def word_pieces() -> BertTokenizerFast:
    digits = [f"{mark}{digit}" for digit in DIGITS for mark in ("", "##")]
    text = "the pass key is remember it what a dark and night rain call me min max med sm [ ] . ? ;"
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "[unused0]"]
    words = [*special, "##ing", *digits, "71", "##43", *text.split(" ")]
    return BertTokenizerFast(vocab={word: index for index, word in enumerate(words)})


def byte_level() -> PreTrainedTokenizerFast:
    """Every byte a token, and a space before a word in the token, as GPT-2 has it; no special token but one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", digit) for digit in DIGITS]
    tokens = [*alphabet, *("".join(pair) for pair in merges), "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


# --- what is asked


def test_copy_repeats_what_stands_between_the_separators() -> None:
    for reading in READINGS:
        for example in examples_of("copy", reading=reading, length=20):
            text = full_text(example, reading)
            first = text.index(1)
            assert text[first : first + 1 + len(answer(example))] == [1, *answer(example)]
            assert text[-len(answer(example)) - 1 :] == [1, *answer(example)]
            assert len(answer(example)) == 9
            assert min(answer(example)) > 2


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("min_distance", [0, 50])
def test_recall_has_one_answer_and_it_is_far(reading: str, min_distance: int) -> None:
    pairs = 12
    for example in examples_of("recall", reading=reading, pairs=pairs, min_distance=min_distance, power=0.5):
        text = full_text(example, reading)
        table = dict(zip(text[: 2 * pairs : 2], text[1 : 2 * pairs : 2], strict=True))
        assert len(table) == pairs
        places = [i for i, label in enumerate(example.labels) if label != IGNORED]
        queries = [example.input_ids[i - (reading == "masked")] for i in places]
        assert sorted(queries) == sorted(table)
        assert answer(example) == [table[key] for key in queries]
        for key, place in zip(queries, places, strict=True):
            assert text.count(key) == 2
            assert place - (reading == "masked") - 2 * pairs >= min_distance


def test_a_low_power_puts_queries_early() -> None:
    def mean_place(power: float) -> float:
        places = [
            i
            for example in examples_of("recall", pairs=4, power=power, count=50)
            for i, label in enumerate(example.labels)
            if label != IGNORED
        ]
        return sum(places) / len(places)

    # 8 tokens of pairs, and the middle of what follows
    assert mean_place(1.0) == pytest.approx(104, abs=8)
    assert mean_place(0.01) < 60


@pytest.mark.parametrize("reading", READINGS)
def test_a_passkey_is_told_once_and_asked_for_at_the_end(reading: str) -> None:
    for example in examples_of("passkey", reading=reading):
        text = say(full_text(example, reading))
        key = say(answer(example))
        assert re.fullmatch(r"[1-9]\d{4}", key)
        assert f" The pass key is {key}. Remember it." in text
        ending = "." if reading == "masked" else ""
        assert text.endswith(f" What is the pass key? The pass key is {key}{ending}")
        assert text.count(key) == 2


def test_where_a_passkey_stands() -> None:
    def places(**settings: Any) -> list[int]:
        texts = [say(full_text(example, "causal")) for example in examples_of("passkey", **settings)]
        return [text.index(" The pass key is ") for text in texts]

    # the last place leaves " The pass key is 71432. Remember it." and the question
    last = 201 - len(" The pass key is 71432. Remember it. What is the pass key? The pass key is 71432")
    assert set(places(depth=0.0)) == {0}
    assert set(places(depth=1.0)) == {last}
    assert set(places(depth=0.5)) == {round(last / 2)}
    assert set(places(depth=1.0, min_distance=60)) == {last - 60 + len(". Remember it.")}
    drawn = places(count=100)
    assert min(drawn) < 0.1 * last and max(drawn) > 0.9 * last
    assert max(places(count=100, min_distance=60)) <= last - 60 + len(". Remember it.")


def test_running_text_goes_on_with_the_next_document() -> None:
    documents = [BYTES.encode("abc"), "", BYTES.encode("defg")]
    for example in examples_of("passkey", documents=documents, depth=0.0):
        filler = say(full_text(example, "causal")).split("Remember it.")[1].split(" What")[0]
        assert filler in "abcdefg" * 40


@pytest.mark.parametrize("reading", READINGS)
def test_the_value_of_an_expression(reading: str) -> None:
    lengths = set()
    for example in examples_of("listops", reading=reading, count=40, length=100):
        assert len(example.input_ids) <= 100
        *text, separator, result = full_text(example, reading)
        assert separator == 1
        assert answer(example) == [result]
        words = [WORDS[index - 3] for index in text]
        assert 25 <= len(words) <= 99
        assert value_of(words) == int(WORDS[result - 3])
        lengths.add(len(words))
    assert len(lengths) > 10


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 4 [MIN 2 3 ] 1 0 ]", 4),
        ("[MED 1 2 ]", 1),
        ("[MED 9 1 4 ]", 4),
        ("[MED 8 1 4 6 ]", 5),
        ("[SM 9 9 [MED 4 5 ] ]", 2),
    ],
)
def test_the_evaluator_of_this_test(text: str, value: int) -> None:
    assert value_of(text.split()) == value


@pytest.mark.parametrize("values", [[3], [1, 2], [9, 1, 4], [0, 9, 9, 4], [5, 5, 6, 6]])
def test_median_is_rounded_down(values: list[int]) -> None:
    assert median(values) == int(statistics.median(values))


def test_expressions_follow_the_generator_of_long_range_arena() -> None:
    generator = random.Random(0)
    drawn = [draw_expression(generator, max_words=10**6, max_depth=4, max_args=3) for _ in range(2000)]
    words = [expression for found in drawn if found is not None for expression in [found[0]]]
    assert len(words) == 2000
    # an operation with probability 1/4, of two or three arguments
    assert sum(len(expression) > 1 for expression in words) / 2000 == pytest.approx(0.25, abs=0.03)
    assert max(map(len, words)) <= largest_size(4, 3) == 2 + 3 * (2 + 3 * (2 + 3))
    operators = [word for expression in words for word in expression if word in WORDS[:4]]
    for operator in WORDS[:4]:
        assert operators.count(operator) / len(operators) == pytest.approx(0.25, abs=0.04)
    # levels: a digit is one, so that three operators can stand around it
    depths = [max(sum(w in WORDS[:4] for w in e[:i]) - e[:i].count("]") for i in range(len(e) + 1)) for e in words]
    assert max(depths) == 3


# --- the same everywhere


def labels(length: int, **answers: int) -> list[int]:
    """Labels that ask at some positions: p8=6 asks for token 6 at position 8."""
    return [answers.get(f"p{position}", IGNORED) for position in range(length)]


@pytest.mark.parametrize(
    ("task", "reading", "settings", "example"),
    [
        (
            "copy",
            "causal",
            {"length": 9},
            Example([1, 6, 58, 55, 13, 1, 6, 58, 55], labels(9, p5=6, p6=58, p7=55, p8=13)),
        ),
        (
            "copy",
            "masked",
            {"length": 9},
            Example([13, 1, 6, 58, 55, 1, 2, 2, 2], labels(9, p6=6, p7=58, p8=55)),
        ),
        (
            "recall",
            "causal",
            {"length": 13, "pairs": 2},
            Example([14, 50, 22, 55, 51, 36, 23, 27, 22, 55, 28, 15, 14], labels(13, p8=55, p12=50)),
        ),
        (
            "recall",
            "masked",
            {"length": 13, "pairs": 2},
            Example([14, 50, 22, 55, 3, 51, 36, 22, 2, 14, 2, 23, 27], labels(13, p8=55, p10=50)),
        ),
    ],
)
def test_examples_are_pinned(task: str, reading: str, settings: dict[str, int], example: Example) -> None:
    assert examples_of(task, reading=reading, count=1, **settings) == [example]


def test_texts_are_pinned() -> None:
    [example] = examples_of("passkey", length=120, count=1)
    assert say(full_text(example, "causal")) == (
        "night; the rain The pass key is 24462. Remember it. fell in torrents. It was  "
        "What is the pass key? The pass key is 24462"
    )
    assert example.labels == [IGNORED] * 115 + BYTES.encode("24462")
    [example] = examples_of("listops", length=24, count=1)
    assert example.input_ids == [*LISTOPS.encode("[MAX 7 4 9 4 7 [MAX 7 0 9 6 4 ] 3 ]"), 1]
    assert example.labels == [IGNORED] * 15 + LISTOPS.encode("9")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("reading", READINGS)
def test_an_example_depends_on_seed_and_number_alone(task: str, reading: str) -> None:
    few, many = (examples_of(task, reading=reading, count=count) for count in (3, 20))
    assert many[:3] == few
    assert many == examples_of(task, reading=reading, count=20)
    others = examples_of(task, reading=reading, count=20, seed=1)
    assert not [example for example in others if example in many]
    assert len({tuple(example.input_ids) for example in many}) == 20


@pytest.mark.parametrize("task", ["copy", "recall", "passkey"])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("length", [128, 129, 1000])
def test_length_is_exact(task: str, reading: str, length: int) -> None:
    for example in examples_of(task, reading=reading, length=length, pairs=20):
        assert len(example.input_ids) == len(example.labels) == length


# --- real tokenizers


@pytest.mark.parametrize("task", TASKS)
def test_word_pieces(task: str) -> None:
    tokenizer = word_pieces()
    for example in examples_of(task, tokenizer, reading="masked", length=101, max_depth=3):
        assert task == "listops" or len(example.input_ids) == 101
        assert example.input_ids[0] == tokenizer.cls_token_id
        assert example.input_ids[-1] == tokenizer.sep_token_id
        masks = [i for i, token in enumerate(example.input_ids) if token == tokenizer.mask_token_id]
        assert masks == [i for i, label in enumerate(example.labels) if label != IGNORED]
        text = tokenizer.decode(full_text(example, "masked"))
        if task == "passkey":
            key = tokenizer.decode(answer(example))
            assert text.count(f"the pass key is {key}.") == 2
        if task == "copy":
            # whole words of letters, not the pieces or the tokens that are never used
            assert all(word.isalpha() for word in tokenizer.convert_ids_to_tokens(answer(example)))


@pytest.mark.parametrize("task", TASKS)
def test_a_space_in_the_token(task: str) -> None:
    tokenizer = byte_level()
    for example in examples_of(task, tokenizer, length=150, max_depth=3):
        text = full_text(example, "causal")
        assert tokenizer.eos_token_id not in text
        said = tokenizer.decode(answer(example))
        if task == "passkey":
            assert tokenizer.decode(text).count(f"The pass key is{said}") == 2
            assert re.fullmatch(r" [1-9]\d{4}", said)
        if task == "listops":
            *words, value = tokenizer.decode(text).split()
            assert value_of(words) == int(said) == int(value)


def test_a_pretrained_tokenizer(minilm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    for example in examples_of("passkey", tokenizer, reading="masked", length=300):
        text, said = tokenizer.decode(full_text(example, "masked")), tokenizer.decode(answer(example))
        assert re.fullmatch(r"\d{5}", said)
        assert text.count(f"the pass key is {said}.") == 2
        assert text.startswith("[CLS]") and text.endswith("[SEP]")
        assert len(example.input_ids) == 300


# --- scoring


class Oracle(nn.Module):
    """Reads the answers off a list of examples."""

    def __init__(self, examples: list[Example], size: int) -> None:
        super().__init__()
        self.config, self.device = SimpleNamespace(pad_token_id=0), torch.device("cpu")
        self.embeddings = nn.Embedding(size, 1)
        self.known = {tuple(example.input_ids): example.labels for example in examples}

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, self.embeddings.num_embeddings)
        for row, (ids, seen) in enumerate(zip(input_ids, attention_mask, strict=True)):
            for position, label in enumerate(self.known[tuple(ids[seen.bool()].tolist())]):
                logits[row, position, max(label, 0)] = 1
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("reading", READINGS)
def test_an_oracle_is_always_right(task: str, reading: str) -> None:
    examples = examples_of(task, reading=reading)
    outcomes = score(Oracle(examples, VOCABULARIES[task].size), examples, batch_size=3)
    assert outcomes == [Outcome(len(answer(example)), len(answer(example))) for example in examples]
    assert all(outcome.exact for outcome in outcomes)


@pytest.mark.parametrize(("family", "auto"), [("bert", "AutoModelForMaskedLM"), ("llama", "AutoModelForCausalLM")])
def test_a_random_model_guesses(family: str, auto: str) -> None:
    reading = "masked" if family == "bert" else "causal"
    examples = examples_of("copy", length=60, count=60, reading=reading)
    outcomes = score(tiny_model(family, auto), examples)
    right, asked = sum(o.correct for o in outcomes), sum(o.answers for o in outcomes)
    assert asked > 1500
    # one in a hundred tokens
    assert right / asked < 0.04
    assert not any(outcome.exact for outcome in outcomes)


@pytest.mark.parametrize(
    ("family", "auto"),
    [
        ("bert", "AutoModelForMaskedLM"),
        ("bert", "AutoModelForTokenClassification"),
        ("llama", "AutoModelForCausalLM"),
        ("gpt2", "AutoModelForCausalLM"),
    ],
)
@pytest.mark.parametrize("converted", [False, True])
def test_padding_and_batches_change_nothing(family: str, auto: str, converted: bool) -> None:
    model: Any = tiny_model(family, auto)
    if converted:
        model = converted_model(LinformerConfig(projection="learned", projection_length=8, window_size=4), family, auto)
    examples = []
    for length in (30, 9, 50, 17, 64):
        inputs = prompts(length, seed=length)
        with torch.no_grad():
            named = model(**inputs).logits[0].argmax(-1).tolist()
        # what the model says of the row alone, at every third position
        labels = [token if position % 3 == 2 else IGNORED for position, token in enumerate(named)]
        examples.append(Example(inputs["input_ids"][0].tolist(), labels))
    expected = [Outcome(len(answer(example)), len(answer(example))) for example in examples]
    for batch_size in (1, 2, 5, 100):
        assert score(model, examples, batch_size=batch_size) == expected


def test_exact_is_what_greedy_decoding_finds() -> None:
    model = tiny_model("llama", "AutoModelForCausalLM")
    prompt = prompts(20)
    said = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0].tolist()
    new = said[20:]
    assert len(set(new)) > 1
    labels = [IGNORED] * 19 + new
    assert score(model, [Example(said[:-1], labels)])[0].exact
    for position in range(6):
        wrong = [*new]
        wrong[position] = (wrong[position] + 1) % 100
        text = said[:20] + wrong
        outcome = score(model, [Example(text[:-1], [IGNORED] * 19 + wrong)])[0]
        assert not outcome.exact
        assert outcome.correct >= position


def test_a_model_in_training_is_scored_without_dropout_and_left_as_it_was() -> None:
    model = tiny_model("bert", "AutoModelForMaskedLM").train()
    examples = examples_of("copy", length=60, reading="masked")
    assert score(model, examples) == score(model, examples)
    assert model.training


# --- bad input


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("reading", READINGS)
def test_the_error_of_a_length_names_the_least_that_works(task: str, reading: str) -> None:
    settings = {"reading": reading, "pairs": 3, "min_distance": 20, "min_length": 4}
    with pytest.raises(ValueError, match=f"length=1 is too small for task='{task}'") as error:
        examples_of(task, length=1, **settings)
    least = int(str(error.value).rpartition(" ")[2].rstrip("."))
    examples_of(task, length=least, **settings)
    with pytest.raises(ValueError, match=rf"at least {least}\."):
        examples_of(task, length=least - 1, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "sort"}, "task='sort' is not one of 'copy', 'passkey', 'recall', 'listops'"),
        ({"reading": "prefix"}, "reading='prefix' is not one of 'causal', 'masked'"),
        ({"length": 0}, "length=0 must be an integer of at least 1"),
        ({"length": 20.0}, "length=20.0 must be an integer"),
        ({"count": True}, "count=True must be an integer"),
        ({"digits": 0}, "digits=0"),
        ({"pairs": 0}, "pairs=0"),
        ({"max_args": 1}, "max_args=1 must be an integer of at least 2"),
        ({"depth": 1.5}, "depth=1.5 must be from 0"),
        ({"power": 0.0}, "power=0.0 must be above 0"),
    ],
)
def test_a_field_that_is_not_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SyntheticConfig(**{"task": "copy", "length": 20, **settings})


def test_what_a_task_cannot_do_without() -> None:
    with pytest.raises(ValueError, match="documents=None"):
        examples_of("passkey", documents=None)
    with pytest.raises(ValueError, match="there is none with text"):
        examples_of("passkey", documents=["", []])
    with pytest.raises(ValueError, match="reading='masked' needs a mask token"):
        examples_of("copy", byte_level(), reading="masked")
    with pytest.raises(ValueError, match="pairs=40: the vocabulary has 32 symbols for keys"):
        examples_of("recall", pairs=40)
    with pytest.raises(ValueError, match="'It' is not one of the 64 words"):
        examples_of("passkey", SYMBOLS)
    with pytest.raises(ValueError, match="each must be there once"):
        Vocabulary.from_words(["a", "b", "a"])


def test_an_expression_that_cannot_be_that_long() -> None:
    with pytest.raises(ValueError, match="min_length=50: expressions of max_depth=3 and max_args=2 have at most 10"):
        examples_of("listops", max_depth=3, max_args=2, min_length=50)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example([5, 6], [IGNORED, IGNORED]), "asks nothing"),
        (Example([5, 6], [7]), "has 2 input_ids and 1 labels"),
        (Example([5, 100], [IGNORED, 7]), "has token 100; the model knows 0 to 99"),
    ],
)
def test_an_example_that_cannot_be_scored(example: Example, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        score(tiny_model("bert", "AutoModelForMaskedLM"), [example])


def test_a_batch_of_none() -> None:
    with pytest.raises(ValueError, match="batch_size=0 must be an integer of at least 1"):
        score(tiny_model("bert", "AutoModelForMaskedLM"), [], batch_size=0)
