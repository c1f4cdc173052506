"""The tokenizer that is saved with a checkpoint, and none that is made up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging


def load_tokenizer(model_id: str | Path, **hub_kwargs: Any) -> Any:
    """The tokenizer of a Hub id or folder.

    Raises:
        OSError: there is none.
        ValueError: it cannot be loaded.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(model_id), **hub_kwargs)
    # where there are no files, some versions of Transformers make one up that knows special tokens only
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise OSError(f"No tokenizer was found with {str(model_id)!r}: what Transformers makes up knows no words.")
    return tokenizer


def encoder_of(tokenizer: Any) -> Callable[[str], list[int]]:
    """What gives the token ids of a text, without special tokens."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


def special_tokens_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The token ids that a tokenizer puts before and after a text."""
    text, whole = encoder_of(tokenizer)("a"), list(tokenizer("a")["input_ids"])
    start = next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)
    return whole[:start], whole[start + len(text) :]


def check_vocabulary(source: str | Path, vocab_size: int, **hub_kwargs: Any) -> None:
    """Whether a model knows all words of the tokenizer that lies beside it, where one does.

    Tokens that were added later may be missing in the model, as is common for padding, and are warned of.

    Raises:
        ValueError: the tokenizer is another model's.
    """
    try:
        tokenizer = load_tokenizer(source, **hub_kwargs)
    except (OSError, ValueError):
        return
    added = tokenizer.get_added_vocab()
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= vocab_size)
    if not beyond:
        return
    index, token = next(((index, token) for index, token in beyond if token not in added), beyond[0])
    told = (
        f"The tokenizer of {str(source)!r} gives its token {token!r} the id {index}, and the model's "
        f"vocab_size={vocab_size} allows 0 to {vocab_size - 1}"
    )
    if token not in added:
        raise ValueError(f"{told}: it is another model's.")
    logging.get_logger(__name__).warning(f"{told}: texts must not hold it.")


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer of the Hub id or folder that a model was loaded from.

    Raises:
        OSError: there is none.
        ValueError: the model was not loaded from anywhere, or the tokenizer cannot be loaded.
    """
    if not model.config.name_or_path:
        raise ValueError("tokenizer is missing: the model given tells no folder or Hub id to load it from.")
    return load_tokenizer(model.config.name_or_path)
