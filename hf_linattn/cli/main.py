"""The command `hf-linattn`."""

import argparse
import difflib
import importlib
import shlex
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NoReturn

from safetensors import SafetensorError

from .. import __version__

#: name of a command, which is also that of its file in this folder -> what it does
COMMANDS = {
    "convert": "Give a checkpoint linear attention.",
    "analyze": "Show how low-rank its attention is, and suggest what to convert.",
    "evaluate": "Compare a checkpoint with its conversions.",
    "adapt": "Train a converted checkpoint: transfer, distillation, a task.",
    "push": "Publish a converted checkpoint on the Hub, with a model card.",
}

# command -> its page in docs/how-to, where that has another name
_PAGES = {"push": "publish"}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, which is longer than a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hf-linattn: {message}; {self.prog} --help describes the options.\n")

    def check_names(self, arguments: Iterable[str]) -> None:
        """Whether all options of this command line exist: argparse would name what is missing before what is wrong."""
        known = list(self._option_string_actions)
        for argument in arguments:
            name = argument.partition("=")[0]
            if name == "--":
                return
            if name.startswith("--") and name not in known:
                self.error(f"there is no option {name}{_suggestion(name, known)}")


def _suggestion(name: str, known: Sequence[str]) -> str:
    """The names that may have been meant: those that start like it, or else look like it."""
    meant = [other for other in known if other.startswith(name)] or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {' or '.join(meant[:3])}?" if meant else ""


def _parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """The parser, with the options of the command that is asked for; the other ones are not even imported."""
    parser = _Parser(prog="hf-linattn", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"hf-linattn {__version__}")
    commands = parser.add_subparsers(dest="command")
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    if asked is not None and asked not in COMMANDS:
        parser.error(f"there is no command {asked!r}{_suggestion(asked, list(COMMANDS)) or ': ' + ', '.join(COMMANDS)}")
    module = None
    for name, description in COMMANDS.items():
        command = commands.add_parser(
            name, help=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == asked:
            module = importlib.import_module(f".{name}", __package__)
            parts = (
                description,
                getattr(module, "START", ""),
                f"documentation: docs/how-to/{_PAGES.get(name, name)}.md",
            )
            command.description = "\n\n".join(part for part in parts if part)
            module.add_arguments(command)
            command.check_names(arguments[arguments.index(name) + 1 :])
    return parser, module


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user's making are one line, not a traceback. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    interrupted, model = "nothing was written", ""
    try:
        # here, where an interrupt is expected, since these imports take seconds
        parser, module = _parser(arguments)
        given = vars(parser.parse_args(arguments))
        given.pop("command")
        if module is None:
            parser.print_help()
            return 0
        interrupted, model = given.pop("interrupted", interrupted), given.get("model", model)
        if "command_line" in given:
            given["command_line"] = shlex.join(["hf-linattn", *arguments])
        # the bar over the layers is ours; the loader's own adds nothing for models of this size
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
        status = module.run(given)
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError, SafetensorError) as error:
        print(f"hf-linattn: {_text(error, model)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"hf-linattn: interrupted; {interrupted}.", file=sys.stderr)
        return 130
    return status or 0


def _text(error: Exception, model: str) -> str:
    """What an error says, without the advice of another library that does not know what was asked for."""
    text = str(error)
    if isinstance(error, OSError) and text.startswith("We couldn't connect to"):
        return f"{model!r} is no folder, and no Hub id that can be reached: {text.splitlines()[0]}"
    return text
