"""The earlier place of `hf_linattn.data.DataConfig`."""

from .data import DataConfig

__all__ = ["DataConfig"]
