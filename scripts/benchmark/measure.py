"""Seconds and memory of work. Nothing here imports hf_linattn, of which an older checkout may be measured."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

MIB, GIB = 1024**2, 1024**3


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most memory in bytes that `work` took beyond what was held before.

    On a CUDA device, what torch allocates there. On the CPU, what the process holds, which is right in a fresh process
    only: memory that was freed earlier may still be held. On Linux the process's high-water mark is reset first.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # not Linux, or not allowed
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = process_peak()
    work()
    return process_peak() - before


def process_peak() -> int:
    """Largest memory in bytes that this process held, on Linux since the high-water mark was last reset."""
    with contextlib.suppress(OSError, StopIteration):
        # not getrusage: its peak is also that of the process that started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def free_memory() -> float:
    """GiB that a process can take without ending others, with some to spare."""
    return 0.85 * psutil.virtual_memory().available / GIB


def limit_memory(gib: float) -> None:
    """Fail where more is asked for, before the machine ends this process or others (Linux only)."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * GIB), resource.RLIM_INFINITY))
