"""The tokenizer that is saved with a checkpoint, and none that is made up."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


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
