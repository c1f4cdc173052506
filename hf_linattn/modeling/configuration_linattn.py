"""Settings of the attention methods, and the model configurations that carry them.

A converted model's config is its base model's with one more field, `linattn`: the settings as plain
JSON. `LinformerConfig` and `PerformerConfig` are what people write and what the modules read.
"""

import dataclasses
import importlib
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

import transformers
from transformers import PreTrainedConfig

from .architectures import ARCHITECTURES, BUILT_IN, MODEL_TYPE_PREFIX, Architecture

# more than is used here: trust_remote_code in Transformers 5.8 copies what a file itself imports, and nothing further
from .blocks import to_blocks  # noqa: F401
from .far_part import FarPart  # noqa: F401
from .feature_maps import FEATURE_MAPS
from .merge import merge  # noqa: F401
from .moments import Moments  # noqa: F401
from .peft_defaults import add_peft_defaults
from .projections import PROJECTIONS, SHARING
from .validation import check_bool, check_choice, check_integer, check_integers

#: What keys are clustered around.
LANDMARKS = ("keys", "prototypes")
#: How features start.
INITS = ("random", "moments", "row_moments")

# Raised when a field changes its meaning. An older package must refuse a newer config, not guess at it.
FORMAT_VERSION = 2


# method -> class of its settings
_CONFIGS: dict[str, type["AttentionConfig"]] = {}


@dataclass(kw_only=True)
class AttentionConfig:
    """What both methods have in common. Use `LinformerConfig` or `PerformerConfig`.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """

    #: name of the method; subclasses are found by it
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
    global_queries: bool = field(
        default=True,
        metadata={
            "help": "Whether the first tokens of `global_tokens` also see every token exactly, as in Longformer. "
            "Encoders only: a decoder's first tokens see what is before them."
        },
    )
    exact_length: int | None = field(
        default=None,
        metadata={
            "help": "Rows of at most this many tokens are attended exactly, each row by its own length. Encoders only; "
            "0 for never. Default: with a window, as many tokens as the base model reads; else 0."
        },
    )
    layers: list[int] | None = field(
        default=None,
        metadata={"help": "Indices of the layers to convert, from 0; the others stay softmax. Default: all layers."},
    )
    softmax_heads: dict[int, list[int]] | None = field(
        default=None,
        metadata={
            "help": "Heads that stay softmax: index of a converted layer -> indices of its heads, those of queries "
            "where several share keys; on the command line as JSON, '{\"3\": [0, 5]}'. Each costs n * n operations for "
            "n tokens, and a decoder keeps all its keys. Default: none."
        },
    )
    near: bool = field(
        default=True, metadata={"help": "Whether the exact part (window and global tokens) takes part. For ablations."}
    )
    far: bool = field(default=True, metadata={"help": "Whether the method's own part takes part. For ablations."})
    max_length: int | None = field(
        default=None, metadata={"help": "Longest document in tokens. Default: as many as the checkpoint has positions."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of random features and fixed projections."})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _CONFIGS[cls.method] = cls

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_integer(name, "window_size", self.window_size, 0)
        check_integer(name, "global_tokens", self.global_tokens, 0)
        check_integer(name, "seed", self.seed, 0)
        check_integer(name, "exact_length", self.exact_length, 0, optional=True)
        if self.max_length is not None:
            check_integer(name, "max_length", self.max_length, 1)
        if self.layers is not None:
            if not isinstance(self.layers, (list, tuple)):
                raise ValueError(f"{name}: layers={self.layers!r} must be a list of integers.")
            self.layers = sorted(self.layers)
            for index in self.layers:
                check_integer(name, "layers", index, 0)
            if not self.layers or len(set(self.layers)) != len(self.layers):
                raise ValueError(f"{name}: layers={self.layers!r} must name at least one layer, and each once.")
        if self.softmax_heads is not None:
            self.softmax_heads = _checked_heads(name, self.softmax_heads)
        for switch in ("near", "far", "global_queries"):
            check_bool(name, switch, getattr(self, switch))
        self._check_branches()

    def _check_branches(self) -> None:
        if not self.far and not (self.near and (self.window_size or self.global_tokens)):
            raise ValueError(
                f"{type(self).__name__}: far=False leaves nothing to attend to with near={self.near}, "
                f"window_size={self.window_size} and global_tokens={self.global_tokens}; near must be True and one of "
                "the two above 0."
            )

    def of_layer(self, index: int) -> "AttentionConfig | None":
        """The settings of layer `index`, or None where it stays softmax."""
        return self if self.layers is None or index in self.layers else None

    @property
    def layer_settings(self) -> list["AttentionConfig"]:
        """The settings of the converted layers: one for all, or, where they differ by layer, those of each."""
        return [self]

    def heads_of_layer(self, index: int) -> list[int]:
        """The heads of layer `index` that stay softmax."""
        return (self.softmax_heads or {}).get(index, [])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with the method's name and the version of the format."""
        plain = {"method": self.method, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        if self.softmax_heads is not None:
            # JSON has strings for keys
            plain["softmax_heads"] = {str(layer): list(heads) for layer, heads in self.softmax_heads.items()}
        return plain

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
        if version < 2:
            # what version 1 did, which had no such fields
            settings = {"global_queries": False, "exact_length": 0, **settings}
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
        default="cluster",
        metadata={
            "help": "How tokens are summarized: cluster (means of similar keys), learned (starts as segment means), "
            "mean, max, conv (a convolution per channel that starts as the mean), gaussian (fixed, N(0, 1/k)).",
            "choices": ("cluster", *PROJECTIONS),
        },
    )
    landmarks: str = field(
        default="keys",
        metadata={
            "help": "What keys are clustered around, with projection='cluster': keys of the document, or prototypes "
            "(fixed centers, which calibration finds by k-means). Decoders have prototypes.",
            "choices": LANDMARKS,
        },
    )
    rounds: int = field(
        default=0,
        metadata={"help": "Rounds of Lloyd's algorithm that move the landmarks, with projection='cluster' and keys."},
    )
    tokens_per_slot: int | None = field(
        default=None,
        metadata={
            "help": "A document of n tokens has n / tokens_per_slot summaries where that is more than "
            "projection_length, so that its cost grows with n * n / tokens_per_slot. With projection='cluster' around "
            "keys, in encoders. Default: projection_length summaries, whatever the length."
        },
    )
    selected_tokens: int = field(
        default=0,
        metadata={
            "help": "Far tokens that each block of queries, in a decoder each query, attends to exactly, beside the "
            "summaries: those of the clusters that matter most to it. With projection='cluster' and a window. A "
            "decoder then keeps the keys and values of all tokens."
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
        check_integer(type(self).__name__, "projection_length", self.projection_length, 1)
        check_choice(type(self).__name__, "projection", self.projection, ("cluster", *PROJECTIONS))
        check_choice(type(self).__name__, "landmarks", self.landmarks, LANDMARKS)
        check_integer(type(self).__name__, "rounds", self.rounds, 0)
        check_integer(type(self).__name__, "tokens_per_slot", self.tokens_per_slot, 1, optional=True)
        if self.tokens_per_slot is not None and (self.projection, self.landmarks) != ("cluster", "keys"):
            raise ValueError(
                f"{type(self).__name__}: tokens_per_slot={self.tokens_per_slot} must be left out with "
                f"projection={self.projection!r} and landmarks={self.landmarks!r}; the number of slots can grow with "
                "projection='cluster' and landmarks='keys' only."
            )
        check_integer(type(self).__name__, "selected_tokens", self.selected_tokens, 0)
        if self.selected_tokens and not (self.projection == "cluster" and self.window_size):
            raise ValueError(
                f"{type(self).__name__}: selected_tokens={self.selected_tokens} must be 0 with "
                f"projection={self.projection!r} and window_size={self.window_size}; blocks of window_size queries "
                "select tokens of projection='cluster'."
            )
        check_choice(type(self).__name__, "sharing", self.sharing, SHARING)
        if self.projection == "cluster" and self.sharing != "heads":
            raise ValueError(
                f"{type(self).__name__}: sharing={self.sharing!r} must be 'heads', the default, with "
                "projection='cluster', which has no projection to share."
            )


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
            "choices": tuple(FEATURE_MAPS),
        },
    )
    init: str = field(
        default="random",
        metadata={
            "help": "What features are matched to: random (nothing, as in the paper), moments (mean and covariance of "
            "queries and keys on calibration texts; positive, hyperbolic and learned) or row_moments (those of each "
            "document, as it comes; positive and hyperbolic, encoders only).",
            "choices": INITS,
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
        check_integer(type(self).__name__, "num_features", self.num_features, 1)
        check_choice(type(self).__name__, "feature_map", self.feature_map, FEATURE_MAPS)
        check_choice(type(self).__name__, "init", self.init, INITS)
        if self.init not in (inits := FEATURE_MAPS[self.feature_map].inits):
            raise ValueError(
                f"{type(self).__name__}: init={self.init!r} is not one of {', '.join(map(repr, inits))} for "
                f"feature_map={self.feature_map!r}."
            )
        check_bool(type(self).__name__, "orthogonal", self.orthogonal)
        if self.redraw_interval is not None:
            check_integer(type(self).__name__, "redraw_interval", self.redraw_interval, 1)
        if self.num_features % (each := FEATURE_MAPS[self.feature_map].features_per_direction):
            raise ValueError(
                f"{type(self).__name__}: num_features={self.num_features} must be a multiple of {each} for "
                f"feature_map={self.feature_map!r}, which has {each} features per direction."
            )


@dataclass(kw_only=True)
class LayerwiseConfig(AttentionConfig):
    """Settings that differ by layer. `max_length`, `seed`, `softmax_heads`, `near` and `far` are the whole model's.

    A layer's own branches can only be off where those of the whole are on.
    """

    method: ClassVar[str] = "layerwise"

    by_layer: dict[int, AttentionConfig] = field(
        metadata={"help": "Index of a layer, from 0 -> its settings. Layers without any stay softmax."}
    )

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.by_layer, dict) or not self.by_layer:
            raise ValueError(
                f"{name}: by_layer={self.by_layer!r} must be a dict that gives the settings of at least one layer. "
                "Softmax in all layers is no conversion; hf_linattn.conversion.positions.extend_positions gives a base "
                "model more positions."
            )
        # JSON has strings for keys, and dicts for settings
        try:
            layers: dict[int, Any] = {int(index): settings for index, settings in self.by_layer.items()}
        except (TypeError, ValueError):
            raise ValueError(f"{name}: by_layer has the keys {list(self.by_layer)}; they must be integers.") from None
        self.by_layer = {
            index: AttentionConfig.from_dict(layers[index]) if isinstance(layers[index], dict) else layers[index]
            for index in sorted(layers)
        }
        for index, settings in self.by_layer.items():
            if type(settings) not in (classes := method_configs().values()):
                allowed = " or a ".join(cls.__name__ for cls in classes)
                raise ValueError(f"{name}: by_layer[{index}]={settings!r} must be a {allowed}.")
            if settings.max_length not in (None, self.max_length):
                raise ValueError(
                    f"{name}: by_layer[{index}].max_length={settings.max_length}, and that of the whole model is "
                    f"{self.max_length}."
                )
            if settings.layers is not None:
                raise ValueError(f"{name}: by_layer[{index}].layers={settings.layers} must not be set.")
            if getattr(settings, "sharing", None) == "layers":
                raise ValueError(f"{name}: by_layer[{index}].sharing='layers' cannot be: layers differ here.")
        for common in ("window_size", "global_tokens"):
            if getattr(self, common):
                raise ValueError(f"{name}: {common}={getattr(self, common)!r} must be set for each layer, in by_layer.")
        if self.layers is not None and list(self.layers) != list(self.by_layer):
            raise ValueError(f"{name}: layers={self.layers} must be left out; by_layer has {list(self.by_layer)}.")
        self.layers = list(self.by_layer)
        super().__post_init__()
        # the model's own settings, seen once here so that what does not fit is found before any layer is made
        self.by_layer = {index: self._of_whole(index, settings) for index, settings in self.by_layer.items()}

    @property
    def layer_settings(self) -> list[AttentionConfig]:
        """The settings of the converted layers: one for all, or, where they differ by layer, those of each."""
        return list(self.by_layer.values())

    def _of_whole(self, index: int, settings: AttentionConfig) -> AttentionConfig:
        chosen = self.heads_of_layer(index)
        heads = {index: chosen} if chosen else None
        if settings.softmax_heads not in (None, heads):
            raise ValueError(
                f"{type(self).__name__}: by_layer[{index}].softmax_heads={settings.softmax_heads} must be left out; "
                "softmax_heads of the whole model has the heads of all layers."
            )
        return dataclasses.replace(settings, max_length=self.max_length, seed=self.seed, softmax_heads=heads)

    def _check_branches(self) -> None:
        for settings in self.by_layer.values():
            _switched(settings, near=self.near, far=self.far)

    def of_layer(self, index: int) -> AttentionConfig | None:
        settings = self.by_layer.get(index)
        return None if settings is None else _switched(settings, near=self.near, far=self.far)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with the settings of each layer in full."""
        by_layer = {str(index): settings.to_dict() for index, settings in self.by_layer.items()}
        # which layers there are is told once
        return {**super().to_dict(), "layers": None, "by_layer": by_layer}


def _checked_heads(owner: str, value: Any) -> dict[int, list[int]]:
    """`softmax_heads` in order, with integers for the keys that JSON has as strings.

    Raises:
        ValueError: it is something else.
    """
    allowed = f"{owner}: softmax_heads={value!r} must be a dict: index of a layer -> a list of its heads, each once."
    if not isinstance(value, dict) or not value:
        raise ValueError(allowed)
    checked = {}
    for layer, heads in value.items():
        if isinstance(layer, bool) or not str(layer).isdecimal() or not isinstance(heads, (list, tuple)):
            raise ValueError(allowed)
        check_integers(owner, f"softmax_heads[{layer}]", heads, 0)
        if len(set(heads)) != len(heads):
            raise ValueError(allowed)
        checked[int(layer)] = sorted(heads)
    return dict(sorted(checked.items()))


def _switched(settings: AttentionConfig, *, near: bool, far: bool) -> AttentionConfig:
    """A layer's settings with branches switched off that are off in the whole model."""
    return dataclasses.replace(settings, near=settings.near and near, far=settings.far and far)


def method_configs() -> dict[str, type[AttentionConfig]]:
    """Name of each method -> class of its settings, those by layer left out."""
    return {method: cls for method, cls in _CONFIGS.items() if cls is not LayerwiseConfig}


def method_class(method: Any) -> type[AttentionConfig]:
    """The settings class of a method, or of settings by layer.

    Raises:
        ValueError: there is no such method.
    """
    if method not in _CONFIGS:
        raise ValueError(f"method={method!r} is not one of {', '.join(map(repr, _CONFIGS))}.")
    return _CONFIGS[method]


class LinAttnConfig(PreTrainedConfig):
    """The part that all converted models' configs share; the classes below add it to each architecture's own config."""

    base_model_type: ClassVar[str] = ""

    # a field and not an `__init__`: Transformers makes a dataclass, with an `__init__` of its own, of every config
    linattn: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "LinAttnConfig":
        # model classes are made, and registered, once there is a config to make a model of; where this file came with a
        # checkpoint, the auto classes find the other files by themselves
        if __package__ == "hf_linattn.modeling":
            importlib.import_module(".modeling_linattn", __package__)
        return super().__new__(cls)

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

    def to_dict(self) -> dict[str, Any]:
        """As of every config. PEFT asks for it before it looks up which modules of this `model_type` it adapts."""
        add_peft_defaults()
        return super().to_dict()


def _config_class(architecture: Architecture) -> type[LinAttnConfig]:
    base = getattr(transformers, f"{architecture.prefix}Config")
    return type(
        f"LinAttn{architecture.prefix}Config",
        (LinAttnConfig, base),
        {
            "__module__": __name__,
            "__doc__": f"`{base.__name__}` of a model converted to linear attention.",
            "model_type": MODEL_TYPE_PREFIX + architecture.model_type.replace("-", "_"),
            "base_model_type": architecture.model_type,
            # the files that travel with a checkpoint have the built-in rows only
            "_auto_class": "AutoConfig" if architecture.model_type in BUILT_IN else None,
        },
    )


#: base model_type -> config class; each is also an attribute of this module, as LinAttnBertConfig and so on
CONFIG_CLASSES: dict[str, type[LinAttnConfig]] = {}


def add_config_class(architecture: Architecture) -> type[LinAttnConfig]:
    """Make the config class of a row of the table."""
    made = _config_class(architecture)
    CONFIG_CLASSES[architecture.model_type] = made
    setattr(sys.modules[__name__], made.__name__, made)
    return made


for _row in ARCHITECTURES.values():
    add_config_class(_row)
