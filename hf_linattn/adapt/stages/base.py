"""A stage: a module whose forward pass is the loss of a batch."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...modeling.modeling_linattn import LinAttnPreTrainedModel

#: input_ids and attention_mask (batch, length), and in the task stage labels
Batch = dict[str, Tensor]


class StageOutput(NamedTuple):
    """Sums over the rows of a batch, so that micro-batches add up to the batch.

    loss: scalar; divided by the batch's weight it is the loss.
    metrics: scalars; divided by the number of rows they are means.
    beside: scalar or None; divided by the number of rows it is added to the loss.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    beside: Tensor | None = None


class Stage(nn.Module):
    """One stage of an adaptation. `forward(batch)` gives a `StageOutput`.

    The teacher stands in a tuple: it is neither trained, nor saved, nor sharded with the model.
    """

    name: str

    def __init__(self, model: nn.Module, student: LinAttnPreTrainedModel, teacher: LinAttnPreTrainedModel | None):
        super().__init__()
        # `model` is the student, or the student in an adapter
        self.model = model
        self._student = (student,)
        self._teacher = (teacher,)

    @property
    def student(self) -> LinAttnPreTrainedModel:
        return self._student[0]

    @property
    def teacher(self) -> LinAttnPreTrainedModel:
        teacher = self._teacher[0]
        assert teacher is not None, "the configuration asks for a base where a stage needs one"
        return teacher

    def weight(self, rows: Sequence[dict[str, Any]]) -> int:
        """What the loss of a batch is divided by: the number of its rows, or of its labeled tokens."""
        return len(rows)

    def forward(self, batch: Batch) -> StageOutput:
        raise NotImplementedError


def inputs_of(batch: Batch) -> Batch:
    """What a base model takes of a batch."""
    return {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}


def in_precision_of(student: nn.Module) -> AbstractContextManager[Any]:
    """For the teacher: DeepSpeed casts the weights that it trains, and does not know of the teacher's."""
    parameter = next(student.parameters())
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return torch.autocast(parameter.device.type, parameter.dtype)


@contextmanager
def without_near(model: LinAttnPreTrainedModel) -> Iterator[None]:
    """While this lasts, no layer uses its exact part; a layer that has no far part keeps it."""
    modules = [module for _, module in model.linear_attentions()]
    before = [module.near for module in modules]
    try:
        for module in modules:
            module.near = module.near and not module.far
        yield
    finally:
        for module, near in zip(modules, before, strict=True):
            module.near = near
