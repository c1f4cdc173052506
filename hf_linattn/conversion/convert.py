"""From a pretrained checkpoint to the same model with linear attention."""

import copy
import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import tqdm
from huggingface_hub import metadata_load
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..data.tokenizers import tokenizer_of
from ..modeling.architectures import FAMILIES, MODEL_TYPE_PREFIX
from ..modeling.configuration_linattn import (
    CONFIG_CLASSES,
    AttentionConfig,
    LayerwiseConfig,
    LinAttnConfig,
    method_class,
)
from ..modeling.modeling_linattn import (
    AUTO_CLASSES,
    HEAD_CLASSES,
    MODEL_CLASSES,
    LinAttnPreTrainedModel,
    check_config,
    linear_attention,
    position_offset,
    self_attentions,
)
from .calibration import calibrate, check_calibration

POSITION_EXTENSIONS = ("repeat", "interpolate")
# Rotary scalings that read the original length out of max_position_embeddings.
_ROPE_TYPES_BOUND_TO_LENGTH = ("dynamic", "longrope")


def convert(
    model_or_id: str | Path | PreTrainedModel,
    config: AttentionConfig | str,
    *,
    max_length: int | None = None,
    auto_class: str | type | None = None,
    seed: int | None = None,
    position_extension: str = "repeat",
    calibration_texts: Sequence[str] | None = None,
    calibration_length: int = 512,
    tokenizer: Any = None,
    **from_pretrained_kwargs: Any,
) -> LinAttnPreTrainedModel:
    """Give a pretrained encoder or decoder attention whose cost grows linearly with the length.

    All weights of the checkpoint stay as they are. The attention modules get what their method needs
    (`config`), and the table of position embeddings is made longer where `max_length` asks for it.

    Args:
        model_or_id: a Hub id, a folder, or a loaded model, which is copied and stays as it is.
        config: `LinformerConfig(...)` or `PerformerConfig(...)`, or "linformer" or "performer" for the defaults.
        max_length: longest document in tokens. Default: as many as the checkpoint has positions.
        auto_class: for an id or folder, the auto class of the head, e.g. "AutoModelForSequenceClassification".
            Default: the head that the checkpoint was saved with.
        seed: seed of random features and fixed projections. Default: the config's, which is 0 unless set.
        position_extension: how positions beyond the checkpoint's get their embeddings: "repeat" the table,
            or "interpolate" it.
        calibration_texts: documents that feature maps and projections are fitted to, layer by layer, about a hundred;
            see `hf_linattn.conversion.calibration`. No weight of the model itself is trained. Default: none, and
            features and projections start as their papers say.
        calibration_length: how many tokens of each of them, at most as many as the checkpoint reads.
        tokenizer: for a loaded model, what makes tokens of them. Default: the checkpoint's.
        from_pretrained_kwargs: for an id or folder, passed on to `from_pretrained`, e.g. dtype, device_map,
            revision, token, num_labels.

    Returns:
        A model of the same head, in eval mode, which trains, saves and loads like any other.

    Raises:
        TypeError: `model_or_id` is neither a path nor a `PreTrainedModel`.
        ValueError: the architecture or head is not supported (the message lists those that are), or an
            argument has a value that is not allowed.
    """
    config = _attention_config(config, seed)
    if position_extension not in POSITION_EXTENSIONS:
        allowed = ", ".join(map(repr, POSITION_EXTENSIONS))
        raise ValueError(f"position_extension={position_extension!r} is not one of {allowed}.")
    # checked on the checkpoint's config: errors come before gigabytes are read
    if isinstance(model_or_id, PreTrainedModel):
        if auto_class is not None or from_pretrained_kwargs:
            given = ", ".join([*from_pretrained_kwargs, *(["auto_class"] if auto_class is not None else [])])
            raise ValueError(f"{given}: only for a Hub id or folder; the model given is loaded already.")
        base = model_or_id
        cls = _converted_class(type(base).__name__, base.config)
        _check_loaded(base)
        new_config = converted_config(base.config, config, max_length)
        # copies: training the converted model must not change the one given
        state = {name: tensor.detach().clone() for name, tensor in base.state_dict().items()}
        device_map = None
    elif isinstance(model_or_id, (str, Path)):
        device_map = from_pretrained_kwargs.pop("device_map", None)
        cls, base_class, base_config, from_pretrained_kwargs = _resolve(
            str(model_or_id), auto_class, from_pretrained_kwargs
        )
        converted_config(base_config, config, max_length)
        try:
            base = base_class.from_pretrained(str(model_or_id), config=base_config, **from_pretrained_kwargs)
        except SafetensorError as error:
            raise ValueError(f"The weights of {str(model_or_id)!r} are damaged: {error}") from error
        _check_loaded(base)
        new_config = converted_config(base.config, config, max_length)
        state = dict(base.state_dict())
    else:
        raise TypeError(
            f"model_or_id is a {type(model_or_id).__name__}; it must be a Hub id, a folder or a PreTrainedModel. "
            "A PEFT model is merged first: model.merge_and_unload()."
        )

    _extend_positions(state, base, new_config, position_extension)
    state |= _attention_state(base, new_config)
    device = base.device
    loaded: Any = cls.from_pretrained(
        None,
        config=new_config,
        state_dict=state,
        dtype=base.dtype,
        device_map=device_map,
        output_loading_info=True,
        **_init_options(base),
    )
    model, report = loaded
    problems = {kind: sorted(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(problems.values()):
        raise RuntimeError(f"The converted model does not match the checkpoint's weights: {problems}")
    # not the base's name: whoever reads it, as PEFT does for an adapter, would load the softmax model by it
    model.config.name_or_path = model.name_or_path = ""
    if origin := _origin(base.config):
        model.config.linattn_base = origin
    if calibration_texts is not None:
        check_calibration(model)
        tokenizer = tokenizer_of(base) if tokenizer is None else tokenizer
        length = min(calibration_length, base.config.max_position_embeddings - position_offset(base.config))
        texts = [text for text in checked_texts(calibration_texts, "calibration_texts") if text.strip()]
        documents = tokenizer(texts, truncation=True, max_length=length)["input_ids"] if texts else []
        calibrate(model, base, documents)
        model.config.linattn_calibration = {"documents": len(documents), "tokens": sum(map(len, documents))}
    if base.can_generate() and model.can_generate():
        model.generation_config = copy.deepcopy(base.generation_config)
    return model.eval() if device_map is not None else model.to(device).eval()


def extend_positions(model: PreTrainedModel, max_length: int, *, position_extension: str = "repeat") -> PreTrainedModel:
    """The same softmax model with room for `max_length` tokens, its positions made longer as `convert` does it.

    What a converted model is compared with on long documents. A model with room enough is returned as it is.

    Raises:
        ValueError: the architecture is not supported, or `position_extension` is not "repeat" or "interpolate".
    """
    if position_extension not in POSITION_EXTENSIONS:
        allowed = ", ".join(map(repr, POSITION_EXTENSIONS))
        raise ValueError(f"position_extension={position_extension!r} is not one of {allowed}.")
    if model.config.model_type not in FAMILIES:
        raise _unsupported(model.config)
    config = copy.deepcopy(model.config)
    offset = position_offset(config)
    if config.max_position_embeddings - offset >= max_length:
        return model
    config.max_position_embeddings = max_length + offset
    state = dict(model.state_dict())
    _extend_positions(state, model, config, position_extension)
    longer: Any = type(model)
    options = _init_options(model)
    extended = longer.from_pretrained(None, config=config, state_dict=state, dtype=model.dtype, **options)
    return extended.to(model.device).eval()


def checked_texts(texts: Any, name: str) -> list[str]:
    """The texts as a list.

    Raises:
        TypeError: they are one string, whose letters would be taken for texts, or some are no strings.
    """
    if isinstance(texts, str):
        raise TypeError(f"{name} is one string; it must be a list of strings.")
    listed = list(texts)
    if not all(isinstance(text, str) for text in listed):
        kinds = ", ".join(sorted({type(text).__name__ for text in listed}))
        raise TypeError(f"{name} holds {kinds}; it must be a list of strings.")
    return listed


def _init_options(base: PreTrainedModel) -> dict[str, Any]:
    """What a model was made with beside its config: whether it has a pooler."""
    takes = "add_pooling_layer" in inspect.signature(type(base).__init__).parameters
    return {"add_pooling_layer": False} if takes and getattr(base, "pooler", None) is None else {}


def _origin(config: PreTrainedConfig) -> dict[str, str]:
    """What a model card says of the base: Hub id and commit; of a folder, whose path helps nobody, the licence."""
    name = config.name_or_path or ""
    if name and not Path(name).exists() and not name.startswith(("/", ".", "~")):
        commit = getattr(config, "_commit_hash", None)
        return {"name": name, **({"revision": commit} if commit else {})}
    readme = Path(name) / "README.md"
    try:
        license = (metadata_load(readme) or {}).get("license") if name and readme.is_file() else None
    except Exception:  # a card that no parser reads says nothing
        license = None
    return {"license": license} if isinstance(license, str) else {}


def _attention_config(config: AttentionConfig | str, seed: int | None) -> AttentionConfig:
    if isinstance(config, str):
        config = method_class(config)()
    elif type(config) is AttentionConfig or not isinstance(config, AttentionConfig):
        raise ValueError(
            f"config={config!r} must be a LinformerConfig, a PerformerConfig, or the name of a method: "
            "'linformer' or 'performer'."
        )
    # `replace` checks the fields again, and leaves the caller's object alone
    return dataclasses.replace(config, seed=config.seed if seed is None else seed)


def _unsupported(config: PreTrainedConfig) -> ValueError:
    if config.model_type.startswith(MODEL_TYPE_PREFIX):
        return ValueError(
            f"model_type={config.model_type!r}: the checkpoint is converted already; start from its base."
        )
    return ValueError(
        f"model_type={config.model_type!r} is not supported. Supported are: {', '.join(sorted(FAMILIES))}."
    )


def _converted_class(architecture: str, config: PreTrainedConfig) -> type[LinAttnPreTrainedModel]:
    """The converted class of an architecture such as "BertForMaskedLM"."""
    if config.model_type not in FAMILIES:
        raise _unsupported(config)
    heads = HEAD_CLASSES[config.model_type]
    if architecture not in heads:
        raise ValueError(
            f"{architecture} is no supported head of {config.model_type}. Supported are: {', '.join(sorted(heads))}. "
            "For a checkpoint with several uses, pass auto_class, one of: " + ", ".join(AUTO_CLASSES) + "."
        )
    return heads[architecture]


def _resolve(
    model_id: str, auto_class: str | type | None, kwargs: dict[str, Any]
) -> tuple[type[LinAttnPreTrainedModel], type[PreTrainedModel], PreTrainedConfig, dict[str, Any]]:
    """Classes to make and to load, the checkpoint's config, and the arguments left for the loading."""
    if (name := getattr(auto_class, "__name__", auto_class)) not in (None, *AUTO_CLASSES):
        raise ValueError(f"auto_class={name!r} is not one of {', '.join(map(repr, AUTO_CLASSES))}.")
    if not model_id or (model_id.startswith(("/", ".", "~")) and not Path(model_id).exists()):
        raise FileNotFoundError(f"There is no folder {model_id!r}.")
    # not the dtype: a config would keep "auto", which names no dtype
    config_kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
    try:
        config, rest = AutoConfig.from_pretrained(model_id, return_unused_kwargs=True, **config_kwargs)
    except OSError as error:
        if Path(model_id).exists():
            raise
        raise FileNotFoundError(f"{model_id!r} is no folder, and no Hub id that can be reached: {error}") from error
    # what names the place to load from was used for the config, and is needed for the weights as well
    kept = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "dtype")
    rest |= {key: kwargs[key] for key in kept if key in kwargs}
    if config.model_type not in FAMILIES:
        raise _unsupported(config)
    if name is None:
        if not config.architectures:
            raise ValueError(
                "The checkpoint's config names no architecture; pass auto_class, one of: "
                + ", ".join(AUTO_CLASSES)
                + "."
            )
        cls = _converted_class(config.architectures[0], config)
    elif config.model_type in MODEL_CLASSES[name]:
        cls = MODEL_CLASSES[name][config.model_type]
    else:
        raise ValueError(f"auto_class={name!r}: {config.model_type} has no such head.")
    return cls, getattr(transformers, cls.__name__.removeprefix("LinAttn")), config, rest


def _check_loaded(model: PreTrainedModel) -> None:
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "The model is quantized. Load the full-precision weights, convert those, and quantize the converted model."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("Some weights of the model are on the meta device (offloaded); load it without device_map.")


def converted_config(base: PreTrainedConfig, config: AttentionConfig, max_length: int | None) -> LinAttnConfig:
    """The converted model's config, with the settings completed by the lengths.

    Raises:
        ValueError: the settings, the lengths and the base do not fit together.
    """
    if config.max_length is not None and max_length not in (None, config.max_length):
        raise ValueError(f"max_length={max_length}, but the config says max_length={config.max_length}.")
    offset = position_offset(base)
    positions = base.max_position_embeddings - offset
    if max_length is None:
        max_length = positions if config.max_length is None else config.max_length
    # rotary positions have no table that a shorter length would have to cut
    least = 1 if FAMILIES[base.model_type].position_table is None else positions
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < least:
        raise ValueError(
            f"max_length={max_length!r} must be an integer of at least {least}; leave it out to keep the checkpoint's "
            f"{positions} positions."
        )
    rope = (getattr(base, "rope_parameters", None) or {}).get("rope_type", "default")
    if max_length > positions and rope in _ROPE_TYPES_BOUND_TO_LENGTH:
        raise ValueError(
            f"max_length={max_length}: rope_type={rope!r} scales rotary positions by max_position_embeddings, which a "
            f"longer conversion would change; leave max_length out to keep {positions}."
        )
    settings = with_exact_length(dataclasses.replace(config, max_length=max_length), base)
    values = base.to_dict()
    for field in ("model_type", "transformers_version", "auto_map"):
        values.pop(field, None)
    # GPT-2 calls it n_positions
    name = getattr(base, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
    values[name] = max_length + offset
    converted = CONFIG_CLASSES[base.model_type].from_dict({**values, "linattn": settings.to_dict()})
    converted.name_or_path = ""
    check_config(converted)
    return converted


def with_exact_length(config: AttentionConfig, base: PreTrainedConfig) -> AttentionConfig:
    """The settings with `exact_length` set where it was left out: see there."""
    if isinstance(config, LayerwiseConfig):
        return dataclasses.replace(
            config, by_layer={index: with_exact_length(its_own, base) for index, its_own in config.by_layer.items()}
        )
    if config.exact_length is not None:
        return config
    encoder = not FAMILIES[base.model_type].causal
    readable = base.max_position_embeddings - position_offset(base)
    return dataclasses.replace(config, exact_length=readable if encoder and config.window_size else 0)


def _extend_positions(
    state: dict[str, Tensor], base: PreTrainedModel, config: PreTrainedConfig, position_extension: str
) -> None:
    """Lengthen the table of position embeddings in `state` to what the config asks for; rotary models have none."""
    family = FAMILIES[base.config.model_type]
    if family.position_table is None:
        return
    name = family.position_table
    if base.base_model is not base:
        name = f"{base.base_model_prefix}.{name}"
    table, offset = state[name], position_offset(config) + family.extra_rows
    length = config.max_position_embeddings - position_offset(config)
    if table.shape[0] == offset + length:
        return
    reserved, positions = table[:offset], table[offset:]
    if position_extension == "repeat":
        # the whole table again and again: neighbouring positions stay neighbours almost everywhere
        longer = positions.repeat(-(-length // positions.shape[0]), 1)[:length]
    else:
        # (rows, dim) as a batch of one signal per dimension, stretched along the rows
        signal = positions.float().T[None]
        longer = nn.functional.interpolate(signal, size=length, mode="linear", align_corners=True)[0].T
    state[name] = torch.cat((reserved, longer.to(table.dtype)))


def _attention_state(base: PreTrainedModel, config: LinAttnConfig) -> dict[str, Tensor]:
    """Initial parameters and buffers of the linear attention, by their names in the converted model."""
    family, settings = FAMILIES[config.base_model_type], config.attention
    attentions = [name for name, _ in self_attentions(base, family)]
    state: dict[str, Tensor] = {}
    shared = None
    for index, name in enumerate(tqdm(attentions, desc="Converting", unit="layer", leave=False)):
        its_own = settings.of_layer(index)
        if its_own is None:
            continue
        module = linear_attention(its_own, config, index, shared)
        for key, tensor in module.state_dict().items():
            state[f"{name}.linattn.{key}"] = tensor.to(base.dtype) if tensor.is_floating_point() else tensor
        if getattr(its_own, "sharing", None) == "layers" and shared is None:
            shared = module
    return state
