"""Options of the command line, made of the fields of dataclasses, so that each is described once."""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def add_option_groups(parser: argparse.ArgumentParser, main: Sequence[str], parts: Mapping[str, type]) -> None:
    """The options of a command: the main ones first, and all others in groups called advanced.

    Args:
        parser: of the command; its usage shows the options that are required.
        main: fields of the main options, in the order in which they are shown.
        parts: title of a group -> dataclass. A field that an earlier part has is not added again.
    """
    shown = set(main)
    group = parser.add_argument_group("main options")
    for name in main:
        owner = next(part for part in parts.values() if name in {f.name for f in dataclasses.fields(part)})
        add_options(group, owner, only=[name])
    for title, part in parts.items():
        names = [f.name for f in dataclasses.fields(part) if f.name not in shown]
        if names:
            add_options(parser.add_argument_group(f"advanced: {title}"), part, only=names)
        shown.update(names)
    actions = parser._actions
    places = [str(action.metavar) for action in actions if not action.option_strings]
    required = [f"{action.option_strings[0]} {action.metavar or '...'}" for action in actions if _is_required(action)]
    parser.usage = " ".join(["%(prog)s", *places, *required, "[options]"])


def _is_required(action: argparse.Action) -> bool:
    return action.required and bool(action.option_strings)


def add_options(parser: Any, options: type, *, only: Collection[str]) -> None:
    """One command line option for each of these fields of a dataclass; an option that is not given leaves no trace."""
    hints = typing.get_type_hints(options)
    for f in dataclasses.fields(options):
        if f.name not in only:
            continue
        # X | None -> X
        kinds = [kind for kind in typing.get_args(hints[f.name]) if kind is not types.NoneType]
        kind = kinds[0] if isinstance(hints[f.name], types.UnionType) else hints[f.name]
        settings: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": f.metadata["help"]}
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is dict:
            settings |= {"type": json_object, "metavar": "JSON"}
        elif typing.get_origin(kind) is list:
            settings |= {"nargs": "+", "type": typing.get_args(kind)[0], "metavar": f.name.upper()}
        else:
            settings |= {"type": kind, "choices": f.metadata.get("choices")}
            if "choices" not in f.metadata:
                settings["metavar"] = f.name.upper()
        if f.default is dataclasses.MISSING:
            settings["required"] = f.default_factory is dataclasses.MISSING
        elif f.default is not None and "Default:" not in f.metadata["help"]:
            settings["help"] += f" Default: {f.default}."
        parser.add_argument(f"--{f.name.replace('_', '-')}", **settings)


def json_object(text: str) -> Any:
    """A value that is given as JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def taken(given: dict[str, Any], options: type[T]) -> T:
    """An object of a dataclass, made of the options that were given; they are taken out of `given`."""
    return options(**{f.name: given.pop(f.name) for f in dataclasses.fields(options) if f.name in given})  # type: ignore[arg-type]
