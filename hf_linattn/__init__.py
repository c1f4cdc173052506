"""Linear-time attention (Linformer, Performer) for pretrained BERT- and GPT-2-family checkpoints."""

from transformers import AutoConfig

from .conversion.architectures import register_architecture
from .conversion.checkpoint import convert_checkpoint
from .conversion.convert import convert
from .modeling.architectures import Architecture
from .modeling.configuration_linattn import (
    CONFIG_CLASSES,
    AttentionConfig,
    LayerwiseConfig,
    LinformerConfig,
    PerformerConfig,
)
from .modeling.modeling_linattn import LinAttnPreTrainedModel

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

for _config_class in CONFIG_CLASSES.values():
    AutoConfig.register(_config_class.model_type, _config_class)
