"""Attention transfer: every layer's linear attention learns from the softmax attention that it replaces.

The student runs as a whole, but what each layer hands on is the teacher's attention output, so that all
layers see the inputs that they had in the base model, and no layer has to make up for the errors of
those before it (LoLCATs, Zhang et al. 2024, arXiv:2410.10254, section 3.1; T2R, Kasai et al. 2021).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...modeling.architectures import ARCHITECTURES
from ...modeling.modeling_linattn import LinAttnPreTrainedModel, self_attentions
from ...utils.hooks import hooked
from ..losses import mean_cosine, real_tokens, relative_error
from .base import Batch, Stage, StageOutput, in_precision_of, inputs_of


class Transfer(Stage):
    """Loss: the relative squared error of the attention output before its projection, averaged over the layers."""

    name = "transfer"

    def forward(self, batch: Batch) -> StageOutput:
        without_cache = {"use_cache": False} if ARCHITECTURES[self.student.config.base_model_type].causal else {}
        with _teacher_outputs(self.student, self.teacher) as outputs:
            self.model(**inputs_of(batch), **without_cache)
        # (batch, heads, length, head_dim) -> (batch, length, heads, head_dim), as `real` has the length second
        layers = [(prediction.transpose(1, 2), target.transpose(1, 2)) for prediction, target in outputs]
        real = real_tokens(batch.get("attention_mask"), layers[0][0].float())
        errors = torch.stack([relative_error(prediction, target, real) for prediction, target in layers])
        with torch.no_grad():
            cosines = {
                f"cosine/layer_{index}": mean_cosine(prediction, target, real).sum()
                for index, (prediction, target) in enumerate(layers)
            }
        return StageOutput(errors.mean(0).sum(), cosines)


@contextmanager
def _teacher_outputs(
    student: LinAttnPreTrainedModel, teacher: LinAttnPreTrainedModel
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While this lasts, the student's layers hand on the teacher's attention outputs.

    Yields:
        The list that collects (student's output, teacher's output) of each layer that runs, each
        (batch, heads, length, head_dim).
    """
    architecture = ARCHITECTURES[student.config.base_model_type]
    outputs: list[tuple[Tensor, Tensor]] = []
    targets: list[Tensor] = []

    def run_teacher(attention: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch.no_grad(), in_precision_of(student):
                attention(*args, **kwargs)

        return hook

    def keep_target(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        targets.append(output)

    def replace_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        target = targets.pop()
        outputs.append((output, target))
        return target.to(output.dtype)

    pairs: Any = zip(self_attentions(student, architecture), self_attentions(teacher, architecture), strict=True)
    with hooked() as handles:
        for (_, ours), (_, theirs) in pairs:
            # layers that stayed softmax have nothing to learn
            if hasattr(ours, "linattn"):
                handles += [
                    ours.register_forward_pre_hook(run_teacher(theirs), with_kwargs=True),
                    theirs.linattn.register_forward_hook(keep_target),
                    ours.linattn.register_forward_hook(replace_output),
                ]
        yield outputs
