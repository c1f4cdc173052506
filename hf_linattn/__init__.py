"""Linear-time attention (Linformer, Performer) for pretrained BERT- and GPT-2-family checkpoints."""

from .conversion.checkpoint import convert_checkpoint
from .conversion.convert import convert
from .modeling.architectures import ARCHITECTURES, Architecture
from .modeling.configuration_linattn import (
    AttentionConfig,
    LayerwiseConfig,
    LinformerConfig,
    PerformerConfig,
)
from .modeling.modeling_linattn import LinAttnPreTrainedModel
from .registration import add_to_auto_classes, register_architecture

__version__ = "0.1.0"

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

for _model_type in ARCHITECTURES:
    add_to_auto_classes(_model_type)
