"""Linear-time attention (Linformer, Performer) for pretrained BERT- and GPT-2-family checkpoints."""

from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from .conversion.checkpoint import convert_checkpoint
from .conversion.convert import convert
from .modeling.configuration_linattn import (
    CONFIG_CLASSES,
    AttentionConfig,
    LayerwiseConfig,
    LinformerConfig,
    PerformerConfig,
)
from .modeling.modeling_linattn import MODEL_CLASSES, LinAttnPreTrainedModel

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "LayerwiseConfig",
    "LinAttnPreTrainedModel",
    "LinformerConfig",
    "PerformerConfig",
    "convert",
    "convert_checkpoint",
]

for _config_class in CONFIG_CLASSES.values():
    AutoConfig.register(_config_class.model_type, _config_class)
for _auto_class, _by_family in MODEL_CLASSES.items():
    for _model_type, _model_class in _by_family.items():
        getattr(modeling_auto, _auto_class).register(CONFIG_CLASSES[_model_type], _model_class)
