"""An architecture from outside the package: one row of the table, and all promises hold.

A contributor touches one file, `architectures.py`. The classes of its models are made from the table when the package
is imported; a row that comes later has them made here, as the package makes them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto import configuration_auto, modeling_auto

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, convert
from hf_linattn.modeling import configuration_linattn, modeling_linattn
from hf_linattn.modeling.architectures import ARCHITECTURES, Architecture

from ..helpers import as_trained, config_id, tiny_model, without_exact_rows
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

ENCODERS = [
    Architecture(
        model_type="xlm-roberta-xl",
        prefix="XLMRobertaXL",
        attention="XLMRobertaXLSelfAttention",
        positions_after_padding=True,
    ),
    Architecture(
        model_type="roberta-prelayernorm",
        prefix="RobertaPreLayerNorm",
        attention="RobertaPreLayerNormSelfAttention",
        positions_after_padding=True,
    ),
]
DECODERS = [
    Architecture(model_type="qwen2", prefix="Qwen2", attention="Qwen2Attention", causal=True, position_table=None)
]


def register_architecture(family: Architecture, patch: pytest.MonkeyPatch) -> None:
    """What happens to a row of the table when the package is imported, undone with `patch`."""
    assert family.model_type not in ARCHITECTURES
    patch.setitem(ARCHITECTURES, family.model_type, family)
    config_class = configuration_linattn._config_class(family.model_type, family.prefix)
    patch.setattr(configuration_linattn, config_class.__name__, config_class, raising=False)
    patch.setitem(modeling_linattn.CONFIG_CLASSES, family.model_type, config_class)
    content = configuration_auto.CONFIG_MAPPING._extra_content
    patch.setattr(configuration_auto.CONFIG_MAPPING, "_extra_content", dict(content))
    AutoConfig.register(config_class.model_type, config_class)
    classes: dict[str, type[LinAttnPreTrainedModel]] = {}
    patch.setitem(modeling_linattn.HEAD_CLASSES, family.model_type, classes)
    for auto, base in modeling_linattn._heads(family):
        if base.__name__ not in classes:
            classes[base.__name__] = modeling_linattn._model_class(base, family, auto)
        converted = classes[base.__name__]
        patch.setattr(modeling_linattn, converted.__name__, converted, raising=False)
        patch.setitem(modeling_linattn.MODEL_CLASSES[auto], family.model_type, converted)
        auto_class = getattr(modeling_auto, auto)
        patch.setattr(auto_class._model_mapping, "_extra_content", dict(auto_class._model_mapping._extra_content))
        auto_class.register(config_class, converted)


@pytest.fixture
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Architecture]:
    """An architecture that is supported while a test runs."""
    register_architecture(request.param, monkeypatch)
    return request.param


def converted(family: Architecture, config: AttentionConfig, auto: str, **options: Any) -> LinAttnPreTrainedModel:
    return convert(tiny_model(family.model_type, auto), without_exact_rows(config), **options)


def family_id(family: Architecture) -> str:
    return family.model_type


@pytest.mark.parametrize("config", ONE_EACH, ids=config_id)
@pytest.mark.parametrize("family", ENCODERS, ids=family_id, indirect=True)
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
@pytest.mark.parametrize("family", DECODERS, ids=family_id, indirect=True)
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
    for family in (*ENCODERS, *DECODERS):
        assert family.model_type not in ARCHITECTURES
        assert family.model_type not in modeling_linattn.HEAD_CLASSES
        name = configuration_linattn.MODEL_TYPE_PREFIX + family.model_type.replace("-", "_")
        assert name not in configuration_auto.CONFIG_MAPPING
        assert not hasattr(modeling_linattn, f"LinAttn{family.prefix}Model")


def test_the_table_is_sorted_and_every_row_under_its_name() -> None:
    assert list(ARCHITECTURES) == sorted(ARCHITECTURES)
    assert all(name == family.model_type for name, family in ARCHITECTURES.items())
