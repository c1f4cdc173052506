"""The tokenizer that is saved with a checkpoint, and none that is made up."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel


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


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer of the Hub id or folder that a model was loaded from.

    Raises:
        OSError: there is none.
        ValueError: the model was not loaded from anywhere, or the tokenizer cannot be loaded.
    """
    if not model.config.name_or_path:
        raise ValueError("tokenizer is missing: the model given tells no folder or Hub id to load it from.")
    return load_tokenizer(model.config.name_or_path)
