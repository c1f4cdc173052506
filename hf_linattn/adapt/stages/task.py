"""Training for a task: the labels of a head, masked tokens or the next token, alone or with distillation beside it."""

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...modeling.modeling_linattn import LinAttnPreTrainedModel
from .base import Batch, Stage, StageOutput, inputs_of
from .distillation import Distil

#: task -> auto class of the head
HEADS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
}
_IGNORED = -100


class Task(Stage):
    """Loss: cross-entropy, averaged over rows or over labeled tokens, + `distillation` * the loss of `Distil`."""

    name = "task"

    def __init__(
        self,
        model: nn.Module,
        student: LinAttnPreTrainedModel,
        *,
        task: str,
        distil: Distil | None = None,
        distillation: float = 0.0,
    ) -> None:
        super().__init__(model, student, None)
        self.task = task
        # in a tuple: its parameters are the model's own
        self._distil = (distil,)
        self.distillation = distillation

    def weight(self, rows: Sequence[dict[str, Any]]) -> int:
        if self.task == "sequence-classification":
            return len(rows)
        # what is compared with the next token has no label for the first one
        begin = int(self.task == "causal-lm")
        return sum(label != _IGNORED for row in rows for label in row["labels"][begin:])

    def forward(self, batch: Batch) -> StageOutput:
        options = {"use_cache": False} if self.task == "causal-lm" else {}
        logits = self.model(**inputs_of(batch), **options).logits
        labels = batch["labels"]
        if self.task == "causal-lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        # one row for each label: (rows, classes)
        loss = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=_IGNORED, reduction="sum")
        with torch.no_grad():
            # the labels of each row: (rows, 1) of classes, (rows, length) of tokens
            right = (logits.argmax(-1) == labels).reshape(len(labels), -1)
            labeled = (labels != _IGNORED).reshape(len(labels), -1)
            # each row's share, so that micro-batches add up
            shares = (right & labeled).sum(-1) / labeled.sum(-1).clamp_min(1)
        metrics = {"accuracy": shares.sum()}
        if (distil := self._distil[0]) is None:
            return StageOutput(loss, metrics)
        beside = distil(batch)
        return StageOutput(loss, metrics | beside.metrics, self.distillation * beside.loss)


def add_labels(
    rows: list[dict[str, Any]], task: str, tokenizer: Any, probability: float, chance: random.Random
) -> list[dict[str, Any]]:
    """Rows of token ids with the labels of a language modeling task.

    Of the tokens to guess, 80 % become the mask token, 10 % a random one, and 10 % stay (Devlin et al.
    2019, arXiv:1810.04805, section 3.1).
    """
    if task == "causal-lm":
        return [{**row, "labels": list(row["input_ids"])} for row in rows]
    special = set(tokenizer.all_special_ids)
    return [_masked(row["input_ids"], special, tokenizer, probability, chance) for row in rows]


def _masked(
    ids: list[int], special: set[int], tokenizer: Any, probability: float, chance: random.Random
) -> dict[str, Any]:
    eligible = [index for index, token in enumerate(ids) if token not in special]
    # at least one: a row without labels would have no loss
    count = min(max(round(probability * len(eligible)), 1), len(eligible))
    ids, labels = list(ids), [_IGNORED] * len(ids)
    for index in chance.sample(eligible, count):
        labels[index] = ids[index]
        draw = chance.random()
        if draw < 0.8:
            ids[index] = tokenizer.mask_token_id
        elif draw < 0.9:
            ids[index] = chance.randrange(len(tokenizer))
    return {"input_ids": ids, "labels": labels}
