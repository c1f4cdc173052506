"""Hooks of PyTorch modules that are gone when a block ends."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def hooked(handles: Iterable[Any] = ()) -> Iterator[list[Any]]:
    """A list of hook handles, to which the block may add, all of which are removed when it ends.

    with hooked([module.register_forward_hook(keep)]) as handles:
        handles.append(other.register_forward_pre_hook(watch))
    """
    registered = list(handles)
    try:
        yield registered
    finally:
        for handle in registered:
            handle.remove()
