"""`hf-linattn convert`: give a checkpoint linear attention."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint import convert_checkpoint
from ..convert import POSITION_EXTENSIONS
from ..cost import summarize
from ..modeling.configuration_linattn import METHODS, AttentionConfig
from ..modeling.modeling_linattn import AUTO_CLASSES
from .options import add_options, taken

DTYPES = ("float32", "float16", "bfloat16", "auto")


@dataclass(kw_only=True)
class ConvertOptions:
    """Options of `hf-linattn convert` beside those of the methods."""

    output: str = field(metadata={"help": "Folder to write. It appears when it is complete."})
    method: str = field(metadata={"help": "Which attention.", "choices": tuple(METHODS)})
    auto_class: str | None = field(
        default=None,
        metadata={
            "help": "Head to load. Default: the one that the checkpoint was saved with.",
            "choices": AUTO_CLASSES,
        },
    )
    position_extension: str = field(
        default="repeat",
        metadata={
            "help": "How positions beyond the checkpoint's get their embeddings.",
            "choices": POSITION_EXTENSIONS,
        },
    )
    dtype: str | None = field(
        default=None, metadata={"help": "Data type of the weights. Default: the checkpoint's.", "choices": DTYPES}
    )
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub id."})
    overwrite: bool = field(default=False, metadata={"help": "Replace an earlier conversion in the output folder."})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", metavar="ID_OR_FOLDER", help="Hub id or folder of the checkpoint to convert.")
    add_options(parser, ConvertOptions)
    add_options(parser.add_argument_group("both methods"), AttentionConfig)
    common = frozenset(f.name for f in dataclasses.fields(AttentionConfig))
    for name, config_class in METHODS.items():
        add_options(parser.add_argument_group(name), config_class, skip=common)


def run(given: dict[str, Any]) -> None:
    """Convert, and tell what was done."""
    options = taken(given, ConvertOptions)
    model, config_class = given.pop("model"), METHODS[options.method]
    if foreign := sorted(set(given) - {f.name for f in dataclasses.fields(config_class)}):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise ValueError(f"{names}: not an option of --method {options.method}.")
    loading = {name: value for name in ("dtype", "revision") if (value := getattr(options, name)) is not None}
    converted = convert_checkpoint(
        model,
        options.output,
        config_class(**given),
        auto_class=options.auto_class,
        position_extension=options.position_extension,
        overwrite=options.overwrite,
        **loading,
    )
    print(f"{model} -> {options.output} ({type(converted).__name__}, {options.method})")
    print(summarize(converted))
    if not _has_exact_part(converted.config.attention):
        print("note                    no exact part (--window-size, --global-tokens): train it before use")


def _has_exact_part(config: AttentionConfig) -> bool:
    """Whether some keys are seen exactly: without, a swap alone loses most of a model."""
    return config.near and bool(config.window_size or config.global_tokens)
