"""Linear-time attention (Linformer, Performer) for pretrained BERT- and GPT-2-family checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

from .modeling.code_version import __version__  # noqa: F401
from .registration import register

if TYPE_CHECKING:
    from .conversion.architectures import register_architecture
    from .conversion.checkpoint import convert_checkpoint
    from .conversion.convert import convert
    from .modeling.architectures import Architecture
    from .modeling.configuration_linattn import AttentionConfig, LayerwiseConfig, LinformerConfig, PerformerConfig
    from .modeling.modeling_linattn import LinAttnPreTrainedModel

__all__ = [
    "Architecture",
    "AttentionConfig",
    "LayerwiseConfig",
    "LinAttnPreTrainedModel",
    "LinformerConfig",
    "PerformerConfig",
    "convert",
    "convert_checkpoint",
    "register_architecture",
]

# where each name comes from: imported when it is asked for, since it takes torch and seconds
_MODULES = {
    **dict.fromkeys(
        ("AttentionConfig", "LayerwiseConfig", "LinformerConfig", "PerformerConfig"), "modeling.configuration_linattn"
    ),
    "LinAttnPreTrainedModel": "modeling.modeling_linattn",
    "convert": "conversion.convert",
    "convert_checkpoint": "conversion.checkpoint",
    "register_architecture": "conversion.architectures",
    "Architecture": "modeling.architectures",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
