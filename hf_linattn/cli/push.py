"""`hf-linattn push`: publish a converted checkpoint on the Hub, with a model card."""

import argparse
from pathlib import Path
from typing import Any

from ..publish import PushConfig, push
from ..publish.upload import DRY_CARD
from .options import add_option_groups

MAIN = ("repo", "private", "report", "base_model", "license", "dry_run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("folder", metavar="FOLDER", help="Converted checkpoint.")
    add_option_groups(parser, MAIN, {"upload": PushConfig})


def run(given: dict[str, Any]) -> None:
    """Push, and tell where to."""
    folder = given.pop("folder")
    config = PushConfig(**given)
    pushed = push(folder, config)
    if not config.dry_run:
        print(f"{folder} -> {pushed.url} (revision {pushed.revision})")
        return
    print(f"{folder} would go to {pushed.url} (branch {pushed.revision}):")
    print("\n".join(f"  {name}" for name in pushed.files))
    card = Path(folder) / ("README.md" if "README.md" in pushed.files else DRY_CARD)
    print(f"Nothing was sent. Model card: {card}")
