"""Training: redraws, gradient checkpointing, compilation, LoRA, and that learned parameters learn."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import Trainer, TrainingArguments

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, LinformerConfig, PerformerConfig
from hf_linattn.modeling import blocks
from hf_linattn.modeling.feature_maps import FEATURE_MAPS

from .helpers import CAUSAL_FEW, METHODS, SHARED, config_id, converted_model, inputs_for, outputs_of, tokens

MASKED_LM = "AutoModelForMaskedLM"
RANDOM = [name for name in FEATURE_MAPS if name not in ("elu", "learned")]
LEARNED = PerformerConfig(num_features=16, feature_map="learned", window_size=4)
ALL_METHODS = pytest.mark.parametrize("config", [*METHODS, *SHARED], ids=config_id)


def without_dropout(model: LinAttnPreTrainedModel) -> LinAttnPreTrainedModel:
    """In training mode, where nothing is random but the redraws."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def gradients(model: LinAttnPreTrainedModel, input_ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids, labels=input_ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def draws(model: LinAttnPreTrainedModel) -> list[int]:
    return [int(module.feature_map.draws) for _, module in model.linear_attentions()]


@pytest.mark.core
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_redraw_features_changes_the_output_of_random_maps(feature_map: str) -> None:
    model = converted_model(PerformerConfig(num_features=16, feature_map=feature_map))
    inputs = inputs_for("AutoModel")
    before = outputs_of(model, inputs)
    model.redraw_features()
    assert torch.equal(outputs_of(model, inputs), before) == (feature_map not in RANDOM)


@pytest.mark.core
def test_the_interval_acts_in_training_only() -> None:
    model = without_dropout(converted_model(PerformerConfig(num_features=16, redraw_interval=3)))
    seen = []
    for _ in range(7):
        model(tokens(12))
        seen.append(draws(model))
    assert seen == [[0, 0]] * 3 + [[1, 1]] * 3 + [[2, 2]]
    model.eval()
    first = outputs_of(model, inputs_for("AutoModel"))
    for _ in range(4):
        assert torch.equal(outputs_of(model, inputs_for("AutoModel")), first)
    assert draws(model) == [2, 2]


@pytest.mark.core
def test_two_forward_passes_before_a_backward_with_a_redraw_between() -> None:
    model = without_dropout(converted_model(PerformerConfig(num_features=16, redraw_interval=1)))
    first = model(tokens(12)).last_hidden_state.sum()
    second = model(tokens(12)).last_hidden_state.sum()
    assert first.item() != second.item()
    (first + second).backward()
    found = model.embeddings.word_embeddings.weight.grad.clone()

    twin = without_dropout(converted_model(PerformerConfig(num_features=16, redraw_interval=1)))
    for _ in range(2):
        twin(tokens(12)).last_hidden_state.sum().backward()
    torch.testing.assert_close(found, twin.embeddings.word_embeddings.weight.grad)


@pytest.mark.core
@pytest.mark.parametrize("use_reentrant", [False, True])
@ALL_METHODS
def test_gradient_checkpointing_changes_no_gradient(config: AttentionConfig, use_reentrant: bool) -> None:
    if isinstance(config, PerformerConfig):
        config = type(config)(**{**vars(config), "redraw_interval": 1})
    model = without_dropout(converted_model(config, auto=MASKED_LM))
    twin = without_dropout(converted_model(config, auto=MASKED_LM))
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        twin.enable_input_require_grads()
    for step in range(2):
        expected, found = (gradients(m, tokens(20, batch=2, seed=step)) for m in (model, twin))
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, msg=name)


@pytest.mark.core
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("config", "family"),
    [*((config, "bert") for config in [*METHODS, LEARNED]), *((config, "gpt2") for config in CAUSAL_FEW)],
    ids=config_id,
)
def test_recomputing_the_attention_of_long_rows_changes_no_gradient(
    config: AttentionConfig, family: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and within gradient checkpointing of whole layers."""
    auto = MASKED_LM if family == "bert" else "AutoModelForCausalLM"
    model = without_dropout(converted_model(config, family, auto=auto))
    expected = gradients(model, tokens(20, batch=2))
    monkeypatch.setattr(blocks, "_LONG", 1)
    monkeypatch.setattr(blocks, "_KEPT", 0)
    if checkpointing:
        model.gradient_checkpointing_enable()
    found = gradients(model, tokens(20, batch=2))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


@pytest.mark.parametrize("config", [config for config in CAUSAL_FEW if config.layers is None], ids=config_id)
def test_long_rows_keep_little_for_the_backward_pass(config: AttentionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a few times queries, keys and values; without recomputation several times more."""
    _, module = next(iter(converted_model(config, "gpt2", max_length=512).linear_attentions()))
    inputs = [torch.randn(1, 4, 512, 8, requires_grad=True) for _ in range(3)]

    def kept() -> int:
        """Bytes of the tensors that are kept, each storage once."""
        found: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = module(*inputs, None, None)
        del out
        return sum(found.values())

    before = kept()
    # each of the two limits alone changes nothing
    monkeypatch.setattr(blocks, "_KEPT", 0)
    assert kept() == before
    monkeypatch.setattr(blocks, "_LONG", 512)
    after = kept()
    assert after < before / 3
    assert after < 4 * sum(x.untyped_storage().nbytes() for x in inputs)


@pytest.mark.core
@pytest.mark.parametrize("config", [*METHODS, *SHARED, LEARNED], ids=config_id)
def test_a_training_step_moves_every_learned_parameter(config: AttentionConfig) -> None:
    model = without_dropout(converted_model(config, auto=MASKED_LM))
    learned = {name: p.detach().clone() for name, p in model.named_parameters() if ".linattn." in name}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        input_ids = tokens(40, batch=2)
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # a signed estimate may be far off at any step
    assert losses[-1] < losses[0] or getattr(config, "feature_map", "") == "trigonometric"
    still = {name for name, p in model.named_parameters() if name in learned and torch.equal(p, learned[name])}
    # a factor per query cancels where there is no exact part beside the estimate
    joined = config.window_size or config.global_tokens
    still = {name for name in still if joined or not name.endswith(("query_square", "query_transform"))}
    # assignments to prototypes have no gradient
    assert still == {name for name in learned if name.endswith("prototypes.centers")}


def test_the_trainer_trains_a_converted_model(tmp_path) -> None:
    model = converted_model(PerformerConfig(num_features=16, feature_map="learned", redraw_interval=1), auto=MASKED_LM)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in tokens(20, batch=4)]
    arguments = TrainingArguments(tmp_path, max_steps=2, report_to="none", use_cpu=True, save_steps=2)
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if "learned" in name)
    resumed = type(model).from_pretrained(tmp_path / "checkpoint-2")
    inputs = inputs_for(MASKED_LM)
    assert torch.equal(outputs_of(resumed, inputs), outputs_of(model.eval(), inputs))


@pytest.mark.parametrize(
    "config",
    [LinformerConfig(projection="learned", projection_length=8), PerformerConfig(num_features=16)],
    ids=config_id,
)
def test_lora_finds_queries_and_values(config: AttentionConfig) -> None:
    base = converted_model(config, auto=MASKED_LM)
    model = get_peft_model(base, LoraConfig(target_modules=["query", "value"], r=2))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    input_ids = tokens(20)
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    assert any(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if name in trained)
    inputs = inputs_for(MASKED_LM)
    merged = model.merge_and_unload()
    assert isinstance(merged, LinAttnPreTrainedModel)
    torch.testing.assert_close(outputs_of(merged, inputs), outputs_of(converted_model(config, auto=MASKED_LM), inputs))


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("config", METHODS, ids=config_id)
def test_compiled_in_one_graph_it_computes_the_same(config: AttentionConfig, padded: bool) -> None:
    """A graph break anywhere is an error with fullgraph=True."""
    torch.compiler.reset()
    model = converted_model(config)
    inputs = inputs_for("AutoModel")
    if not padded:
        inputs = {"input_ids": inputs["input_ids"][:1]}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected, found = (m(**inputs).last_hidden_state for m in (model, compiled))
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    torch.testing.assert_close(found[mask], expected[mask], atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(24, 37, 130), (600, 700, 1000)], ids=["one chunk", "two chunks"])
def test_one_graph_serves_the_lengths_of_as_many_chunks(lengths: tuple[int, ...]) -> None:
    """What was compiled for one length is right at the others, and not compiled again."""
    torch.compiler.reset()
    model, counter = converted_model(PerformerConfig(num_features=16), max_length=1024), CompileCounter()
    model.encoder.layer = model.encoder.layer[:1]
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for length in lengths:
            ids = tokens(length, batch=2)
            found, expected = (m(ids).last_hidden_state for m in (compiled, model))
            torch.testing.assert_close(found, expected)
            assert counter.frame_count <= 2
