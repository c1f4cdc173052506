"""The files of a checkpoint's folder: their exact names, and that none of them leads out of the folder."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled

from ..modeling.modeling_linattn import MODEL_CLASSES
from ..utils.files import inside
from ..utils.paths import is_path

CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
#: What Transformers writes of the tokenizers of the supported architectures.
TOKENIZER_FILES = (
    *("tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt"),
    *("tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "spm.model"),
    "chat_template.jinja",
)
#: Folder of the chat templates beside the default one; Transformers reads each file of it that ends in .jinja.
CHAT_TEMPLATES = "additional_chat_templates"
#: What makes a sentence encoder of a checkpoint, beside the folders that modules.json names.
SENTENCE_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
#: What such a folder holds.
SENTENCE_MODULE_FILES = ("config.json", WEIGHTS)

# Kind of model of sentence-transformers -> ends of the heads that it is made of; "": the model without a head.
_KINDS = {
    "SentenceTransformer": ("",),
    "MultiVectorEncoder": ("",),
    "SparseEncoder": ("ForMaskedLM",),
    "CrossEncoder": ("ForSequenceClassification", "ForCausalLM", "LMHeadModel"),
}

# files that name others
_NAMING = (CONFIG, TOKENIZER_CONFIG, SENTENCE_FILES[0], WEIGHTS_INDEX, ADAPTER_CONFIG)
# weights in formats that are read and never written
_OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_checkpoint(folder: Path) -> None:
    """Whether all that a checkpoint's files name lies in its folder, links followed.

    Raises:
        ValueError: a name leads out of the folder; the message names the file, the field and the value.
    """
    names = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES, *SENTENCE_FILES, WEIGHTS, WEIGHTS_INDEX, *_OTHER_WEIGHTS)
    for name in (*present_files(folder, names), *chat_templates(folder)):
        if name.endswith(".index.json"):
            shards_of(folder, name)
    for file in (CONFIG, TOKENIZER_CONFIG):
        check_auto_map(folder, file)
    _check_tokenizer_files(folder)
    _check_adapter(folder)
    sentence_module_folders(folder)


def check_source(source: str | Path, *, subfolder: str = "", **places: Any) -> None:
    """`check_checkpoint` of a folder, or of a Hub id's files that name others, which are fetched for it.

    Args:
        source: folder or Hub id.
        subfolder: of the checkpoint in it.
        places: revision, token and cache_dir, as `from_pretrained` takes them.

    Raises:
        ValueError: as `check_checkpoint`.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(str(source), allow_patterns=[f"**{name}" for name in _NAMING], **places))
        except (OSError, ValueError, OfflineModeIsEnabled):
            # what cannot be reached is told by what loads it
            return
    check_checkpoint(folder / subfolder)


def present_files(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Those of the names that are files of the folder.

    Raises:
        ValueError: one is a link that leads out of the folder.
    """
    for name in names:
        if inside(folder, name, file=name, field="file").is_file():
            yield name


def chat_templates(folder: Path) -> list[str]:
    """Paths within the folder of the chat templates beside the default one.

    Raises:
        ValueError: one is a link that leads out of the folder.
    """
    names = sorted(f"{CHAT_TEMPLATES}/{path.name}" for path in (folder / CHAT_TEMPLATES).glob("*.jinja"))
    return list(present_files(folder, names))


def shards_of(folder: Path, index: str) -> dict[str, set[str]]:
    """Names of the files that an index of weights names, and the tensors that it says are in each.

    Raises:
        ValueError: the index is damaged, or a name leads out of the folder.
    """
    try:
        weight_map = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
        tensors = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(folder / index)!r} is damaged: {error!r}") from error
    shards: dict[str, set[str]] = {}
    for tensor, name in tensors:
        inside(folder, name, file=index, field=f"weight_map[{tensor!r}]")
        shards.setdefault(name, set()).add(tensor)
    return shards


def check_auto_map(folder: Path, file: str) -> None:
    """Whether the modules that the `auto_map` of a file names lie in its folder; code of other repositories does not.

    Raises:
        ValueError: one leads out of the folder.
    """
    values = json_of(folder / file)
    auto_map = values.get("auto_map") if isinstance(values, dict) else None
    for auto_class, named in (auto_map if isinstance(auto_map, dict) else {}).items():
        # of a tokenizer, a slow and a fast one, or None
        for reference in named if isinstance(named, list) else [named]:
            if isinstance(reference, str) and "--" not in reference:
                module = f"{reference.rpartition('.')[0]}.py"
                inside(folder, module, file=file, field=f"auto_map[{auto_class!r}]")


def _check_tokenizer_files(folder: Path) -> None:
    """Whether the files that tokenizer_config.json names, and that are there, lie in the folder."""
    values = json_of(folder / TOKENIZER_CONFIG)
    for field, name in (values if isinstance(values, dict) else {}).items():
        # older versions left paths of the machine that wrote them, which are nothing here
        if field.endswith("_file") and isinstance(name, str) and Path(name).exists():
            inside(folder, str(Path(name).absolute()), file=TOKENIZER_CONFIG, field=field)


def _check_adapter(folder: Path) -> None:
    """Whether the base of a PEFT adapter, where it is named by a path, lies in the folder."""
    name = adapter_base(folder)
    if name is not None and (is_path(name) or Path(name).exists()):
        path = str(Path(name).expanduser().absolute())
        inside(folder, path, file=ADAPTER_CONFIG, field="base_model_name_or_path")


def adapter_base(folder: Path) -> str | None:
    """What a PEFT adapter was put on, a path or a Hub id; None of a folder that is no adapter's."""
    values = json_of(folder / ADAPTER_CONFIG)
    name = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    return name if isinstance(name, str) and name else None


def sentence_module_folders(folder: Path) -> list[str]:
    """The folders that a sentence encoder's modules.json names, but the model itself, which has none of its own.

    Raises:
        ValueError: modules.json is damaged, or a folder, or a file in it, leads out of the checkpoint's.
    """
    file = SENTENCE_FILES[0]
    if not (folder / file).is_file():
        return []
    try:
        names = [module["path"] for module in json.loads((folder / file).read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder / file)!r} is damaged: {error!r}") from error
    folders = []
    for name in names:
        path = inside(folder, name, file=file, field="path")
        # "" and "." are the checkpoint's own
        if path.resolve() == folder.resolve() or not path.is_dir():
            continue
        for part in path.rglob("*"):
            inside(folder, part.relative_to(folder).as_posix(), file=file, field="path")
        folders.append(Path(os.path.normpath(name)).as_posix())
    return folders


def sentence_kind(folder: Path, architecture: str) -> str | None:
    """What sentence-transformers makes of a model with the modules of a folder, such as "SentenceTransformer".

    None where there are no modules, or where they belong to another head: a classifier that was trained from a
    sentence encoder is no sentence encoder.

    Args:
        folder: has modules.json, or not.
        architecture: name of the model's class.
    """
    if not (folder / SENTENCE_FILES[0]).is_file():
        return None
    values = json_of(folder / SENTENCE_FILES[2])
    # older versions knew one kind only
    kind = values.get("model_type") if isinstance(values, dict) else None
    kind = kind if kind in _KINDS else "SentenceTransformer"
    if architecture in {cls.__name__ for cls in MODEL_CLASSES["AutoModel"].values()}:
        return kind if "" in _KINDS[kind] else None
    return kind if any(end and architecture.endswith(end) for end in _KINDS[kind]) else None


def json_of(path: Path) -> Any:
    """What a JSON file holds; None where there is none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
