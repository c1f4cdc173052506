"""From a pretrained checkpoint to the same model with linear attention."""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from accelerate.utils import tqdm
from huggingface_hub import metadata_load
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..data.tokenizers import check_vocabulary, tokenizer_of
from ..modeling.architectures import ARCHITECTURES, UNAVAILABLE
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
    check_attention,
    check_config,
    linear_attention,
    position_offset,
    self_attentions,
    sliding_layers,
)
from ..utils.digest import weights_digest
from .calibration import calibrate, check_calibration, default_texts, tokenized
from .checkpoint_files import check_source
from .positions import (
    check_extension,
    checked_length,
    extend_table,
    init_options,
    unsupported,
    unsupported_type,
)


def convert(
    model_or_id: str | Path | PreTrainedModel,
    config: AttentionConfig | str,
    *,
    max_length: int | None = None,
    auto_class: str | type | None = None,
    seed: int | None = None,
    position_extension: str = "repeat",
    calibration_texts: Sequence[str] | None = None,
    calibration_length: int | None = None,
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
            see `hf_linattn.conversion.calibration`. No weight of the model itself is trained. Default: Python's help
            texts for what has no start without data (prototypes of clusters, init="moments"), where the checkpoint has
            a tokenizer; none for the rest, which starts as its paper says.
        calibration_length: how many tokens of each of them, at most as many as the checkpoint reads. Default: 512; of
            a decoder 1,024, to which texts are joined.
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
    check_extension(position_extension)
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
        if device_map == "disk" or (isinstance(device_map, dict) and "disk" in device_map.values()):
            raise ValueError(
                f"device_map={device_map!r} puts weights on the disk, and a conversion has all of them in memory. "
                "Convert without it, save, and load the converted folder with this device_map and an offload_folder."
            )
        cls, base_class, base_config, from_pretrained_kwargs = _resolve(
            str(model_or_id), auto_class, from_pretrained_kwargs
        )
        converted_config(base_config, config, max_length)
        places = {
            k: v for k, v in from_pretrained_kwargs.items() if k in ("revision", "token", "cache_dir", "subfolder")
        }
        if not Path(model_or_id).is_dir():
            # its config could be reached
            check_source(model_or_id, **places)
        check_vocabulary(str(model_or_id), base_config.vocab_size, **places)
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

    extend_table(state, base, new_config, position_extension)
    state |= _attention_state(base, new_config)
    device = base.device
    loaded: Any = cls.from_pretrained(
        None,
        config=new_config,
        state_dict=state,
        dtype=base.dtype,
        device_map=device_map,
        output_loading_info=True,
        **init_options(base),
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
        texts = [text for text in checked_texts(calibration_texts, "calibration_texts") if text.strip()]
        source, tokenizer = "given", tokenizer_of(base) if tokenizer is None else tokenizer
    else:
        texts, source, tokenizer = default_texts(model, base, tokenizer)
    if calibration_texts is not None or texts:
        longest = base.config.max_position_embeddings - position_offset(base.config)
        documents = tokenized(texts, tokenizer, calibration_length, longest, model.config.base_model_type)
        calibrate(model, base, documents)
        model.config.linattn_calibration = {
            "documents": len(documents),
            "tokens": sum(map(len, documents)),
            "texts": source,
        }
    # by which a card knows whether the weights have been trained since
    model.config.linattn_digest = weights_digest(model.state_dict().values())
    if base.can_generate() and model.can_generate():
        model.generation_config = copy.deepcopy(base.generation_config)
    return model.eval() if device_map is not None else model.to(device).eval()


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


def _converted_class(architecture: str, config: PreTrainedConfig) -> type[LinAttnPreTrainedModel]:
    """The converted class of an architecture such as "BertForMaskedLM"."""
    if config.model_type not in ARCHITECTURES:
        raise unsupported(config)
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
    if Path(model_id).is_dir():
        check_source(model_id, subfolder=kwargs.get("subfolder") or "")
    # not the dtype: a config would keep "auto", which names no dtype
    config_kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
    try:
        config, rest = AutoConfig.from_pretrained(model_id, return_unused_kwargs=True, **config_kwargs)
    except OSError as error:
        if Path(model_id).exists():
            raise
        # what follows is advice about the network
        reason = str(error).split("\n", 1)[0]
        raise FileNotFoundError(f"{model_id!r} is no folder, and no Hub id that can be reached: {reason}") from error
    except ValueError as error:
        # a model_type that this version of Transformers does not know
        model_type = PreTrainedConfig.get_config_dict(model_id, **config_kwargs)[0].get("model_type")
        if model_type not in UNAVAILABLE:
            raise
        raise unsupported_type(model_type) from error
    # what names the place to load from was used for the config, and is needed for the weights as well
    kept = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "dtype")
    rest |= {key: kwargs[key] for key in kept if key in kwargs}
    if config.model_type not in ARCHITECTURES:
        raise unsupported(config)
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
    max_length = checked_length(base, config.max_length, max_length)
    check_attention(base)
    settings = with_exact_length(dataclasses.replace(config, max_length=max_length), base)
    settings = _without_sliding_layers(settings, base)
    values = base.to_dict()
    for field in ("model_type", "transformers_version", "auto_map"):
        values.pop(field, None)
    # GPT-2 calls it n_positions
    name = getattr(base, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
    values[name] = max_length + position_offset(base)
    converted = CONFIG_CLASSES[base.model_type].from_dict({**values, "linattn": settings.to_dict()})
    converted.name_or_path = ""
    check_config(converted)
    return converted


def full_layers(base: PreTrainedConfig) -> list[int]:
    """Indices of the layers that see every token: those that can be converted."""
    sliding = set(sliding_layers(base))
    return [index for index in range(base.num_hidden_layers) if index not in sliding]


def _without_sliding_layers(config: AttentionConfig, base: PreTrainedConfig) -> AttentionConfig:
    """The settings with `layers` set where it was left out and some layers have a sliding window."""
    full = full_layers(base)
    if config.layers is not None or len(full) == base.num_hidden_layers:
        return config
    if not full:
        raise ValueError(
            f"{type(base).__name__}: sliding_window={base.sliding_window} in every layer, so that their cost is linear "
            "already and nothing is left to convert. sliding_window=None in convert(...) lets all layers see all "
            "tokens, which the checkpoint was not trained for."
        )
    return dataclasses.replace(config, layers=full)


def with_exact_length(config: AttentionConfig, base: PreTrainedConfig) -> AttentionConfig:
    """The settings with `exact_length` set where it was left out: see there."""
    if isinstance(config, LayerwiseConfig):
        return dataclasses.replace(
            config, by_layer={index: with_exact_length(its_own, base) for index, its_own in config.by_layer.items()}
        )
    if config.exact_length is not None:
        return config
    encoder = not ARCHITECTURES[base.model_type].causal
    readable = base.max_position_embeddings - position_offset(base)
    return dataclasses.replace(config, exact_length=readable if encoder and config.window_size else 0)


def _attention_state(base: PreTrainedModel, config: LinAttnConfig) -> dict[str, Tensor]:
    """Initial parameters and buffers of the linear attention, by their names in the converted model."""
    architecture, settings = ARCHITECTURES[config.base_model_type], config.attention
    attentions = [name for name, _ in self_attentions(base, architecture)]
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
