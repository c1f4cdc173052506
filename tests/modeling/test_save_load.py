"""What is saved beside the weights, and pipelines. That a reload gives the same bits: see `conformance`."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, pipeline

from hf_linattn import PerformerConfig
from hf_linattn.modeling import modeling_linattn

from ..helpers import (
    converted_model,
    inputs_for,
    outputs_of,
    save_tokenizer,
)

pytestmark = pytest.mark.core

MASKED_LM = "AutoModelForMaskedLM"


def test_the_modeling_files_travel_and_nothing_of_the_package_above_them(tmp_path: Path) -> None:
    converted_model(PerformerConfig(num_features=16)).save_pretrained(tmp_path)
    folder = Path(modeling_linattn.__file__).parent
    files = {path.name for path in tmp_path.glob("*.py")}
    # the quadratic references stay at home
    assert files == {path.name for path in folder.glob("*.py")} - {"__init__.py", "naive.py"}
    for path in tmp_path.glob("*.py"):
        assert "import hf_linattn" not in path.read_text()
        assert "from hf_linattn" not in path.read_text()


def test_switched_branches_are_saved(tmp_path: Path) -> None:
    model, inputs = converted_model(PerformerConfig(num_features=16, window_size=4)), inputs_for("AutoModel")
    model.set_branches(far=False)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs_of(AutoModel.from_pretrained(tmp_path), inputs), outputs_of(model, inputs))


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    converted_model(PerformerConfig(num_features=16)).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"(?i)safetensor|incomplete|invalid|header|file"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("task", "auto", "text"),
    [
        ("fill-mask", MASKED_LM, "w7 [MASK] w9 w10"),
        ("feature-extraction", "AutoModel", "w7 w8 w9"),
        ("text-classification", "AutoModelForSequenceClassification", "w7 w8 w9"),
    ],
)
def test_pipelines_run_on_the_folder(tmp_path: Path, task: str, auto: str, text: str) -> None:
    save_tokenizer(tmp_path)
    model = converted_model(PerformerConfig(num_features=16), auto=auto)
    model.save_pretrained(tmp_path)
    pipe = pipeline(task, model=str(tmp_path))
    assert type(pipe.model) is type(model)
    result = pipe(text)
    if task == "feature-extraction":
        encoded = pipe.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(result), model(**encoded).last_hidden_state)
    else:
        assert 0 < result[0]["score"] <= 1
