"""Comparisons of a checkpoint with its conversions: quality with intervals, time, memory, fidelity, report."""

from .compare import CompareConfig, compare
from .tasks import TASKS, TaskConfig

__all__ = ["TASKS", "CompareConfig", "TaskConfig", "compare"]
