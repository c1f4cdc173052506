"""The model classes: each supported head of each architecture, with linear attention under its attention modules.

`LinAttnBertForMaskedLM` is `BertForMaskedLM` in everything but its attention function. The classes are
made from Transformers' own list of heads, and are attributes of this module under their names.
"""

import inspect
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.auto import modeling_auto

from .architectures import ARCHITECTURES, BUILT_IN, Architecture
from .attention_interface import ATTENTION_NAME, CACHE_KEYWORD
from .blocks import to_blocks  # noqa: F401
from .cache import prepare_cache, tokens_seen
from .causal_projections import CausalProjection  # noqa: F401
from .code_version import check_code, code_version
from .configuration_linattn import CONFIG_CLASSES, AttentionConfig, LinAttnConfig
from .decoder_attention import attend_causally  # noqa: F401
from .decoder_step import step  # noqa: F401
from .encoder_attention import attend  # noqa: F401

# all files of the folder: trust_remote_code in Transformers 5.8 copies what this file imports, and nothing further
from .far_clusters import ClusterFarPart  # noqa: F401
from .far_kept_clusters import CausalKeptClusterFarPart  # noqa: F401
from .far_linformer import LinformerFarPart  # noqa: F401
from .far_part import FarPart  # noqa: F401
from .far_performer import PerformerFarPart  # noqa: F401
from .feature_maps import FeatureMap  # noqa: F401
from .feature_sums import read  # noqa: F401
from .kernels import gated_part  # noqa: F401
from .linear_attention import LinearAttention
from .merge import merge  # noqa: F401
from .methods import METHODS  # noqa: F401
from .moments import Moments  # noqa: F401
from .near import NearPart  # noqa: F401
from .peft_defaults import add_peft_defaults  # noqa: F401
from .projections import Projection  # noqa: F401
from .selection import Selection  # noqa: F401
from .softmax_heads import HeadSplit  # noqa: F401
from .state import State  # noqa: F401
from .validation import check_integer  # noqa: F401

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
    "AutoModelForCausalLM",
)


class LinAttnPreTrainedModel(PreTrainedModel):
    """What all converted models add to the model of their architecture: it stands before that in the list of bases."""

    config: LinAttnConfig

    def __init__(self, config: LinAttnConfig, *inputs: Any, **kwargs: Any) -> None:
        attention_config = config.attention
        architecture = ARCHITECTURES[config.base_model_type]
        check_config(config)
        check_code(config)
        super().__init__(config, *inputs, **kwargs)
        _attach(self, architecture, attention_config)
        body: Any = self.base_model.get_submodule(architecture.body)
        # indices of the layers whose state is kept in the cache
        body.linattn_layers = _converted_layers(config) if architecture.causal else ()
        body.linattn_owner = _owner(config)
        parameters = list(inspect.signature(body.forward).parameters)
        # how the body calls its inputs, and its cache: past_key_values in older versions of Transformers
        body.linattn_inputs = parameters
        body.linattn_cache_keyword = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        body.register_forward_pre_hook(_before_forward, with_kwargs=True)

    @property
    def attention_config(self) -> AttentionConfig:
        """The settings of the conversion, as the config has them."""
        return self.config.attention

    def linear_attentions(self) -> Iterator[tuple[str, LinearAttention]]:
        """Names and modules of the converted layers' linear attention, first layer first."""
        for name, module in self.named_modules():
            if isinstance(module, LinearAttention):
                yield name, module

    def redraw_features(self) -> None:
        """Draw the random directions of every Performer layer anew; the next draw is recorded and reproducible."""
        for _, module in self.linear_attentions():
            module.redraw()

    def set_branches(self, *, near: bool = True, far: bool = True) -> None:
        """Switch the exact part or the method's own part off or on, in every layer and in the config.

        Raises:
            ValueError: nothing would be left to attend to.
        """
        settings = AttentionConfig.from_dict({**self.config.attention.to_dict(), "near": near, "far": far})
        self.config.linattn = settings.to_dict()
        architecture = ARCHITECTURES[self.config.base_model_type]
        for index, (_, attention) in enumerate(self_attentions(self, architecture)):
            its_own = settings.of_layer(index)
            # more than one where an adapter has a copy
            for module in attention.modules():
                if its_own is not None and isinstance(module, LinearAttention):
                    module.near, module.far = its_own.near, its_own.far

    @contextmanager
    def branches(
        self,
        *,
        near: bool | None = None,
        far: bool | None = None,
        exact: bool | None = None,
        summary: bool | None = None,
        selected: bool | None = None,
    ) -> Iterator[None]:
        """While this lasts, parts of attention are switched off or on. None leaves a part as it is.

        Args:
            near, far: the exact part and the method's own part, as by `set_branches`.
            exact: whether short rows are attended exactly (`exact_length`).
            summary, selected: of the far part with `selected_tokens`, the clusters and the selected tokens.

        Raises:
            ValueError: nothing would be left to attend to.
        """
        before = self.config.attention
        modules = [module for _, module in self.linear_attentions()]
        exact_before = [module.exact for module in modules]
        switches = [getattr(module.far_part, "switches", {}) for module in modules]
        switches_before = [dict(its_own) for its_own in switches]
        self.set_branches(
            near=before.near if near is None else near,
            far=before.far if far is None else far,
        )
        for module, value in zip(modules, exact_before, strict=True):
            module.exact = value if exact is None else exact
        for its_own in switches:
            chosen = {"summary": summary, "selected": selected}
            its_own.update({name: chosen[name] for name in its_own if chosen[name] is not None})
        try:
            yield
        finally:
            self.set_branches(near=before.near, far=before.far)
            for module, value in zip(modules, exact_before, strict=True):
                module.exact = value
            for its_own, earlier in zip(switches, switches_before, strict=True):
                its_own.update(earlier)

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
        if self.config.base_model_type in BUILT_IN:
            # every head of the architecture can be loaded from the folder, not only the one that was saved
            self.config.auto_map = auto_map(self.config.base_model_type)
            self.config.linattn_code = code_version()
        super().save_pretrained(save_directory, *args, **kwargs)


class LinAttnGeneration:
    """What converted models that generate add; it stands first in their list of bases."""

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """`generate` of Transformers.

        Raises:
            ValueError: the cache has seen as many tokens as the text has, or more.
        """
        text = kwargs.get("inputs_embeds")
        text = kwargs.get("input_ids", inputs) if text is None else text
        mask, cache = kwargs.get("attention_mask"), kwargs.get("cache", kwargs.get("past_key_values"))
        seen = tokens_seen(cache)
        # a wider mask says that only the new tokens are given
        whole = text is not None and (mask is None or mask.shape[-1] == text.shape[1])
        if seen and whole and text.shape[1] <= seen:
            # Transformers would count the new tokens from the wrong end
            raise ValueError(
                f"The cache has seen {seen} tokens, and the text has {text.shape[1]}; it must be the whole text with "
                "new tokens at its end. The state of linear attention cannot go back to an earlier token: give a new "
                "cache, or a copy (copy.deepcopy) that was made before the cache was used."
            )
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]


def check_config(config: LinAttnConfig) -> None:
    """Whether the attention settings and the model's config fit together.

    Raises:
        ValueError: they do not; the message names the field.
    """
    name, settings, architecture = type(config).__name__, config.attention, ARCHITECTURES[config.base_model_type]
    if getattr(config, "is_decoder", False) and not architecture.causal:
        raise ValueError(
            f"{name}: is_decoder=True is not supported: a converted {architecture.model_type} is an encoder."
        )
    if settings.max_length is None:
        raise ValueError(f"{name}: linattn.max_length is missing; hf_linattn.convert sets it.")
    positions = config.max_position_embeddings - position_offset(config)
    if settings.max_length > positions:
        raise ValueError(
            f"{name}: linattn.max_length={settings.max_length} is more than the {positions} positions of "
            f"max_position_embeddings={config.max_position_embeddings}."
        )
    check_attention(config)
    its_layers = [settings.of_layer(index) for index in range(config.num_hidden_layers)]
    exact = next((x.exact_length for x in its_layers if x is not None and x.exact_length), 0)
    if architecture.causal and exact:
        raise ValueError(f"{name}: exact_length={exact} must be 0 or left out: {architecture.model_type} is a decoder.")
    if architecture.causal and any(getattr(x, "projection", None) == "gaussian" for x in its_layers):
        raise ValueError(
            f"{name}: projection='gaussian' cannot be causal: each of its slots mixes all tokens of a document, so "
            "that none is finished before the document ends. Use learned, mean, max or conv."
        )
    per_slot = next(filter(None, (getattr(x, "tokens_per_slot", None) for x in its_layers)), None)
    if architecture.causal and per_slot:
        raise ValueError(
            f"{name}: tokens_per_slot={per_slot} must be left out: {architecture.model_type} is a decoder, whose "
            "clusters have prototypes, as many as projection_length says."
        )
    if settings.layers is not None:
        if architecture.shares_layers:
            raise ValueError(
                f"{name}: layers={settings.layers} cannot be chosen: {architecture.model_type} has one attention "
                "module for all layers."
            )
        if max(settings.layers) >= config.num_hidden_layers:
            raise ValueError(
                f"{name}: layers={settings.layers}; the model has layers 0 to {config.num_hidden_layers - 1}."
            )
    _check_softmax_heads(config)
    if sliding := sorted({*sliding_layers(config)}.intersection(_converted_layers(config))):
        raise ValueError(
            f"{name}: layers {sliding} have a sliding window of {config.sliding_window} tokens, so that their cost is "
            "linear already. They stay as they are; leave them out of `layers`."
        )


def _check_softmax_heads(config: LinAttnConfig) -> None:
    name, settings, architecture = type(config).__name__, config.attention, ARCHITECTURES[config.base_model_type]
    if settings.softmax_heads and architecture.shares_layers:
        raise ValueError(
            f"{name}: softmax_heads={settings.softmax_heads} must be left out: {architecture.model_type} has one "
            "attention module for all layers."
        )
    converted, heads = _converted_layers(config), config.num_attention_heads
    for layer, chosen in (settings.softmax_heads or {}).items():
        if layer not in converted:
            raise ValueError(
                f"{name}: softmax_heads has layer {layer}; it must be one of the converted layers, "
                f"{', '.join(map(str, converted))}."
            )
        if max(chosen) >= heads:
            raise ValueError(f"{name}: softmax_heads[{layer}]={chosen}; the layer has heads 0 to {heads - 1}.")
        if len(chosen) == heads:
            raise ValueError(
                f"{name}: softmax_heads[{layer}] has all {heads} heads of the layer, so that nothing is converted in "
                "it. Leave it out of `layers`."
            )


def check_attention(config: Any) -> None:
    """Whether linear attention can stand for the softmax attention of a base model with this config.

    Raises:
        ValueError: it cannot; the message names the field.
    """
    name = type(config).__name__
    if cap := getattr(config, "attn_logit_softcapping", None):
        raise ValueError(
            f"{name}: attn_logit_softcapping={cap} must be None: linear attention cannot bound each logit. "
            "attn_logit_softcapping=None in convert(...) leaves the bound out."
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(
            f"{name}: use_bidirectional_attention={config.use_bidirectional_attention!r} must be False: a converted "
            "decoder is causal."
        )
    if not getattr(config, "is_causal", True):
        raise ValueError(f"{name}: is_causal={config.is_causal!r} must be True or left out.")


def sliding_layers(config: Any) -> list[int]:
    """Indices of the layers that see a sliding window of tokens only."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return [index for index, kind in enumerate(types) if kind == "sliding_attention"]
    # without types, all layers of a model are alike
    return list(range(config.num_hidden_layers)) if getattr(config, "sliding_window", None) else []


def sliding_window(attention: nn.Module) -> int | None:
    """How far apart tokens do not see each other in a layer, by its attention module; None if they all do."""
    # where not every layer has one, the module says so, and where all are alike, the config
    config = getattr(attention, "config", None)
    return getattr(attention, "sliding_window", getattr(config, "sliding_window", None))


def _converted_layers(config: LinAttnConfig) -> tuple[int, ...]:
    layers = config.attention.layers
    return tuple(range(config.num_hidden_layers)) if layers is None else tuple(layers)


def self_attentions(model: nn.Module, architecture: Architecture) -> list[tuple[str, nn.Module]]:
    """Names and modules of a model's self-attention, one for each layer."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__ == architecture.attention and not getattr(module, "is_cross_attention", False)
    ]


def position_offset(config: Any) -> int:
    """How many rows at the start of the position table belong to no position (RoBERTa: up to the padding id)."""
    architecture = ARCHITECTURES[getattr(config, "base_model_type", config.model_type)]
    return config.pad_token_id + 1 if architecture.positions_after_padding else 0


def _attach(model: nn.Module, architecture: Architecture, config: AttentionConfig) -> None:
    """Hang one linear attention module, named `linattn`, under each attention module that is converted."""
    shared = None
    for index, (_, attention) in enumerate(self_attentions(model, architecture)):
        settings = config.of_layer(index)
        if settings is None:
            continue
        attention.linattn = linear_attention(settings, model.config, index, shared)
        if getattr(settings, "sharing", None) == "layers" and shared is None:
            shared = attention.linattn


def linear_attention(
    config: AttentionConfig, model_config: Any, index: int, shared: LinearAttention | None = None
) -> LinearAttention:
    """The linear attention of layer `index`, initialised from the config's seed.

    `shared` is the first layer's module where all layers share one projection.
    """
    num_heads = model_config.num_attention_heads
    return LinearAttention(
        config,
        num_heads=num_heads,
        head_dim=head_dim(model_config),
        causal=ARCHITECTURES[model_config.base_model_type].causal,
        # far apart: no two layers of any two seeds that people choose draw the same numbers
        seed=config.seed * 1_000_003 + index,
        shared=shared,
        softmax_heads=config.heads_of_layer(index),
        group_size=num_heads // (getattr(model_config, "num_key_value_heads", None) or num_heads),
    )


def _before_forward(body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Checks of the inputs that would otherwise fail deep inside, or not at all; the redraw in training; the cache."""
    config: Any = body.config
    layers, max_length = body.linattn_layers, config.linattn["max_length"]
    # whoever sets the field itself is asked nothing by Transformers, and the converted layers would be softmax
    if config._attn_implementation != ATTENTION_NAME:
        raise ValueError(
            f"config._attn_implementation={config._attn_implementation!r} would make the converted layers softmax; it "
            f"must be {ATTENTION_NAME!r}. Leave out what sets it, or use the base model."
        )
    if kwargs.get("output_attentions", getattr(config, "output_attentions", False)):
        raise ValueError(
            "output_attentions=True: linear attention forms no matrix of attention probabilities. Ask the base model."
        )
    if body.training:
        for module in body.modules():
            if isinstance(module, LinearAttention):
                module.count_training_forward()

    cache = None
    if layers:
        kwargs |= dict(zip(body.linattn_inputs, args, strict=False))
        args, keyword = (), body.linattn_cache_keyword
        # newer versions of Transformers still accept the old name
        cache = kwargs.get(keyword) if kwargs.get(keyword) is not None else kwargs.pop("past_key_values", None)
        use_cache = kwargs.get("use_cache")
        use_cache = config.use_cache if use_cache is None else use_cache
        checkpointing = body.training and getattr(body, "gradient_checkpointing", False)
        if cache is None and use_cache and not checkpointing:
            cache = DynamicCache(config=config)
        if cache is not None:
            shape = _shape(args, kwargs)
            rows = None if shape is None else math.prod(shape[:-1])
            prepare_cache(cache, layers, owner=body.linattn_owner, rows=rows)
            kwargs[keyword] = cache
            if not checkpointing:
                # the layers pass it on to the attention function; with checkpointing they use no cache
                kwargs[CACHE_KEYWORD] = cache

    shape = _shape(args, kwargs)
    length = 0 if shape is None else shape[-1] + tokens_seen(cache)
    if length > max_length:
        raise ValueError(
            f"The input is {length} tokens long, and the model takes at most max_length={max_length}. "
            "Truncate it, or convert the base model with a higher max_length."
        )
    # without a cache, Transformers takes the mask's word for how many tokens there are
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if shape is not None and mask is not None and mask.ndim == 2 and mask.shape[-1] != length:
        raise ValueError(f"attention_mask has {mask.shape[-1]} columns for {length} tokens, the cached ones included.")
    return args, kwargs


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """(rows, tokens) of the inputs of a body, with more dimensions before them in some heads; None without any."""
    inputs = kwargs.get("input_ids", args[0] if args else None)
    embeds = kwargs.get("inputs_embeds")
    return inputs.shape if inputs is not None else embeds.shape[:-1] if embeds is not None else None


def _owner(config: LinAttnConfig) -> str:
    """What a cache calls a model: its settings and sizes, without the switches of ablations."""
    settings = {key: value for key, value in config.linattn.items() if key not in ("near", "far", "format_version")}
    sizes = f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads of {head_dim(config)}"
    return f"a {config.base_model_type} of {sizes} with {settings}"


def head_dim(config: Any) -> int:
    """Size of one attention head; some configs give it, others leave it to be divided."""
    # MobileBERT attends in a bottleneck
    hidden_size = getattr(config, "true_hidden_size", config.hidden_size)
    return getattr(config, "head_dim", None) or hidden_size // config.num_attention_heads


def auto_map(model_type: str) -> dict[str, str]:
    """Auto class -> file.class for every head of a architecture, as `trust_remote_code` loading reads it."""
    entries: dict[str, type] = {"AutoConfig": CONFIG_CLASSES[model_type]}
    entries |= {auto: classes[model_type] for auto, classes in MODEL_CLASSES.items() if model_type in classes}
    return {auto: f"{cls.__module__.rpartition('.')[-1]}.{cls.__name__}" for auto, cls in entries.items()}


def _model_class(
    base: type[PreTrainedModel], architecture: Architecture, auto_class: str
) -> type[LinAttnPreTrainedModel]:
    return type(
        f"LinAttn{base.__name__}",
        (*((LinAttnGeneration,) if base.can_generate() else ()), LinAttnPreTrainedModel, base),
        {
            "__module__": __name__,
            "__doc__": f"`{base.__name__}` converted to linear attention.",
            "config_class": CONFIG_CLASSES[architecture.model_type],
            "_auto_class": auto_class if architecture.model_type in BUILT_IN else None,
            # a state that cannot go back: generate() then refuses what needs that
            "_is_stateful": architecture.causal,
        },
    )


def _heads(architecture: Architecture) -> Iterator[tuple[str, type[PreTrainedModel]]]:
    """The heads of a architecture that can be converted, each with the auto class that loads it."""
    # the architecture's own config comes after LinAttnConfig in the list of bases
    base_config = CONFIG_CLASSES[architecture.model_type].__bases__[1]
    for auto in AUTO_CLASSES:
        mapping = getattr(modeling_auto, auto)._model_mapping
        # an encoder's causal head makes a decoder of it
        if base_config in mapping and (architecture.causal or auto != "AutoModelForCausalLM"):
            yield auto, mapping[base_config]


#: base model_type -> name of the base class -> converted class; each is also an attribute of this module
HEAD_CLASSES: dict[str, dict[str, type[LinAttnPreTrainedModel]]] = {}
#: auto class -> base model_type -> the converted class that it loads
MODEL_CLASSES: dict[str, dict[str, type[LinAttnPreTrainedModel]]] = {auto: {} for auto in AUTO_CLASSES}


def add_model_classes(architecture: Architecture) -> None:
    """Make the model classes of a row of the table, whose config class is there already."""
    made = HEAD_CLASSES[architecture.model_type] = {}
    for auto, base in _heads(architecture):
        if base.__name__ not in made:
            made[base.__name__] = _model_class(base, architecture, auto)
        MODEL_CLASSES[auto][architecture.model_type] = made[base.__name__]
    for name in architecture.other_heads:
        made[name] = _model_class(getattr(transformers, name), architecture, "AutoModelForPreTraining")
    for cls in made.values():
        setattr(sys.modules[__name__], cls.__name__, cls)
    # some heads make their body by `AutoModel.from_config`, which knows remote code only where it is registered too
    for auto, by_type in MODEL_CLASSES.items():
        if architecture.model_type in by_type:
            config_class = CONFIG_CLASSES[architecture.model_type]
            getattr(modeling_auto, auto).register(config_class, by_type[architecture.model_type])


for _row in ARCHITECTURES.values():
    add_model_classes(_row)
