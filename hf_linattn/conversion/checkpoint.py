"""From a checkpoint's folder or Hub id to a folder that holds all that a converted model's repository has."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import GenerationConfig
from transformers.utils import logging

from ..data.tokenizers import load_tokenizer
from ..modeling.architectures import MODEL_TYPE_PREFIX
from ..modeling.configuration_linattn import AttentionConfig
from ..modeling.modeling_linattn import LinAttnPreTrainedModel
from ..utils.files import full_disk
from .checkpoint_files import SENTENCE_FILES, sentence_kind, sentence_module_folders
from .convert import convert


def convert_checkpoint(
    model_id: str | Path,
    output_dir: str | Path,
    config: AttentionConfig | str,
    *,
    overwrite: bool = False,
    **convert_kwargs: Any,
) -> LinAttnPreTrainedModel:
    """`convert` from one folder or Hub id to another folder, which then holds all that a model repository has.

    Written are the weights, the config, the modelling files for `trust_remote_code=True`, the tokenizer
    with its `model_max_length` raised, the generation config where the checkpoint has one, and of a
    sentence encoder its pooling and other modules with `max_seq_length` raised. The folder appears when
    it is complete, and not before.

    Args:
        model_id: a Hub id or a folder.
        output_dir: where to write; must be empty or not exist, unless `overwrite`.
        config: as in `convert`.
        overwrite: replace `output_dir` if it holds an earlier conversion; anything else is never removed.
        convert_kwargs: all other arguments of `convert`.

    Returns:
        The converted model.

    Raises:
        FileExistsError: `output_dir` has something in it that may not be replaced.
        TypeError: `model_id` is a loaded model.
        OSError: the disk is full.
        ValueError: as `convert`, or `output_dir` is or contains the folder to convert.
    """
    if not isinstance(model_id, (str, Path)):
        raise TypeError(
            f"model_id is a {type(model_id).__name__}; it must be a Hub id or a folder. "
            "A loaded model is converted by convert()."
        )
    # through links and '.', so that what is replaced is what is there
    target = Path(output_dir).resolve()
    _check_target(Path(model_id), str(output_dir), target, overwrite)
    model = convert(model_id, config, **convert_kwargs)

    def no_room(error: Exception) -> str:
        return f"output_dir={str(output_dir)!r}: the disk is full; make room, or write somewhere else."

    with full_disk(no_room):
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the last step is a rename within one file system
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            places = {k: v for k, v in convert_kwargs.items() if k in ("revision", "token", "cache_dir", "subfolder")}
            save_checkpoint(model, model_id, unfinished, **places)
            unfinished.chmod(0o755)
            _put_in_place(unfinished, target, overwrite)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return model


def save_checkpoint(model: LinAttnPreTrainedModel, source: str | Path, folder: Path, **hub_kwargs: Any) -> None:
    """Write into `folder` a converted model and all else that the checkpoint `source` (an id or folder) has."""
    max_length = model.config.linattn["max_length"]
    model.save_pretrained(folder)
    _save_tokenizer(source, folder, max_length, hub_kwargs)
    _save_generation_config(source, folder, hub_kwargs)
    _save_sentence_modules(source, folder, type(model).__name__, max_length, hub_kwargs)


def _check_target(source: Path, name: str, target: Path, overwrite: bool) -> None:
    if source.is_dir() and source.resolve() == target:
        raise ValueError(f"output_dir={name!r} is the checkpoint itself; write somewhere else.")
    if source.is_dir() and source.resolve().is_relative_to(target):
        raise ValueError(f"output_dir={name!r} contains the checkpoint {str(source)!r}; write somewhere else.")
    if target.is_file():
        raise FileExistsError(f"output_dir={name!r} is a file.")
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise PermissionError(
            f"output_dir={name!r} cannot be made: {str(parent)!r} is no folder that can be written to."
        )
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"output_dir={name!r} is not empty; pass overwrite=True (--overwrite) to replace it.")
    if not _is_conversion(target):
        raise FileExistsError(
            f"output_dir={name!r} holds something else than a converted model, which overwrite does not remove."
        )


def _is_conversion(folder: Path) -> bool:
    """Whether a folder holds a converted model, and so may be replaced by another one."""
    try:
        return str(json.loads((folder / "config.json").read_text())["model_type"]).startswith(MODEL_TYPE_PREFIX)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _put_in_place(folder: Path, target: Path, overwrite: bool) -> None:
    """Rename `folder` to `target`; what stood there is moved aside first, so that one of the two is always whole."""
    aside = folder.with_name(f"{folder.name}-replaced")
    if overwrite and target.exists():
        target.rename(aside)
    try:
        # fails, rather than replaces it, where another process has filled the folder since the check
        folder.rename(target)
    except BaseException as error:
        if aside.exists() and not target.exists():
            aside.rename(target)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(f"output_dir={str(target)!r} was written by another process meanwhile.") from error
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _save_tokenizer(model_id: str | Path, folder: Path, max_length: int, hub_kwargs: dict[str, Any]) -> None:
    try:
        tokenizer = load_tokenizer(model_id, **hub_kwargs)
    except (OSError, ValueError) as error:
        logging.get_logger(__name__).warning(
            f"No tokenizer was found with {str(model_id)!r}, and none is written ({error})."
        )
        return
    tokenizer.model_max_length = max_length
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        # a length that tokenizer.json cuts at, left by the training of a sentence encoder
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(folder)


def _save_generation_config(model_id: str | Path, folder: Path, hub_kwargs: dict[str, Any]) -> None:
    try:
        config = GenerationConfig.from_pretrained(str(model_id), **hub_kwargs)
    except OSError:
        return  # encoders have none
    config.save_pretrained(folder)


def _save_sentence_modules(
    model_id: str | Path, folder: Path, architecture: str, max_length: int, hub_kwargs: dict[str, Any]
) -> None:
    """What sentence-transformers keeps beside the model, where it belongs to its head: pooling, prompts."""
    source = Path(model_id)
    if not source.is_dir():
        kwargs = {k: v for k, v in hub_kwargs.items() if k != "subfolder"}
        patterns = [*SENTENCE_FILES, "[0-9]_*/*"]
        source = Path(snapshot_download(str(model_id), allow_patterns=patterns, **kwargs))
    if sentence_kind(source, architecture) is None:
        if (source / "modules.json").is_file():
            logging.get_logger(__name__).warning(
                f"modules.json of {str(model_id)!r} is left out: {architecture} is no model that it makes."
            )
        return
    for name in SENTENCE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for name in sentence_module_folders(source):
        shutil.copytree(source / name, folder / name)
    settings = folder / "sentence_bert_config.json"
    if settings.is_file():
        values = json.loads(settings.read_text())
        settings.write_text(json.dumps({**values, "max_seq_length": max_length}, indent=2) + "\n")
