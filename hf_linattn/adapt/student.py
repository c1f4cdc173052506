"""The student: the converted model as a run begins with it, ready to be trained in a stage."""

import copy
from typing import NamedTuple

import torch
from torch import nn

from ..modeling.modeling_linattn import MODEL_CLASSES, LinAttnPreTrainedModel
from .inputs import Inputs
from .loading import load_model
from .stages import HEADS

# Attributes of modules in which Transformers keeps dropout probabilities that act in training mode.
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "layerdrop")


class Student(NamedTuple):
    """A model to train.

    model: in float32, on the CPU.
    drawn: names of the parameters of which the checkpoint has none.
    dtypes: name -> dtype of each tensor as it was loaded.
    """

    model: LinAttnPreTrainedModel
    drawn: list[str]
    dtypes: dict[str, torch.dtype]


def fresh_student(inputs: Inputs) -> Student:
    """The model that the run began with, the same on every call.

    Raises:
        ValueError: it has not the head of the task, or an adapter.
    """
    model: LinAttnPreTrainedModel
    task, drawn = inputs.config.task, list[str]()
    if isinstance(inputs.model, LinAttnPreTrainedModel):
        model = copy.deepcopy(inputs.model).cpu()
    else:
        labels = inputs.labels if task == "sequence-classification" else None
        model, drawn = load_model(inputs.model, task, labels)
    if inputs.finds_padding:
        model.config.pad_token_id = inputs.padding_id
    head = HEADS.get(task or "")
    if head and type(model) is not MODEL_CLASSES[head].get(model.config.base_model_type):
        raise ValueError(f"task={task!r} needs a model for {head}, not {type(model).__name__}.")
    if adapted := [name for name, _ in model.named_parameters() if ".lora_" in name]:
        raise ValueError(f"model: it has LoRA layers ({adapted[0]}, ...); merge them before it is adapted.")
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    # small steps would be lost to the rounding of 16-bit weights, and Adam's moments leave the range of float16
    return Student(model.float(), drawn, dtypes)


def checkpoint_gradients(model: LinAttnPreTrainedModel, *, dropout: bool) -> None:
    """Compute activations again in the backward pass, which Transformers does in training mode only.

    Args:
        model: put into training mode.
        dropout: whether its dropout stays; otherwise its probabilities are set to 0.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if dropout:
        return
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in _DROPOUTS:
            # probabilities that are handed to functions, or that skip layers
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
