"""Loading what a run starts from: the config, the tokenizer and the weights of a converted model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedModel

from ..data.tokenizers import load_tokenizer
from ..modeling.architectures import MODEL_TYPE_PREFIX
from ..modeling.modeling_linattn import HEAD_CLASSES, MODEL_CLASSES, LinAttnPreTrainedModel
from ..utils.paths import name_of_path
from .stages import HEADS

#: A converted model, or the folder or Hub id of one.
ModelSource = str | Path | LinAttnPreTrainedModel


def load_config(model: ModelSource) -> Any:
    """The config of a converted model.

    Raises:
        TypeError: `model` is no converted model.
        ValueError: its config is not that of a converted model that can be adapted.
    """
    if isinstance(model, LinAttnPreTrainedModel):
        return model.config
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model is a {type(model).__name__}; it must be a converted model, a folder or a Hub id.")
    config = AutoConfig.from_pretrained(str(model))
    if not config.model_type.startswith(MODEL_TYPE_PREFIX):
        raise ValueError(f"model={str(model)!r} has model_type={config.model_type!r}: convert it first.")
    # raises what is wrong with the settings
    _ = config.attention
    architecture, name = config.base_model_type, (config.architectures or [""])[0]
    if name.removeprefix("LinAttn") not in HEAD_CLASSES[architecture]:
        known = ", ".join(repr(f"LinAttn{head}") for head in HEAD_CLASSES[architecture])
        raise ValueError(f"model={str(model)!r}: architectures={config.architectures!r} must name one of {known}.")
    if name.endswith("ForMultipleChoice"):
        raise ValueError(f"model={str(model)!r} is a {name}: of heads over several texts at once, none can be adapted.")
    if not isinstance(config.linattn.get("max_length"), int):
        raise ValueError(f"model={str(model)!r}: linattn.max_length is missing from its config.json.")
    return config


def find_tokenizer(model: ModelSource, base: str | Path | PreTrainedModel | None) -> Any:
    """The tokenizer that is saved with the model, or else with its base.

    Raises:
        ValueError: there is none.
    """
    for source in (model, base):
        name = source if isinstance(source, (str, Path)) else getattr(source, "name_or_path", "")
        if name:
            try:
                return load_tokenizer(name)
            except (OSError, ValueError):
                continue
    raise ValueError("tokenizer is missing: none was found with the model or its base.")


def load_model(
    folder: str | Path, task: str | None, labels: list[str] | None = None
) -> tuple[LinAttnPreTrainedModel, list[str]]:
    """A converted model with the head of a task, or without a task with the head that it was saved with.

    Args:
        folder: or Hub id.
        task: of `HEADS`, or None.
        labels: classes of a classification head that the checkpoint does not have.

    Returns:
        The model in eval mode, and the names of the parameters that were drawn, because the checkpoint has none.

    Raises:
        ValueError: the architecture has no such head, or a file of weights is damaged.
    """
    config: Any = load_config(folder)
    architecture, saved = config.base_model_type, config.architectures[0]
    head: Any
    if task is None:
        head = HEAD_CLASSES[architecture][saved.removeprefix("LinAttn")]
    else:
        head = MODEL_CLASSES[HEADS[task]].get(architecture)
    if head is None:
        raise ValueError(f"task={task!r}: {architecture} has no such head.")
    if head.__name__ != saved and labels:
        config.label2id = {label: index for index, label in enumerate(labels)}
        config.id2label = dict(enumerate(labels))
    # the weights of a head that is not in the checkpoint are drawn anew: the same on every start
    with torch.random.fork_rng(), readable_weights(folder):
        torch.manual_seed(0)
        model, report = head.from_pretrained(str(folder), config=config, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing and head.__name__ == saved:
        raise ValueError(
            f"model={str(folder)!r} has no weights for {', '.join(missing[:4])}{', ...' * (len(missing) > 4)}: its "
            "files are damaged or incomplete; convert or download it again."
        )
    return model.eval(), missing


def check_weights(source: Any) -> None:
    """Whether the files of weights in a folder can be opened; a Hub id or a loaded model has none here.

    Raises:
        ValueError: a file is damaged; the message names it.
    """
    if not isinstance(source, (str, Path)):
        return
    for path in sorted(Path(source).expanduser().glob("*.safetensors")):
        try:
            # reads the header, and compares it with the size of the file
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is damaged ({error}); convert or download it again.") from error


@contextmanager
def readable_weights(source: Any) -> Iterator[None]:
    """Around loading a model: damaged files of weights become one error.

    Raises:
        ValueError: a file is damaged.
    """
    try:
        yield
    except SafetensorError as error:
        # of a folder, which file it is
        check_weights(source)
        raise ValueError(f"The weights of {str(source)!r} are damaged ({error}); download them again.") from error


def name_of(model: Any) -> str | None:
    """A name that means something on other machines: of a folder its last part."""
    if model is None:
        return None
    name = str(model) if isinstance(model, (str, Path)) else model.name_or_path
    path = Path(name).expanduser()
    if name and path.exists():
        return path.resolve().name
    return name_of_path(name) or type(model).__name__
