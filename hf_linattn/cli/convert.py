"""`hf-linattn convert`: give a checkpoint linear attention."""

import argparse
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..conversion.checkpoint import convert_checkpoint
from ..conversion.positions import POSITION_EXTENSIONS
from ..conversion.summary import summarize
from ..data.documents import DataConfig, load_documents
from ..modeling.configuration_linattn import AttentionConfig, method_configs
from ..modeling.modeling_linattn import AUTO_CLASSES
from .options import add_option_groups, taken

MAIN = ("method", "output", "max_length", "window_size", "global_tokens", "projection_length", "num_features")

DTYPES = ("float32", "float16", "bfloat16", "auto")


@dataclass(kw_only=True)
class ConvertOptions:
    """Options of `hf-linattn convert` beside those of the methods."""

    output: str = field(metadata={"help": "Folder to write. It appears when it is complete."})
    method: str | None = field(
        default=None,
        metadata={"help": "Which attention. Required without --config.", "choices": tuple(method_configs())},
    )
    config: str | None = field(
        default=None,
        metadata={
            "help": "JSON file of attention settings, or the folder of hf-linattn analyze, whose suggestion it takes."
        },
    )
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
    calibration_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Documents, as --dataset of the other commands, to which features and projections are fitted."
        },
    )
    calibration_documents: int = field(default=96, metadata={"help": "How many of them."})
    overwrite: bool = field(default=False, metadata={"help": "Replace an earlier conversion in the output folder."})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", metavar="ID_OR_FOLDER", help="Hub id or folder of the checkpoint to convert.")
    parts = {"checkpoint": ConvertOptions, "both methods": AttentionConfig, **method_configs()}
    add_option_groups(parser, MAIN, parts)


def run(given: dict[str, Any]) -> None:
    """Convert, and tell what was done."""
    options = taken(given, ConvertOptions)
    model = given.pop("model")
    config = _of_file(options, given) if options.config is not None else _of_options(options, given)
    loading = {name: value for name in ("dtype", "revision") if (value := getattr(options, name)) is not None}
    if options.calibration_dataset is not None:
        data = DataConfig(dataset=options.calibration_dataset, max_documents=options.calibration_documents)
        loading["calibration_texts"] = [document.text for document in load_documents(data).documents]
    converted = convert_checkpoint(
        model,
        options.output,
        config,
        auto_class=options.auto_class,
        position_extension=options.position_extension,
        overwrite=options.overwrite,
        **loading,
    )
    print(f"{model} -> {options.output} ({type(converted).__name__}, {config.method})")
    print(summarize(converted))
    if not _has_exact_part(converted.config.attention):
        print("note                    no exact part (--window-size, --global-tokens): train it before use")


def _of_options(options: ConvertOptions, given: dict[str, Any]) -> AttentionConfig:
    if options.method is None:
        raise ValueError(f"Give --method ({' or '.join(method_configs())}) or --config.")
    config_class = method_configs()[options.method]
    if foreign := sorted(set(given) - {f.name for f in dataclasses.fields(config_class)}):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise ValueError(f"{names}: not an option of --method {options.method}.")
    return config_class(**given)


def _of_file(options: ConvertOptions, given: dict[str, Any]) -> AttentionConfig:
    """Settings in JSON, alone or as `config` of a suggestion; of the options only the length may be given with them."""
    foreign = sorted(({"method"} if options.method is not None else set()) | (set(given) - {"max_length"}))
    if foreign:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise ValueError(f"{names}: not with --config, whose file has all settings.")
    path = Path(str(options.config))
    path = path / "suggestion.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or not isinstance(values.get("config", values), dict):
            raise ValueError(f"it holds {str(values)[:40]!r}")
        config = AttentionConfig.from_dict(values.get("config", values))
    except ValueError as error:
        raise ValueError(f"--config {str(path)!r} holds no attention settings: {error}") from error
    return dataclasses.replace(config, **given)


def _has_exact_part(config: AttentionConfig) -> bool:
    """Whether some keys are seen exactly in all layers: without, a swap alone loses most of a model."""
    return config.near and all(bool(x.window_size or x.global_tokens) for x in config.layer_settings)
