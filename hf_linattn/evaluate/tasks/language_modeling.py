"""Causal language modeling: perplexity by length and by position."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from ...data.documents import DataConfig
from ...modeling.architectures import ARCHITECTURES
from ...modeling.validation import check_integer
from ..runner import Runner
from .base import Metric, Outcomes, metric
from .token_loss import TokenLoss, TokenLossOptions

#: Positions are told apart by these edges: tokens from one to the next share one perplexity.
POSITION_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 1 << 62)
# logits are large: so many positions at once
_LOGIT_ROWS = 512


@dataclass(kw_only=True)
class LanguageModelingOptions(TokenLossOptions):
    """Options of causal language modeling."""

    stride: int | None = field(
        default=None,
        metadata={
            "help": "language-modeling: new tokens per window, of a document read in windows. Default: half of one."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(type(self).__name__, "stride", self.stride, 1, optional=True)


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, first) of windows over a document: each token but the first is predicted in exactly one of them.

    The tokens from `first` on are those that the window [start, end) predicts; each has at least `window - stride`
    tokens before it, but those of the first window.
    """
    start, first = 0, 1
    while first < length:
        end = min(start + window, length)
        yield start, end, first
        # a token needs one before it: windows overlap by at least that
        first, start = end, min(start + stride, end - 1)


class LanguageModeling(TokenLoss):
    """Perplexity of a causal LM, over whole documents and by position.

    Softmax truncated reads a document in overlapping windows of its own length, and the others all of it at once;
    every model predicts the same tokens.
    """

    name = "language-modeling"
    used = ("stride", "detokenizer", "seed")
    config: LanguageModelingOptions
    auto_class = "AutoModelForCausalLM"

    def __init__(
        self, config: LanguageModelingOptions, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model_type = AutoConfig.from_pretrained(tokenizer.name_or_path).model_type
        if not ARCHITECTURES[model_type].causal:
            raise ValueError(f"task='language-modeling': {model_type} is an encoder; use 'masked-lm'.")
        super().__init__(config, data, tokenizer)
        # nothing can be predicted of a single token
        self._ids = [ids for ids in self._ids if len(ids) + self.special_tokens > 1]
        if not self._ids:
            raise ValueError("No document has the two tokens that a prediction needs.")

    def metrics(self) -> list[Metric]:
        return [metric("perplexity", ("nll", "tokens"))]

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        documents = self.at_length(length, None)
        window = min(length, runner.limit or length)
        stride = min(self.config.stride or max(window // 2, 1), window)
        parts = [(i, *part) for i, ids in enumerate(documents) for part in windows(len(ids), window, stride)]

        def read(
            model: nn.Module, ids: Tensor, mask: Tensor, indices: list[int]
        ) -> list[tuple[list[float], list[int]]]:
            nll = token_nll(model, ids, mask)
            return [_by_position(nll[row], *parts[index][1:]) for row, index in enumerate(indices)]

        results = runner.run([documents[i][start:end] for i, start, end, _ in parts], read)
        count = len(POSITION_EDGES) - 1
        sums = [[0.0] * count for _ in documents]
        tokens = [[0] * count for _ in documents]
        for (i, *_), (part_sums, part_tokens) in zip(parts, results, strict=True):
            sums[i] = [a + b for a, b in zip(sums[i], part_sums, strict=True)]
            tokens[i] = [a + b for a, b in zip(tokens[i], part_tokens, strict=True)]
        return {
            "nll": [sum(row) for row in sums],
            "tokens": [sum(row) for row in tokens],
            "nll_by_position": sums,
            "tokens_by_position": tokens,
        }

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"stride": self.config.stride or "half a window"}


def token_nll(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each token after the first: ids (batch, length) -> (batch, length - 1)."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    nll = torch.empty(ids.shape[0], ids.shape[1] - 1, device=ids.device)
    for start in range(0, ids.shape[1] - 1, _LOGIT_ROWS):
        part = slice(start, min(start + _LOGIT_ROWS, ids.shape[1] - 1))
        target = ids[:, part.start + 1 : part.stop + 1]
        # classes second, as cross_entropy has them
        nll[:, part] = F.cross_entropy(logits[:, part].float().transpose(1, 2), target, reduction="none")
    return nll


def _by_position(nll: Tensor, start: int, end: int, first: int) -> tuple[list[float], list[int]]:
    """Sums and counts by position in the document of the tokens from `first` to `end`; nll[i] is of token i + 1."""
    losses = nll[first - start - 1 : end - start - 1].double().cpu()
    position = torch.arange(first, end)
    sums, counts = [], []
    for low, high in pairwise(POSITION_EDGES):
        chosen = (position >= low) & (position < high)
        sums.append(losses[chosen].sum().item())
        counts.append(int(chosen.sum()))
    return sums, counts
