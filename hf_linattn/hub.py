"""The earlier place of `hf_linattn.publish`."""

from .publish import PushConfig, push

__all__ = ["PushConfig", "push"]
