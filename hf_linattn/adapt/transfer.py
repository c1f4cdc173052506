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

from ..modeling.architectures import FAMILIES
from ..modeling.modeling_linattn import LinAttnPreTrainedModel, self_attentions
from .losses import mean_cosine, real_tokens, relative_error
from .stages import Batch, Stage, StageOutput, in_precision_of, inputs_of


class Transfer(Stage):
    """Loss: the relative squared error of the attention output before its projection, averaged over the layers."""

    name = "transfer"
    trains = ("features", "projections", "query_key")

    def forward(self, batch: Batch) -> StageOutput:
        pairs: list[tuple[Tensor, Tensor]] = []
        with _teacher_path(self.student, self.teacher, pairs):
            hidden = self.model(**inputs_of(batch), **_without_cache(self.student))
        del hidden
        # heads and positions change places: (batch, heads, length, dim) -> (batch, length, heads, dim)
        layers = [(found.transpose(1, 2), wanted.transpose(1, 2)) for found, wanted in pairs]
        real = real_tokens(batch.get("attention_mask"), layers[0][0].float())
        errors = torch.stack([relative_error(found, wanted, real) for found, wanted in layers])
        with torch.no_grad():
            cosines = {
                f"cosine/layer_{index}": mean_cosine(found, wanted, real).sum()
                for index, (found, wanted) in enumerate(layers)
            }
        return StageOutput(errors.mean(0).sum(), cosines)


def _without_cache(model: LinAttnPreTrainedModel) -> dict[str, Any]:
    return {"use_cache": False} if FAMILIES[model.config.base_model_type].causal else {}


@contextmanager
def _teacher_path(
    student: LinAttnPreTrainedModel, teacher: LinAttnPreTrainedModel, pairs: list[tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """While this lasts, the student's attention hands on the teacher's outputs, and `pairs` collects both."""
    family = FAMILIES[student.config.base_model_type]
    wanted: list[Tensor] = []

    def ask_teacher(attention: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch.no_grad(), in_precision_of(student):
                attention(*args, **kwargs)

        return hook

    def hand_on(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        pairs.append((output, wanted.pop()))
        return pairs[-1][1].to(output.dtype)

    handles = []
    modules: Any = zip(self_attentions(student, family), self_attentions(teacher, family), strict=True)
    try:
        for (_, ours), (_, theirs) in modules:
            if not hasattr(ours, "linattn"):
                continue
            handles += [
                ours.register_forward_pre_hook(ask_teacher(theirs), with_kwargs=True),
                theirs.linattn.register_forward_hook(lambda module, args, output: wanted.append(output)),
                ours.linattn.register_forward_hook(hand_on),
            ]
        yield
    finally:
        for handle in handles:
            handle.remove()
