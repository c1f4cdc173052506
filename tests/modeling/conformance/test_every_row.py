"""Every row of the table of architectures: short forms of the promises, which one row of each kind keeps at length."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_linattn import LinAttnPreTrainedModel
from hf_linattn.modeling.architectures import ARCHITECTURES, UNAVAILABLE
from hf_linattn.modeling.modeling_linattn import MODEL_CLASSES

from ...helpers import POSITIONS, converted_model, inputs_for, outputs_of, prompts, small, tiny_model, tokens
from . import test_causality, test_padding, test_parallel_equals_step, test_saving
from .cases import CLASSES, ONE_EACH, is_causal, make_model

pytestmark = pytest.mark.core

ROWS = [
    *ARCHITECTURES,
    *(
        pytest.param(name, marks=pytest.mark.skip(f"{name} needs Transformers {row.since}"))
        for name, row in UNAVAILABLE.items()
    ),
]
ALL_ROWS = pytest.mark.parametrize("architecture", ROWS)
#: near keys alone, which are all keys of a text as long as the longest
WHOLE = [small(config_class, window_size=POSITIONS) for config_class in CLASSES]

MULTIPLE_CHOICE = "AutoModelForMultipleChoice"


def body_of(architecture: str, number: int = 0) -> LinAttnPreTrainedModel:
    """A body or causal language model with a window shorter than the text, by one of the methods."""
    return make_model(architecture, ONE_EACH[number % len(ONE_EACH)])


@ALL_ROWS
def test_every_head_is_softmax_where_the_window_is_the_text(architecture: str) -> None:
    autos = [auto for auto, classes in MODEL_CLASSES.items() if architecture in classes]
    assert "AutoModel" in autos
    for number, auto in enumerate(autos):
        inputs: dict[str, Any] = inputs_for(auto, 40)
        base = tiny_model(architecture, auto)
        model = converted_model(WHOLE[number % len(WHOLE)], architecture, auto)
        assert type(model) is MODEL_CLASSES[auto][architecture]
        if is_causal(architecture):
            inputs["use_cache"] = False
        try:
            expected = outputs_of(base, inputs)
        except IndexError:
            # multiple choice of XLM-RoBERTa lacks its pooler in Transformers 5.8, and fails in the base too
            assert (architecture, auto) in (("camembert", MULTIPLE_CHOICE), ("xlm-roberta", MULTIPLE_CHOICE))
            continue
        torch.testing.assert_close(outputs_of(model, inputs), expected, atol=1e-5, rtol=1e-5)


@ALL_ROWS
def test_a_row_does_not_depend_on_its_padding(architecture: str) -> None:
    test_padding.check_rows_do_not_depend_on_their_padding(body_of(architecture), 2e-5)


@ALL_ROWS
def test_every_parameter_has_a_gradient(architecture: str) -> None:
    model = body_of(architecture, 1)
    options = {"use_cache": False} if is_causal(architecture) else {}
    model(tokens(40, batch=2), **options)[0].square().mean().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    # these have outputs of their own
    assert not {name for name in without if "pooler" not in name and "contact_head" not in name}
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    for attention in (module for _, module in model.named_modules() if type(module).__name__.endswith("Attention")):
        assert all(parameter.grad is None or parameter.grad.any() for parameter in attention.parameters())


@ALL_ROWS
def test_a_reload_gives_the_same_bits(architecture: str, tmp_path: Path) -> None:
    auto = "AutoModelForCausalLM" if is_causal(architecture) else "AutoModel"
    inputs = test_saving.inputs_of("gpt2") if is_causal(architecture) else None
    model = body_of(architecture)
    test_saving.check_a_reload_gives_the_same_bits(model, tmp_path, getattr(transformers, auto), inputs)


@ALL_ROWS
def test_a_decoder_is_causal_and_its_steps_are_the_parallel_form(architecture: str) -> None:
    if not is_causal(architecture):
        return
    for number in range(len(ONE_EACH)):
        test_parallel_equals_step.check_steps_are_the_parallel_form(body_of(architecture, number))
    model = body_of(architecture)
    test_causality.check_no_output_depends_on_a_later_input(model, (12, 38))
    inputs = prompts(20, 9)
    found = test_parallel_equals_step.generated(model, inputs, max_new_tokens=8)
    expected = test_parallel_equals_step.generated(model, inputs, max_new_tokens=8, use_cache=False)
    assert torch.equal(found, expected)
