"""One run to a folder: a lock that the operating system takes back when its process ends, however it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Held while it lasts.

    Raises:
        FileExistsError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise FileExistsError(f"Another process is at work in {str(folder)!r}; wait for it.") from error
        yield
