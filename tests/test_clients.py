"""Converted models where people use models: pipelines, sentence-transformers, PEFT, Trainer, ONNX, quantization."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    DynamicCache,
    QuantizedCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert, convert_checkpoint

from .helpers import (
    POSITIONS,
    PURE,
    config_id,
    converted_model,
    inputs_for,
    outputs_of,
    run_python,
    save_tokenizer,
    tiny_model,
    tokens,
)

CONFIG = LinformerConfig(projection="learned", projection_length=8, window_size=4, global_tokens=1)
CLASSIFIER = "AutoModelForSequenceClassification"

#: pipeline -> family and head; each task of Transformers that a converted head has
PIPELINES = {
    "feature-extraction": ("bert", "AutoModel"),
    "fill-mask": ("bert", "AutoModelForMaskedLM"),
    "text-classification": ("bert", CLASSIFIER),
    "zero-shot-classification": ("bert", CLASSIFIER),
    "token-classification": ("bert", "AutoModelForTokenClassification"),
    "text-generation": ("gpt2", "AutoModelForCausalLM"),
}
# longer than the base model could read
TEXT = " ".join(f"w{5 + i % 90}" for i in range(POSITIONS + 20))
CALL = """
def call(pipe):
    text = TEXT + " [MASK]" if pipe.task == "fill-mask" else TEXT
    kwargs = {
        "zero-shot-classification": {"candidate_labels": ["w7", "w8"]},
        "text-generation": {"max_new_tokens": 5, "do_sample": False},
    }.get(pipe.task, {})
    return pipe(text, **kwargs)
"""
RUN_PIPELINES = (
    """
import sys
sys.modules["hf_linattn"] = None  # any import of it fails
import json
from pathlib import Path
import torch
from transformers import pipeline
torch.set_num_threads(1)
TEXT = sys.argv[2]
"""
    + CALL
    + """
results = {}
for folder in Path(sys.argv[1]).iterdir():
    pipe = pipeline(folder.name, str(folder), trust_remote_code=True)
    assert type(pipe.model).__module__.startswith("transformers_modules"), type(pipe.model)
    results[folder.name] = call(pipe)
print(json.dumps(results, default=float))
"""
)


def save_with_tokenizer(folder: Path, family: str = "bert", auto: str = "AutoModel") -> Path:
    save_tokenizer(folder)
    if family == "gpt2":
        # of a BERT, whose segments GPT-2 does not read
        file = folder / "tokenizer_config.json"
        values = {**json.loads(file.read_text()), "model_input_names": ["input_ids", "attention_mask"]}
        file.write_text(json.dumps(values))
    model = converted_model(CONFIG, family, auto, max_length=256)
    if auto == CLASSIFIER:
        model.config.label2id, model.config.id2label = {"entailment": 0, "other": 1}, {0: "entailment", 1: "other"}
    model.save_pretrained(folder)
    return folder


def test_pipelines_of_every_head_without_the_package(tmp_path: Path) -> None:
    for task, (family, auto) in PIPELINES.items():
        (tmp_path / "folders").mkdir(exist_ok=True)
        save_with_tokenizer(tmp_path / "folders" / task, family, auto)
    done = run_python(RUN_PIPELINES, tmp_path / "folders", TEXT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    call: dict[str, Any] = {"TEXT": TEXT}
    exec(CALL, call)
    for task in PIPELINES:
        expected = call["call"](pipeline(task, str(tmp_path / "folders" / task)))
        assert found[task] == json.loads(json.dumps(expected, default=float)), task


def test_a_sentence_encoder_reads_more_than_the_original_could(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    save_tokenizer(tmp_path / "words")
    tiny_model().save_pretrained(tmp_path / "words")
    body = models.Transformer(str(tmp_path / "words"))
    original = sentence_transformers.SentenceTransformer(modules=[body, models.Pooling(32)])
    original.save(str(tmp_path / "original"))
    convert_checkpoint(tmp_path / "original", tmp_path / "converted", CONFIG, max_length=256)
    encoder = sentence_transformers.SentenceTransformer(str(tmp_path / "converted"), trust_remote_code=True)
    assert original.max_seq_length == POSITIONS and encoder.max_seq_length == 256

    def embed(model: Any, text: str) -> torch.Tensor:
        return model.encode(text, convert_to_tensor=True)

    # the original does not see what comes after its positions, the converted model does
    changed = TEXT[: -len("w5 w6")] + "w90 w91"
    assert changed != TEXT
    assert torch.equal(embed(original, TEXT), embed(original, changed))
    assert not torch.allclose(embed(encoder, TEXT), embed(encoder, changed), atol=1e-3)
    # and the embedding is the mean over all of the document's tokens
    encoded = encoder.tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(tmp_path / "converted")(**encoded).last_hidden_state
    assert states.shape[1] == POSITIONS + 22
    torch.testing.assert_close(embed(encoder, TEXT), states[0].mean(0))


@pytest.mark.parametrize(("family", "targets"), [("bert", ["query", "value"]), ("gpt2", ["c_attn"])])
def test_an_adapter_is_trained_saved_and_put_on_again(tmp_path: Path, family: str, targets: list[str]) -> None:
    converted_model(CONFIG, family, CLASSIFIER).save_pretrained(tmp_path / "model")

    def load() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")

    config = LoraConfig(task_type="SEQ_CLS", target_modules=targets, init_lora_weights=False)
    model, inputs = get_peft_model(load(), config), inputs_for(CLASSIFIER)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name or "modules_to_save" in name for name in trained)
    model(**inputs, labels=torch.tensor([0, 1])).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    model.eval().save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(), tmp_path / "adapter").eval()
    assert torch.equal(outputs_of(again, inputs), outputs_of(model, inputs))
    assert not torch.allclose(outputs_of(load(), inputs), outputs_of(model, inputs), atol=1e-3)
    torch.testing.assert_close(outputs_of(again.merge_and_unload(), inputs), outputs_of(model, inputs))


def test_a_trainer_trains_saves_and_reloads(tmp_path: Path) -> None:
    model = converted_model(CONFIG, auto=CLASSIFIER)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = [{"input_ids": tokens(20, seed=i)[0], "labels": i % 2} for i in range(4)]
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, **options
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    trainer.save_model(str(tmp_path / "saved"))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    # what the method learns, and what it was given
    assert any("linattn" in name for name in changed) and any("query" in name for name in changed)
    loaded, inputs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved"), inputs_for(CLASSIFIER)
    assert torch.equal(outputs_of(loaded, inputs), outputs_of(model.eval(), inputs))


LENGTH = 64


def export(model: nn.Module, path: Path, **options: Any) -> None:
    """A graph that takes rows of `LENGTH` tokens, as many as one likes."""
    inputs = inputs_for("AutoModel", LENGTH)
    rows = torch.export.Dim("rows")
    options = {"dynamo": True, "dynamic_shapes": {name: {0: rows} for name in inputs}, **options}
    names = {"input_names": list(inputs), "output_names": ["last_hidden_state"]}
    torch.onnx.export(model, (), str(path), kwargs=inputs, verbose=False, **names, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "config",
    [
        LinformerConfig(projection="learned", projection_length=8, window_size=16, global_tokens=1),
        PerformerConfig(num_features=16, window_size=16, global_tokens=1),
    ],
    ids=config_id,
)
def test_an_exported_encoder_gives_the_same_numbers_at_every_length(tmp_path: Path, config: AttentionConfig) -> None:
    """The graph has one length, and shorter documents are padded to it, which changes nothing in their attention."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = converted_model(config)
    model.encoder.layer = model.encoder.layer[:1]
    export(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for lengths in ((LENGTH,), (1,), (30, 17, 5)):
        input_ids = tokens(LENGTH, batch=len(lengths), seed=3)
        mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
        (found,) = session.run(["last_hidden_state"], {"input_ids": input_ids.numpy(), "attention_mask": mask.numpy()})
        for row, length in enumerate(lengths):
            with torch.no_grad():
                # on its own, and as long as it is
                expected = model(input_ids[row : row + 1, :length]).last_hidden_state[0]
            torch.testing.assert_close(torch.tensor(found[row, :length]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("projection", "rows"), [("cluster", 3), ("learned", 2)])
@pytest.mark.parametrize("exact_length", [None, 0])
def test_an_export_at_512_tokens_reads_1_and_100_and_511(
    projection: str, rows: int, exact_length: int | None, tmp_path: Path
) -> None:
    """With the exact rows of the default and without; of clusters for as many rows as the example has."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    config = LinformerConfig(
        projection=projection, projection_length=16, window_size=32, global_tokens=1, exact_length=exact_length
    )
    model = convert(tiny_model(), config, max_length=512).eval()
    example = {"input_ids": tokens(512, batch=rows), "attention_mask": torch.ones(rows, 512, dtype=torch.long)}
    dim = torch.export.Dim("rows")
    torch.onnx.export(
        model,
        (),
        str(tmp_path / "model.onnx"),
        kwargs=example,
        dynamo=True,
        dynamic_shapes={name: {0: dim} for name in example},
        input_names=list(example),
        output_names=["last_hidden_state"],
        verbose=False,
    )
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    lengths = (1, 100, 511)
    input_ids = tokens(512, batch=3, seed=3)
    mask = (torch.arange(512) < torch.tensor(lengths)[:, None]).long()
    (found,) = session.run(["last_hidden_state"], {"input_ids": input_ids.numpy(), "attention_mask": mask.numpy()})
    for row, length in enumerate(lengths):
        with torch.no_grad():
            expected = model(input_ids[row : row + 1, :length]).last_hidden_state[0]
        torch.testing.assert_close(torch.tensor(found[row, :length]), expected, rtol=1e-4, atol=1e-4)


#: family -> head, and a map with one layer on the disk
ON_DISK = {
    "bert": (
        "AutoModel",
        {"embeddings": "cpu", "encoder.layer.0": "disk", "encoder.layer.1": "cpu", "pooler": "cpu"},
    ),
    "llama": (
        "AutoModelForCausalLM",
        {
            **dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu"),
            "model.layers.1": "disk",
            "lm_head": "cpu",
        },
    ),
}


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, window_size=0),
        dataclasses.replace(CONFIG, projection="mean"),
        dataclasses.replace(CONFIG, projection="conv", sharing="layers"),
        LinformerConfig(projection_length=8, window_size=4, landmarks="prototypes"),
        PerformerConfig(num_features=16, init="moments"),
        PerformerConfig(num_features=16, feature_map="learned", window_size=4),
    ],
    ids=config_id,
)
@pytest.mark.parametrize("family", ON_DISK)
def test_weights_may_be_on_the_disk(
    family: str, config: LinformerConfig, offload_buffers: bool, tmp_path: Path
) -> None:
    """Accelerate loads the weights of a module for each call of it, and a far part reads them without one."""
    auto, device_map = ON_DISK[family]
    if family == "llama" and getattr(config, "landmarks", "keys") == "prototypes":
        config = dataclasses.replace(config, landmarks="keys")
    model = converted_model(config, family, auto)
    model.save_pretrained(tmp_path / "model")
    loaded = getattr(transformers, auto).from_pretrained(
        tmp_path / "model",
        device_map=device_map,
        offload_folder=str(tmp_path / "disk"),
        offload_buffers=offload_buffers,
    )
    kept = {name for name, tensor in loaded.state_dict().items() if tensor.is_meta}
    assert kept
    inputs = inputs_for(auto)
    assert torch.equal(outputs_of(loaded, inputs), outputs_of(model, inputs))
    # and back again
    assert {name for name, tensor in loaded.state_dict().items() if tensor.is_meta} == kept
    if auto == "AutoModelForCausalLM":
        ids, options = tokens(20, batch=2), {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize("implementation", ["static", "quantized"])
def test_a_cache_of_keys_and_values_is_refused_by_its_name(implementation: str) -> None:
    """The state has a fixed size and no keys: there is nothing in it that a quantized cache could make smaller."""
    model = converted_model(CONFIG, "llama", "AutoModelForCausalLM")
    if implementation == "quantized":
        # whatever does it is not asked
        made = QuantizedCache.__new__(QuantizedCache)
        made.layers = []
        with pytest.raises(ValueError, match=r"The cache is a QuantizedCache; .* DynamicCache"):
            model(input_ids=tokens(8), past_key_values=made)
        return
    with pytest.raises(ValueError, match=r"The cache is a StaticCache; .* Leave out cache_implementation"):
        model.generate(tokens(8), max_new_tokens=2, cache_implementation=implementation)


def test_a_cache_that_was_offloaded_goes_on() -> None:
    """What Transformers calls layer by layer; with another device than the CPU, where the state then goes."""
    model = converted_model(CONFIG, "llama", "AutoModelForCausalLM")
    ids, options = tokens(20, batch=2), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)


@pytest.mark.slow
def test_cross_encoder_and_pipeline_read_4096_tokens(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    save_tokenizer(tmp_path / "base")
    tiny_model("bert", "AutoModelForSequenceClassification", num_labels=1).save_pretrained(tmp_path / "base")
    config = LinformerConfig(window_size=8, global_tokens=1, projection_length=8, projection="mean")
    convert_checkpoint(tmp_path / "base", tmp_path / "model", config, max_length=4096)
    # [CLS] w5 [SEP] and [SEP] take four
    document = " ".join(f"w{5 + index % 90}" for index in range(4092))
    encoder = sentence_transformers.CrossEncoder(str(tmp_path / "model"), activation_fn=torch.nn.Identity())
    encoded = encoder.tokenizer("w5", document, return_tensors="pt")
    assert encoded.input_ids.shape == (1, 4096)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        expected = model(**encoded).logits.item()
    # in a batch with a short one, which does not change it
    for pairs in ([("w5", document)], [("w5", document), ("w5", "w6 w7")]):
        assert encoder.predict(pairs)[0] == pytest.approx(expected, abs=1e-4)
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "model"))
    text = " ".join(f"w{5 + index % 90}" for index in range(4094))
    alone = classify(text, function_to_apply="none")[0]["score"]
    assert classify([text, "w6 w7"], batch_size=2, function_to_apply="none")[0]["score"] == pytest.approx(
        alone, abs=1e-4
    )
    with pytest.raises(ValueError, match="4097 tokens long, and the model takes at most max_length=4096"):
        classify(f"{text} w5")
    assert classify(f"{text} w5", truncation=True)


@pytest.mark.filterwarnings("ignore")
def test_an_export_that_fixes_what_depends_on_the_text_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnx")

    class LastHiddenState(nn.Module):
        """Takes two tensors and no options, which is all that this exporter can give."""

        def __init__(self) -> None:
            super().__init__()
            self.model = converted_model(CONFIG)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    inputs = tuple(inputs_for("AutoModel", LENGTH).values())
    with pytest.raises(ValueError, match=r"Use torch\.onnx\.export\(\.\.\., dynamo=True\)"):
        torch.onnx.export(LastHiddenState(), inputs, str(tmp_path / "model.onnx"), dynamo=False)


def test_dynamic_quantization_leaves_the_attention_method_as_it_is() -> None:
    model, inputs = converted_model(CONFIG), inputs_for("AutoModel")
    expected = outputs_of(model, inputs)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    found = outputs_of(quantized, inputs)
    assert not torch.equal(found, expected)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_folder_loads_with_weights_in_int8(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    model, inputs = converted_model(CONFIG), inputs_for("AutoModel")
    model.save_pretrained(tmp_path / "model")
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    loaded = AutoModel.from_pretrained(tmp_path / "model", quantization_config=config)
    assert type(loaded.encoder.layer[0].attention.self.query.weight) is not nn.Parameter
    # what the method adds stays as it was saved
    state = model.state_dict()
    added = [name for name in state if "linattn" in name]
    assert added and all(torch.equal(loaded.state_dict()[name], state[name]) for name in added)
    expected, found = outputs_of(model, inputs), outputs_of(loaded, inputs)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    loaded.save_pretrained(tmp_path / "int8")
    assert torch.equal(outputs_of(AutoModel.from_pretrained(tmp_path / "int8"), inputs), found)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prefix_tuning_of_a_decoder_is_refused_by_its_name(family: str) -> None:
    model = converted_model(CONFIG, family, "AutoModelForCausalLM")
    tuned = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=r"holds 3 tokens.*prefix tuning"):
        tuned(input_ids=tokens(8), attention_mask=torch.ones(1, 8))


class _States(nn.Module):
    """A model's hidden states, as a function of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        options = {} if "bert" in self.model.config.model_type else {"use_cache": False}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **options)[0]


def _padded(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return tokens(length, batch=2, seed=length), mask


# 512 tokens are one chunk of work
@torch.no_grad()
@pytest.mark.parametrize("traced", [24, 700])
@pytest.mark.parametrize("config", [c for c in PURE if getattr(c, "init", "random") == "random"], ids=config_id)
def test_a_traced_encoder_is_right_at_other_lengths(config: AttentionConfig, traced: int) -> None:
    model = _States(converted_model(config, max_length=2048))
    graph = torch.jit.trace(model, _padded(traced), strict=False, check_trace=False)
    for length in (24, 9, 700, 1100):
        inputs = _padded(length)
        valid = inputs[1].bool()
        # signed features cancel
        tolerance = 1e-3 if getattr(config, "feature_map", "") == "trigonometric" else 2e-5
        torch.testing.assert_close(graph(*inputs)[valid], model(*inputs)[valid], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("config", "family", "reason"),
    [
        (CONFIG, "bert", "how many blocks window_size=4 makes"),
        (PerformerConfig(num_features=16, window_size=4), "bert", "how many blocks window_size=4 makes"),
        (PerformerConfig(num_features=16, window_size=4, layers=[1]), "bert", "how many blocks window_size=4 makes"),
        (PerformerConfig(num_features=16, exact_length=16), "bert", "which rows exact_length=16 makes exact"),
        (LinformerConfig(projection_length=8), "gpt2", "how a decoder cuts a text into blocks"),
        (PerformerConfig(num_features=16), "llama", "how a decoder cuts a text into blocks"),
    ],
    ids=config_id,
)
def test_a_trace_that_would_be_wrong_at_other_lengths_is_refused(
    config: AttentionConfig, family: str, reason: str
) -> None:
    model = _States(converted_model(config, family))
    with pytest.raises(ValueError, match=rf"torch\.jit\.trace would fix {reason}.*Use torch\.compile"):
        torch.jit.trace(model, _padded(24), strict=False, check_trace=False)
