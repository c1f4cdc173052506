"""The stages of an adaptation, a file each: attention transfer, distillation, a task."""

from torch import nn

from ...modeling.modeling_linattn import LinAttnPreTrainedModel
from ..config import AdaptConfig
from .base import Batch, Stage, StageOutput, without_near
from .distillation import Distil
from .task import HEADS, Task, add_labels
from .transfer import Transfer

__all__ = ["HEADS", "Batch", "Stage", "StageOutput", "add_labels", "make_stage", "without_near"]


def make_stage(
    name: str,
    config: AdaptConfig,
    model: nn.Module,
    student: LinAttnPreTrainedModel,
    teacher: LinAttnPreTrainedModel | None,
) -> Stage:
    """The stage of that name, one of those that `config.stages()` lists.

    Args:
        name: "transfer", "distil" or "task".
        config: the settings of the losses.
        model: the student, or the student in an adapter.
        student: the converted model.
        teacher: its softmax model; None for a task without distillation.
    """
    for _, module in student.linear_attentions():
        # what is trained to imitate softmax is linear attention, in short rows too; a task trains what will be used
        module.exact = name == "task"
    if name == "transfer":
        return Transfer(model, student, teacher)
    distil = None
    if teacher is not None:
        distil = Distil(
            model,
            student,
            teacher,
            hidden_weight=config.hidden_weight,
            embedding_weight=config.embedding_weight,
            logits_weight=config.logits_weight,
            temperature=config.temperature,
            pooling=config.pooling,
        )
    if name == "distil":
        assert distil is not None
        return distil
    assert config.task is not None
    return Task(model, student, task=config.task, distil=distil, distillation=config.task_distillation)
