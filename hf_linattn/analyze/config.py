"""What an analysis looks at, and the settings that it tries."""

from dataclasses import dataclass, field, fields
from typing import Any

from ..modeling.architectures import ARCHITECTURES
from ..modeling.configuration_linattn import AttentionConfig, LinformerConfig, PerformerConfig
from ..modeling.validation import check_integer, check_integers


def _window(size: int, **settings: Any) -> LinformerConfig:
    return LinformerConfig(projection="learned", window_size=size, global_tokens=1, **settings)


def _linformer(length: int) -> LinformerConfig:
    return LinformerConfig(projection="learned", projection_length=length, global_tokens=1)


def _clusters(length: int, **settings: Any) -> LinformerConfig:
    return LinformerConfig(projection="cluster", projection_length=length, global_tokens=1, **settings)


#: Settings that are tried in every layer of an encoder unless others are given. A window goes with the first token.
CANDIDATES: dict[str, AttentionConfig] = {
    **{f"window {size}": _window(size, projection_length=1, far=False) for size in (8, 16, 24, 32, 48, 64, 96)},
    **{f"window {size} + k=32": _window(size, projection_length=32) for size in (16, 32, 48, 64, 96)},
    **{f"window {size} + k=64": _window(size, projection_length=64) for size in (32, 64, 128)},
    **{f"Linformer k={k}": _linformer(k) for k in (32, 64, 128, 256)},
    **{f"window 64 + {k} clusters": _clusters(k, window_size=64) for k in (32, 64, 128)},
    "window 64 + 64 clusters + 128 selected": _clusters(64, window_size=64, selected_tokens=128),
    **{f"{k} clusters": _clusters(k) for k in (64, 128, 256)},
    "window 64 + m=64": PerformerConfig(num_features=64, feature_map="learned", window_size=64, global_tokens=1),
    "Performer m=128": PerformerConfig(num_features=128, feature_map="learned"),
    "Performer m=128, row moments": PerformerConfig(num_features=128, init="row_moments"),
}


def _causal_window(size: int, **settings: Any) -> PerformerConfig:
    return PerformerConfig(window_size=size, global_tokens=1, feature_map="learned", **settings)


#: The same for a decoder. Nothing far is a Performer's window there: a causal Linformer also sees the segment exactly
#: that has not ended yet.
DECODER_CANDIDATES: dict[str, AttentionConfig] = {
    **{f"window {size}": _causal_window(size, num_features=1, far=False) for size in (16, 32, 64, 128)},
    **{f"window {size} + k=64": _window(size, projection_length=64) for size in (32, 64, 128)},
    **{f"Linformer k={k}": _linformer(k) for k in (64, 128, 256)},
    "window 64 + m=64": _causal_window(64, num_features=64),
    "Performer m=128": PerformerConfig(num_features=128, feature_map="learned"),
}


def candidates_for(model_type: str) -> dict[str, AttentionConfig]:
    """What is tried in a model of this type unless something else is given."""
    causal = model_type in ARCHITECTURES and ARCHITECTURES[model_type].causal
    return DECODER_CANDIDATES if causal else CANDIDATES


@dataclass(kw_only=True)
class AnalyzeConfig:
    """How an analysis is made.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """

    length: int = field(
        default=512, metadata={"help": "Tokens of each document that are read, and the length that costs are told for."}
    )
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest document that the converted model shall read; a decoder's summaries depend on it. "
            "Default: as many tokens as the checkpoint has positions."
        },
    )
    documents: int = field(default=8, metadata={"help": "How many documents are read."})
    spectrum_length: int = field(
        default=512,
        metadata={"help": "First tokens of each document whose attention is decomposed; takes the cube in time."},
    )
    window_sizes: list[int] = field(
        default_factory=lambda: [16, 64, 128],
        metadata={"help": "Distances in tokens within which the attention mass is told."},
    )
    feature_error: float = field(
        default=0.1, metadata={"help": "Relative error of FAVOR+'s estimate for which the number of features is told."}
    )
    position_extension: str = field(
        default="repeat", metadata={"help": "How positions beyond the checkpoint's get their embeddings."}
    )
    retrieval_texts: int = field(
        default=0,
        metadata={
            "help": "How many texts with a planted key are read for the retrieval score of each head: the share of its "
            "attention from where the key is asked for to the key."
        },
    )
    seed: int = field(default=0, metadata={"help": "Seed of random features."})

    def __post_init__(self) -> None:
        for f in fields(self):
            value, name = getattr(self, f.name), type(self).__name__
            if f.name == "window_sizes":
                check_integers(name, f.name, value, 1)
            elif f.name not in ("feature_error", "position_extension"):
                check_integer(
                    name, f.name, value, 0 if f.name in ("seed", "retrieval_texts") else 1, optional=f.default is None
                )
        if not isinstance(self.feature_error, (int, float)) or not 0 < self.feature_error < 1:
            raise ValueError(f"feature_error={self.feature_error!r} must be a number between 0 and 1.")
        if self.max_length is not None and self.max_length < self.length:
            raise ValueError(f"max_length={self.max_length} is less than length={self.length}.")
