"""What one attention layer and the rest of a model cost, by method: time on this machine, memory and operations."""

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Runs of which the median counts, after one that does not.
_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one document.

    Attributes:
        time: seconds of a forward pass.
        memory: bytes that are held at most while it runs, its results included and its inputs not.
        operations: floating-point operations of matrix products.
    """

    time: float
    memory: float
    operations: float


class _PeakBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, for as long as these live."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # a view has the storage of what it views, which may be an input
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage()._cdata)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (address := tensor.untyped_storage()._cdata) not in self._known:
                self._known.add(address)
                size = tensor.untyped_storage().nbytes()
                self.held += size
                self.peak = max(self.peak, self.held)
                weakref.finalize(tensor.untyped_storage(), self._free, address, size)
        return out

    def _free(self, address: int, size: int) -> None:
        self.held -= size
        self._known.discard(address)


@torch.no_grad()
def measure(run: Callable[[], Any], device: torch.device, operations: float) -> Cost:
    """The cost of `run`, which is called some times; `operations` are counted elsewhere."""
    run()
    times = []
    for _ in range(_RUNS):
        _finish(device)
        begin = time.perf_counter()
        run()
        _finish(device)
        times.append(time.perf_counter() - begin)
    with _PeakBytes() as memory:
        result = run()
    del result
    return Cost(time=statistics.median(times), memory=memory.peak, operations=operations)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
