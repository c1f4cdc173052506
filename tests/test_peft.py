"""PEFT on converted models: what needs no settings, what can be tuned, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AutoPeftModelForSequenceClassification,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import constants
from transformers import AutoModelForSequenceClassification

from hf_linattn import LinformerConfig
from hf_linattn.modeling.architectures import ARCHITECTURES

from .helpers import converted_model, inputs_for, outputs_of, prompts, run_python, tiny_model

CLASSIFIER, CAUSAL_LM = "AutoModelForSequenceClassification", "AutoModelForCausalLM"
CONFIG = LinformerConfig(projection="mean", projection_length=8, window_size=4, global_tokens=1)
#: family and head: an encoder and a decoder
MODELS = {"bert": (CLASSIFIER, "SEQ_CLS"), "gpt2": (CAUSAL_LM, "CAUSAL_LM")}
FAMILIES = pytest.mark.parametrize("family", MODELS)
#: each by its name; without targets, where it has any
TUNERS: dict[str, Any] = {
    "lora": (LoraConfig, {}),
    "ia3": (IA3Config, {}),
    "prompt": (PromptTuningConfig, {"num_virtual_tokens": 4}),
    "p-tuning": (PromptEncoderConfig, {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
}


def tuner(name: str, family: str) -> PeftConfig:
    config_class, options = TUNERS[name]
    return config_class(task_type=MODELS[family][1], **options)


def labelled(family: str) -> dict[str, torch.Tensor]:
    inputs = inputs_for(MODELS[family][0])
    return {**inputs, "labels": torch.tensor([0, 1]) if family == "bert" else inputs["input_ids"]}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_lora_needs_no_targets(family: str) -> None:
    auto = CAUSAL_LM if ARCHITECTURES[family].causal else "AutoModel"
    model = get_peft_model(converted_model(CONFIG, family, auto), LoraConfig())
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    # where PEFT has a default for the base, it is the same
    wanted = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(family)
    assert adapted == set(wanted or adapted) and adapted
    assert not any("linattn" in name for name, p in model.named_parameters() if p.requires_grad)


@FAMILIES
@pytest.mark.parametrize("name", TUNERS)
def test_tuning_trains_saves_and_loads(name: str, family: str, tmp_path: Path) -> None:
    auto, _ = MODELS[family]
    converted_model(CONFIG, family, auto).save_pretrained(tmp_path / "model")
    load = type(converted_model(CONFIG, family, auto)).from_pretrained
    model, inputs = get_peft_model(load(tmp_path / "model"), tuner(name, family)), labelled(family)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        found = model(**inputs).logits
        assert not torch.allclose(load(tmp_path / "model").eval()(**inputs).logits, found[:, -24:], atol=1e-3)
        again = type(model).from_pretrained(load(tmp_path / "model"), tmp_path / "adapter").eval()
        assert torch.equal(again(**inputs).logits, found)


def test_an_auto_model_loads_an_adapter_and_its_model(tmp_path: Path) -> None:
    converted_model(CONFIG, auto=CLASSIFIER).save_pretrained(tmp_path / "model")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter").eval()
    inputs = inputs_for(CLASSIFIER)
    assert type(again.get_base_model()).__name__ == "LinAttnBertForSequenceClassification"
    assert torch.equal(outputs_of(again, inputs), outputs_of(model, inputs))


@pytest.mark.parametrize("name", ["prompt", "p-tuning"])
def test_a_tuned_prompt_generates_as_the_base_does(name: str) -> None:
    """Without a cache: this PEFT looks for it under an old name, and gives the base the prompt at every step."""
    generated = []
    config = LinformerConfig(window_size=64)
    for model in (tiny_model("gpt2", CAUSAL_LM), converted_model(config, "gpt2", CAUSAL_LM)):
        torch.manual_seed(0)
        tuned = get_peft_model(model, tuner(name, "gpt2")).eval()
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "no_repeat_ngram_size": 2}
        generated.append(tuned.generate(**prompts(12, 9), **options, use_cache=False))
    assert torch.equal(*generated)


@FAMILIES
def test_prefix_tuning_is_refused(family: str) -> None:
    """It gives every layer keys and values, and a state has none."""
    auto, task = MODELS[family]
    config = PrefixTuningConfig(task_type=task, num_virtual_tokens=4)
    with pytest.raises(ValueError, match=r"past key values|cannot go on from the cache|28 columns for 24 tokens"):
        get_peft_model(converted_model(CONFIG, family, auto), config)(**labelled(family))


def test_the_defaults_are_known_whichever_is_imported_first_and_without_the_package(tmp_path: Path) -> None:
    converted_model(CONFIG).save_pretrained(tmp_path / "model")
    code = """
import sys
sys.modules["hf_linattn"] = None  # any import of it fails
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
from peft import LoraConfig, get_peft_model
print(sorted(get_peft_model(model, LoraConfig()).targeted_module_names)[0])
"""
    done = run_python(code, tmp_path / "model", cwd=tmp_path)
    assert done.stdout.strip() == "encoder.layer.0.attention.self.query", done.stderr
