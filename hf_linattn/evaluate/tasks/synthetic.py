"""What a model answers to the examples of `data.synthetic`.

examples = make_examples(config, tokenizer, documents=texts)
outcomes = score(model, examples)
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import tqdm
from torch import Tensor, nn

from ...data.synthetic import IGNORED, Example
from ...modeling.validation import check_integer


@dataclass(frozen=True)
class Outcome:
    """How one example was answered: how many of its answer tokens were right."""

    correct: int
    answers: int

    @property
    def exact(self) -> bool:
        """Whether all answer tokens were right."""
        return self.correct == self.answers


@torch.no_grad()
def score(
    model: nn.Module, examples: Sequence[Example], *, batch_size: int = 8, progress: bool = True
) -> list[Outcome]:
    """What a model answers, by its most likely token at each answer position, given all that comes before it.

    Args:
        model: a Transformers model whose `logits` are (batch, length, tokens): a causal LM, a masked LM or a
            token classifier. It is scored in eval mode, and left as it was.
        examples: as `make_examples` gives them, of the reading that is the model's.
        batch_size: how many are read at once; shorter ones are padded on the right.
        progress: show a bar.

    Returns:
        One outcome for each example, in their order.

    Raises:
        ValueError: `batch_size` is below 1, an example asks nothing, its parts differ in length, or the model does
            not know a token of it.
    """
    # For a causal model the earlier answer tokens are given, and `exact` is yet that of greedy decoding: its first
    # token is this first argmax; where that is right, its second one is read off the same tokens as here; and so on.
    transformer: Any = model
    _check(transformer, examples, batch_size)
    some_logits = "logits_to_keep" in inspect.signature(transformer.forward).parameters
    training = transformer.training
    transformer.eval()
    outcomes = []
    try:
        starts = range(0, len(examples), batch_size)
        for start in tqdm(starts, desc="Scoring", unit="batch", leave=False, disable=not progress):
            batch = padded(examples[start : start + batch_size], transformer.config.pad_token_id or 0)
            input_ids, mask, labels = (tensor.to(transformer.device) for tensor in batch)
            options = {}
            if some_logits:
                # logits of all tokens are large, and these models make them only where any row has an answer
                asked = (labels != IGNORED).any(0).nonzero()[:, 0]
                options, labels = {"logits_to_keep": asked}, labels[:, asked]
            named = transformer(input_ids=input_ids, attention_mask=mask, **options).logits.argmax(-1)
            correct, answers = (named == labels).sum(1).tolist(), (labels != IGNORED).sum(1).tolist()
            outcomes += [Outcome(*pair) for pair in zip(correct, answers, strict=True)]
    finally:
        transformer.train(training)
    return outcomes


def padded(examples: Sequence[Example], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, attention mask and labels, each (examples, length of the longest), padded on the right."""
    length = max(len(example.input_ids) for example in examples)
    ids, mask, labels = (torch.full((len(examples), length), fill) for fill in (padding, 0, IGNORED))
    for row, example in enumerate(examples):
        end = len(example.input_ids)
        ids[row, :end], labels[row, :end] = torch.tensor(example.input_ids), torch.tensor(example.labels)
        mask[row, :end] = 1
    return ids, mask, labels


def _check(model: Any, examples: Sequence[Example], batch_size: int) -> None:
    check_integer("score", "batch_size", batch_size, 1)
    size = model.get_input_embeddings().weight.shape[0]
    for index, example in enumerate(examples):
        if len(example.input_ids) != len(example.labels):
            raise ValueError(
                f"examples[{index}] has {len(example.input_ids)} input_ids and {len(example.labels)} labels."
            )
        if all(label == IGNORED for label in example.labels):
            raise ValueError(f"examples[{index}] asks nothing: all its labels are {IGNORED}.")
        if max(example.input_ids) >= size:
            raise ValueError(f"examples[{index}] has token {max(example.input_ids)}; the model knows 0 to {size - 1}.")
