"""Which heads find a planted token: the retrieval score of each head, from one pass over planted texts.

    score(l, h) = mean over texts and over answer tokens j of softmax(q_r(j) . k)_p(j)

with p(j) the position of the j-th planted token, and r(j) that of the token from which the model answers it: in a
decoder the token before, from the last one of the prompt on; in an encoder the mask token in its place. Texts are those
of the passkey task. Wu et al. 2024 (arXiv:2404.15574) find retrieval heads by how often a head attends to the token
that is generated, and so copies it; here its weight counts, so that nothing is generated.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..conversion.softmax import AttentionCall, watch_attention
from ..data.synthetic import IGNORED, Example, SyntheticConfig, make_examples
from ..data.vocabulary import Vocabulary
from ..modeling.architectures import ARCHITECTURES

#: How many planted texts are read where scores are asked for and no number is given.
DEFAULT_TEXTS = 16


def planted_examples(texts: Sequence[str], tokenizer: Any, *, causal: bool, length: int, count: int, seed: int) -> Any:
    """Passkey texts of `length` tokens, for a decoder or an encoder; without a mask token, an encoder reads as one."""
    words = Vocabulary.from_tokenizer(tokenizer)
    reading = "causal" if causal or words.mask is None else "masked"
    config = SyntheticConfig(task="passkey", length=length, count=count, seed=seed, reading=reading)
    return make_examples(config, words, texts)


@torch.no_grad()
def retrieval_scores(model: PreTrainedModel, examples: Sequence[Example]) -> tuple[tuple[float, ...], ...]:
    """The score of each head of each layer of a softmax model in eval mode, from 0 to 1."""
    causal = ARCHITECTURES[model.config.model_type].causal
    totals: dict[int, Tensor] = {}
    for example in examples:
        readers = torch.tensor([i for i, label in enumerate(example.labels) if label != IGNORED], device=model.device)
        planted = torch.tensor(example.planted, device=model.device)

        def look(call: AttentionCall, readers: Tensor = readers, planted: Tensor = planted) -> None:
            share = _weights(call.query[0, :, readers], call.key[0], readers if causal else None)
            # of each answer token the weight on the planted one, (heads, answers)
            share = share.gather(-1, planted.expand(len(share), -1).unsqueeze(-1)).squeeze(-1).mean(-1).cpu()
            totals[call.layer] = totals.get(call.layer, torch.zeros(())) + share / len(examples)

        with watch_attention(model, look):
            ids = torch.tensor([example.input_ids], device=model.device)
            model.base_model(ids, **({"use_cache": False} if causal else {}))
    return tuple(tuple(totals[layer].tolist()) for layer in sorted(totals))


def _weights(query: Tensor, key: Tensor, last: Tensor | None) -> Tensor:
    """softmax(q k^T) of (heads, queries, dim) and (heads, keys, dim), in a decoder up to the positions `last`."""
    logits = query.double() @ key.double().mT
    if last is not None:
        logits = logits.masked_fill(torch.arange(key.shape[1], device=key.device) > last[:, None], float("-inf"))
    return logits.softmax(-1)


def ranked_heads(scores: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """Score, layer and head of all heads, the largest score first."""
    return sorted(
        ((score, layer, head) for layer, heads in enumerate(scores) for head, score in enumerate(heads)), reverse=True
    )


def heads_for(scores: Sequence[Sequence[float]], share: float) -> dict[int, list[int]]:
    """The fewest heads that together have this share of all scores: layer -> heads."""
    ranked = ranked_heads(scores)
    wanted, found, chosen = share * sum(score for score, _, _ in ranked), 0.0, dict[int, list[int]]()
    for score, layer, head in ranked:
        # what rounding leaves asks for no more heads
        if found >= wanted * (1 - 1e-9):
            break
        found += score
        chosen.setdefault(layer, []).append(head)
    return {layer: sorted(heads) for layer, heads in sorted(chosen.items())}
