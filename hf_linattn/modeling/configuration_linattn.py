"""Settings of the attention methods, and the model configurations that carry them.

A converted model's config is its base model's with one more field, `linattn`: the settings as plain
JSON. `LinformerConfig` and `PerformerConfig` are what people write and what the modules read.
"""

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

import transformers
from transformers import PreTrainedConfig

# `blocks` too: trust_remote_code in Transformers 5.8 copies what this file itself imports, and nothing further
from .blocks import to_blocks  # noqa: F401
from .families import FAMILIES, MODEL_TYPE_PREFIX
from .feature_maps import FEATURE_MAPS
from .projections import PROJECTIONS, SHARING

# Raised when a field changes its meaning. An older package must refuse a newer config, not guess at it.
FORMAT_VERSION = 1


def _check_choice(owner: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{owner}: {name}={value!r} is not one of {', '.join(map(repr, allowed))}.")


def _check_integer(owner: str, name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{owner}: {name}={value!r} must be an integer of at least {minimum}.")


@dataclass(kw_only=True)
class AttentionConfig:
    """What both methods have in common. Use `LinformerConfig` or `PerformerConfig`.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """

    method: ClassVar[str] = ""

    window_size: int = field(
        default=0,
        metadata={
            "help": "Block size of exact attention: a query sees its own block of this many tokens and both neighbours "
            "exactly, and the rest through the method. 0 is the pure method."
        },
    )
    global_tokens: int = field(
        default=0, metadata={"help": "Number of first tokens of each document that every query sees exactly."}
    )
    layers: list[int] | None = field(
        default=None,
        metadata={"help": "Indices of the layers to convert, from 0; the others stay softmax. Default: all layers."},
    )
    near: bool = field(
        default=True, metadata={"help": "Whether the exact part (window and global tokens) takes part. For ablations."}
    )
    far: bool = field(default=True, metadata={"help": "Whether the method's own part takes part. For ablations."})
    max_length: int | None = field(
        default=None, metadata={"help": "Longest document in tokens. Default: as many as the checkpoint has positions."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of random features and fixed projections."})

    def __post_init__(self) -> None:
        name = type(self).__name__
        _check_integer(name, "window_size", self.window_size, 0)
        _check_integer(name, "global_tokens", self.global_tokens, 0)
        _check_integer(name, "seed", self.seed, 0)
        if self.max_length is not None:
            _check_integer(name, "max_length", self.max_length, 1)
        if self.layers is not None:
            if not isinstance(self.layers, (list, tuple)):
                raise ValueError(f"{name}: layers={self.layers!r} must be a list of integers.")
            self.layers = sorted(self.layers)
            for index in self.layers:
                _check_integer(name, "layers", index, 0)
            if not self.layers or len(set(self.layers)) != len(self.layers):
                raise ValueError(f"{name}: layers={self.layers!r} must name at least one layer, and each once.")
        for switch in ("near", "far"):
            if not isinstance(getattr(self, switch), bool):
                raise ValueError(f"{name}: {switch}={getattr(self, switch)!r} must be True or False.")
        if not self.far and not (self.near and (self.window_size or self.global_tokens)):
            raise ValueError(
                f"{name}: far=False leaves nothing to attend to with near={self.near}, window_size={self.window_size} "
                f"and global_tokens={self.global_tokens}; near must be True and one of the two above 0."
            )

    def joining(self) -> dict[str, Any]:
        """How near and far are joined, as all attention functions take it."""
        return {name: getattr(self, name) for name in ("window_size", "global_tokens", "near", "far")}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with the method's name and the version of the format."""
        return {"method": self.method, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(settings: dict[str, Any]) -> "AttentionConfig":
        """The inverse of `to_dict`.

        Raises:
            ValueError: `settings` was written by a newer version, or names a method or field that does not exist.
        """
        settings = dict(settings)
        version = settings.pop("format_version", FORMAT_VERSION)
        if isinstance(version, bool) or not isinstance(version, int):
            raise ValueError(f"linattn.format_version={version!r} must be an integer.")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"linattn.format_version={version!r} is newer than what this hf-linattn reads ({FORMAT_VERSION}). "
                "Upgrade with `pip install -U hf-linattn`."
            )
        cls = method_class(settings.pop("method", None))
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(settings) - known):
            raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
        return cls(**settings)


@dataclass(kw_only=True)
class LinformerConfig(AttentionConfig):
    """Linformer (Wang et al. 2020, arXiv:2006.04768): keys and values projected to a fixed number along the length."""

    method: ClassVar[str] = "linformer"

    projection_length: int = field(
        default=256, metadata={"help": "Linformer's k: how many summaries stand for the whole document."}
    )
    projection: str = field(
        default="learned",
        metadata={
            "help": "How tokens are summarised: learned (starts as segment means), mean, max, conv (a convolution per "
            "channel that starts as the mean), gaussian (fixed, N(0, 1/k)).",
            "choices": PROJECTIONS,
        },
    )
    sharing: str = field(
        default="heads",
        metadata={
            "help": "What shares one projection: none (one for keys and one for values per head), heads (all heads of "
            "a layer), key_value (also keys and values), layers (also all layers).",
            "choices": SHARING,
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_integer(type(self).__name__, "projection_length", self.projection_length, 1)
        _check_choice(type(self).__name__, "projection", self.projection, PROJECTIONS)
        _check_choice(type(self).__name__, "sharing", self.sharing, SHARING)


@dataclass(kw_only=True)
class PerformerConfig(AttentionConfig):
    """Performer (Choromanski et al. 2021, arXiv:2009.14794): softmax estimated with random features (FAVOR+)."""

    method: ClassVar[str] = "performer"

    num_features: int = field(default=256, metadata={"help": "Performer's m: length of the feature vectors."})
    feature_map: str = field(
        default="positive",
        metadata={
            "help": "positive (FAVOR+), hyperbolic and trigonometric estimate softmax; relu and elu replace it; "
            "learned starts as FAVOR+ and is trained.",
            "choices": FEATURE_MAPS,
        },
    )
    orthogonal: bool = field(
        default=True, metadata={"help": "Orthogonal random directions, which estimate better than independent ones."}
    )
    redraw_interval: int | None = field(
        default=None,
        metadata={
            "help": "In training, draw the random directions anew every this many forward passes. Default: never."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_integer(type(self).__name__, "num_features", self.num_features, 1)
        _check_choice(type(self).__name__, "feature_map", self.feature_map, FEATURE_MAPS)
        if not isinstance(self.orthogonal, bool):
            raise ValueError(f"{type(self).__name__}: orthogonal={self.orthogonal!r} must be True or False.")
        if self.redraw_interval is not None:
            _check_integer(type(self).__name__, "redraw_interval", self.redraw_interval, 1)
        if self.feature_map in ("hyperbolic", "trigonometric") and self.num_features % 2:
            raise ValueError(
                f"{type(self).__name__}: num_features={self.num_features} must be even for "
                f"feature_map={self.feature_map!r}, which has two features per direction."
            )


METHODS = {cls.method: cls for cls in (LinformerConfig, PerformerConfig)}


def method_class(method: Any) -> type[AttentionConfig]:
    """The settings class of a method.

    Raises:
        ValueError: there is no such method.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(map(repr, METHODS))}.")
    return METHODS[method]


class LinAttnConfig(PreTrainedConfig):
    """The part that all converted models' configs share; the classes below join it to each family's own config."""

    base_model_type: ClassVar[str] = ""

    # a field and not an `__init__`: Transformers makes a dataclass, with an `__init__` of its own, of every config
    linattn: Any = None

    @property
    def attention(self) -> AttentionConfig:
        """The attention settings, checked.

        Raises:
            ValueError: there are none, or they are not valid.
        """
        if not self.linattn:
            raise ValueError(
                f"{type(self).__name__}: linattn={self.linattn!r}; a converted model's config holds its attention "
                "settings there. Make one with hf_linattn.convert."
            )
        return AttentionConfig.from_dict(self.linattn)


def _config_class(model_type: str, prefix: str) -> type[LinAttnConfig]:
    base = getattr(transformers, f"{prefix}Config")
    return type(
        f"LinAttn{prefix}Config",
        (LinAttnConfig, base),
        {
            "__module__": __name__,
            "__doc__": f"`{base.__name__}` of a model converted to linear attention.",
            "model_type": MODEL_TYPE_PREFIX + model_type.replace("-", "_"),
            "base_model_type": model_type,
            "_auto_class": "AutoConfig",
        },
    )


#: base model_type -> config class; each is also an attribute of this module, as LinAttnBertConfig and so on
CONFIG_CLASSES = {family.model_type: _config_class(family.model_type, family.prefix) for family in FAMILIES.values()}
for _class in CONFIG_CLASSES.values():
    setattr(sys.modules[__name__], _class.__name__, _class)
