"""Saved and loaded again: here, in a fresh process with the package, and in one without it. Always offline."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedModel, pipeline

import hf_linattn
from hf_linattn import LinformerConfig, PerformerConfig
from hf_linattn.modeling.modeling_linattn import MODEL_CLASSES

from ..helpers import (
    ENCODERS,
    METHODS,
    config_id,
    converted_model,
    inputs_for,
    outputs_of,
    run_python,
    save_tokenizer,
    tiny_model,
)

pytestmark = pytest.mark.core

MASKED_LM = "AutoModelForMaskedLM"
#: folder name -> settings and family; every family once, every kind of parameter and buffer once
SAVED = {
    **{family: (PerformerConfig(num_features=16, window_size=4), family) for family in ENCODERS},
    "linformer": (LinformerConfig(projection_length=8, sharing="none"), "bert"),
    "gaussian": (LinformerConfig(projection_length=8, projection="gaussian", global_tokens=1), "bert"),
    "shared": (LinformerConfig(projection_length=8, sharing="layers"), "roberta"),
    "learned": (PerformerConfig(num_features=16, feature_map="learned", redraw_interval=2), "bert"),
    "one layer": (PerformerConfig(num_features=16, layers=[1]), "bert"),
}

# run in a process of its own: loads every folder below argv[1] and writes the logits to argv[2]
LOAD = """
import sys
root, out, package = sys.argv[1:]
if package == "without":
    sys.modules["hf_linattn"] = None  # any import of it fails
else:
    sys.path.insert(0, package)
    import hf_linattn
from pathlib import Path
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM
logits = {}
for folder in sorted(Path(root).iterdir()):
    options = {"trust_remote_code": True} if package == "without" else {}
    model = AutoModelForMaskedLM.from_pretrained(folder, **options)
    assert not model.training and type(model).__name__.startswith("LinAttn")
    origin = "transformers_modules" if package == "without" else "hf_linattn"
    assert type(model).__module__.startswith(origin), type(model)
    torch.set_num_threads(1)
    with torch.no_grad():
        logits[folder.name] = model(**load_file(folder / "inputs.safetensors")).logits
save_file(logits, out)
"""

LOAD_PLAINLY = """
import sys
sys.modules["hf_linattn"] = None
from transformers import AutoModelForMaskedLM
AutoModelForMaskedLM.from_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of saved models, and the logits that each gave before it was saved."""
    root, logits = tmp_path_factory.mktemp("folders with a space"), {}
    inputs = inputs_for(MASKED_LM)
    for name, (config, family) in SAVED.items():
        model = converted_model(config, family, MASKED_LM, max_length=128)
        if name in ("learned", "linformer"):  # as after training
            with torch.no_grad():
                for _, module in model.linear_attentions():
                    for parameter in module.parameters():
                        parameter += 0.1 * torch.randn_like(parameter)
        if name == "bert":
            model.redraw_features()
        with torch.no_grad():
            logits[name] = model(**inputs).logits
        model.save_pretrained(root / name)
        save_file(inputs, root / name / "inputs.safetensors")
    return root, logits


@pytest.mark.parametrize("package", ["with", "without"])
def test_a_fresh_process_gives_the_same_bits(saved, tmp_path: Path, package: str) -> None:
    root, logits = saved
    place = Path(hf_linattn.__file__).parents[1] if package == "with" else package
    done = run_python(LOAD, root, tmp_path / "logits.safetensors", place, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "logits.safetensors")
    assert set(found) == set(SAVED)
    assert [name for name in SAVED if not torch.equal(found[name], logits[name])] == []


@pytest.mark.parametrize("name", SAVED)
def test_the_same_process_gives_the_same_bits_and_not_the_bases(saved, name: str) -> None:
    root, logits = saved
    config, family = SAVED[name]
    inputs = inputs_for(MASKED_LM)
    model = AutoModelForMaskedLM.from_pretrained(root / name)
    assert type(model).__module__ == "hf_linattn.modeling.modeling_linattn"
    assert type(model.config.attention) is type(config)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits[name])
        assert not torch.allclose(tiny_model(family, MASKED_LM)(**inputs).logits, logits[name], atol=1e-3)


def test_loading_without_the_package_or_trust_says_what_to_do(saved, tmp_path: Path) -> None:
    done = run_python(LOAD_PLAINLY, saved[0] / "bert", cwd=tmp_path)
    assert done.returncode != 0
    assert "trust_remote_code=True" in done.stderr


@pytest.mark.parametrize("name", ENCODERS)
def test_every_head_of_the_family_loads_from_one_folder(saved, name: str) -> None:
    config = AutoConfig.from_pretrained(saved[0] / name)
    autos = {auto for auto, classes in MODEL_CLASSES.items() if name in classes}
    assert set(config.auto_map) == {"AutoConfig", *autos}
    body = tiny_model(name, MASKED_LM).base_model.state_dict()
    for auto in autos:
        model: PreTrainedModel = getattr(transformers, auto).from_pretrained(saved[0] / name)
        assert type(model) is MODEL_CLASSES[auto][name]
        state = model.base_model.state_dict()
        # positions were added, and a pooler, which a masked LM does not have, comes up new
        assert all(torch.equal(state[key], body[key]) for key in body if "position" not in key and "pooler" not in key)


def test_the_modelling_files_travel_and_nothing_of_the_package_above_them(saved) -> None:
    files = {path.name for path in (saved[0] / "bert").glob("*.py")}
    assert {
        "modeling_linattn.py",
        "configuration_linattn.py",
        "performer.py",
        "linformer.py",
        "attention_interface.py",
    } <= files
    assert not files & {"convert.py", "main.py", "naive.py"}
    for path in (saved[0] / "bert").glob("*.py"):
        assert "import hf_linattn" not in path.read_text()
        assert "from hf_linattn" not in path.read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", METHODS, ids=config_id)
def test_half_precision_is_kept(tmp_path: Path, config, dtype: torch.dtype) -> None:
    model, inputs = converted_model(config).to(dtype), inputs_for("AutoModel")
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    assert torch.equal(outputs_of(loaded, inputs), outputs_of(model, inputs))


@pytest.mark.parametrize("config", METHODS, ids=config_id)
def test_a_second_round_trip_changes_nothing(tmp_path: Path, config) -> None:
    converted_model(config).save_pretrained(tmp_path / "once")
    AutoModel.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "once/config.json").read_text() == (tmp_path / "twice/config.json").read_text()


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
