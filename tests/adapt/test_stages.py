"""The stages and their teacher: what each compares, and that the models are left as they were."""

import pytest
import torch

from hf_linattn import AttentionConfig, PerformerConfig
from hf_linattn.adapt.stages import without_near
from hf_linattn.adapt.stages.distillation import Distil
from hf_linattn.adapt.stages.transfer import Transfer
from hf_linattn.adapt.teacher import softmax_teacher

from ..helpers import (
    DECODERS,
    ENCODERS,
    PURE,
    as_trained,
    config_id,
    converted_model,
    inputs_for,
    outputs_of,
    tiny_model,
    tokens,
)
from .runs import LEARNED, PROJECTED


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_the_teacher_is_the_base_model(family: str) -> None:
    config = PerformerConfig(num_features=8, feature_map="learned")
    model = as_trained(converted_model(config, family, max_length=80))
    inputs = inputs_for("AutoModel")
    expected = outputs_of(tiny_model(family), {**inputs, **({"use_cache": False} if family in DECODERS else {})})
    for teacher in (softmax_teacher(model), softmax_teacher(model, tiny_model(family))):
        options = {"use_cache": False} if family in DECODERS else {}
        found = outputs_of(teacher, {**inputs, **options})
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        assert not any(p.requires_grad for p in teacher.parameters())


def test_the_teacher_must_fit() -> None:
    model = converted_model(LEARNED)
    with pytest.raises(ValueError, match="hidden_size=16"):
        softmax_teacher(model, tiny_model(hidden_size=16))
    with pytest.raises(ValueError, match="model_type='roberta'"):
        softmax_teacher(model, tiny_model("roberta"))


@pytest.mark.parametrize("extension", ["repeat", "interpolate"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_teacher_has_the_positions_of_its_base(family: str, extension: str) -> None:
    """Made longer as the model's were, and not those that have been trained since."""
    model = converted_model(PROJECTED, family, max_length=96, position_extension=extension)
    inputs = inputs_for("AutoModel", 90)
    before = outputs_of(softmax_teacher(model), inputs)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight += 1e-3 * torch.randn_like(
            model.embeddings.position_embeddings.weight
        )
    torch.testing.assert_close(outputs_of(softmax_teacher(model, tiny_model(family)), inputs), before)


@pytest.mark.parametrize("family", ["albert", "bert", "distilbert", "gpt2", "llama", "opt"])
def test_transfer_compares_each_layer_on_the_inputs_of_the_base(family: str) -> None:
    """With the rest of the model as it was, what comes out of the student is the base model's output."""
    model = as_trained(converted_model(PerformerConfig(num_features=8, feature_map="learned"), family))
    base = tiny_model(family)
    seen = []
    model.base_model.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    batch = inputs_for("AutoModel")
    out = Transfer(model, model, softmax_teacher(model))(batch)
    assert len(out.metrics) == base.config.num_hidden_layers
    assert out.loss > 0.01
    with torch.no_grad():
        expected = base(**batch)[0]
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(seen[0][real], expected[real], atol=2e-5, rtol=2e-5)
    # and afterwards the student is itself again
    with torch.no_grad():
        assert (model(**batch)[0][real] - expected[real]).abs().max() > 1e-3


def test_transfer_leaves_out_layers_that_are_not_converted() -> None:
    model = converted_model(PerformerConfig(num_features=8, feature_map="learned", layers=[1]))
    assert list(Transfer(model, model, softmax_teacher(model))(inputs_for("AutoModel")).metrics) == ["cosine/layer_0"]


@pytest.mark.parametrize("config", [PURE[0], LEARNED], ids=config_id)
def test_a_perfect_student_has_no_loss(config: AttentionConfig) -> None:
    # rows of 8 tokens have a slot for each, and a window of 4 sees 12 tokens at once
    model = converted_model(config)
    batch = {"input_ids": tokens(8, batch=2)}
    teacher = softmax_teacher(model)
    options = {"hidden_weight": 1.0, "embedding_weight": 1.0, "logits_weight": 1.0, "temperature": 1.0}
    for stage in (Transfer(model, model, teacher), Distil(model, model, teacher, pooling="mean", **options)):
        assert stage(batch).loss.item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_teacher_of_more_precision_than_its_student(family: str) -> None:
    """DeepSpeed casts the weights that it trains, and not the teacher's."""
    model = converted_model(LEARNED, family)
    teacher, batch = softmax_teacher(model), inputs_for("AutoModel")
    options = {"hidden_weight": 1.0, "embedding_weight": 1.0, "logits_weight": 0.0, "temperature": 1.0}
    stages = [Transfer(model, model, teacher)]
    stages += [Distil(model, model, teacher, pooling="mean", **options)] if family == "bert" else []
    expected = [stage(batch).loss.item() for stage in stages]
    model.bfloat16()
    assert [stage(batch).loss.item() for stage in stages] == pytest.approx(expected, rel=0.1)
    assert teacher.dtype == torch.float32


def test_branches_are_switched_off_for_a_while_and_never_all() -> None:
    model = converted_model(LEARNED)
    batch = inputs_for("AutoModel")
    before = outputs_of(model, batch)
    with without_near(model):
        assert (outputs_of(model, batch) - before).abs().max() > 1e-3
    assert torch.equal(outputs_of(model, batch), before)
    model.set_branches(far=False)
    near_only = outputs_of(model, batch)
    with without_near(model):
        assert torch.equal(outputs_of(model, batch), near_only)
