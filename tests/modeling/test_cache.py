"""The cache layer alone: what Transformers asks of every layer of a `Cache`."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

from hf_linattn.modeling.cache import LinAttnCacheLayer, cache_layer, prepare_cache, tokens_seen
from hf_linattn.modeling.state import State

from ..helpers import qkv, tiny_config

pytestmark = pytest.mark.core


def filled(rows: int = 3) -> LinAttnCacheLayer:
    """A layer that saw seven tokens, the state of each row its own."""
    layer = LinAttnCacheLayer()
    layer.update(torch.zeros(rows, 2, 7, 4), torch.zeros(rows, 2, 7, 4))
    nothing = torch.zeros(rows, 2, 0, 4)
    sums = torch.arange(rows * 6.0).view(rows, 2, 3)
    layer.state = State(0, 0, torch.arange(rows), nothing, nothing, nothing[..., 0], (sums,))
    return layer


def assert_rows(layer: LinAttnCacheLayer, rows: list[int]) -> None:
    assert isinstance(layer.state, State)
    assert layer.state.seen.tolist() == rows
    assert torch.equal(layer.state.far[0], filled().state.far[0][rows])


def test_update_counts_tokens_and_hands_keys_and_values_on() -> None:
    layer = LinAttnCacheLayer()
    assert layer.get_seq_length() == layer.nbytes() == 0
    assert not layer.is_initialized
    for total, count in ((5, 5), (6, 1), (9, 3)):
        _, key, value = qkv(count)
        new_key, new_value = layer.update(key, value)
        assert torch.equal(new_key, key)
        assert torch.equal(new_value, value)
        assert layer.get_seq_length() == layer.tokens == total
    assert layer.is_initialized
    # all tokens and the ones to come, from the first
    assert layer.get_mask_sizes(2) == (11, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1


def test_the_layer_of_an_attention_module_is_found_by_its_index() -> None:
    cache, module = DynamicCache(), nn.Module()
    prepare_cache(cache, (0, 1))
    for module.layer_idx in (0, 1):
        assert cache_layer(None, module) is None
        assert cache_layer(cache, module) is cache.layers[module.layer_idx]
        assert cache_layer(EncoderDecoderCache(cache, DynamicCache()), module) is cache.layers[module.layer_idx]


def test_rows_are_chosen_as_beam_search_and_sampling_ask() -> None:
    layer = filled()
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert_rows(layer, [2, 0, 0])
    layer = filled()
    layer.batch_select_indices(torch.tensor([1]))
    assert_rows(layer, [1])
    layer = filled()
    layer.batch_repeat_interleave(2)
    assert_rows(layer, [0, 0, 1, 1, 2, 2])
    assert layer.get_seq_length() == 7


def test_before_the_first_token_there_is_nothing_to_move() -> None:
    layer = LinAttnCacheLayer()
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_select_indices(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    layer.offload()
    layer.prefetch()
    layer.reset()
    assert layer.state is None


def test_a_layer_that_is_reset_is_empty() -> None:
    layer = filled()
    layer.reset()
    assert layer.state is None
    assert layer.get_seq_length() == layer.nbytes() == 0


def test_offloaded_and_fetched_again_it_is_the_same() -> None:
    layer = filled()
    layer.offload()
    layer.prefetch()
    assert_rows(layer, [0, 1, 2])


def test_a_copy_shares_nothing() -> None:
    layer = filled()
    twin = copy.deepcopy(layer)
    twin.state.far[0].zero_()
    twin.tokens = 0
    assert_rows(layer, [0, 1, 2])
    assert layer.get_seq_length() == 7


def test_cropping_is_refused() -> None:
    for arguments in ((), (3,), (-1,)):
        with pytest.raises(ValueError, match="cannot go back to an earlier token"):
            filled().crop(*arguments)
    assert not LinAttnCacheLayer.is_croppable


def test_nbytes_adds_the_tensors_up() -> None:
    assert filled().nbytes() == 3 * 8 + 18 * 4


@pytest.mark.parametrize("layers", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("with_config", [False, True])
def test_new_caches_get_layers_where_attention_was_converted(layers: tuple[int, ...], with_config: bool) -> None:
    cache = DynamicCache(config=tiny_config("gpt2")) if with_config else DynamicCache()
    prepare_cache(cache, layers)
    kinds = [type(layer) for layer in cache.layers]
    assert [kind is LinAttnCacheLayer for kind in kinds] == [index in layers for index in range(len(kinds))]
    assert tokens_seen(cache) == 0
    # a cache that is prepared already keeps its layers
    before = list(cache.layers)
    prepare_cache(cache, layers)
    assert all(a is b for a, b in zip(cache.layers, before, strict=True))


def test_of_a_cache_for_two_models_the_decoders_is_prepared() -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    prepare_cache(cache, (0, 1))
    assert [type(layer) for layer in cache.self_attention_cache.layers] == [LinAttnCacheLayer] * 2
    assert len(cache.cross_attention_cache.layers) == 0
    assert tokens_seen(cache) == 0
    cache.self_attention_cache.layers[0].tokens = 4
    assert tokens_seen(cache) == 4


def test_tokens_of_no_cache_are_none() -> None:
    assert tokens_seen(None) == 0


def test_a_softmax_layer_that_is_empty_again_is_replaced() -> None:
    cache = DynamicCache()
    cache.update(*qkv(3)[1:], layer_idx=0)
    cache.layers[0] = DynamicLayer()
    prepare_cache(cache, (0,))
    assert isinstance(cache.layers[0], LinAttnCacheLayer)


def test_caches_that_cannot_be_prepared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"StaticCache.*DynamicCache"):
        prepare_cache(StaticCache(config=tiny_config("gpt2"), max_cache_len=8), (0, 1))
    cache = DynamicCache()
    cache.update(*qkv(3)[1:], layer_idx=0)
    prepare_cache(cache, ())
    with pytest.raises(ValueError, match=r"Layer 0 of the cache is a DynamicLayer that holds 3 tokens"):
        prepare_cache(cache, (0,))
