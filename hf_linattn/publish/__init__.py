"""Publishing a converted checkpoint on the Hub."""

from .upload import PushConfig, push

__all__ = ["PushConfig", "push"]
