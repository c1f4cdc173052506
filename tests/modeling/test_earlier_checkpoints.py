"""Folders that were saved by an earlier version load, to the same logits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

import hf_linattn  # noqa: F401  # registers the model types

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("bert-layerwise", AutoModelForMaskedLM),
        ("gpt2-layerwise", AutoModelForCausalLM),
        ("roberta-linformer-shared", AutoModelForSequenceClassification),
    ],
)
def test_logits_are_those_of_the_version_that_saved_the_folder(name: str, auto: type) -> None:
    model, report = auto.from_pretrained(FIXTURES / name, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = load_file(FIXTURES / name / "expected.safetensors")
    mask = expected["attention_mask"]
    with torch.no_grad():
        logits = model.eval()(input_ids=expected["input_ids"], attention_mask=mask).logits
        exact = model.double()(input_ids=expected["input_ids"], attention_mask=mask).logits
    saved = expected["logits"]
    if logits.ndim == 3:
        logits, exact, saved = (x[mask.bool()] for x in (logits, exact, saved))
    # layers of every kind, with large weights, one after the other: the saved logits are rounded in the fifth digit
    rounding = (saved - exact).abs().max()
    assert rounding < 3e-5
    assert (logits - exact).abs().max() <= 2 * rounding
