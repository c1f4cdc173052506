"""Decoding with a cache: one step, the cache before it, and its size."""

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

# Tokens that a prompt is read at a time.
_CHUNK = 1024


def step(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> None:
    """Read the next tokens (1, length), which come after those in the cache."""
    # older versions of Transformers call it past_key_values
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(input_ids=ids, **{keyword: cache}, use_cache=True, logits_to_keep=1)


def state_bytes(cache: DynamicCache) -> int:
    """Size of all that a cache holds."""
    total = 0
    for layer in cache.layers:
        nbytes: Callable[[], int] | None = getattr(layer, "nbytes", None)
        total += (
            nbytes() if nbytes is not None else sum(x.numel() * x.element_size() for x in (layer.keys, layer.values))
        )
    return total


def softmax_cache(model: PreTrainedModel, position: int) -> DynamicCache:
    """A cache of `position` random keys and values in each layer of a GPT-2; they cost as much as computed ones."""
    config, cache = model.config, DynamicCache(config=model.config)
    shape = (2, 1, config.n_head, position, config.n_embd // config.n_head)
    for index in range(config.n_layer):
        keys, values = torch.randn(shape, device=model.device).to(model.dtype).unbind(0)
        cache.update(keys, values, index)
    return cache


@torch.no_grad()
def caches(model: PreTrainedModel, positions: list[int], ids: Tensor, softmax: bool) -> list[DynamicCache]:
    """The cache before the token at each of the positions, which are in rising order; ids (1, length)."""
    if softmax:
        return [softmax_cache(model, position) for position in positions]
    cache, done, copies = DynamicCache(config=model.config), 0, []
    for position in positions:
        for begin in range(done, position, _CHUNK):
            step(model, ids[:, begin : min(begin + _CHUNK, position)], cache)
        done = position
        copies.append(copy.deepcopy(cache))
    return copies
