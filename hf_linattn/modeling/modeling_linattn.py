"""The model classes: each supported head of each family, with linear attention under its attention modules.

`LinAttnBertForMaskedLM` is `BertForMaskedLM` in everything but its attention function. The classes are
made from Transformers' own list of heads, and are attributes of this module under their names.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from .configuration_linattn import CONFIG_CLASSES, AttentionConfig, LinAttnConfig
from .families import FAMILIES, Family
from .linformer import LinformerAttention
from .performer import PerformerAttention
from .seam import ATTENTION_NAME

#: The heads that can be converted, by the auto class that loads them.
AUTO_CLASSES = (
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForPreTraining",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForMultipleChoice",
    "AutoModelForQuestionAnswering",
    "AutoModelForNextSentencePrediction",
)

LinearAttention: TypeAlias = LinformerAttention | PerformerAttention
_METHOD_MODULES: dict[str, type[Any]] = {"linformer": LinformerAttention, "performer": PerformerAttention}


class LinAttnPreTrainedModel(PreTrainedModel):
    """What all converted models add to the model of their family: it stands before that in the list of bases."""

    config: LinAttnConfig

    def __init__(self, config: LinAttnConfig, *inputs: Any, **kwargs: Any) -> None:
        attention_config = config.attention
        family = FAMILIES[config.base_model_type]
        _check_config(config, attention_config, family)
        super().__init__(config, *inputs, **kwargs)
        _attach(self, family, attention_config)
        self.base_model.register_forward_pre_hook(_before_forward, with_kwargs=True)

    @property
    def attention_config(self) -> AttentionConfig:
        """The settings that all converted layers share."""
        return next(self.linear_attentions())[1].config

    def linear_attentions(self) -> Iterator[tuple[str, LinearAttention]]:
        """Names and modules of the converted layers' linear attention, first layer first."""
        for name, module in self.named_modules():
            if isinstance(module, (LinformerAttention, PerformerAttention)):
                yield name, module

    def redraw_features(self) -> None:
        """Draw the random directions of every Performer layer anew; the next draw is recorded and reproducible."""
        for _, module in self.linear_attentions():
            if isinstance(module, PerformerAttention):
                module.feature_map.redraw()

    def set_branches(self, *, near: bool = True, far: bool = True) -> None:
        """Switch the exact part or the method's own part off or on, in every layer and in the config.

        Raises:
            ValueError: nothing would be left to attend to.
        """
        settings = {**self.config.attention.to_dict(), "near": near, "far": far}
        AttentionConfig.from_dict(settings)
        self.config.linattn = settings
        for _, module in self.linear_attentions():
            module.config.near, module.config.far = near, far

    def initialize_weights(self) -> None:
        super().initialize_weights()  # type: ignore[operator]  # wrapped by decorators without types
        # `_init_weights` of the base model inside this one does not know these modules
        for _, module in self.linear_attentions():
            module.reset_parameters()

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention not in (None, ATTENTION_NAME):
            raise ValueError(
                f"attn_implementation={requested_attention!r}: a converted model has its own attention; leave it out."
            )
        return ATTENTION_NAME

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        # every head of the family can be loaded from the folder, not only the one that was saved
        self.config.auto_map = auto_map(self.config.base_model_type)
        super().save_pretrained(save_directory, *args, **kwargs)


def _check_config(config: LinAttnConfig, attention_config: AttentionConfig, family: Family) -> None:
    name = type(config).__name__
    if getattr(config, "is_decoder", False):
        raise ValueError(f"{name}: is_decoder=True is not supported: a converted {family.model_type} is an encoder.")
    if attention_config.max_length is None:
        raise ValueError(f"{name}: linattn.max_length is missing; hf_linattn.convert sets it.")
    positions = config.max_position_embeddings - position_offset(config)
    if attention_config.max_length > positions:
        raise ValueError(
            f"{name}: linattn.max_length={attention_config.max_length} is more than the {positions} positions of "
            f"max_position_embeddings={config.max_position_embeddings}."
        )
    if attention_config.layers is not None:
        if family.shares_layers:
            raise ValueError(
                f"{name}: layers={attention_config.layers} cannot be chosen: {family.model_type} has one attention "
                "module for all layers."
            )
        if max(attention_config.layers) >= config.num_hidden_layers:
            raise ValueError(
                f"{name}: layers={attention_config.layers}; the model has layers 0 to {config.num_hidden_layers - 1}."
            )


def position_offset(config: Any) -> int:
    """How many rows at the start of the position table belong to no position (RoBERTa: up to the padding id)."""
    family = FAMILIES[getattr(config, "base_model_type", config.model_type)]
    return config.pad_token_id + 1 if family.positions_after_padding else 0


def _attach(model: nn.Module, family: Family, config: AttentionConfig) -> None:
    """Hang one linear attention module, named `linattn`, under each attention module that is converted."""
    attentions = [module for module in model.modules() if type(module).__name__ == family.attention]
    shared = None
    for index, attention in enumerate(attentions):
        if config.layers is not None and index not in config.layers:
            continue
        attention.linattn = linear_attention(config, model.config, index, shared)
        if getattr(config, "sharing", None) == "layers" and shared is None:
            shared = attention.linattn


def linear_attention(
    config: AttentionConfig, model_config: Any, index: int, shared: LinearAttention | None = None
) -> LinearAttention:
    """The linear attention of layer `index`, initialised from the config's seed.

    `shared` is the first layer's module where all layers share one projection.
    """
    options = {"shared": shared} if shared is not None else {}
    return _METHOD_MODULES[config.method](
        config,
        num_heads=model_config.num_attention_heads,
        head_dim=model_config.hidden_size // model_config.num_attention_heads,
        # far apart: no two layers of any two seeds that people choose draw the same numbers
        seed=config.seed * 1_000_003 + index,
        **options,
    )


def _before_forward(base_model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks of the inputs that would otherwise fail deep inside, or not at all; and the redraw in training."""
    config = base_model.config
    settings = config.linattn
    inputs = kwargs.get("input_ids", args[0] if args else None)
    embeds = kwargs.get("inputs_embeds")
    shape = inputs.shape if inputs is not None else embeds.shape[:-1] if embeds is not None else None
    if shape is not None and shape[-1] > settings["max_length"]:
        raise ValueError(
            f"The input is {shape[-1]} tokens long, and the model takes at most max_length={settings['max_length']}. "
            "Truncate it, or convert the base model with a higher max_length."
        )
    if kwargs.get("output_attentions", getattr(config, "output_attentions", False)):
        raise ValueError(
            "output_attentions=True: linear attention forms no matrix of attention probabilities. Ask the base model."
        )
    if base_model.training and settings.get("redraw_interval"):
        for module in base_model.modules():
            if isinstance(module, PerformerAttention):
                module.count_training_forward()


def auto_map(model_type: str) -> dict[str, str]:
    """Auto class -> file.class for every head of a family, as `trust_remote_code` loading reads it."""
    config_class = CONFIG_CLASSES[model_type]
    entries: dict[str, type] = {"AutoConfig": config_class}
    entries |= {auto: classes[model_type] for auto, classes in MODEL_CLASSES.items() if model_type in classes}
    return {auto: f"{cls.__module__.rpartition('.')[-1]}.{cls.__name__}" for auto, cls in entries.items()}


def _model_classes() -> dict[str, dict[str, type[LinAttnPreTrainedModel]]]:
    """Auto class -> base model_type -> converted model class."""
    made: dict[type, type[LinAttnPreTrainedModel]] = {}
    classes: dict[str, dict[str, type[LinAttnPreTrainedModel]]] = {}
    for auto in AUTO_CLASSES:
        mapping = getattr(modeling_auto, auto)._model_mapping
        classes[auto] = {}
        for model_type, config_class in CONFIG_CLASSES.items():
            # the family's own config comes after LinAttnConfig in the list of bases
            base_config = config_class.__bases__[1]
            if base_config not in mapping:
                continue
            base = mapping[base_config]
            if base not in made:
                made[base] = type(
                    f"LinAttn{base.__name__}",
                    (LinAttnPreTrainedModel, base),
                    {
                        "__module__": __name__,
                        "__doc__": f"`{base.__name__}` converted to linear attention.",
                        "config_class": config_class,
                        "_auto_class": auto,
                    },
                )
            classes[auto][model_type] = made[base]
    return classes


#: Auto class -> base model_type -> model class; each class is also an attribute of this module.
MODEL_CLASSES = _model_classes()
for _classes in MODEL_CLASSES.values():
    for _class in _classes.values():
        setattr(sys.modules[__name__], _class.__name__, _class)
