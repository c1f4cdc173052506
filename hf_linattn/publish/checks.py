"""What is looked at before a converted checkpoint is pushed: its files, and whether it loads elsewhere."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_imports

from ..conversion.checkpoint_files import (
    CONFIG,
    GENERATION_CONFIG,
    SENTENCE_FILES,
    SENTENCE_MODULE_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    WEIGHTS,
    WEIGHTS_INDEX,
    chat_templates,
    check_checkpoint,
    json_of,
    present_files,
    sentence_kind,
    sentence_module_folders,
    shards_of,
)
from ..modeling.architectures import MODEL_TYPE_PREFIX
from ..modeling.configuration_linattn import CONFIG_CLASSES, AttentionConfig
from ..utils.files import inside
from ..utils.paths import without_paths

# What a model repository holds beside config, weights and modelling files, by exact names. Nothing else in a folder is
# pushed: not what a training left there, nothing that is private, and nothing pickled.
_OTHER_FILES = (
    GENERATION_CONFIG,
    *TOKENIZER_FILES,
    "README.md",
    *(f"{name}{ending}" for name in ("LICENSE", "LICENCE", "NOTICE") for ending in ("", ".txt", ".md")),
)


def check_folder(folder: Path) -> list[str]:
    """The files of a converted checkpoint that belong on the Hub, after a look at each that loading needs.

    Returns:
        Paths within the folder.

    Raises:
        FileNotFoundError, ValueError: as `push`; the message names the file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r}.")
    if not (folder / "config.json").is_file():
        hint = "not a converted checkpoint"
        if (folder / "adapter_config.json").is_file():
            hint = "a PEFT adapter; save the whole model: model.merge_and_unload().save_pretrained(...)"
        raise FileNotFoundError(f"{str(folder)!r} has no config.json: it is {hint}.")
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = str(values["model_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder / 'config.json')!r} is damaged: {error!r}") from error
    if not model_type.startswith(MODEL_TYPE_PREFIX):
        raise ValueError(
            f"{str(folder)!r} has model_type={model_type!r}, which is no converted model; make one with "
            "hf-linattn convert."
        )
    if model_type not in {cls.model_type for cls in CONFIG_CLASSES.values()}:
        raise ValueError(
            f"{str(folder)!r} has model_type={model_type!r}, which this hf-linattn does not know. Upgrade with "
            "`pip install -U hf-linattn`."
        )
    try:
        AttentionConfig.from_dict(values.get("linattn") or {})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(folder / 'config.json')!r}: {error}") from error
    code = _modelling_files(folder, values)
    check_checkpoint(folder)
    others = [*present_files(folder, _OTHER_FILES), *chat_templates(folder)]
    sentence_folders = sentence_module_folders(folder)
    if sentence_kind(folder, values["architectures"][0]) is not None:
        others += present_files(folder, SENTENCE_FILES)
        for name in sentence_folders:
            others += present_files(folder, [f"{name}/{file}" for file in SENTENCE_MODULE_FILES])
    return sorted({CONFIG, *code, *_weight_files(folder), *others})


def cleaned_files(folder: Path, files: Iterable[str]) -> dict[str, bytes]:
    """The JSON files in which paths of this machine stand, as they are pushed: with names in place of the paths.

    Raises:
        ValueError: a README.md of the folder's own has a path of this machine.
    """
    cleaned: dict[str, bytes] = {}
    for file in files:
        name = Path(file).name
        if name == "README.md":
            _check_own_card(folder)
        if name not in (CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, *SENTENCE_FILES):
            continue
        values = json_of(folder / file)
        clean = _without_paths(values, named_only=name == TOKENIZER_CONFIG)
        if clean != values:
            cleaned[file] = (json.dumps(clean, indent=2, ensure_ascii=False) + "\n").encode()
    return cleaned


def _without_paths(values: Any, *, named_only: bool) -> Any:
    if not isinstance(values, dict):
        return without_paths(values)
    return {
        key: value
        # labels may look like paths, and so may tokens
        if key in ("id2label", "label2id") or (named_only and not key.endswith(("name_or_path", "_file", "_dir")))
        else without_paths(value)
        for key, value in values.items()
    }


def _check_own_card(folder: Path) -> None:
    for number, line in enumerate((folder / "README.md").read_text(encoding="utf-8").splitlines(), start=1):
        for path in {str(folder.resolve()), str(Path.home())} - {"/"}:
            if re.search(rf"{re.escape(path)}(?![\w-])", line):
                raise ValueError(
                    f"{str(folder / 'README.md')!r}, line {number} has a path of this machine, {path!r}; take it out, "
                    "or remove the file to have a card written."
                )


def load_afresh(folder: Path) -> None:
    """Load the folder in a fresh process, offline and without this package, and run it once.

    Raises:
        ValueError: it does not load, a weight is missing, or an output is not finite; the message says which.
    """
    script = Path(__file__).with_name("clean_load.py")
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": scratch}
        done = subprocess.run(
            [sys.executable, "-I", str(script), str(folder.resolve())],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"{str(folder)!r} does not work in a fresh process, and is not pushed: {reason}")


def _modelling_files(folder: Path, values: dict[str, Any]) -> set[str]:
    """The modules that the config's auto_map names, and all that they import of each other."""
    references = (values.get("auto_map") or {}).values()
    if not references or not values.get("architectures"):
        raise ValueError(
            f"{str(folder / 'config.json')!r} has no auto_map or no architectures, by which others load it; write the "
            "folder with model.save_pretrained."
        )
    if elsewhere := [reference for reference in references if "--" in reference]:
        raise ValueError(
            f"{str(folder / 'config.json')!r}: auto_map names the code of another repository, {elsewhere[0]!r}; write "
            "the folder with model.save_pretrained."
        )
    code: set[str] = set()
    waiting = {reference.partition(".")[0]: "config.json" for reference in references}
    while waiting:
        name, needed_by = waiting.popitem()
        file = inside(folder, f"{name}.py", file=needed_by, field="module")
        if not file.is_file():
            raise FileNotFoundError(
                f"{str(file)!r} is missing, a modelling file that {needed_by} needs; write the folder with "
                "model.save_pretrained."
            )
        code.add(file.name)
        waiting |= {module: file.name for module in get_relative_imports(file) if f"{module}.py" not in code}
    return code


def _weight_files(folder: Path) -> set[str]:
    """The weights, in one file or in shards; each is opened, which finds it cut off."""
    has_index = any(present_files(folder, [WEIGHTS_INDEX]))
    shards = shards_of(folder, WEIGHTS_INDEX) if has_index else {WEIGHTS: set()}
    for name, tensors in shards.items():
        file = inside(folder, name, file=name, field="file")
        if not file.is_file():
            raise FileNotFoundError(f"{str(file)!r} is missing: weights are pushed as safetensors only.")
        try:
            with safe_open(file, framework="pt") as opened:
                present = set(opened.keys())
        except SafetensorError as error:
            raise ValueError(f"{str(file)!r} is cut off or damaged: {error}") from error
        if lost := sorted(tensors - present):
            raise ValueError(
                f"{str(file)!r} lacks {lost[0]} and {len(lost) - 1} more tensors that {WEIGHTS_INDEX} names."
            )
    return {*shards, *([WEIGHTS_INDEX] if has_index else [])}
