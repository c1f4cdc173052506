"""Decoding from a state, through Transformers' own `generate`. That it is the parallel form: see `conformance`."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, QuantizedCache

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig
from hf_linattn.modeling.cache import LinAttnCacheLayer

from ..helpers import (
    CACHE,
    CAUSAL,
    CAUSAL_FEW,
    DECODERS,
    POSITIONS,
    cache_of,
    config_id,
    decoder,
    logits_in_pieces,
    positions_of,
    prompts,
    tiny_model,
    tokens,
)
from .conformance.test_parallel_equals_step import generated

pytestmark = pytest.mark.core

ALL_METHODS = pytest.mark.parametrize("config", CAUSAL, ids=config_id)
FEW_METHODS = pytest.mark.parametrize("config", CAUSAL_FEW, ids=config_id)
ALL_FAMILIES = pytest.mark.parametrize("family", DECODERS)
#: a few methods on one family, and two of them on every family
SOME = pytest.mark.parametrize(
    ("family", "config"),
    [("gpt2", config) for config in CAUSAL_FEW]
    + [(family, config) for family in DECODERS if family != "gpt2" for config in (CAUSAL_FEW[1], CAUSAL_FEW[3])],
    ids=config_id,
)
JOINED = PerformerConfig(num_features=16, window_size=4, global_tokens=1)


@FEW_METHODS
def test_samples_of_one_seed_are_the_same_without_a_cache(config: AttentionConfig) -> None:
    model, inputs = decoder(config), prompts(12, 7)
    results = []
    for options in ({}, {"use_cache": False}):
        torch.manual_seed(3)
        results.append(generated(model, inputs, do_sample=True, top_k=20, num_return_sequences=3, **options))
    assert results[0].shape == (6, 28)
    assert torch.equal(*results)
    assert len({tuple(row.tolist()) for row in results[0]}) == 6


@SOME
def test_generation_goes_beyond_the_positions_of_the_checkpoint(family: str, config: AttentionConfig) -> None:
    model, inputs = decoder(config, family, max_length=3 * POSITIONS), prompts(POSITIONS - 4, 30)
    output = generated(model, inputs, max_new_tokens=POSITIONS, no_repeat_ngram_size=0)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, POSITIONS, dtype=torch.long)), dim=1)
    with torch.no_grad():
        logits = model(output, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).logits
    assert torch.equal(logits[:, POSITIONS - 5 : -1].argmax(-1), output[:, POSITIONS - 4 :])


@SOME
def test_generation_continues_from_a_returned_cache(family: str, config: AttentionConfig) -> None:
    model, inputs = decoder(config, family), prompts(12, 7)
    whole = generated(model, inputs)
    first = generated(model, inputs, max_new_tokens=9, return_dict_in_generate=True)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 9, dtype=torch.long)), dim=1)
    longer = {"input_ids": first.sequences, "attention_mask": mask}
    cache = cache_of(first)
    assert cache.get_seq_length() == 20
    assert torch.equal(generated(model, longer, max_new_tokens=7, **{CACHE: cache}), whole)
    assert cache.get_seq_length() == 27


def test_a_second_turn_is_read_after_the_first() -> None:
    model, inputs = decoder(JOINED), prompts(12, 7)
    first = generated(model, inputs, max_new_tokens=5, return_dict_in_generate=True)
    turn = tokens(6, batch=2, seed=4)
    dialogue = {
        "input_ids": torch.cat((first.sequences, turn), dim=1),
        "attention_mask": torch.cat((inputs["attention_mask"], torch.ones(2, 11, dtype=torch.long)), dim=1),
    }
    expected = generated(model, dialogue, use_cache=False)
    assert torch.equal(generated(model, dialogue, **{CACHE: cache_of(first)}), expected)


@FEW_METHODS
def test_a_copy_of_a_cache_is_a_state_of_its_own(config: AttentionConfig) -> None:
    """One prefix, read once, and several texts that go on from it."""
    model, prefix = decoder(config), tokens(15)
    _, cache = logits_in_pieces(model, {"input_ids": prefix, "attention_mask": torch.ones_like(prefix)}, [15])
    for seed in (1, 2, 1):
        text = {"input_ids": torch.cat((prefix, tokens(5, seed=seed)), dim=1)}
        output = generated(model, text, **{CACHE: copy.deepcopy(cache)})
        assert torch.equal(output, generated(model, text, use_cache=False))
    assert cache.get_seq_length() == 15


@SOME
def test_a_prompt_may_come_in_chunks(family: str, config: AttentionConfig) -> None:
    model, inputs = decoder(config, family), prompts(30, 17, 3)
    expected = generated(model, inputs)
    for size in (7, 64):
        assert torch.equal(generated(model, inputs, prefill_chunk_size=size), expected)


def test_a_cache_that_is_reset_is_as_new() -> None:
    for config in (JOINED, LinformerConfig(projection="learned", projection_length=8, window_size=4)):
        model = decoder(config)
        first, cache = logits_in_pieces(model, prompts(30, 17), [20, 1, 9])
        logits_in_pieces(model, prompts(30), [30])
        cache.reset()
        assert cache.get_seq_length() == 0
        again, used = logits_in_pieces(model, prompts(30, 17), [20, 1, 9], cache)
        assert used is cache
        assert torch.equal(again, first)
        # and for a batch of another size
        cache.reset()
        expected, _ = logits_in_pieces(model, prompts(21), [21])
        assert torch.equal(logits_in_pieces(model, prompts(21), [21], cache)[0], expected)


def test_a_cache_is_returned_where_it_is_asked_for() -> None:
    model = decoder(JOINED)
    assert isinstance(cache_of(model(tokens(9))), DynamicCache)
    assert isinstance(cache_of(model(tokens(9), use_cache=True)), DynamicCache)
    assert cache_of(model(tokens(9), use_cache=False)) is None
    # the older name of the argument goes on working
    cache = DynamicCache()
    model(tokens(9), past_key_values=cache)
    assert all(isinstance(layer, LinAttnCacheLayer) for layer in cache.layers)
    assert cache.get_seq_length() == 9


def test_generation_starts_from_embeddings() -> None:
    model, inputs = decoder(JOINED), prompts(12, 7)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    output = generated(model, {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]})
    assert torch.equal(output[:, -16:], generated(model, inputs)[:, -16:])


@ALL_FAMILIES
def test_only_softmax_layers_keep_every_key(family: str) -> None:
    model = decoder(PerformerConfig(num_features=16, layers=[1]), family)
    _, cache = logits_in_pieces(model, prompts(30), [29, 1])
    assert cache.layers[0].keys.shape[2] == 30
    assert isinstance(cache.layers[1], LinAttnCacheLayer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@FEW_METHODS
def test_half_precision_generates(config: AttentionConfig, dtype: torch.dtype) -> None:
    model, inputs = decoder(config).to(dtype), prompts(20, 9)
    out = generated(model, inputs, output_logits=True, return_dict_in_generate=True)
    assert torch.stack(out.logits).isfinite().all()
    _, cache = logits_in_pieces(model, inputs, [19, 1])
    for layer in cache.layers:
        if isinstance(layer, LinAttnCacheLayer):
            assert not any(tensor.isnan().any() or tensor.isposinf().any() for tensor in layer.state.tensors())
            # sums of many terms are kept in float32, keys as they are
            assert layer.state.key.dtype == dtype


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
@pytest.mark.parametrize("config", CAUSAL_FEW[:5], ids=config_id)
def test_either_branch_generates_alone(config: AttentionConfig, near: bool, far: bool) -> None:
    if not far and not (config.window_size or config.global_tokens):
        pytest.skip("nothing would be left")
    model, inputs = decoder(config), prompts(20, 9)
    joined, _ = logits_in_pieces(model, inputs, [20])
    model.set_branches(near=near, far=far)
    mask = inputs["attention_mask"].bool()
    output, _ = logits_in_pieces(model, inputs, [7, 3] + [1] * 10)
    with torch.no_grad():
        positions = positions_of(inputs["attention_mask"])
        expected = model(**inputs, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(output[mask], expected[mask], atol=1e-5, rtol=1e-5)
    if config.window_size or config.global_tokens or "linformer" in config.method:
        assert not torch.allclose(output[mask], joined[mask], atol=1e-3)
    assert torch.equal(generated(model, inputs), generated(model, inputs, use_cache=False))


def test_assisted_decoding_is_refused() -> None:
    model = decoder(JOINED)
    assistant = tiny_model("gpt2", "AutoModelForCausalLM")
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        with pytest.raises(ValueError, match=r"assisted generation is not supported.*LinAttnGPT2LMHeadModel"):
            generated(model, {"input_ids": tokens(9)}, **options)


def test_a_cache_cannot_be_cropped() -> None:
    _, cache = logits_in_pieces(decoder(JOINED), prompts(9), [9])
    with pytest.raises(ValueError, match=r"cannot go back.*Use greedy search"):
        cache.crop(-1)


def test_other_caches_are_refused() -> None:
    model, prompt = decoder(JOINED), {"input_ids": tokens(9)}
    with pytest.raises(ValueError, match=r"StaticCache.*Leave out cache_implementation"):
        generated(model, prompt, cache_implementation="static")
    try:
        cache = QuantizedCache("fp8", model.config)
    except (ImportError, ValueError) as error:
        pytest.skip(f"no backend of QuantizedCache is installed: {error}")
    with pytest.raises(ValueError, match=r"QuantizedCache.*Leave out cache_implementation"):
        generated(model, prompt, **{CACHE: cache})


@ALL_FAMILIES
def test_the_cache_of_another_model_is_refused(family: str) -> None:
    base = tiny_model(family, "AutoModelForCausalLM")
    with torch.no_grad():
        cache = cache_of(base(tokens(9)))
    for given in (cache, EncoderDecoderCache(cache, DynamicCache())):
        with pytest.raises(ValueError, match=r"Layer 0 of the cache is a DynamicLayer that holds 9 tokens.*another"):
            decoder(JOINED, family)(tokens(1), **{CACHE: given})


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}], ids=str)
def test_a_cache_that_has_seen_the_text_is_refused(options: dict[str, int]) -> None:
    """A state cannot go back: a second turn is read from a used cache once."""
    if options and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("chunked prefill of this version reads the whole text again, whatever the cache has seen")
    model, ids = decoder(JOINED), tokens(10)
    first = generated(model, {"input_ids": ids}, max_new_tokens=5, return_dict_in_generate=True)
    turn = {"input_ids": torch.cat((first.sequences, tokens(5, seed=3)), dim=1)}
    cache = cache_of(first)
    spare = copy.deepcopy(cache)
    second = generated(model, turn, max_new_tokens=7, **options, **{CACHE: cache})
    for given in (turn, {"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)}):
        with pytest.raises(
            ValueError, match=r"has seen 26 tokens, and the text has (20|10);.*cannot go back.*deepcopy"
        ):
            generated(model, given, **options, **{CACHE: cache})
    assert torch.equal(generated(model, turn, max_new_tokens=7, **options, **{CACHE: spare}), second)


@ALL_FAMILIES
def test_a_cache_of_another_number_of_rows_is_refused(family: str) -> None:
    model = decoder(JOINED, family)
    cache = cache_of(model(tokens(9)))
    with pytest.raises(ValueError, match=r"state of 1 rows, and 2 rows are given.*batch_repeat_interleave"):
        model(tokens(1, batch=2), **{CACHE: cache})
    cache.batch_repeat_interleave(2)
    assert model(tokens(1, batch=2), **{CACHE: cache}).logits.isfinite().all()


@pytest.mark.parametrize(
    "other",
    [
        PerformerConfig(num_features=16, window_size=4, global_tokens=1, seed=1),
        PerformerConfig(num_features=16, window_size=4),
        LinformerConfig(projection_length=8, window_size=4, global_tokens=1),
        # its softmax layer finds a state where it looks for keys
        PerformerConfig(num_features=16, window_size=4, global_tokens=1, layers=[0]),
    ],
    ids=config_id,
)
def test_the_state_of_another_converted_model_is_refused(other: AttentionConfig) -> None:
    cache = cache_of(decoder(JOINED)(tokens(9)))
    with pytest.raises(ValueError, match=r"Layer 0 of the cache holds the state of a gpt2.*another model"):
        decoder(other)(tokens(1), **{CACHE: cache})
    # unless it is empty
    cache.reset()
    if other.layers is None:
        assert decoder(other)(tokens(3), **{CACHE: cache}).logits.isfinite().all()


@ALL_FAMILIES
def test_generation_past_the_longest_text_is_refused_with_both_numbers(family: str) -> None:
    model, inputs = decoder(JOINED, family), prompts(POSITIONS - 4, 9)
    # the last token is not read again
    assert generated(model, inputs, max_new_tokens=5).shape[1] == POSITIONS + 1
    for options in ({}, {"use_cache": False}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=f"{POSITIONS + 1} tokens.*max_length={POSITIONS}"):
            generated(model, inputs, max_new_tokens=6, **options)


def test_attention_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"output_attentions=True.*no matrix"):
        generated(decoder(JOINED), {"input_ids": tokens(9)}, output_attentions=True, return_dict_in_generate=True)


def test_a_generation_config_is_used() -> None:
    model, inputs = decoder(JOINED), prompts(12, 7)
    settings = GenerationConfig(max_new_tokens=16, num_beams=3, no_repeat_ngram_size=2, pad_token_id=1)
    assert torch.equal(model.generate(**inputs, generation_config=settings), generated(model, inputs, num_beams=3))
