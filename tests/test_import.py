"""`import hf_linattn` is quick, and the auto classes know the converted types whatever is imported when."""

import pickle
from pathlib import Path

import pytest

from hf_linattn import LinformerConfig

from .helpers import converted_model, run_python

MASKED = "AutoModelForMaskedLM"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    converted_model(LinformerConfig(projection="mean", projection_length=4), auto=MASKED).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("module", ["hf_linattn", "hf_linattn.cli"])
def test_an_import_takes_neither_torch_nor_the_auto_classes(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}\nprint({{'torch', 'datasets', 'transformers.models.auto'}} & set(sys.modules))"
    done = run_python(code, cwd=tmp_path)
    assert done.stdout.strip() == "set()", done.stderr


def test_help_takes_no_torch(tmp_path: Path) -> None:
    code = """
import sys
from hf_linattn.cli import main
try:
    main(["--help"])
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    assert run_python(code, cwd=tmp_path).stdout.splitlines()[-1] == "0 False"


@pytest.mark.parametrize(
    "imports",
    [
        "import transformers\ntransformers.AutoModelForMaskedLM\nimport hf_linattn",
        # each of these imports the auto classes in the middle of its own import
        "import hf_linattn\nimport transformers\ntransformers.BertModel",
        "import hf_linattn\nimport transformers\nimport transformers.quantizers",
        "import hf_linattn\nimport transformers\nhf_linattn.convert",
        "import hf_linattn\nimport transformers\nlist(transformers.CONFIG_MAPPING.values())",
    ],
)
def test_auto_classes_load_converted_checkpoints(imports: str, checkpoint: Path, tmp_path: Path) -> None:
    code = f"""
import sys
{imports}
model = transformers.{MASKED}.from_pretrained(sys.argv[1])
print(type(model).__module__, type(model).__name__)
"""
    done = run_python(code, checkpoint, cwd=tmp_path)
    expected = ["hf_linattn.modeling.modeling_linattn", "LinAttnBertForMaskedLM"]
    assert done.stdout.split() == expected, done.stderr


def test_a_config_is_enough_for_the_auto_classes(tmp_path: Path) -> None:
    """They are asked for a model of a config that no auto class made."""
    config = converted_model(LinformerConfig(projection="mean", projection_length=4)).config
    code = """
import pickle, sys
from transformers import AutoModelForMaskedLM
config = pickle.loads(bytes.fromhex(sys.argv[1]))
print(type(AutoModelForMaskedLM.from_config(config)).__name__)
"""
    done = run_python(code, pickle.dumps(config).hex(), cwd=tmp_path)
    assert done.stdout.strip() == "LinAttnBertForMaskedLM", done.stderr


def test_the_auto_classes_that_were_there_keep_what_is_registered(tmp_path: Path) -> None:
    code = """
from transformers import AutoConfig, BertConfig, CONFIG_MAPPING
class Own(BertConfig):
    model_type = "own"
AutoConfig.register("own", Own)
import hf_linattn
class Other(BertConfig):
    model_type = "other"
AutoConfig.register("other", Other)
print(CONFIG_MAPPING["own"] is Own, CONFIG_MAPPING["other"] is Other, CONFIG_MAPPING["linattn_bert"].__name__)
print("linattn_xlm_roberta" in CONFIG_MAPPING, "linattn_x" in CONFIG_MAPPING)
"""
    assert run_python(code, cwd=tmp_path).stdout.split() == ["True", "True", "LinAttnBertConfig", "True", "False"]
