"""Files and folders that are written whole or not at all."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors of a disk that is full, of a quota, and of a limit to the size of files.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


def is_full(error: Exception) -> bool:
    """Whether an error is that of a full disk."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # safetensors and tokenizers have classes of their own, and the number in the text only
    return any(f"os error {number})" in str(error) for number in _FULL)


@contextmanager
def full_disk(text: Callable[[Exception], str]) -> Iterator[None]:
    """Around writing: the error of a full disk, which names a file of the package or none, says `text` of it instead.

    Raises:
        OSError: the disk is full.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise OSError(text(error)) from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8 that is there when it is complete, and not before."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def inside(folder: str | Path, name: str, *, file: str, field: str) -> Path:
    """The path of what a checkpoint's own file calls `name`, which must lie in `folder`, links followed.

    A snapshot in the Hugging Face cache holds links to the blobs of its repository; these are followed.

    Args:
        folder: the checkpoint's.
        name: path within it.
        file, field: where the name comes from, for the message.

    Raises:
        ValueError: the name is no text, or leads out of the folder; the message names file, field and value.
    """
    folder = Path(folder)
    told = f"{str(folder / file)!r}: {field}={name!r}"
    if not isinstance(name, str):
        raise ValueError(f"{told} must be a path within the folder.")
    root, path = folder.resolve(), folder / name
    # without following links: a name may not climb out of the folder, wherever that leads
    climbed = Path(os.path.normpath(root / name))
    if not climbed.is_relative_to(root):
        raise ValueError(f"{told} leads out of the folder; it must be a path within the folder.")
    if not path.resolve().is_relative_to(root) and not _is_blob(root, climbed):
        raise ValueError(f"{told} is a link that leads out of the folder; put the file itself there.")
    return path


def _is_blob(folder: Path, link: Path) -> bool:
    """Whether a link of a snapshot in the Hugging Face cache leads to a blob of the same repository.

    The blob may itself be a link into the store that all repositories of the cache share.
    """
    for snapshots in folder.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            break
    else:
        return False
    # the folder that the link lies in, whose own links must not lead out
    place = link.parent.resolve()
    if not place.is_relative_to(folder) or not link.is_symlink():
        return False
    blob = Path(os.path.normpath(place / os.readlink(link)))
    blobs, shared = repository / "blobs", repository.parent / "blobs"
    return blob.parent == blobs and any(blob.resolve().is_relative_to(allowed) for allowed in (blobs, shared))
