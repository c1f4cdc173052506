"""Masked language modeling: the loss and accuracy of hidden tokens."""

import random
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...data.documents import DataConfig
from ...modeling.validation import check_number
from ..runner import Runner
from .base import Metric, Outcomes, metric
from .token_loss import TokenLoss, TokenLossOptions


@dataclass(kw_only=True)
class MaskedLMOptions(TokenLossOptions):
    """Options of masked language modeling."""

    mask_fraction: float = field(default=0.15, metadata={"help": "masked-lm: share of tokens to be predicted."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(type(self).__name__, "mask_fraction", self.mask_fraction, 0)
        if not 0 < self.mask_fraction < 1:
            raise ValueError(f"{type(self).__name__}: mask_fraction={self.mask_fraction!r} must be between 0 and 1.")


class MaskedLanguageModeling(TokenLoss):
    """Loss and accuracy of a masked LM on the same hidden tokens for all models.

    Each chosen token is replaced by the mask token. Softmax truncated reads a document in chunks of its own length.
    """

    name = "masked-lm"
    used = ("mask_fraction", "detokenizer", "seed")
    config: MaskedLMOptions
    auto_class = "AutoModelForMaskedLM"

    def __init__(self, config: MaskedLMOptions, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, data, tokenizer)
        if tokenizer.mask_token_id is None:
            raise ValueError("task='masked-lm': the tokenizer has no mask token.")

    def metrics(self) -> list[Metric]:
        return [
            metric("perplexity", ("nll", "tokens")),
            metric("mean", ("accuracy",), called="accuracy", higher_is_better=True),
        ]

    def hidden(self, index: int, length: int) -> list[int]:
        """Positions, special tokens not counted, that are hidden in a document of that many tokens; at least one."""
        draw = random.Random(f"{self.config.seed} {index}")
        chosen = [i for i in range(length) if draw.random() < self.config.mask_fraction]
        return chosen or [length // 2]

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        most = length - self.special_tokens
        chunk = min(most, (runner.limit or length) - self.special_tokens)
        inputs, targets, owner = [], [], []
        for index, whole in enumerate(self._ids):
            ids = whole[:most]
            hidden = set(self.hidden(index, len(ids)))
            masked = [self.tokenizer.mask_token_id if i in hidden else token for i, token in enumerate(ids)]
            for start in range(0, len(ids), chunk):
                part = range(start, min(start + chunk, len(ids)))
                inputs.append(self.with_special_tokens(masked[start : start + chunk]))
                targets.append({i - start + len(self.special_ids[0]): ids[i] for i in part if i in hidden})
                owner.append(index)

        def read(model: nn.Module, ids: Tensor, mask: Tensor, indices: list[int]) -> list[tuple[float, int, int]]:
            logits = model(input_ids=ids, attention_mask=mask).logits
            results = []
            for row, index in enumerate(indices):
                places = list(targets[index])
                target = torch.tensor([targets[index][place] for place in places], device=ids.device, dtype=torch.long)
                asked = logits[row, places].float()
                loss = F.cross_entropy(asked, target, reduction="sum").item() if places else 0.0
                results.append((loss, len(places), int((asked.argmax(-1) == target).sum())))
            return results

        nll, tokens, right = [0.0] * len(self._ids), [0] * len(self._ids), [0] * len(self._ids)
        for index, (loss, count, correct) in zip(owner, runner.run(inputs, read), strict=True):
            nll[index] += loss
            tokens[index] += count
            right[index] += correct
        accuracy = [r / t for r, t in zip(right, tokens, strict=True)]
        return {"nll": nll, "tokens": tokens, "accuracy": accuracy}
