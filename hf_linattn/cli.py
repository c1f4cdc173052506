"""The command `hf-linattn`."""

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import logging

from . import __version__
from .checkpoint import convert_checkpoint
from .convert import POSITION_EXTENSIONS
from .cost import summarize
from .modeling.configuration_linattn import METHODS, AttentionConfig
from .modeling.modeling_linattn import AUTO_CLASSES

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


def add_options(parser: Any, options: type, *, skip: frozenset[str] = frozenset()) -> None:
    """One command line option for each field of a dataclass; an option that is not given leaves no trace."""
    hints = typing.get_type_hints(options)
    for f in dataclasses.fields(options):
        if f.name in skip:
            continue
        # X | None -> X
        kinds = [kind for kind in typing.get_args(hints[f.name]) if kind is not types.NoneType]
        kind = kinds[0] if isinstance(hints[f.name], types.UnionType) else hints[f.name]
        settings: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": f.metadata["help"]}
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is list:
            settings |= {"nargs": "+", "type": typing.get_args(kind)[0], "metavar": f.name.upper()}
        else:
            settings |= {"type": kind, "choices": f.metadata.get("choices")}
            if "choices" not in f.metadata:
                settings["metavar"] = f.name.upper()
        if f.default is dataclasses.MISSING:
            settings["required"] = True
        elif f.default is not None and "Default:" not in f.metadata["help"]:
            settings["help"] += f" Default: {f.default}."
        parser.add_argument(f"--{f.name.replace('_', '-')}", **settings)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ID_OR_FOLDER", help="Hub id or folder of the checkpoint to convert.")
    add_options(parser, ConvertOptions)
    add_options(parser.add_argument_group("both methods"), AttentionConfig)
    common = frozenset(f.name for f in dataclasses.fields(AttentionConfig))
    for name, config_class in METHODS.items():
        add_options(parser.add_argument_group(name), config_class, skip=common)
    parser.set_defaults(run=_convert)


def _convert(given: dict[str, Any]) -> None:
    options = ConvertOptions(
        **{f.name: given.pop(f.name) for f in dataclasses.fields(ConvertOptions) if f.name in given}
    )
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-linattn", description=__doc__)
    parser.add_argument("--version", action="version", version=f"hf-linattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_convert(commands.add_parser("convert", help="Give a checkpoint linear attention."))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user's making are one line, not a traceback. Returns the exit status."""
    given = vars(_parser().parse_args(arguments))
    given.pop("command")
    # the bar over the layers is ours; the loader's own adds nothing for models of this size
    logging.disable_progress_bar()
    try:
        given.pop("run")(given)
    except (ValueError, TypeError, OSError) as error:
        print(f"hf-linattn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hf-linattn: interrupted; nothing was written.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
