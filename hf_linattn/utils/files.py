"""Files and folders that are written whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write a file or a folder to, which takes the place of the file `path` once the block has ended.

        with replacing(folder / "report.json") as unfinished:
            unfinished.write_text(text)

    An error or an interrupt in the block leaves `path` as it was and nothing beside it. Two processes do not meet.
    """
    path = Path(path)
    # the same ending: some writers choose the format by it
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8 that is there when it is complete, and not before."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
