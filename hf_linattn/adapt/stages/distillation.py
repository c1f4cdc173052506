"""Distillation of the whole model: hidden states and embedding of an encoder, next-token logits of a decoder."""

import torch
import torch.nn.functional as F
from torch import nn

from ...modeling.architectures import ARCHITECTURES
from ...modeling.modeling_linattn import LinAttnPreTrainedModel
from ..losses import divergence, mean_cosine, pooled, real_tokens, relative_error
from .base import Batch, Stage, StageOutput, in_precision_of, inputs_of


class Distil(Stage):
    """Loss of an encoder: hidden_weight * relative error of the hidden states, averaged over the layers, +
    embedding_weight * (1 - cosine of the pooled embedding). Loss of a decoder: hidden_weight * the same
    + logits_weight * KL of the next token. A decoder that predicts no next token learns as an encoder.
    """

    name = "distil"

    def __init__(
        self,
        model: nn.Module,
        student: LinAttnPreTrainedModel,
        teacher: LinAttnPreTrainedModel,
        *,
        hidden_weight: float,
        embedding_weight: float,
        logits_weight: float,
        temperature: float,
        pooling: str,
    ) -> None:
        super().__init__(model, student, teacher)
        self.causal = ARCHITECTURES[student.config.base_model_type].causal
        self.next_token = self.causal and student.get_output_embeddings() is not None
        self.hidden_weight, self.embedding_weight, self.logits_weight = hidden_weight, embedding_weight, logits_weight
        self.temperature, self.pooling = temperature, pooling

    def forward(self, batch: Batch) -> StageOutput:
        options = {"output_hidden_states": True} | ({"use_cache": False} if self.causal else {})
        with torch.no_grad(), in_precision_of(self.student):
            target = self.teacher(**inputs_of(batch), **options)
        prediction = self.model(**inputs_of(batch), **options)
        # without the embeddings, which are the same until they are trained
        ours, theirs = prediction.hidden_states[1:], target.hidden_states[1:]
        real = real_tokens(batch.get("attention_mask"), theirs[0].float())
        errors = torch.stack([relative_error(x, y, real) for x, y in zip(ours, theirs, strict=True)])
        loss = self.hidden_weight * errors.mean(0)
        with torch.no_grad():
            metrics = {
                f"cosine/layer_{index}": mean_cosine(x, y, real).sum()
                for index, (x, y) in enumerate(zip(ours, theirs, strict=True))
            }
            metrics["hidden_error"] = errors.mean(0).sum()
        if self.next_token:
            kl = divergence(prediction.logits, target.logits, real, self.temperature)
            loss, metrics["kl"] = loss + self.logits_weight * kl, kl.detach().sum()
        else:
            cosine = F.cosine_similarity(
                pooled(ours[-1], real, self.pooling), pooled(theirs[-1], real, self.pooling), dim=-1
            )
            loss, metrics["pooled_cosine"] = loss + self.embedding_weight * (1 - cosine), cosine.detach().sum()
        return StageOutput(loss.sum(), metrics)
