"""Converted decoders as models: exactness, heads, options, positions, training. Promises: see `conformance`."""

import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GPT2Config, GPT2DoubleHeadsModel, GPT2LMHeadModel

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, LinformerConfig, PerformerConfig, convert
from hf_linattn.modeling.architectures import ARCHITECTURES
from hf_linattn.modeling.modeling_linattn import HEAD_CLASSES, MODEL_CLASSES, self_attentions

from ..helpers import (
    CACHE,
    CAUSAL,
    CAUSAL_FEW,
    DECODERS,
    POSITIONS,
    as_trained,
    cache_of,
    config_id,
    converted_model,
    decoder,
    inputs_for,
    logits_in_pieces,
    outputs_of,
    positions_of,
    prompts,
    tiny_config,
    tiny_model,
    tokens,
)

pytestmark = pytest.mark.core

CAUSAL_LM = "AutoModelForCausalLM"
SWAP = PerformerConfig(num_features=16)
EXACT = [
    LinformerConfig(projection="learned", projection_length=POSITIONS),
    LinformerConfig(projection="learned", projection_length=4, window_size=POSITIONS),
    PerformerConfig(num_features=16, window_size=POSITIONS),
    PerformerConfig(num_features=16, window_size=POSITIONS, layers=[1]),
]
#: (family, auto class) of every head of a decoder that can be converted
HEADS = [(family, auto) for auto, by_family in MODEL_CLASSES.items() for family in DECODERS if family in by_family]

ALL_METHODS = pytest.mark.parametrize("config", CAUSAL, ids=config_id)
FEW_METHODS = pytest.mark.parametrize("config", CAUSAL_FEW, ids=config_id)
ALL_FAMILIES = pytest.mark.parametrize("family", DECODERS)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=config_id)


def logits_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits of the real tokens, (tokens, vocabulary), positions counted over real tokens."""
    with torch.no_grad():
        logits = model(**inputs, position_ids=positions_of(inputs["attention_mask"])).logits
    return logits[inputs["attention_mask"].bool()]


# exactness


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", EXACT, ids=config_id)
@ALL_FAMILIES
def test_what_covers_the_whole_text_is_softmax(family: str, config: AttentionConfig, side: str) -> None:
    base, inputs = tiny_model(family, CAUSAL_LM), prompts(40, 23, 1, side=side)
    model = converted_model(config, family, CAUSAL_LM)
    expected = logits_of(base, inputs)
    torch.testing.assert_close(logits_of(model, inputs), expected, atol=1e-5, rtol=1e-5)
    # at the longest length, and without a mask
    with torch.no_grad():
        expected, found = (m(tokens(POSITIONS)).logits for m in (base, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", EXACT, ids=config_id)
@ALL_FAMILIES
def test_what_covers_the_whole_text_generates_as_softmax(family: str, config: AttentionConfig) -> None:
    base, model, inputs = tiny_model(family, CAUSAL_LM), converted_model(config, family, CAUSAL_LM), prompts(20, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 2}
    assert torch.equal(model.generate(**inputs, **options), base.generate(**inputs, **options))


@pytest.mark.parametrize(
    "overrides",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ],
    ids=lambda overrides: "-".join(overrides),
)
@pytest.mark.parametrize("config", EXACT[1:3], ids=config_id)
def test_gpt2s_ways_to_scale_are_kept(config: AttentionConfig, overrides: dict) -> None:
    base, inputs = tiny_model("gpt2", CAUSAL_LM, **overrides), prompts(40, 23)
    expected = logits_of(base, inputs)
    assert not torch.allclose(expected, logits_of(tiny_model("gpt2", CAUSAL_LM), inputs), atol=1e-3)
    model = convert(base, config)
    torch.testing.assert_close(logits_of(model, inputs), expected, atol=1e-5, rtol=1e-5)
    mask = inputs["attention_mask"].bool()
    found, _ = logits_in_pieces(model, inputs, [30, 1, 9])
    torch.testing.assert_close(found[mask], expected, atol=1e-5, rtol=1e-5)


@HALVES
@pytest.mark.parametrize("config", EXACT[1:3], ids=config_id)
def test_reorder_and_upcast_attn_attends_in_float32(config: AttentionConfig, dtype: torch.dtype) -> None:
    """Logits of attention in the hundreds, where half precision loses much, are those of float32."""
    base = tiny_model("gpt2", CAUSAL_LM, reorder_and_upcast_attn=True)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "attn.c_attn.weight" in name:
                # queries and keys, the first two thirds
                parameter[:, :64] *= 6
    base, inputs = base.to(dtype), prompts(40, 23)
    model = convert(base, config)
    exact = logits_of(copy.deepcopy(base).double(), inputs)
    base.set_attn_implementation("eager")  # the only one in which Transformers reads the option
    theirs, ours = ((logits_of(m, inputs).double() - exact).abs().mean() for m in (base, model))
    assert ours < 1.2 * theirs
    for _, attention in self_attentions(model, ARCHITECTURES["gpt2"]):
        attention.reorder_and_upcast_attn = False
    # a Performer works in float32 in any case
    without = (logits_of(model, inputs).double() - exact).abs().mean()
    assert (without != ours) == isinstance(config, LinformerConfig)


@ALL_FAMILIES
@pytest.mark.parametrize("config", EXACT[1:], ids=config_id)
def test_earlier_tokens_do_not_see_later_ones_through_softmax_layers(family: str, config: AttentionConfig) -> None:
    model = converted_model(config, family, CAUSAL_LM)
    for row in (prompts(30, 30), prompts(30, 12)):
        other = {**row, "input_ids": torch.cat((row["input_ids"][:, :-1], tokens(1, batch=2, seed=8)), dim=1)}
        mask = row["attention_mask"].bool()[:, :-1]
        with torch.no_grad():
            first, second = (model(**x).logits[:, :-1][mask] for x in (row, other))
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-6)


# heads


def head_inputs(model: torch.nn.Module, length: int = 24) -> dict[str, Tensor]:
    """Two rows for a head, the second one padded at the end; for double heads, two choices."""
    inputs = inputs_for("AutoModelForMultipleChoice" if "DoubleHeads" in type(model).__name__ else "AutoModel", length)
    if "DoubleHeads" in type(model).__name__:
        inputs["mc_token_ids"] = inputs["attention_mask"].sum(-1) - 1
    return inputs


def double_heads() -> GPT2DoubleHeadsModel:
    torch.manual_seed(1)
    return GPT2DoubleHeadsModel(tiny_config("gpt2", num_labels=1)).eval()


@pytest.mark.parametrize(("family", "auto"), [*HEADS, ("gpt2", "double heads")])
def test_a_converted_head_keeps_the_base_and_differs_from_it(tmp_path, family: str, auto: str) -> None:
    base = double_heads() if auto == "double heads" else tiny_model(family, auto)
    inputs = head_inputs(base)
    before = outputs_of_head(base, inputs)
    model = convert(base, SWAP)
    assert isinstance(model, LinAttnPreTrainedModel)
    assert isinstance(model, type(base))
    assert type(model).__name__ == f"LinAttn{type(base).__name__}"
    assert model.config.model_type == f"linattn_{family}"
    after = outputs_of_head(model, inputs)
    assert not torch.allclose(after, before, atol=1e-3)
    state = model.state_dict()
    for name, tensor in base.state_dict().items():
        assert torch.equal(state[name], tensor), name
        assert state[name].data_ptr() != tensor.data_ptr(), name
    added = set(state) - set(base.state_dict())
    attention = {"gpt2": ".attn.", "gpt_neox": ".attention.", "llama": ".self_attn.", "opt": ".self_attn."}[family]
    assert all(f"{attention}linattn." in name for name in added)
    assert len(list(model.linear_attentions())) == 2
    exact = convert(base, EXACT[2])
    torch.testing.assert_close(outputs_of_head(exact, inputs), before, atol=1e-5, rtol=1e-5)

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    # one product for a single row, of double heads, is rounded as the file's layout in memory has it, in the base also
    tolerance = 1e-6 if auto == "double heads" else 0
    torch.testing.assert_close(outputs_of_head(loaded, inputs), after, atol=tolerance, rtol=0)


def outputs_of_head(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """`outputs_of`, with the padding left out of logits per token, and without the cache."""
    model.config.use_cache = False
    return outputs_of(model, inputs)


def test_gpt2_has_the_heads_that_the_issue_names() -> None:
    assert set(HEAD_CLASSES["gpt2"]) == {
        "GPT2Model",
        "GPT2LMHeadModel",
        "GPT2DoubleHeadsModel",
        "GPT2ForSequenceClassification",
        "GPT2ForTokenClassification",
        "GPT2ForQuestionAnswering",
    }


def test_gpt2s_projections_stay_conv1d_and_tied() -> None:
    model = converted_model(SWAP, "gpt2", CAUSAL_LM)
    assert type(model.transformer.h[0].attn.c_attn).__name__ == "Conv1D"
    assert model.transformer.h[0].attn.c_attn.weight.shape == (32, 96)
    assert model.lm_head.weight is model.transformer.wte.weight


@FEW_METHODS
def test_a_sequence_is_classified_by_its_last_token(config: AttentionConfig) -> None:
    auto = "AutoModelForSequenceClassification"
    model = as_trained(converted_model(config, "gpt2", auto))
    with torch.no_grad():
        expected = torch.cat([model(tokens(n, seed=n)).logits for n in (20, 7)])
        rows = torch.ones(2, 20, dtype=torch.long)
        rows[0], rows[1, :7] = tokens(20, seed=20), tokens(7, seed=7)
        found = model(rows, attention_mask=(rows != 1).long()).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "auto"), HEADS)
def test_losses_of_all_heads_have_gradients(family: str, auto: str) -> None:
    model, inputs = converted_model(SWAP, family, auto), inputs_for("AutoModel")
    labels: dict[str, Tensor] = {
        "AutoModelForSequenceClassification": {"labels": torch.tensor([0, 1])},
        "AutoModelForQuestionAnswering": {
            "start_positions": torch.tensor([1, 2]),
            "end_positions": torch.tensor([3, 4]),
        },
        "AutoModelForTokenClassification": {"labels": torch.ones(2, 24, dtype=torch.long)},
        "AutoModel": {},
    }.get(auto, {"labels": inputs["input_ids"]})
    out = model.train()(**inputs, **labels)
    (out.loss if labels else out.last_hidden_state.square().mean()).backward()
    assert model.get_input_embeddings().weight.grad.isfinite().all()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


# cross-attention


def cross_attending(**overrides: Any) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(tiny_config("gpt2", add_cross_attention=True, **overrides)).eval()


def encoded(batch: int = 2, length: int = 9) -> dict[str, Tensor]:
    """Hidden states of an encoder, the second row padded."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, 5:] = 0
    states = torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(2))
    return {"encoder_hidden_states": states, "encoder_attention_mask": mask}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("config", EXACT, ids=config_id)
def test_cross_attention_stays_softmax(config: AttentionConfig, masked: bool) -> None:
    base = cross_attending()
    model = convert(base, config)
    assert all(".crossattention." not in name for name, _ in model.linear_attentions())
    encoder = encoded()
    if not masked:
        del encoder["encoder_attention_mask"]
    for inputs in (prompts(20, 11), prompts(20, 11, side="right"), prompts(9, 9)):
        expected, found = (logits_of(m, {**inputs, **encoder}) for m in (base, model))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # the encoder's states matter, and what is padded among them does not
    other = {**encoder, "encoder_hidden_states": encoder["encoder_hidden_states"].clone()}
    other["encoder_hidden_states"][1, 5:] += 1.0
    first, second, *expected = (logits_of(m, {**inputs, **x}) for m in (model, base) for x in (encoder, other))
    # GPT-2 in Transformers 5.8 forgets the encoder's mask
    assert torch.equal(first, second) == torch.equal(*expected)
    assert masked or not torch.equal(first, second)


@pytest.mark.parametrize("config", EXACT, ids=config_id)
def test_cross_attention_reads_nothing_of_a_row_of_padding(config: AttentionConfig) -> None:
    base = cross_attending()
    model, inputs, encoder = convert(base, config), prompts(20, 11), encoded()
    encoder["encoder_attention_mask"][1] = 0
    other = {**encoder, "encoder_hidden_states": encoder["encoder_hidden_states"].clone()}
    other["encoder_hidden_states"][1] += 1.0
    first, second, *expected = (logits_of(m, {**inputs, **x}) for m in (model, base) for x in (encoder, other))
    torch.testing.assert_close(first, expected[0], atol=1e-5, rtol=1e-5)
    # GPT-2 in Transformers 5.8 forgets the encoder's mask
    assert torch.equal(first, second) == torch.equal(*expected)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("config", [EXACT[2], EXACT[3], CAUSAL_FEW[1], CAUSAL_FEW[3]], ids=config_id)
def test_cross_attention_keeps_its_keys_in_a_cache_of_two(config: AttentionConfig, given: bool) -> None:
    base = cross_attending()
    model, inputs, encoder = convert(base, config), prompts(20, 11), encoded()
    mask = inputs["attention_mask"].bool()
    expected = logits_of(base if config in EXACT else model, {**inputs, **encoder})
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if given else None
    logits = []
    for begin, end in ((0, 8), (8, 9), (9, 20)):
        seen = inputs["attention_mask"][:, :end]
        with torch.no_grad():
            out = model(
                inputs["input_ids"][:, begin:end],
                attention_mask=seen,
                position_ids=positions_of(seen)[:, begin:],
                use_cache=True,
                **{CACHE: cache},
                **encoder,
            )
        cache = cache_of(out)
        logits.append(out.logits)
    assert isinstance(cache, EncoderDecoderCache)
    assert cache.get_seq_length() == 20
    assert cache.cross_attention_cache.layers[0].keys.shape[2] == 9
    torch.testing.assert_close(torch.cat(logits, dim=1)[mask], expected, atol=1e-5, rtol=1e-5)


# positions


#: position tables: their name, and the rows in them before position 0
TABLES = {"gpt2": ("wpe.weight", 0), "opt": ("decoder.embed_positions.weight", 2)}


@pytest.mark.parametrize("max_length", [POSITIONS + 1, 3 * POSITIONS - 7])
@pytest.mark.parametrize("family", TABLES)
def test_position_tables_are_repeated(family: str, max_length: int) -> None:
    base = tiny_model(family, CAUSAL_LM)
    name, offset = TABLES[family]
    model = convert(base, SWAP, max_length=max_length)
    table, longer = (m.base_model.get_parameter(name).detach() for m in (base, model))
    assert longer.shape == (max_length + offset, 32)
    assert torch.equal(longer[:offset], table[:offset])
    for position in range(max_length):
        assert torch.equal(longer[offset + position], table[offset + position % POSITIONS])


@pytest.mark.parametrize("family", TABLES)
def test_position_tables_are_interpolated(family: str) -> None:
    base = tiny_model(family, CAUSAL_LM)
    name, offset = TABLES[family]
    model = convert(base, SWAP, max_length=2 * POSITIONS - 1, position_extension="interpolate")
    table, longer = (m.base_model.get_parameter(name).detach() for m in (base, model))
    assert torch.equal(longer[:offset], table[:offset])
    # twice as many points less one: each old row, and between two of them their mean
    torch.testing.assert_close(longer[offset::2], table[offset:])
    torch.testing.assert_close(longer[offset + 1 :: 2], (table[offset:-1] + table[offset + 1 :]) / 2)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_rotary_positions_need_no_table(family: str) -> None:
    assert ARCHITECTURES[family].position_table is None
    base = tiny_model(family, CAUSAL_LM)
    for extension in ("repeat", "interpolate"):
        model = convert(base, EXACT[1], max_length=3 * POSITIONS, position_extension=extension)
        assert {name for name in model.state_dict() if "linattn" not in name} == set(base.state_dict())
        inputs = prompts(60, 31)
        torch.testing.assert_close(logits_of(model, inputs), logits_of(base, inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": POSITIONS,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_positions_keep_their_scaling_in_longer_texts(rope: dict) -> None:
    torch.manual_seed(1)
    config = tiny_config("llama", rope_parameters={"rope_theta": 10000.0, **rope})
    # twice as long as the tests above: float32 rounds to just over 1e-5
    base = transformers.LlamaForCausalLM(config).eval().double()
    model = convert(base, PerformerConfig(num_features=16, window_size=3 * POSITIONS), max_length=3 * POSITIONS)
    for length in (POSITIONS - 4, 2 * POSITIONS):
        with torch.no_grad():
            expected, found = (m(tokens(length)).logits for m in (base, model))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rotary_models_may_become_shorter() -> None:
    model = convert(tiny_model("llama", CAUSAL_LM), PerformerConfig(num_features=16), max_length=POSITIONS // 2)
    assert model.config.max_position_embeddings == POSITIONS // 2
    with pytest.raises(ValueError, match=rf"max_length={POSITIONS // 2}.*at least {POSITIONS}"):
        convert(tiny_model("gpt2", CAUSAL_LM), PerformerConfig(num_features=16), max_length=POSITIONS // 2)


def test_rotary_scaling_that_depends_on_the_length_is_refused() -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    base = transformers.LlamaForCausalLM(tiny_config("llama", rope_parameters=rope)).eval()
    with pytest.raises(ValueError, match=rf"max_length=150.*'dynamic'.*keep {POSITIONS}"):
        convert(base, PerformerConfig(num_features=16), max_length=150)
    # as long as the base model it is the same
    model = convert(base, PerformerConfig(num_features=16, window_size=POSITIONS))
    with torch.no_grad():
        expected, found = (m(tokens(POSITIONS)).logits for m in (base, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@ALL_FAMILIES
def test_everything_agrees_on_the_length_at_once_and_after_a_reload(tmp_path, family: str) -> None:
    model = converted_model(SWAP, family, CAUSAL_LM, max_length=150)
    model.save_pretrained(tmp_path)
    for found in (model, type(model).from_pretrained(tmp_path)):
        assert found.config.max_position_embeddings == found.attention_config.max_length == 150
        with torch.no_grad():
            assert found(tokens(150)).logits.isfinite().all()
        with pytest.raises(ValueError, match=r"151 tokens.*max_length=150"):
            found(tokens(151))


# training


def gradients(model: LinAttnPreTrainedModel, **inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@ALL_METHODS
def test_training_moves_every_learned_parameter_and_lowers_the_loss(config: AttentionConfig) -> None:
    # slots of two tokens, so that what is learned about each shows within the text
    if isinstance(config, LinformerConfig):
        config = type(config)(**{**vars(config), "projection_length": POSITIONS // 2})
    model = converted_model(config, "gpt2", CAUSAL_LM).train()
    learned = {name: p.detach().clone() for name, p in model.named_parameters() if ".linattn." in name}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        input_ids = tokens(POSITIONS, batch=2)
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        moved = {name: p for name, p in model.named_parameters() if not name.endswith("prototypes.centers")}
        assert all(p.grad is not None and p.grad.isfinite().all() for p in moved.values())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    still = {name for name, p in model.named_parameters() if name in learned and torch.equal(p, learned[name])}
    joined = config.window_size or config.global_tokens
    # assignments to prototypes have no gradient
    expected = {name for name in learned if name.endswith("prototypes.centers")}
    # a factor per query cancels where there is no exact part beside the estimate
    assert {name for name in still if joined or not name.endswith(("query_square", "query_transform"))} == expected


@pytest.mark.parametrize("use_reentrant", [False, True])
@ALL_FAMILIES
@FEW_METHODS
def test_gradient_checkpointing_changes_no_gradient(config: AttentionConfig, family: str, use_reentrant: bool) -> None:
    if isinstance(config, PerformerConfig):
        config = type(config)(**{**vars(config), "redraw_interval": 1})
    model, twin = (converted_model(config, family, CAUSAL_LM).train() for _ in range(2))
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        twin.enable_input_require_grads()
    for step in range(2):
        expected, found = (gradients(m, **prompts(30, 17, side="right", seed=step)) for m in (model, twin))
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, msg=name)


@FEW_METHODS
def test_gradients_are_the_same_with_a_cache_and_without(config: AttentionConfig) -> None:
    results = [gradients(decoder(config).train(), **prompts(30, 17)) for _ in range(2)]
    model = decoder(config).train()
    model.config.use_cache = False
    results.append(gradients(model, **prompts(30, 17)))
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, msg=name)
        torch.testing.assert_close(results[2][name], gradient, msg=name, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
@pytest.mark.parametrize("config", [CAUSAL_FEW[1], CAUSAL_FEW[3]], ids=config_id)
def test_either_branch_is_trained_alone(config: AttentionConfig, near: bool, far: bool) -> None:
    model = decoder(config).train()
    joined = gradients(model, **prompts(40, 23))
    model.set_branches(near=near, far=far)
    found = gradients(model, **prompts(40, 23))
    assert all(gradient.isfinite().all() for gradient in found.values())
    weight = "transformer.h.0.attn.c_attn.weight"
    assert not torch.allclose(found[weight], joined[weight], atol=1e-6)
    learned = [gradient.abs().sum() > 0 for name, gradient in found.items() if name.endswith("directions")]
    # what the far part alone learns has no gradient without it
    assert all(learned) if far else not any(learned)


def test_lora_finds_gpt2s_projection_and_what_is_merged_generates() -> None:
    model = get_peft_model(
        converted_model(SWAP, "gpt2", CAUSAL_LM), LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    )
    inputs = prompts(20, 9)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    trained = [p for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 4
    assert any(p.grad.abs().sum() > 0 for p in trained)
    expected = converted_model(SWAP, "gpt2", CAUSAL_LM).generate(**inputs, max_new_tokens=8)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8), expected)
    assert isinstance(model.merge_and_unload(), LinAttnPreTrainedModel)


# lengths


def test_gpt2s_own_name_for_the_length_is_understood() -> None:
    model = convert(GPT2LMHeadModel(GPT2Config(n_positions=40, n_embd=16, n_head=2, n_layer=1, vocab_size=50)), SWAP)
    assert model.config.n_positions == model.attention_config.max_length == 40
