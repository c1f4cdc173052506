"""The teacher: the base model itself, with softmax attention, at the lengths of the converted model."""

import copy
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..conversion.convert import convert
from ..conversion.positions import POSITION_EXTENSIONS
from ..conversion.softmax import SoftmaxAttention
from ..modeling.architectures import ARCHITECTURES, Architecture
from ..modeling.configuration_linattn import PerformerConfig
from ..modeling.modeling_linattn import LinAttnPreTrainedModel, self_attentions, sliding_window


def softmax_teacher(
    model: LinAttnPreTrainedModel, base: str | Path | PreTrainedModel | None = None
) -> LinAttnPreTrainedModel:
    """The softmax model that a converted one imitates: frozen, with as many positions as `model`.

    Args:
        model: the converted model.
        base: the Hub id, folder or loaded model that `model` was converted from. Default: `model` itself, whose
            weights are those of its base until they are trained.

    Raises:
        ValueError: the two are not of the same architecture and size.
    """
    architecture = ARCHITECTURES[model.config.base_model_type]
    teacher = copy.deepcopy(model) if base is None else _extended(base, model, architecture)
    for _, attention in self_attentions(teacher, architecture):
        window = sliding_window(attention)
        attention.linattn = SoftmaxAttention(is_causal=architecture.causal, window=window)
    return teacher.requires_grad_(False).eval()


def _extended(base: str | Path | PreTrainedModel, model: LinAttnPreTrainedModel, architecture: Architecture) -> Any:
    """The base model with the positions of `model`."""
    options: dict[str, Any] = {}
    if not isinstance(base, PreTrainedModel):
        options = {"auto_class": "AutoModelForCausalLM" if architecture.causal else "AutoModel", "dtype": model.dtype}
    options["max_length"] = model.config.linattn["max_length"]
    # of the conversion, only the longer table of positions stays
    teachers = [
        convert(base, PerformerConfig(num_features=1), position_extension=extension, **options)
        for extension in (POSITION_EXTENSIONS if architecture.position_table else POSITION_EXTENSIONS[:1])
    ]
    teacher = teachers[0]
    if teacher.config.model_type != model.config.model_type:
        raise ValueError(
            f"base has model_type={teacher.config.base_model_type!r}, and the model to adapt was converted from "
            f"{model.config.base_model_type!r}."
        )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        ours, theirs = getattr(model.config, name), getattr(teacher.config, name)
        if ours != theirs:
            raise ValueError(f"base has {name}={theirs}, and the model to adapt {name}={ours}.")
    if architecture.position_table is None:
        return teacher
    # how the table of `model` was made longer is not recorded, and its rows may have been trained since
    ours = model.base_model.get_parameter(architecture.position_table).detach()

    def distance(teacher: Any) -> float:
        table = teacher.base_model.get_parameter(architecture.position_table).detach()
        return float((table.to(ours) - ours).norm())

    return min(teachers, key=distance)
