"""Architectures that are added to the table after the import."""

import sys
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel

from ..modeling.architectures import ARCHITECTURES, UNAVAILABLE, Architecture
from ..modeling.configuration_linattn import add_config_class
from ..modeling.modeling_linattn import add_model_classes


def register_architecture(architecture: Architecture) -> None:
    """Support one more architecture of Transformers: make its model classes and add them to the Auto classes.

    A checkpoint of it loads where the same call was made before. It holds no modeling files for `trust_remote_code`,
    which know the rows of the package only.

    Raises:
        ValueError: the architecture is supported already, or the installed Transformers does not fit the row; the
            message names the field.
    """
    _check(architecture)
    ARCHITECTURES[architecture.model_type] = architecture
    config_class = add_config_class(architecture)
    AutoConfig.register(config_class.model_type, config_class)
    add_model_classes(architecture)


def _check(row: Architecture) -> None:
    name = f"Architecture: model_type={row.model_type!r}"
    if row.model_type in ARCHITECTURES or row.model_type in UNAVAILABLE:
        raise ValueError(f"{name} has a row already; each model_type has one.")
    config_class: Any = getattr(transformers, f"{row.prefix}Config", None)
    if config_class is None or not row.available:
        raise ValueError(
            f"{name}: prefix={row.prefix!r} and since={row.since!r}; Transformers {transformers.__version__} must be "
            f"as new and have {row.prefix}Config."
        )
    if config_class.model_type != row.model_type:
        raise ValueError(f"{name} must be {config_class.model_type!r}, that of {config_class.__name__}.")
    body: Any = AutoModel._model_mapping[config_class]
    if not body._supports_attention_backend:
        raise ValueError(
            f"{name}: {body.__name__} does not call the attention interface of Transformers "
            "(_supports_attention_backend), through which a conversion works."
        )
    if not hasattr(sys.modules[body.__module__], row.attention):
        raise ValueError(f"{name}: attention={row.attention!r} must be a class of {body.__module__}.")
