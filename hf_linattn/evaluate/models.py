"""What a comparison compares: the softmax model at its own length, in chunks and extended, and its conversions."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from huggingface_hub import snapshot_download
from peft import PeftModel
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from ..conversion.checkpoint_files import ADAPTER_CONFIG, adapter_base, check_source
from ..conversion.convert import convert
from ..conversion.positions import extend_positions
from ..data.tokenizers import load_tokenizer as saved_tokenizer
from ..modeling.architectures import ARCHITECTURES, MODEL_TYPE_PREFIX
from ..modeling.configuration_linattn import AttentionConfig
from ..modeling.modeling_linattn import LinAttnPreTrainedModel, position_offset

#: The names of softmax at the checkpoint's own length, over chunks of that length, and extended.
TRUNCATED, CHUNKS, EXTENDED = "softmax truncated", "softmax in chunks", "softmax extended"
_BRANCHES = {"both": (True, True), "near": (True, False), "far": (False, True)}
# weights that are made anew for some uses of a checkpoint, and have no part in what a task reads
_UNUSED_WEIGHTS = ("pooler.",)

#: A converted checkpoint's folder or Hub id, a folder with a PEFT adapter, or settings to convert the base with.
Source: TypeAlias = str | AttentionConfig


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison; of a conversion with several seeds, all of them."""

    name: str
    kind: str  # "truncated", "chunks", "extended" or "converted"
    sources: tuple[Source, ...]
    branches: str = "both"  # "both", "near" or "far"
    # of sources that are adapters the checkpoint that each is put on, of the others None
    adapted: tuple[str | None, ...] = ()

    @property
    def has_own_length(self) -> bool:
        """Whether it is the checkpoint as it is, with as many positions as that has."""
        return self.kind in ("truncated", "chunks")

    def describe(self, base: str) -> dict[str, Any]:
        """What the report tells about the model."""
        config = None if self.kind != "converted" else _attention_settings(self.sources[0], base, *self.adapted[:1])
        return {
            "name": self.name,
            "kind": self.kind,
            "branches": self.branches,
            "sources": [s if isinstance(s, str) else f"{base} converted on the fly" for s in self.sources],
            "attention": None if config is None else config[0],
            "training": None if config is None else config[1],
            "seeds": len(self.sources),
        }


def compared_models(
    base: str, converted: Mapping[str, Source | Sequence[Source]], *, branches: bool = True, chunks: bool = False
) -> list[ComparedModel]:
    """The models of a comparison, in the order in which they are shown.

    Args:
        base: id or folder of the softmax checkpoint.
        converted: name -> source, or the sources of several seeds.
        branches: also each conversion that has both branches with either of them switched off.
        chunks: also softmax over chunks of the checkpoint's own length, whose embeddings are averaged.

    Raises:
        ValueError: a source is no converted checkpoint, or a name is taken.
    """
    kinds = {TRUNCATED: "truncated", CHUNKS: "chunks", EXTENDED: "extended"}
    models = [ComparedModel(name, kind, (base,)) for name, kind in kinds.items() if chunks or kind != "chunks"]
    listed = {name: (x,) if isinstance(x, (str, AttentionConfig)) else tuple(x) for name, x in converted.items()}
    checkpoints = [x for sources in listed.values() for x in sources if isinstance(x, str) and not _is_adapter(x)]
    for source in (base, *checkpoints):
        check_source(source)
    for name, sources in listed.items():
        if not name or name in (compared.name for compared in models):
            raise ValueError(f"converted={name!r} is not a new, non-empty name of a model.")
        adapted = tuple(_adapted(source, checkpoints) if _is_adapter(source) else None for source in sources)
        compared = ComparedModel(name, "converted", sources, adapted=adapted)
        models.append(compared)
        settings = [_attention_settings(*each)[0] for each in zip(sources, [base] * len(sources), adapted, strict=True)]
        if branches and all(_has_two_branches(s) for s in settings):
            models += [
                dataclasses.replace(compared, name=f"{name}, {part} only", branches=part) for part in ("near", "far")
            ]
    return models


def base_length(base: str) -> int:
    """How many tokens the softmax checkpoint was made for.

    Raises:
        ValueError: the architecture is not supported.
    """
    config = AutoConfig.from_pretrained(base)
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type={config.model_type!r} of the base is not supported. Supported are: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    return config.max_position_embeddings - position_offset(config)


def load_tokenizer(base: str) -> PreTrainedTokenizerBase:
    """The base model's tokenizer, which cuts nothing unless told to."""
    tokenizer: PreTrainedTokenizerBase = saved_tokenizer(base)
    tokenizer.model_max_length = int(1e9)
    return tokenizer


def load_model(
    compared: ComparedModel,
    base: str,
    *,
    seed: int = 0,
    auto_class: str,
    max_length: int,
    position_extension: str = "repeat",
    dtype: str | None = None,
) -> nn.Module:
    """The model itself, in eval mode.

    Args:
        compared: of `compared_models`.
        base: id or folder of the softmax checkpoint.
        seed: which of its sources.
        auto_class: the head, such as "AutoModel" or "AutoModelForCausalLM".
        max_length: longest document in tokens.
        position_extension: how the base's positions beyond its own get their embeddings; as in `convert`.
        dtype: of the weights. Default: the checkpoint's.

    Raises:
        ValueError: the checkpoint has no trained weights for this head, or takes no documents of that length.
    """
    source = compared.sources[seed]
    kwargs = {} if dtype is None else {"dtype": dtype}
    if compared.kind != "converted":
        model = _load_with_head(str(source), auto_class, kwargs)
        if compared.kind == "extended":
            model = extend_positions(model, max_length, position_extension=position_extension)
        return model.eval()
    if isinstance(source, AttentionConfig):
        softmax = _load_with_head(base, auto_class, kwargs)
        longest = max(max_length, base_length(base))
        model = convert(softmax, source, max_length=longest, position_extension=position_extension)
    elif _is_adapter(source):
        model = PeftModel.from_pretrained(_load_with_head(str(compared.adapted[seed]), auto_class, kwargs), source)
    else:
        model = _load_with_head(source, auto_class, kwargs)
    linear = _converted_model(model)
    if (limit := linear.attention_config.max_length) is not None and limit < max_length:
        raise ValueError(
            f"{compared.name}: takes documents of at most max_length={limit} tokens; lengths up to {max_length} were "
            "asked for."
        )
    near, far = _BRANCHES[compared.branches]
    if compared.branches != "both":
        linear.set_branches(near=near, far=far)
    return model.eval()


def fingerprint(compared: ComparedModel, base: str, seed: int) -> str:
    """Changes when the model's weights or settings change: what was measured on it is then no longer valid."""
    digest = hashlib.sha256(f"{compared.kind} {compared.branches}".encode())
    source = compared.sources[seed]
    if isinstance(source, AttentionConfig):
        digest.update(json.dumps(source.to_dict(), sort_keys=True).encode())
        source = base
    elif _is_adapter(source):
        _digest_folder(Path(source), digest)
        source = str(compared.adapted[seed])
    folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, local_files_only=True))
    if compared.branches == "near" and isinstance(compared.sources[seed], str):
        _digest_near(folder, digest)
    else:
        _digest_folder(folder, digest)
    return digest.hexdigest()[:16]


def _digest_near(folder: Path, digest: Any) -> None:
    """What the exact branch alone depends on: conversions of one checkpoint that share it are measured once."""
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("linattn")
    names = ("window_size", "global_tokens", "layers", "max_length")
    # of settings by layer, those of each layer
    each = settings.get("by_layer", {"all": settings})
    shared = {layer: {name: its_own[name] for name in names} for layer, its_own in each.items()}
    for name in ("model_type", "auto_map", "architectures", *(name for name in config if name.startswith("linattn_"))):
        config.pop(name, None)
    digest.update(json.dumps([config, shared], sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in sorted(file.keys()):
                if ".linattn." not in key:
                    # bytes of any dtype
                    tensor = file.get_tensor(key).contiguous()
                    digest.update(key.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def _digest_folder(folder: Path, digest: Any) -> None:
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*config.json")]):
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)


def _load_with_head(source: str, auto_class: str, kwargs: dict[str, Any]) -> Any:
    model, report = getattr(transformers, auto_class).from_pretrained(source, output_loading_info=True, **kwargs)
    missing = [key for key in report["missing_keys"] if not any(part in key for part in _UNUSED_WEIGHTS)]
    if missing:
        raise ValueError(
            f"{source!r} has no trained weights for {type(model).__name__}: {', '.join(sorted(missing)[:4])}"
            f"{', ...' if len(missing) > 4 else ''} would be random."
        )
    return model


def _converted_model(model: nn.Module) -> LinAttnPreTrainedModel:
    """The converted model itself, or the one inside a PEFT model."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, LinAttnPreTrainedModel):
        raise ValueError(f"{type(inner).__name__} is not a converted model; make one with hf-linattn convert.")
    return inner


def _is_adapter(source: Source) -> bool:
    return isinstance(source, str) and (Path(source) / "adapter_config.json").is_file()


def _adapted(adapter: Source, checkpoints: Sequence[str]) -> str:
    """The converted checkpoint that a PEFT adapter was put on: one of those that are compared, or a Hub id.

    A path in the adapter's own file is not followed where it leads out of the adapter's folder.
    """
    name = adapter_base(Path(str(adapter)))
    if name is None:
        raise ValueError(f"converted={adapter!r}: its {ADAPTER_CONFIG} names no base_model_name_or_path.")
    for checkpoint in checkpoints:
        # an adapter may have the last part alone
        if Path(checkpoint).resolve() == Path(name).expanduser().resolve() or Path(checkpoint).resolve().name == name:
            return checkpoint
    try:
        check_source(str(adapter))
    except ValueError as error:
        raise ValueError(
            f"{error} Or compare that checkpoint too (--converted NAME={name}), which says that you trust it."
        ) from error
    return name


def _attention_settings(
    source: Source, base: str, adapted: str | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The attention settings of a conversion, and the record of its training where there is one."""
    if isinstance(source, AttentionConfig):
        return source.to_dict(), None
    if Path(source).resolve() == Path(base).resolve():
        raise ValueError(f"converted={source!r} is the base model itself.")
    config: PreTrainedConfig = AutoConfig.from_pretrained(source if adapted is None else adapted)
    if not config.model_type.startswith(MODEL_TYPE_PREFIX):
        raise ValueError(
            f"converted={source!r} has model_type={config.model_type!r}, which is no converted model; make one with "
            "hf-linattn convert."
        )
    return config.linattn, getattr(config, "linattn_training", None)


def _has_two_branches(settings: dict[str, Any]) -> bool:
    """Whether each can be switched off: of settings by layer, in every layer."""
    if "by_layer" in settings:
        its_own = settings["by_layer"].values()
        return settings["near"] and settings["far"] and all(_has_two_branches(layer) for layer in its_own)
    near = settings["near"] and (settings["window_size"] or settings["global_tokens"])
    return bool(near and settings["far"])
