"""`hf-linattn push`: publish a converted checkpoint on the Hub, with a model card."""

import argparse
from typing import Any

from ..publish import PushConfig, push
from .options import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("folder", metavar="FOLDER", help="Converted checkpoint.")
    add_options(parser, PushConfig)


def run(given: dict[str, Any]) -> None:
    """Push, and tell where to."""
    folder = given.pop("folder")
    pushed = push(folder, PushConfig(**given))
    print(f"{folder} -> {pushed.url} (revision {pushed.revision})")
