"""Paths of this machine: what is written for others has names in their place."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

# an absolute path, one of a home folder, one that climbs, or one of Windows; Hub ids and addresses are none
_PATH = re.compile(r"(/[^/\s]|~/|~$|\.{1,2}/|[A-Za-z]:[\\/]|\\\\)")


def is_path(text: str) -> bool:
    """Whether a text can only be the path of a file or folder, and is no Hub id."""
    return "\n" not in text and _PATH.match(text) is not None


def name_of_path(text: str) -> str:
    """The last part of a path; of any other text the text itself."""
    if not is_path(text):
        return text
    # knows both separators
    return PureWindowsPath(Path(text).expanduser().name).name or text.strip("/\\~.") or "folder"


def without_paths(value: Any) -> Any:
    """Plain JSON with each path replaced by its last part."""
    if isinstance(value, str):
        return name_of_path(value)
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    return value


def command_without_paths(command: str) -> str:
    """A command line with each path replaced by its last part, also behind NAME=."""
    words = []
    for word in shlex.split(command):
        name, equals, value = word.rpartition("=")
        words.append(f"{name}{equals}{name_of_path(value)}")
    return shlex.join(words)
