"""Options of the command line, made of the fields of dataclasses, so that each is described once."""

import argparse
import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def add_options(parser: Any, options: type, *, skip: frozenset[str] = frozenset()) -> None:
    """One command line option for each field of a dataclass; an option that is not given leaves no trace."""
    hints = typing.get_type_hints(options)
    for f in dataclasses.fields(options):
        if f.name in skip:
            continue
        # X | None -> X
        kinds = [kind for kind in typing.get_args(hints[f.name]) if kind is not types.NoneType]
        kind = kinds[0] if isinstance(hints[f.name], types.UnionType) else hints[f.name]
        settings: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": f.metadata["help"]}
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
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


def taken(given: dict[str, Any], options: type[T]) -> T:
    """An object of a dataclass, made of the options that were given; they are taken out of `given`."""
    return options(**{f.name: given.pop(f.name) for f in dataclasses.fields(options) if f.name in given})  # type: ignore[arg-type]
