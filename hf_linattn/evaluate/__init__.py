"""Comparisons of a checkpoint with its conversions: quality with intervals, time, memory, fidelity, report."""

from .compare import CompareConfig, compare
from .task import TaskConfig
from .tasks import TASKS

__all__ = ["TASKS", "CompareConfig", "TaskConfig", "compare"]
