"""The command `hf-linattn`."""

from .main import main

__all__ = ["main"]
