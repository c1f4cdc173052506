"""Real English documents that every CPython has: the topics of `pydoc_data`."""

from pydoc_data.topics import topics
from typing import Any

# Longer than any topic in characters per token: what is cut off before the tokenizer would be cut off after it.
_CHARACTERS_PER_TOKEN = 12


def topic_documents(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Token ids, special ones included, of the `count` longest topics, each cut to `length` tokens.

    Raises:
        ValueError: fewer topics are that long.
    """
    texts = sorted(topics.values(), key=len, reverse=True)
    documents = [_cut(tokenizer, text, length) for text in texts[:count]]
    if len(documents) < count or len(documents[-1]) < length:
        complete = sum(len(document) == length for document in documents)
        raise ValueError(f"count={count}: only {complete} topics have {length} tokens.")
    return documents


def joined_document(tokenizer: Any, length: int) -> list[int]:
    """Token ids of one document of `length` tokens: the topics in alphabetical order, as often as it takes."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    repeats = -(-length * _CHARACTERS_PER_TOKEN // len(text))
    return _cut(tokenizer, "\n\n".join([text] * repeats), length)


def _cut(tokenizer: Any, text: str, length: int) -> list[int]:
    return tokenizer(text[: length * _CHARACTERS_PER_TOKEN], truncation=True, max_length=length)["input_ids"]
