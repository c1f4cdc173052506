"""Where in a local file something is wrong. Files are read for it once something was found to be."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

#: Endings of the files that are text, without .gz.
TEXT_ENDINGS = (".jsonl", ".json", ".csv", ".txt")


def fault_of(path: Path) -> str | None:
    """The first line of a text file that cannot be read, and why; None where no line is to blame alone."""
    ending = ending_of(path)
    if ending not in TEXT_ENDINGS:
        return None
    for number, line in _lines(path):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            return f"{str(path)!r}, line {number}: byte {byte:#04x} is no UTF-8; save the file in UTF-8."
        if ending == ".jsonl" and text.strip():
            try:
                found = json.loads(text)
            except ValueError as error:
                return f"{str(path)!r}, line {number}: {text.strip()[:40]!r} is no JSON: {error}."
            if not isinstance(found, dict):
                return f'{str(path)!r}, line {number}: {text.strip()[:40]!r} must be an object, as in {{"text": ...}}.'
    return None


def place_of(path: Path, row: int) -> str:
    """Where a row stands, counted from 0: of a jsonl file the line."""
    if path.is_file() and ending_of(path) == ".jsonl":
        filled = (number for number, line in _lines(path) if line.strip())
        number = next((number for index, number in enumerate(filled) if index == row), None)
        if number is not None:
            return f"{str(path)!r}, line {number}"
    return f"{str(path)!r}, row {row}"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from enumerate(file, start=1)


def ending_of(path: Path) -> str:
    """The ending of a file's name, .gz left out."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
