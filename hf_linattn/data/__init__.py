"""Documents and tokenizers."""

from .documents import DataConfig

__all__ = ["DataConfig"]
