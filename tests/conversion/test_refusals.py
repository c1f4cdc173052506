"""Everything that `convert` and a converted model refuse, and that the message says why and what else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from hf_linattn import LinformerConfig, PerformerConfig, convert
from hf_linattn.modeling.architectures import ARCHITECTURES, REFUSED
from hf_linattn.modeling.modeling_linattn import AUTO_CLASSES

from ..helpers import ENCODERS, POSITIONS, converted_model, tiny_config, tiny_model, tokens

pytestmark = pytest.mark.core

CONFIG = PerformerConfig(num_features=16)
SMALL = {"vocab_size": 100, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}


def unsupported(name: str, **overrides) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**{**SMALL, "intermediate_size": 16, **overrides})
    return getattr(transformers, f"{name}Model")(config)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("MPNet", {}), ("Deberta", {}), ("DebertaV2", {}), ("RoFormer", {})],
)
@pytest.mark.parametrize("saved", [False, True])
def test_other_architectures_are_answered_with_the_list(
    tmp_path: Path, name: str, overrides: dict, saved: bool
) -> None:
    base = unsupported(name, **overrides)
    model_type = base.config.model_type
    if saved:
        base.save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        convert(tmp_path if saved else base, CONFIG)
    assert f"model_type={model_type!r} is not supported" in str(error.value)
    assert REFUSED.get(model_type, "") in str(error.value)
    assert all(family in str(error.value) for family in ARCHITECTURES)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            lambda: transformers.BertLMHeadModel(tiny_config("bert")),
            ["BertLMHeadModel", "BertForMaskedLM", "auto_class"],
        ),
        (lambda: tiny_model(is_decoder=True), ["is_decoder=True", "encoder"]),
        (lambda: converted_model(CONFIG), ["linattn_bert", "converted already", "base"]),
        (lambda: get_peft_model(tiny_model(), LoraConfig(target_modules=["query"])), ["PeftModel", "merge_and_unload"]),
        (lambda: tiny_model().to("meta"), ["meta device"]),
        (lambda: torch.nn.Linear(2, 2), ["Linear", "PreTrainedModel"]),
        (lambda: None, ["NoneType", "folder"]),
    ],
    ids=["head", "decoder", "converted", "peft", "meta", "module", "none"],
)
def test_models_that_cannot_be_converted(model: Callable, told: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        convert(model(), CONFIG)
    assert all(text in str(error.value) for text in told), error.value


def test_a_quantized_model_is_refused() -> None:
    base = tiny_model()
    base.hf_quantizer = object()
    with pytest.raises(ValueError, match="quantized"):
        convert(base, CONFIG)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("reformer", ["method='reformer'", "'linformer', 'performer'"]),
        ({"method": "performer"}, ["config=", "LinformerConfig", "PerformerConfig"]),
        (None, ["config=None", "LinformerConfig"]),
        (PerformerConfig, ["config=", "PerformerConfig"]),
        (PerformerConfig(layers=[0, 2]), ["layers=[0, 2]", "0 to 1"]),
    ],
    ids=["method", "dict", "none", "class", "layer"],
)
def test_settings_that_do_not_fit(config: object, told: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        convert(tiny_model(), config)
    assert all(text in str(error.value) for text in told), error.value


def test_layers_of_a_model_that_shares_them_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match=r"layers=\[0\].*albert has one attention module"):
        convert(tiny_model("albert"), PerformerConfig(layers=[0]))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_length": POSITIONS - 1}, [f"max_length={POSITIONS - 1}", f"{POSITIONS} positions"]),
        ({"max_length": "4096"}, ["max_length='4096'", "integer"]),
        ({"max_length": 128.0}, ["max_length=128.0"]),
        ({"max_length": True}, ["max_length=True"]),
        ({"max_length": 0}, ["max_length=0"]),
        ({"max_length": -5}, ["max_length=-5"]),
        ({"position_extension": "rope"}, ["position_extension='rope'", "'repeat', 'interpolate'"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"seed": 0.5}, ["seed=0.5"]),
        ({"auto_class": "AutoModel"}, ["auto_class", "loaded already"]),
        ({"dtype": torch.float16}, ["dtype", "loaded already"]),
        ({"num_labels": 3, "revision": "main"}, ["num_labels", "revision", "loaded already"]),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(options: dict, told: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        convert(tiny_model(), CONFIG, **options)
    assert all(text in str(error.value) for text in told), error.value


def test_two_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_length=128.*max_length=256"):
        convert(tiny_model(), PerformerConfig(max_length=256), max_length=128)
    assert convert(tiny_model(), PerformerConfig(max_length=256)).config.max_position_embeddings == 256


@pytest.mark.parametrize("auto_class", ["AutoModelForSeq2SeqLM", "BertModel", transformers.AutoModelForSeq2SeqLM])
def test_an_auto_class_that_does_not_exist_is_answered_with_those_that_do(tmp_path: Path, auto_class) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        convert(tmp_path, CONFIG, auto_class=auto_class)
    assert repr(getattr(auto_class, "__name__", auto_class)) in str(error.value)
    assert all(name in str(error.value) for name in AUTO_CLASSES)


def test_a_head_that_the_family_lacks_is_refused(tmp_path: Path) -> None:
    tiny_model("roberta").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"AutoModelForNextSentencePrediction.*roberta"):
        convert(tmp_path, CONFIG, auto_class="AutoModelForNextSentencePrediction")


def test_a_checkpoint_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """The folder has a config and no weights: any other order would end in a missing file."""
    tiny_config("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="max_length=5"):
        convert(tmp_path, CONFIG, auto_class="AutoModel", max_length=5)
    with pytest.raises(OSError):
        convert(tmp_path, CONFIG, auto_class="AutoModel")


def test_converting_a_converted_folder_is_refused(tmp_path: Path) -> None:
    converted_model(CONFIG).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"linattn_bert.*converted already"):
        convert(tmp_path, CONFIG)


@pytest.mark.parametrize("family", ENCODERS)
def test_attention_matrices_are_refused(family: str) -> None:
    model = converted_model(CONFIG, family)
    with pytest.raises(ValueError, match=r"output_attentions=True.*no matrix"):
        model(tokens(8), output_attentions=True)
    # Transformers itself refuses it in the config
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 1, 8, 8)])
def test_masks_per_query_and_key_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as error:
        converted_model(CONFIG)(tokens(8), attention_mask=torch.ones(shape))
    assert str(shape) in str(error.value)
    assert "(batch, length)" in str(error.value)


@pytest.mark.parametrize("width", [19, 21])
@pytest.mark.parametrize("how", ["keyword", "positional"])
@pytest.mark.parametrize("family", ENCODERS)
def test_a_mask_of_another_width_is_refused(family: str, how: str, width: int) -> None:
    model, mask = converted_model(CONFIG, family), torch.ones(2, width, dtype=torch.long)
    mask[1, :5] = 0
    with pytest.raises(ValueError, match=f"{width} columns for 20 tokens"):
        if how == "positional":
            model(tokens(20, batch=2), mask)
        else:
            model(tokens(20, batch=2), attention_mask=mask)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
def test_another_attention_implementation_is_refused(tmp_path: Path, implementation: str) -> None:
    model = converted_model(CONFIG)
    model.save_pretrained(tmp_path)
    for ask in (
        lambda: transformers.AutoModel.from_pretrained(tmp_path, attn_implementation=implementation),
        lambda: model.set_attn_implementation(implementation),
    ):
        with pytest.raises(ValueError, match=rf"attn_implementation='{implementation}'.*leave it out"):
            ask()


@pytest.mark.parametrize("implementation", ["sdpa", "eager", None])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_converted_layers_are_never_softmax_without_a_word(family: str, implementation: str | None) -> None:
    model = converted_model(CONFIG, family)
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=rf"_attn_implementation={implementation!r}.*softmax.*Leave out"):
        model(tokens(8))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format_version": 99}, ["format_version=99", "pip install -U"]),
        ({"buckets": 1}, ["no field buckets"]),
        ({"feature_map": "cosine"}, ["feature_map='cosine'", "'positive'"]),
        ({"max_length": None}, ["linattn.max_length is missing"]),
        ({"max_length": 1000}, ["linattn.max_length=1000", f"max_position_embeddings={POSITIONS}"]),
        ({"layers": [7]}, ["layers=[7]", "0 to 1"]),
    ],
    ids=str,
)
def test_a_saved_config_that_does_not_hold_is_refused(change: dict, told: list[str]) -> None:
    model = converted_model(CONFIG)
    model.config.linattn = {**model.config.linattn, **change}
    with pytest.raises(ValueError) as error:
        type(model)(model.config)
    assert all(text in str(error.value) for text in told), error.value


def test_linformer_settings_are_checked_when_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """Weights for another projection length are an error, not a fresh start."""
    converted_model(LinformerConfig(projection="learned", projection_length=4)).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"projection_length": 4', '"projection_length": 5'))
    with pytest.raises(RuntimeError, match=r"mismatch|size"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_weights_on_the_disk_are_refused_before_they_are_read(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for device_map in ({"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}, "disk"):
        with pytest.raises(ValueError, match=r"device_map=.*puts weights on the disk.*offload_folder"):
            convert(tmp_path, "linformer", device_map=device_map)
