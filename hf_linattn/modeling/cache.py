"""The state of a converted decoder layer as a layer of Transformers' `Cache`.

`generate` and whoever calls the model make a `DynamicCache` as always; `prepare_cache` puts the layers
below in it before the first token. The model's body hands the cache down to the attention function as a keyword,
which Transformers' decoder layers pass on.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache

from .state import SplitState, State


class LinAttnCacheLayer(CacheLayerMixin):
    """State of one layer: tensors, batch first, whose size grows with the text only where a setting keeps tokens.

    Attributes:
        state: what came so far; None before the first token.
        tokens: how many tokens came, padding included.
        owner: which models can go on from the state.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | SplitState | None = None
        self.tokens = 0
        self.owner = ""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens, and hand keys and values on as they are: (batch, heads, new tokens, dim)."""
        self.is_initialized = True
        self.tokens += key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # the name of the same in older versions
    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.state, self.tokens = None, 0

    def _map(self, function: Any) -> None:
        if self.state is not None:
            self.state = self.state.map(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        if self.state is not None:
            self.device = self.state.seen.device
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def crop(self, *args: Any) -> None:
        raise ValueError(
            "The state of linear attention cannot go back to an earlier token, as assisted decoding, prompt lookup and "
            "contrastive search ask of it. Use greedy search, sampling or beam search."
        )

    def nbytes(self) -> int:
        """Size of the state in bytes."""
        return 0 if self.state is None else sum(x.numel() * x.element_size() for x in self.state.tensors())


def cache_layer(cache: Cache | None, module: nn.Module) -> LinAttnCacheLayer | None:
    """The layer of the cache that belongs to an attention module; None without a cache."""
    if cache is None:
        return None
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return cache.layers[module.layer_idx]  # type: ignore[index,return-value]


def prepare_cache(cache: Cache, converted: Iterable[int], *, owner: str = "", rows: int | None = None) -> None:
    """Make the layers with these indices `LinAttnCacheLayer`s, where the cache is new.

    Args:
        owner: the model that reads and writes the states; those of another owner are refused.
        rows: how many rows the new tokens have; states of another number are refused. None: any.

    Raises:
        ValueError: the cache is not a `DynamicCache`, or holds what the model cannot go on from.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, DynamicCache):
        raise ValueError(
            f"The cache is a {type(cache).__name__}; a converted model keeps a state of fixed size in a DynamicCache. "
            "Leave out cache_implementation."
        )
    # softmax layers too: what another model keeps as a state has no keys for them
    for index, kept in enumerate(cache.layers):
        if isinstance(kept, LinAttnCacheLayer) and kept.state is not None:
            _check_state(kept.state, kept.owner, index, owner, rows)
    for index in converted:
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        layer: Any = cache.layers[index]
        if not isinstance(layer, LinAttnCacheLayer):
            if layer.is_initialized and layer.get_seq_length():
                raise ValueError(
                    f"Layer {index} of the cache is a {type(layer).__name__} that holds {layer.get_seq_length()} "
                    "tokens; a converted model cannot go on from the cache of another model, or from the keys and "
                    "values of prefix tuning."
                )
            layer = cache.layers[index] = LinAttnCacheLayer()
        layer.owner = owner


def _check_state(state: State | SplitState, kept_by: str, index: int, owner: str, rows: int | None) -> None:
    if kept_by != owner:
        raise ValueError(
            f"Layer {index} of the cache holds the state of {kept_by}; {owner} cannot go on from the cache of another "
            "model. Give it a new one."
        )
    if rows is not None and len(state.seen) != rows:
        raise ValueError(
            f"The cache holds the state of {len(state.seen)} rows, and {rows} rows are given; they must be as many. "
            "Repeat the rows of the cache by cache.batch_repeat_interleave, or give a new one."
        )


def tokens_seen(cache: Cache | None) -> int:
    """How many tokens a cache has seen, padding included."""
    return 0 if cache is None else int(cache.get_seq_length())
