"""Rows of running text with a planted key or a repeated passage, from which a model learns to look far back.

Keys are planted as in the passkey task (`synthetic`), with other words and numbers than that asks for.
"""

from collections.abc import Sequence
from typing import Any

from .synthetic import Draw, SyntheticConfig, Wording, passkey
from .tokenizers import encoder_of
from .vocabulary import Vocabulary

#: Not the words of the passkey task, which evaluates.
WORDING = Wording(
    before=" The secret number is",
    after=". Keep it in mind.",
    question=" What was the secret number? The secret number was",
)
#: Digits of a key; those of the task are fewer.
DIGITS = 7
# Tokens of a row below which nothing is changed, and the share of a row that is repeated.
_LEAST, _REPEATED = 8, 4


class Planter:
    """Plants keys and repeats passages in rows of token ids.

    Args:
        tokenizer: that made the rows.
    """

    def __init__(self, tokenizer: Any) -> None:
        encode = encoder_of(tokenizer)
        self._special = set(tokenizer.all_special_ids)
        self._words = Vocabulary(size=len(tokenizer), encode=encode, symbols=())
        # tokens beside the running text: every key has as many digits, but not as many tokens
        self._least = len(encode(WORDING.before + WORDING.after + WORDING.question)) + 2 * DIGITS + 4

    def plant(self, ids: Sequence[int], seed: str) -> list[int]:
        """The row with a key that is asked for at its end, or with a passage of it again at its end.

        It stays as long as it is, and keeps the special tokens around its text; which of the two it gets is drawn. A
        row without room for a key gets a passage, and a very short one nothing.
        """
        begin, end = 0, len(ids)
        while begin < end and ids[begin] in self._special:
            begin += 1
        while end > begin and ids[end - 1] in self._special:
            end -= 1
        text, draw = list(ids[begin:end]), Draw(seed)
        wants_key = draw.below(2) == 0
        if wants_key and len(text) >= self._least:
            config = SyntheticConfig(task="passkey", length=len(text), digits=DIGITS)
            text = passkey([text], config, self._words, draw, len(text), WORDING).ids
        elif len(text) >= _LEAST:
            repeated = len(text) // _REPEATED
            kept = len(text) - repeated
            start = draw.below(kept - repeated + 1)
            text = [*text[:kept], *text[start : start + repeated]]
        return [*ids[:begin], *text, *ids[end:]]
