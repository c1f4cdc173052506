"""`convert`: every head of every family, from a loaded model and from a folder, and what it leaves alone."""

import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, LinformerConfig, PerformerConfig, convert
from hf_linattn.conversion.positions import extend_positions
from hf_linattn.modeling.architectures import ARCHITECTURES

from ..helpers import ENCODERS, HEADS, POSITIONS, config_id, converted_model, inputs_for, outputs_of, tiny_model, tokens

pytestmark = pytest.mark.core

SWAPS = [LinformerConfig(projection="learned", projection_length=4), PerformerConfig(num_features=16)]
EXACT = [
    LinformerConfig(projection="learned", projection_length=POSITIONS),
    LinformerConfig(projection="learned", projection_length=4, window_size=POSITIONS),
    PerformerConfig(num_features=16, window_size=POSITIONS),
]
ALL_FAMILIES = pytest.mark.parametrize("family", ENCODERS)


@pytest.mark.parametrize(("family", "auto"), HEADS)
def test_a_converted_head_keeps_the_base_and_differs_from_it(family: str, auto: str) -> None:
    base, inputs = tiny_model(family, auto), inputs_for(auto)
    try:
        before = outputs_of(base, inputs)
    except IndexError:
        pytest.skip(f"{type(base).__name__} itself does not run with this Transformers")
    model = convert(base, PerformerConfig(num_features=16))
    assert isinstance(model, LinAttnPreTrainedModel)
    assert isinstance(model, type(base))
    assert type(model).__name__ == f"LinAttn{type(base).__name__}"
    assert model.config.model_type == "linattn_" + family.replace("-", "_")
    assert not any(module.training for module in model.modules())
    assert torch.equal(outputs_of(base, inputs), before)
    assert not torch.allclose(outputs_of(model, inputs), before, atol=1e-3)

    # the base's weights under their own names, in storage of their own
    state = model.state_dict()
    for name, tensor in base.state_dict().items():
        assert torch.equal(state[name], tensor), name
        assert state[name].data_ptr() != tensor.data_ptr(), name
    assert all(".linattn." in name for name in set(state) - set(base.state_dict()))

    exact = convert(base, EXACT[0])
    torch.testing.assert_close(outputs_of(exact, inputs), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", EXACT, ids=config_id)
@ALL_FAMILIES
def test_what_covers_the_whole_document_is_softmax(family: str, config: AttentionConfig) -> None:
    inputs = inputs_for("AutoModel")
    expected = outputs_of(tiny_model(family), inputs)
    found = outputs_of(converted_model(config, family), inputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", SWAPS, ids=config_id)
@ALL_FAMILIES
def test_changing_the_converted_model_does_not_change_the_base(family: str, config: AttentionConfig) -> None:
    base, inputs = tiny_model(family), inputs_for("AutoModel")
    before, config_before = outputs_of(base, inputs), base.config.to_dict()
    model = convert(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    assert torch.equal(outputs_of(base, inputs), before)
    assert base.config.to_dict() == config_before


@ALL_FAMILIES
def test_one_module_hangs_under_each_attention_module(family: str) -> None:
    modules = list(converted_model(SWAPS[0], family).linear_attentions())
    assert len(modules) == (1 if ARCHITECTURES[family].shares_layers else 2)
    assert all(name.endswith(".linattn") for name, _ in modules)


def test_tied_weights_stay_tied() -> None:
    model = converted_model(SWAPS[0], auto="AutoModelForMaskedLM")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("method", ["linformer", "performer"])
def test_the_name_of_a_method_is_its_default_settings(method: str) -> None:
    model = convert(tiny_model(), method)
    config = {"linformer": LinformerConfig, "performer": PerformerConfig}[method](max_length=POSITIONS, exact_length=0)
    assert model.attention_config == config
    assert model.config.attention == config


def test_the_callers_settings_stay_as_they_are() -> None:
    config = PerformerConfig(num_features=16)
    before = copy.deepcopy(config)
    model = convert(tiny_model(), config, max_length=128, seed=3)
    model.set_branches(near=False)
    assert config == before
    assert (model.config.attention.max_length, model.config.attention.seed) == (128, 3)


def test_layers_draw_directions_of_their_own_and_the_seed_is_the_one_given() -> None:
    def directions(**options: int) -> list[torch.Tensor]:
        model = converted_model(PerformerConfig(num_features=16), **options)
        return [module.feature_map.directions for _, module in model.linear_attentions()]

    first, second = directions()
    assert not torch.equal(first, second)
    assert torch.equal(first, directions(seed=0)[0])
    assert not torch.equal(first, directions(seed=1)[0])
    configured = converted_model(PerformerConfig(num_features=16, seed=1))
    assert torch.equal(next(configured.linear_attentions())[1].feature_map.directions, directions(seed=1)[0])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("config", SWAPS, ids=config_id)
def test_only_the_layers_named_are_converted(config: AttentionConfig, layer: int) -> None:
    chosen = type(config)(**{**vars(config), "layers": [layer]})
    model = converted_model(chosen)
    assert [name for name, _ in model.linear_attentions()] == [f"encoder.layer.{layer}.attention.self.linattn"]
    inputs = inputs_for("AutoModel")
    states = {
        name: m(**inputs, output_hidden_states=True).hidden_states
        for name, m in {"base": tiny_model(), "model": model, "all": converted_model(config)}.items()
    }
    mask = inputs["attention_mask"].bool()
    for index in range(2):
        # what comes in is the same up to the first converted layer
        same = torch.allclose(states["model"][index + 1][mask], states["base"][index + 1][mask], atol=1e-5)
        assert same == (index < layer)
    if layer == 0:
        torch.testing.assert_close(states["model"][1][mask], states["all"][1][mask])


def test_a_softmax_layer_survives_every_mask() -> None:
    model = converted_model(PerformerConfig(num_features=16, layers=[1]))
    for mask in (torch.tensor([[1] * 12, [0] * 12]), torch.tensor([[0] * 6 + [1] * 6, [1, 0] * 6])):
        assert model(tokens(12, batch=2), attention_mask=mask).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("sharing", ["layers", "none"])
def test_shared_projections_are_one_parameter(sharing: str) -> None:
    model = converted_model(LinformerConfig(projection="learned", projection_length=4, sharing=sharing))
    names = [name for name, _ in model.named_parameters() if "linattn" in name]
    assert len(names) == (2 if sharing == "layers" else 6)
    model(tokens(12)).last_hidden_state.sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "linattn" in name)


@pytest.mark.parametrize("kind", [LinformerConfig, PerformerConfig])
def test_branches_are_switched_in_every_layer_and_in_the_config(kind: type[AttentionConfig]) -> None:
    model, inputs = converted_model(kind(window_size=4, global_tokens=1)), inputs_for("AutoModel")
    joined = outputs_of(model, inputs)
    results = [joined]
    for near, far in ((True, False), (False, True)):
        model.set_branches(near=near, far=far)
        assert (model.config.attention.near, model.config.attention.far) == (near, far)
        assert all((m.near, m.far) == (near, far) for _, m in model.linear_attentions())
        results.append(outputs_of(model, inputs))
    assert all(
        not torch.allclose(a, b, atol=1e-3) for a, b in zip(results, [*results[1:], joined], strict=True) if a is not b
    )
    pure = outputs_of(converted_model(kind()), inputs)
    if kind is PerformerConfig:
        # without its near part a window still hides the near keys from the far part
        assert not torch.allclose(results[2], pure, atol=1e-3)
    with pytest.raises(ValueError, match="far=False leaves nothing"):
        model.set_branches(near=False, far=False)
    assert model.config.attention.far
    model.set_branches()
    assert torch.equal(outputs_of(model, inputs), joined)


def test_a_folder_gives_what_the_loaded_model_gives(tmp_path: Path) -> None:
    base = tiny_model(auto="AutoModelForMaskedLM")
    base.save_pretrained(tmp_path)
    inputs = inputs_for("AutoModelForMaskedLM")
    expected = outputs_of(convert(base, SWAPS[1]), inputs)
    for place in (tmp_path, str(tmp_path)):
        model = convert(place, SWAPS[1])
        assert type(model).__name__ == "LinAttnBertForMaskedLM"
        assert torch.equal(outputs_of(model, inputs), expected)
        # PEFT would load the softmax model by it
        assert model.config.name_or_path == model.name_or_path == ""


def test_auto_class_chooses_the_head_by_name_or_by_class(tmp_path: Path) -> None:
    tiny_model(auto="AutoModelForMaskedLM").save_pretrained(tmp_path)
    assert type(convert(tmp_path, SWAPS[0], auto_class="AutoModel")).__name__ == "LinAttnBertModel"
    assert type(convert(tmp_path, SWAPS[0], auto_class=AutoModel)).__name__ == "LinAttnBertModel"
    labelled = convert(tmp_path, SWAPS[0], auto_class="AutoModelForSequenceClassification", num_labels=5)
    assert type(labelled).__name__ == "LinAttnBertForSequenceClassification"
    assert labelled.classifier.out_features == labelled.config.num_labels == 5


def test_a_config_without_architectures_asks_for_the_head(tmp_path: Path) -> None:
    base = tiny_model()
    base.save_pretrained(tmp_path)
    config = base.config
    config.architectures = None
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no architecture.*auto_class.*AutoModelForMaskedLM"):
        convert(tmp_path, SWAPS[0])
    assert type(convert(tmp_path, SWAPS[0], auto_class="AutoModel")).__name__ == "LinAttnBertModel"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bfloat16", "auto"])
def test_dtype_is_passed_on(tmp_path: Path, dtype: torch.dtype | str) -> None:
    tiny_model().to(torch.float16).save_pretrained(tmp_path)
    model = convert(tmp_path, SWAPS[0], dtype=dtype)
    expected = {"bfloat16": torch.bfloat16, "auto": torch.float16}.get(dtype, dtype)
    assert {p.dtype for p in model.parameters()} == {expected}
    assert model.config.dtype == model.dtype == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loaded_model_keeps_its_dtype(dtype: torch.dtype) -> None:
    model = convert(tiny_model().to(dtype), SWAPS[1])
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(tokens(12)).last_hidden_state.dtype == dtype


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_map_is_passed_on(tmp_path: Path, device_map: str | dict) -> None:
    base = tiny_model(auto="AutoModelForMaskedLM")
    base.save_pretrained(tmp_path)
    model = convert(tmp_path, SWAPS[1], device_map=device_map)
    inputs = inputs_for("AutoModelForMaskedLM")
    assert model.device == torch.device("cpu")
    assert torch.equal(outputs_of(model, inputs), outputs_of(convert(base, SWAPS[1]), inputs))


def test_the_meta_device_gets_no_numbers(tmp_path: Path) -> None:
    """Building a converted model on the meta device must not fail where initial values are drawn."""
    model = converted_model(SWAPS[1])
    with torch.device("meta"):
        assert all(p.is_meta for p in type(model)(model.config).parameters())


def test_a_conversion_shows_its_progress(capfd: pytest.CaptureFixture[str]) -> None:
    convert(tiny_model(), SWAPS[0])
    shown = capfd.readouterr().err
    assert "Converting" in shown
    assert "/2" in shown


def test_a_copy_is_a_model_of_its_own() -> None:
    model = convert(tiny_model(auto="AutoModelForMaskedLM"), SWAPS[1])
    inputs = inputs_for("AutoModelForMaskedLM")
    expected = outputs_of(model, inputs)
    twin = copy.deepcopy(model)
    assert torch.equal(outputs_of(twin, inputs), expected)
    twin.redraw_features()
    assert not torch.equal(outputs_of(twin, inputs), expected)
    assert torch.equal(outputs_of(model, inputs), expected)
    twin.train()
    with pytest.raises(ValueError, match=str(POSITIONS)):
        twin(tokens(POSITIONS + 1))


def test_a_base_model_that_was_trained_in_train_mode_is_left_in_train_mode() -> None:
    base = tiny_model().train()
    assert not convert(base, SWAPS[0]).training
    assert base.training


def test_converted_loss_is_a_number() -> None:
    model = converted_model(SWAPS[1], auto="AutoModelForMaskedLM")
    assert isinstance(model, AutoModelForMaskedLM._model_mapping[type(tiny_model().config)])
    input_ids = tokens(20)
    assert math.isfinite(model(input_ids, labels=input_ids).loss.item())


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_model_without_a_pooler_has_none_afterwards(family: str) -> None:
    base = type(tiny_model(family))(tiny_model(family).config, add_pooling_layer=False).eval()
    inputs = inputs_for("AutoModel")
    model = convert(base, EXACT[0])
    assert model.pooler is None and extend_positions(base, 2 * POSITIONS).pooler is None
    torch.testing.assert_close(outputs_of(model, inputs), outputs_of(base, inputs), atol=1e-5, rtol=1e-5)


def test_from_a_folder_no_weight_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting takes no more memory than loading: the converted model has the very tensors that were loaded."""
    tiny_model("bert").save_pretrained(tmp_path)
    loaded: dict[str, int] = {}
    check = convert.__globals__["_check_loaded"]

    def look(model: torch.nn.Module) -> None:
        loaded.update({name: tensor.data_ptr() for name, tensor in model.state_dict().items()})
        check(model)

    monkeypatch.setitem(convert.__globals__, "_check_loaded", look)
    state = convert(tmp_path, LinformerConfig(projection="learned", projection_length=4)).state_dict()
    assert loaded
    assert {name: state[name].data_ptr() for name in loaded} == loaded
