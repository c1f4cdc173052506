"""The command `hf-linattn`."""

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

from transformers.utils import logging

from .. import __version__

#: name of a command, which is also that of its file in this folder -> what it does
COMMANDS = {
    "convert": "Give a checkpoint linear attention.",
    "analyze": "Show how low-rank its attention is, and suggest what to convert.",
    "evaluate": "Compare a checkpoint with its conversions.",
    "adapt": "Train a converted checkpoint: transfer, distillation, a task.",
    "push": "Publish a converted checkpoint on the Hub, with a model card.",
}


def _parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """The parser, with the options of the command that is asked for; the other ones are not even imported."""
    parser = argparse.ArgumentParser(prog="hf-linattn", description=__doc__)
    parser.add_argument("--version", action="version", version=f"hf-linattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    module = None
    for name, description in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        if name == asked:
            module = importlib.import_module(f".{name}", __package__)
            module.add_arguments(command)
    return parser, module


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user's making are one line, not a traceback. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, module = _parser(arguments)
    given = vars(parser.parse_args(arguments))
    given.pop("command")
    interrupted = given.pop("interrupted", "nothing was written")
    if "command_line" in given:
        given["command_line"] = shlex.join(["hf-linattn", *arguments])
    # the bar over the layers is ours; the loader's own adds nothing for models of this size
    logging.disable_progress_bar()
    try:
        assert module is not None
        module.run(given)
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        print(f"hf-linattn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"hf-linattn: interrupted; {interrupted}.", file=sys.stderr)
        return 130
    return 0
