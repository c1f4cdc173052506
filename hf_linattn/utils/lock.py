"""One process to a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if it is not there, until the block ends.

    The operating system takes the lock back when the process ends, however it ends.

    Raises:
        FileExistsError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise FileExistsError(f"Another process is at work in {str(folder)!r}; wait for it.") from error
    try:
        yield
    finally:
        lock.release()
