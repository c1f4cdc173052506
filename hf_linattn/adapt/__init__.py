"""Adaptation of converted models: attention transfer, distillation, task training, LoRA."""

from .config import AdaptConfig
from .run import adapt

__all__ = ["AdaptConfig", "adapt"]
