"""What a run is started with, and whether it fits together: checked before anything is loaded or written."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..conversion.checkpoint_files import check_source
from ..data.documents import DataConfig, load_documents
from ..modeling.architectures import ARCHITECTURES, Architecture
from ..modeling.modeling_linattn import MODEL_CLASSES
from .config import AdaptConfig
from .loading import ModelSource, check_weights, find_tokenizer, load_config
from .metrics_log import check_tracker
from .stages import HEADS


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run is started with.

    Attributes:
        model: the converted model, or its folder or Hub id.
        model_config: its config.
        base: the softmax model that it was converted from; None for `model` itself with softmax attention.
        config: the settings.
        data, eval_data: the documents.
        tokenizer: of the model.
        tokenizer_given: whether the caller gave the tokenizer; otherwise it is saved with the model or its base.
    """

    model: ModelSource
    model_config: Any
    base: str | Path | PreTrainedModel | None
    config: AdaptConfig
    data: DataConfig
    eval_data: DataConfig | None
    tokenizer: Any
    tokenizer_given: bool

    @property
    def architecture(self) -> Architecture:
        """The row of the model's architecture."""
        return ARCHITECTURES[self.model_config.base_model_type]

    @property
    def finds_padding(self) -> bool:
        """Whether the model looks for padding in the tokens: a decoder's class is that of its last real token."""
        return self.config.task == "sequence-classification" and self.architecture.causal

    @property
    def padding_id(self) -> int | None:
        """The token that batches are padded with."""
        candidates = (self.tokenizer.pad_token_id, self.model_config.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in candidates if isinstance(token, int) and token >= 0), None)

    @cached_property
    def labels(self) -> list[str]:
        """The classes of the documents; none of a stream, which shows them when it is read."""
        return labels_of(self.data)


def collect_inputs(
    model: ModelSource,
    config: AdaptConfig,
    data: DataConfig,
    eval_data: DataConfig | None,
    base: str | Path | PreTrainedModel | None,
    tokenizer: Any,
) -> Inputs:
    """The inputs of a run, checked but for the classes (`check_classes`), for which documents must be read.

    Raises:
        ImportError: the tracker is not installed.
        TypeError, ValueError: they do not fit together.
    """
    for name, value in (("data", data), ("eval_data", eval_data)):
        if not isinstance(value, DataConfig) and not (name == "eval_data" and value is None):
            raise TypeError(
                f"{name} is a {type(value).__name__}; it must be a DataConfig, which names a dataset, folder or file."
            )
    if eval_data is not None and not config.eval_sequences:
        raise ValueError("eval_sequences=0 with eval_data: it must be at least 1, or eval_data left out.")
    check_tracker(config.tracker)
    if config.task == "sequence-classification" and data.resolved().label_column is None:
        raise ValueError("task='sequence-classification' needs a label_column in the data.")
    for source in (model, base):
        if isinstance(source, (str, Path)):
            check_source(source)
    model_config = load_config(model)
    window = any(layer.window_size for layer in model_config.attention.layer_settings)
    inputs = Inputs(
        model=model,
        model_config=model_config,
        base=base,
        config=config.for_model(window=window),
        data=data,
        eval_data=eval_data,
        tokenizer=find_tokenizer(model, base) if tokenizer is None else tokenizer,
        tokenizer_given=tokenizer is not None,
    )
    _check_model(inputs)
    _check_tokenizer(inputs)
    for source in (model, base):
        check_weights(source)
    return inputs


def _check_model(inputs: Inputs) -> None:
    config, architecture = inputs.config, inputs.architecture
    needs_teacher = config.transfer_steps or config.distil_steps or config.task_distillation
    if needs_teacher and inputs.base is None and getattr(inputs.model_config, "linattn_training", None):
        raise ValueError(
            "base is missing: the model has been trained already, and is no teacher for itself; give the softmax "
            "model that was converted (--base)."
        )
    if config.task == "causal-lm" and not architecture.causal:
        raise ValueError(f"task='causal-lm': {architecture.model_type} is an encoder; use 'masked-lm'.")
    if config.task == "masked-lm" and architecture.causal:
        raise ValueError(f"task='masked-lm': {architecture.model_type} is a decoder; use 'causal-lm'.")


def _check_tokenizer(inputs: Inputs) -> None:
    config, tokenizer, model_config = inputs.config, inputs.tokenizer, inputs.model_config
    max_length, vocab_size = model_config.linattn["max_length"], model_config.vocab_size
    if config.sequence_length > max_length:
        raise ValueError(f"sequence_length={config.sequence_length} is more than the model's max_length={max_length}.")
    if len(tokenizer) > vocab_size:
        raise ValueError(f"tokenizer: it has {len(tokenizer)} tokens, and the model's vocab_size={vocab_size}.")
    # ids need not be without gaps
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise ValueError(
            f"tokenizer: the id of its token {token!r} is {largest}, and the model's vocab_size={vocab_size} allows 0 "
            f"to {vocab_size - 1}."
        )
    if config.task == "masked-lm" and tokenizer.mask_token_id is None:
        raise ValueError("task='masked-lm': the tokenizer has no mask token.")
    if inputs.finds_padding and inputs.padding_id is None:
        raise ValueError("task='sequence-classification': the tokenizer has no token for padding or end of text.")


def check_classes(inputs: Inputs) -> None:
    """Whether the head has the class of each document; of a stream that shows when it is read.

    Raises:
        ValueError: it has not, or there is one class only.
    """
    if inputs.config.task != "sequence-classification":
        return
    data, eval_data, model_config = inputs.data, inputs.eval_data, inputs.model_config
    if eval_data is not None and eval_data.resolved().label_column is None:
        raise ValueError("eval_data needs a label_column for task='sequence-classification'.")
    head = MODEL_CLASSES[HEADS[inputs.config.task]].get(model_config.base_model_type)
    has_head = head is not None and head.__name__ in (model_config.architectures or ())
    known = set(model_config.label2id if has_head else inputs.labels)
    if not known:
        return
    if len(known) == 1:
        raise ValueError(
            f"label_column={data.resolved().label_column!r}: {known.pop()!r} is the only class; a classifier needs two."
        )
    evaluated = [] if eval_data is None else labels_of(eval_data)
    for source, labels in ((data, inputs.labels), (eval_data, evaluated)):
        if source is not None and (unknown := sorted(set(labels) - known)):
            raise ValueError(
                f"label_column={source.resolved().label_column!r} of {source.dataset!r}: "
                f"{', '.join(map(repr, unknown))} is no class of the model, which has "
                f"{', '.join(map(repr, sorted(known)))}."
            )


def labels_of(data: DataConfig) -> list[str]:
    """The classes of the documents, sorted; none of a stream."""
    if data.resolved().streaming:
        return []
    return sorted({str(document.label) for document in load_documents(data)})
