"""An architecture from outside the package: `register_architecture` and one row, and all promises hold."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto import configuration_auto, modeling_auto

from hf_linattn import Architecture, AttentionConfig, LinAttnPreTrainedModel, convert, register_architecture
from hf_linattn.adapt.optimizer import group_of
from hf_linattn.modeling import configuration_linattn, modeling_linattn
from hf_linattn.modeling.architectures import ARCHITECTURES, UNAVAILABLE

from ..helpers import as_trained, config_id, run_python, tiny_model, without_exact_rows
from .conformance import (
    test_causality,
    test_errors,
    test_length,
    test_numerics,
    test_padding,
    test_parallel_equals_step,
    test_saving,
)
from .conformance.cases import DTYPES, ONE_EACH, TOLERANCE, in_dtype

pytestmark = pytest.mark.core

ENCODER = Architecture(
    model_type="data2vec-text",
    prefix="Data2VecText",
    attention="Data2VecTextSelfAttention",
    positions_after_padding=True,
)
DECODER = Architecture(
    model_type="olmo",
    prefix="Olmo",
    attention="OlmoAttention",
    causal=True,
    position_table=None,
    query_key=("q_proj", "k_proj"),
    embeddings=("embed_tokens",),
)


def tables() -> list[dict[Any, Any]]:
    """What a registration writes into."""
    mappings = [getattr(modeling_auto, auto)._model_mapping for auto in modeling_linattn.AUTO_CLASSES]
    return [
        ARCHITECTURES,
        configuration_linattn.CONFIG_CLASSES,
        modeling_linattn.HEAD_CLASSES,
        *modeling_linattn.MODEL_CLASSES.values(),
        *(mapping._extra_content for mapping in (configuration_auto.CONFIG_MAPPING, *mappings)),
        vars(configuration_linattn),
        vars(modeling_linattn),
    ]


@pytest.fixture
def clean() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = [dict(table) for table in tables()]
    yield
    for table, entries in zip(tables(), before, strict=True):
        for name in table.keys() - entries.keys():
            del table[name]


@pytest.fixture
def family(request: pytest.FixtureRequest, clean: None) -> Architecture:
    """An architecture that is supported while a test runs."""
    register_architecture(request.param)
    return request.param


def converted(family: Architecture, config: AttentionConfig, auto: str, **options: Any) -> LinAttnPreTrainedModel:
    return convert(tiny_model(family.model_type, auto), without_exact_rows(config), **options)


def family_id(family: Architecture) -> str:
    return family.model_type


@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
@pytest.mark.parametrize("family", [ENCODER], ids=family_id, indirect=True)
def test_the_promises_of_an_encoder_hold(family: Architecture, config: AttentionConfig, tmp_path: Path) -> None:
    for dtype in DTYPES:
        model, context = in_dtype(converted(family, config, "AutoModel"), dtype)
        test_padding.check_rows_do_not_depend_on_their_padding(model, TOLERANCE[dtype], context)
        test_padding.check_rows_of_padding_are_finite(model, context)
        test_numerics.check_results_are_finite(model, padded=True, context=context)
    model = converted(family, config, "AutoModel")
    test_length.check_any_length_works(model)
    test_length.check_longer_inputs_are_refused(model)
    test_errors.check_attention_matrices_are_refused(model)
    test_saving.check_a_reload_gives_the_same_bits(model, tmp_path / "body", AutoModel)
    model = converted(family, config, "AutoModelForMaskedLM", max_length=128)
    test_saving.check_a_reload_gives_the_same_bits(model, tmp_path / "head", AutoModelForMaskedLM)


@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
@pytest.mark.parametrize("family", [DECODER], ids=family_id, indirect=True)
def test_the_promises_of_a_decoder_hold(family: Architecture, config: AttentionConfig, tmp_path: Path) -> None:
    model = as_trained(converted(family, config, "AutoModelForCausalLM"))
    test_causality.check_no_output_depends_on_a_later_input(model, (0, 3, 8, 20, 38))
    test_parallel_equals_step.check_steps_are_the_parallel_form(model)
    test_padding.check_rows_do_not_depend_on_their_padding(model, 1e-5)
    test_padding.check_rows_of_padding_are_finite(model, use_cache=True)
    test_numerics.check_results_are_finite(model, padded=True)
    test_length.check_any_length_works(model)
    test_length.check_longer_inputs_are_refused(model)
    test_errors.check_attention_matrices_are_refused(model)
    inputs = test_saving.inputs_of("gpt2")
    test_saving.check_a_reload_gives_the_same_bits(model, tmp_path, AutoModelForCausalLM, inputs)


def test_nothing_of_it_stays() -> None:
    for family in (ENCODER, DECODER):
        assert family.model_type not in ARCHITECTURES
        assert family.model_type not in modeling_linattn.HEAD_CLASSES
        name = configuration_linattn.MODEL_TYPE_PREFIX + family.model_type.replace("-", "_")
        assert name not in configuration_auto.CONFIG_MAPPING
        assert not hasattr(modeling_linattn, f"LinAttn{family.prefix}Model")


@pytest.mark.usefixtures("clean")
def test_a_checkpoint_of_it_holds_no_files_that_do_not_know_it(tmp_path: Path) -> None:
    register_architecture(replace(DECODER, query_key=("q_proj", "k_proj", "my_key")))
    model = convert(tiny_model(DECODER.model_type), ONE_EACH[0])
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    assert not hasattr(AutoConfig.from_pretrained(tmp_path), "auto_map")
    # the optimizer reads the table when it is asked
    assert group_of("layers.0.self_attn.my_key.weight") == "query_key"


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "bert"}, ["model_type='bert'", "a row already"]),
        ({"prefix": "Nothing"}, ["prefix='Nothing'", transformers.__version__, "NothingConfig"]),
        ({"since": "99.0"}, ["since='99.0'", transformers.__version__]),
        ({"prefix": "Llama"}, ["model_type='olmo' must be 'llama'"]),
        ({"attention": "Attention"}, ["attention='Attention'", "modeling_olmo"]),
        ({"model_type": "mpnet", "prefix": "MPNet"}, ["MPNetModel", "_supports_attention_backend"]),
    ],
)
def test_a_row_that_does_not_fit_is_refused(changes: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        register_architecture(replace(DECODER, **changes))
    assert all(text in str(error.value) for text in told), str(error.value)
    assert DECODER.model_type not in ARCHITECTURES


def test_the_table_is_sorted_and_every_row_under_its_name() -> None:
    assert list(ARCHITECTURES) == sorted(ARCHITECTURES)
    for table, available in ((ARCHITECTURES, True), (UNAVAILABLE, False)):
        assert all(name == row.model_type and row.available == available for name, row in table.items())


# what an older Transformers says, from a newer one
OLDER = """
import sys
sys.path.insert(0, sys.argv[1])
import transformers
transformers.__version__ = "5.8.0"
import hf_linattn
from hf_linattn.conversion.positions import unsupported_type
from hf_linattn.modeling.architectures import ARCHITECTURES, UNAVAILABLE
assert set(UNAVAILABLE) == {"gptj", "gte"} and "bert" in ARCHITECTURES
print(unsupported_type("gte"))
"""


def test_a_version_that_lacks_an_architecture_has_all_others(tmp_path: Path) -> None:
    done = run_python(OLDER, Path(modeling_linattn.__file__).parents[2], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'gte' can be converted with Transformers 5.18.0 or newer" in done.stdout


@pytest.mark.parametrize("model_type", ["gte", "gptj"])
def test_a_row_that_is_too_new_says_which_version_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """`gte` is not known to every supported version; `gptj` is, with attention that cannot be replaced."""
    row = {**ARCHITECTURES, **UNAVAILABLE}[model_type]
    monkeypatch.delitem(ARCHITECTURES, model_type, raising=False)
    monkeypatch.setitem(UNAVAILABLE, model_type, row)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": ["SomeModel"]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"model_type='{model_type}' can be converted with Transformers {row.since}"):
        convert(tmp_path, ONE_EACH[0])
