"""How tasks of known answer become token ids: with a tokenizer, or without one for models that are trained on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .tokenizers import encoder_of, special_tokens_of

# ids of a vocabulary without a tokenizer; what it can say comes after them
_PADDING, _SEPARATOR, _MASK = range(3)
_SPECIAL = 3


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a task needs to know of a model's tokens.

    Attributes:
        size: number of token ids.
        encode: the token ids of a piece of text, without special tokens.
        symbols: ids of the tokens that random sequences are made of.
        separator: ids of what stands between the parts of a sequence.
        prefix, suffix: ids of the special tokens that a text begins and ends with.
        mask: id of the mask token; None for a model that has none.
        padding: id that fills shorter sequences of a batch.
    """

    size: int
    encode: Callable[[str], list[int]]
    symbols: Sequence[int]
    separator: Sequence[int] = (_SEPARATOR,)
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    mask: int | None = _MASK
    padding: int = _PADDING

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> "Vocabulary":
        """The vocabulary of a pretrained model.

        Random sequences are made of its tokens that are a whole word of letters a to z: pieces of words, and
        tokens that the model has hardly seen, would make a task harder than it means to be.

        Raises:
            ValueError: the tokenizer has neither a line break nor a separator token, or no such words.
        """

        encode = encoder_of(tokenizer)
        special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        # a space before a word is written Ġ or ▁ by the tokenizers that have it in the word
        symbols = sorted(
            index
            for token, index in tokenizer.get_vocab().items()
            if index not in special and (word := token.lstrip("Ġ▁")).isascii() and word.isalpha()
        )
        if len(symbols) < 2:
            raise ValueError("The tokenizer has no tokens that are a word of letters; a task needs at least two.")
        # a word-piece tokenizer drops line breaks, and has a token for the purpose
        separator = encode("\n") or [tokenizer.sep_token_id]
        if separator == [None]:
            raise ValueError("The tokenizer drops line breaks and has no sep_token: nothing can part a sequence.")
        prefix, suffix = special_tokens_of(tokenizer)
        return cls(
            size=len(tokenizer),
            encode=encode,
            symbols=symbols,
            separator=separator,
            prefix=prefix,
            suffix=suffix,
            mask=tokenizer.mask_token_id,
            padding=tokenizer.pad_token_id or 0,
        )

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "Vocabulary":
        """One token for each of some words, and for padding, separator and mask. A text is words with spaces between.

        Raises:
            ValueError: a word is there twice; and later, on encoding a text, a word of it is not there.
        """
        ids = {word: _SPECIAL + index for index, word in enumerate(words)}
        if len(ids) != len(words):
            raise ValueError("words: each must be there once.")

        def encode(text: str) -> list[int]:
            if unknown := [word for word in text.split() if word not in ids]:
                raise ValueError(f"{unknown[0]!r} is not one of the {len(ids)} words of this vocabulary.")
            return [ids[word] for word in text.split()]

        return cls(size=_SPECIAL + len(words), encode=encode, symbols=range(_SPECIAL, _SPECIAL + len(words)))

    @classmethod
    def from_bytes(cls) -> "Vocabulary":
        """One token for each byte of a text in UTF-8, and for padding, separator and mask."""
        return cls(
            size=_SPECIAL + 256,
            encode=lambda text: [_SPECIAL + byte for byte in text.encode("utf-8")],
            symbols=range(_SPECIAL, _SPECIAL + 256),
        )
