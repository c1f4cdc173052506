"""Adaptation of converted models: attention transfer, distillation, task training, LoRA."""

from .adaptation import adapt
from .config import AdaptConfig

__all__ = ["AdaptConfig", "adapt"]
