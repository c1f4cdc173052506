"""How much memory a piece of work takes."""

import contextlib
import resource
import sys
from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """The most memory in bytes that is held while the block runs, beyond what was held when it began.

        with PeakMemory(device) as memory:
            ...
        print(memory.bytes)

    On a CUDA device, what torch allocates there. On the CPU, what the process holds: on Linux its high-water mark is
    set back at the start; elsewhere it cannot be, and what was held before at some time hides what is held now.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            _reset_peak()
            self._before = _peak()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        else:
            self.bytes = _peak() - self._before


def _reset_peak() -> None:
    # not Linux, or not allowed: see above
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def _peak() -> int:
    """Largest resident size of this process since the last reset, in bytes."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
