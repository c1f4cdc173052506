"""Tiny models of every family, their inputs, and the settings that the tests go over."""

import contextlib
import copy
import dataclasses
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import BertTokenizerFast, Cache, GPT2Model, PreTrainedConfig, PreTrainedModel

from hf_linattn import (
    AttentionConfig,
    LayerwiseConfig,
    LinAttnPreTrainedModel,
    LinformerConfig,
    PerformerConfig,
    convert,
)
from hf_linattn.modeling.architectures import ARCHITECTURES, UNAVAILABLE
from hf_linattn.modeling.decoder_attention import attend_causally
from hf_linattn.modeling.feature_maps import FeatureMap, Moments
from hf_linattn.modeling.linear_attention import LinearAttention
from hf_linattn.modeling.methods import METHODS as REGISTRY
from hf_linattn.modeling.modeling_linattn import MODEL_CLASSES
from hf_linattn.modeling.state import State, empty_state

POSITIONS = 64
VOCABULARY = 100
#: encoders, and decoders, whose tokens see earlier ones only: one of each kind, for tests that go over much else;
#: `conformance/test_every_row.py` is the test of all that the table has
ENCODERS = ("albert", "bert", "distilbert", "roberta")
DECODERS = ("gpt2", "gpt_neox", "llama", "opt")
#: (architecture, auto class) of every head of the encoders that can be converted
HEADS = [(family, auto) for auto, by_family in MODEL_CLASSES.items() for family in ENCODERS if family in by_family]

#: sizes for tiny models, of the fields that settings may have
SMALL = {"projection_length": 8, "num_features": 16}


def small(config_class: type[AttentionConfig], **options: Any) -> AttentionConfig:
    """Settings for a tiny model."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{**{name: size for name, size in SMALL.items() if name in fields}, **options})


def choices(config_class: type[AttentionConfig]) -> dict[str, tuple[str, ...]]:
    """The fields with a choice of names, and their choices."""
    return {f.name: tuple(f.metadata["choices"]) for f in dataclasses.fields(config_class) if "choices" in f.metadata}


def variants(config_class: type[AttentionConfig], **options: Any) -> list[AttentionConfig]:
    """Every combination of choices that is allowed, `sharing` left out, the default first and each once."""
    names = [name for name in choices(config_class) if name != "sharing"]
    configs = [small(config_class, **options)]
    for chosen in itertools.product(*(choices(config_class)[name] for name in names)):
        with contextlib.suppress(ValueError):
            configs.append(small(config_class, **options, **dict(zip(names, chosen, strict=True))))
    if "rounds" in {field.name for field in dataclasses.fields(config_class)}:
        configs.append(small(config_class, **options, projection="cluster", rounds=2))
    # landmarks are those of clusters
    configs = [c for c in configs if getattr(c, "landmarks", "keys") == "keys" or c.projection == "cluster"]
    return [config for index, config in enumerate(configs) if config not in configs[:index]]


def can_be_causal(config: AttentionConfig) -> bool:
    """Whether a decoder can have these settings; of clusters, whose landmarks are prototypes there, one config."""
    if getattr(config, "landmarks", "keys") != "keys" or getattr(config, "rounds", 0):
        return False
    config = dataclasses.replace(config, max_length=POSITIONS)
    try:
        REGISTRY[config.method].decoder(config, num_heads=4, head_dim=8, seed=0)
    except ValueError:
        return False
    return True


_CLASSES = [method.config for method in REGISTRY.values()]
#: every method with every choice, without near keys
PURE: list[AttentionConfig] = [config for cls in _CLASSES for config in variants(cls)]
#: the same with a window and global tokens, and with one of the two; and the near part alone
JOINED: list[AttentionConfig] = [
    *(config for cls in _CLASSES for config in variants(cls, window_size=4, global_tokens=1)),
    *(
        dataclasses.replace(config, **({"global_tokens": 2} if index % 2 else {"window_size": 4}))
        for cls in _CLASSES
        for index, config in enumerate(variants(cls))
    ),
    *(small(cls, window_size=4, global_tokens=1, far=False) for cls in _CLASSES),
    # with 6, two clusters are so nearly alike that the rounding of float16 decides which is selected
    LinformerConfig(projection_length=8, window_size=4, global_tokens=1, selected_tokens=7),
    LinformerConfig(projection_length=2, tokens_per_slot=4),
    LinformerConfig(projection_length=2, tokens_per_slot=4, window_size=4, global_tokens=1, rounds=1),
]
#: every way to attend, each once
METHODS = PURE + JOINED
#: one config each of what has its own code for sharing
SHARED = [
    small(cls, sharing=sharing, projection="learned")
    for cls in _CLASSES
    if "sharing" in choices(cls)
    for sharing in choices(cls)["sharing"]
]

#: settings with a head that stays softmax, in encoders and decoders
SPLIT: list[AttentionConfig] = [
    *(small(cls, window_size=4, global_tokens=1, softmax_heads={0: [1]}) for cls in _CLASSES),
    LinformerConfig(projection_length=8, projection="learned", sharing="none", softmax_heads={0: [0]}),
]

# (window_size, global_tokens)
_NEAR = ((0, 0), (4, 0), (0, 2), (6, 1))
#: every causal way to attend, each alone and joined with what is near
CAUSAL: list[AttentionConfig] = [
    *(
        dataclasses.replace(config, window_size=window, global_tokens=first)
        for config in PURE
        if can_be_causal(config)
        for window, first in _NEAR
    ),
    *(dataclasses.replace(config, window_size=4) for config in SHARED if can_be_causal(config)),
    LinformerConfig(projection_length=8, window_size=4, global_tokens=1, selected_tokens=7),
]
CAUSAL = [config for index, config in enumerate(CAUSAL) if config not in CAUSAL[:index]]
#: one config each of what a decoder has its own code for, for tests that go over much else
CAUSAL_FEW: list[AttentionConfig] = [
    LinformerConfig(projection="learned", projection_length=8),
    LinformerConfig(projection_length=8, projection="max", window_size=4, global_tokens=1),
    PerformerConfig(num_features=16),
    PerformerConfig(num_features=16, feature_map="learned", window_size=4, global_tokens=1),
    LinformerConfig(projection="learned", projection_length=8, window_size=4, layers=[0]),
    PerformerConfig(num_features=16, layers=[1]),
    LinformerConfig(projection_length=8, projection="cluster", window_size=4, global_tokens=1),
    # of other methods one joined config each
    *(small(cls, window_size=4, global_tokens=1) for cls in _CLASSES if cls not in (LinformerConfig, PerformerConfig)),
]
#: what a decoder's cache is called: past_key_values in older versions of Transformers
CACHE = next(name for name in ("cache", "past_key_values") if name in inspect.signature(GPT2Model.forward).parameters)


def config_id(value: Any) -> str:
    """A short test id: the method and every setting that is not the default."""
    if not isinstance(value, AttentionConfig):
        return str(value).removeprefix("torch.")
    default = type(value)().to_dict()
    changed = {k: v for k, v in value.to_dict().items() if v != default[k]}
    return "-".join([value.method, *(f"{k}={v}" for k, v in changed.items())])


#: what the tiny models of some architectures have beside the common sizes; where it can be, heads that are not as wide
#: as hidden_size says, and scales that are not the default
TINY: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 4},
    "eurobert": {"mask_token_id": 4, "bos_token_id": 2, "eos_token_id": 3},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 8,
        "attn_logit_softcapping": None,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gptj": {"rotary_dim": 4},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "mistral": {"sliding_window": None},
    "mobilebert": {
        "embedding_size": 16,
        "intra_bottleneck_size": 16,
        "normalization_type": "layer_norm",
        # which reads the token of padding beside a text
        "trigram_input": False,
    },
    "modernbert": {
        "local_attention": 16,
        **dict.fromkeys(("bos_token_id", "cls_token_id"), 2),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 3),
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """A config with two layers of four heads of eight; attention sharp enough for its approximations to differ."""
    architecture = {**ARCHITECTURES, **UNAVAILABLE}[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": POSITIONS + (2 if architecture.positions_after_padding else 0),
        "pad_token_id": 1,
        "initializer_range": 0.2,
        **TINY.get(family, {}),
        **overrides,
    }
    if family == "distilbert":
        settings["hidden_dim"] = settings.pop("intermediate_size")
    if architecture.causal:
        # no token ends a text, and no dropout: what the tests train is the attention
        settings = {"eos_token_id": None, "bos_token_id": 2, **settings}
        names = (
            ("attn_pdrop", "embd_pdrop", "resid_pdrop")
            if family in ("gpt2", "gptj")
            else ("dropout", "attention_dropout")
        )
        settings |= dict.fromkeys(names, 0.0)
    if family in ("gpt2", "gptj"):
        settings["n_inner"] = settings.pop("intermediate_size")
    config_class = getattr(transformers, f"{architecture.prefix}Config")
    if hasattr(config_class(), "num_key_value_heads"):
        settings.setdefault("num_key_value_heads", 2)
    if family == "opt":
        settings |= {"ffn_dim": settings.pop("intermediate_size"), "word_embed_proj_dim": settings["hidden_size"]}
    return config_class(**settings)


@cache
def _base_model(family: str, auto: str, overrides: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    torch.manual_seed(1)
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in overrides}
    return getattr(transformers, auto).from_config(tiny_config(family, **settings)).eval()


def tiny_model(family: str = "bert", auto: str = "AutoModel", **overrides: Any) -> PreTrainedModel:
    """A random model of its own in eval mode; the same arguments give the same weights."""
    hashable = {name: tuple(value) if isinstance(value, list) else value for name, value in overrides.items()}
    return copy.deepcopy(_base_model(family, auto, tuple(sorted(hashable.items()))))


def tokens(length: int, *, batch: int = 1, seed: int = 0) -> Tensor:
    """Random token ids without special ones, (batch, length)."""
    return torch.randint(5, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of `VOCABULARY` words w5, w6, ... for a tiny BERT, for as many tokens as it has positions."""
    folder.mkdir(exist_ok=True)
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, VOCABULARY))]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=POSITIONS).save_pretrained(folder)


def inputs_for(auto: str, length: int = 24, seed: int = 0) -> dict[str, Tensor]:
    """Two rows for a head, the second one padded at the end."""
    input_ids = tokens(length, batch=2, seed=seed)
    mask = torch.ones_like(input_ids)
    mask[1, length // 2 :] = 0
    input_ids = input_ids.where(mask.bool(), 1)
    if auto == "AutoModelForMultipleChoice":
        # two choices for one question
        return {"input_ids": input_ids[None], "attention_mask": mask[None]}
    return {"input_ids": input_ids, "attention_mask": mask}


def outputs_of(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """All floating point outputs of a forward pass as one vector, padded positions left out of hidden states."""
    with torch.no_grad():
        outputs = [x for x in model(**inputs).to_tuple() if isinstance(x, Tensor) and x.is_floating_point()]
    assert outputs
    mask = inputs["attention_mask"].bool()
    return torch.cat([x[mask].flatten() if x.shape[: mask.ndim] == mask.shape else x.flatten() for x in outputs])


def without_exact_rows(config: AttentionConfig) -> AttentionConfig:
    """The settings with `exact_length` 0 where it was left out: else all rows of tiny encoders would be exact."""
    if isinstance(config, LayerwiseConfig):
        by_layer = {index: without_exact_rows(its_own) for index, its_own in config.by_layer.items()}
        return dataclasses.replace(config, by_layer=by_layer)
    return dataclasses.replace(config, exact_length=config.exact_length or 0)


@cache
def _converted(family: str, auto: str, config: str, options: tuple[tuple[str, Any], ...]) -> LinAttnPreTrainedModel:
    # the text of a settings object is the call that makes it
    classes = (LayerwiseConfig, *(method.config for method in REGISTRY.values()))
    settings = eval(config, {cls.__name__: cls for cls in classes})
    return convert(tiny_model(family, auto), settings, **dict(options))


def converted_model(
    config: AttentionConfig, family: str = "bert", auto: str = "AutoModel", **options: Any
) -> LinAttnPreTrainedModel:
    """`convert(tiny_model(family, auto), config, **options)`, a model of its own, by default without exact rows."""
    config = without_exact_rows(config)
    return copy.deepcopy(_converted(family, auto, repr(config), tuple(sorted(options.items()))))


def with_moments(module: nn.Module, seed: int = 6) -> nn.Module:
    """The module with its feature maps of init="moments" matched to some moments: they start as FAVOR+."""
    generator = torch.Generator().manual_seed(seed)
    for feature_map in module.modules():
        if isinstance(feature_map, FeatureMap) and feature_map.init == "moments":
            heads, dim = feature_map.num_heads, feature_map.head_dim
            transform = torch.eye(dim) + 0.2 * torch.randn(heads, dim, dim, generator=generator)
            feature_map.set_moments(
                Moments(
                    0.3 * torch.randn(heads, dim, generator=generator),
                    transform,
                    torch.linalg.inv(transform).transpose(-1, -2).contiguous(),
                    -0.05 * torch.rand(heads, dim, generator=generator),
                )
            )
    return module


def as_trained(model: LinAttnPreTrainedModel) -> LinAttnPreTrainedModel:
    """The model with noise on what its methods learn: most of it starts as zeros or ones, which hide mistakes."""
    with_moments(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, module in model.linear_attentions():
            for parameter in module.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def decoder(config: AttentionConfig, family: str = "gpt2", **options: Any) -> LinAttnPreTrainedModel:
    """A converted causal language model, as after training."""
    return as_trained(converted_model(config, family, "AutoModelForCausalLM", **options))


def prompts(*lengths: int, width: int | None = None, side: str = "left", seed: int = 0) -> dict[str, Tensor]:
    """Rows of these lengths, padded on one side to the longest one or to `width`."""
    width = max(lengths) if width is None else width
    input_ids = tokens(width, batch=len(lengths), seed=seed)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    return {"input_ids": input_ids.where(mask.bool(), 1), "attention_mask": mask}


def positions_of(mask: Tensor) -> Tensor:
    """Positions that count real tokens, as `generate` counts them."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


def cache_of(outputs: Any) -> Cache | None:
    """The cache that a forward pass or `generate` returned."""
    return outputs.get(CACHE)


def logits_in_pieces(
    model: PreTrainedModel, inputs: dict[str, Tensor], sizes: Iterable[int], cache: Cache | None = None
) -> tuple[Tensor, Cache]:
    """Logits of rows whose tokens come in pieces of these sizes, and the cache after the last."""
    pieces, begin = [], 0
    for size in sizes:
        end = begin + size
        with torch.no_grad():
            mask = inputs["attention_mask"][:, :end]
            outputs = model(
                input_ids=inputs["input_ids"][:, begin:end],
                attention_mask=mask,
                position_ids=positions_of(mask)[:, begin:],
                use_cache=True,
                **{CACHE: cache},
            )
        cache, begin = cache_of(outputs), end
        pieces.append(outputs.logits)
    assert begin == inputs["input_ids"].shape[1]
    return torch.cat(pieces, dim=1), cache


def linear_attention(
    config: AttentionConfig, *, causal: bool = False, heads: int = 2, head_dim: int = 4, seed: int = 0
) -> LinearAttention:
    """A layer's linear attention by itself, for rows of up to `POSITIONS` tokens where the config does not say."""
    config = dataclasses.replace(config, max_length=config.max_length or POSITIONS)
    return LinearAttention(
        config, num_heads=heads, head_dim=head_dim, causal=causal, seed=seed, softmax_heads=config.heads_of_layer(0)
    )


def trained(layer: LinearAttention, noise: float = 0.3, seed: int = 5) -> LinearAttention:
    """The layer with noise on what it learns: most of it starts as zeros or ones, which hide mistakes."""
    with_moments(layer)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return layer


def from_state(
    layer: LinearAttention, inputs: Iterable[Tensor], state: State | None = None, lengths: Tensor | None = None
) -> tuple[Tensor, State]:
    """Outputs of tokens that come after those of a state, which stays as it is, and the state after them."""
    state = None if state is None else state.map(torch.clone)
    return attend_causally(*inputs, layer.far_part, state, lengths, layer.settings())


def initial_state(layer: LinearAttention, key: Tensor, value: Tensor) -> State:
    """The state before the first token."""
    return empty_state(key, value, layer.far_part, layer.settings())


def in_chunks(layer: LinearAttention, inputs: list[Tensor], sizes: Iterable[int]) -> tuple[Tensor, State | None]:
    """Outputs of tokens that come in chunks of these sizes, and the state after the last."""
    state, outputs, begin = None, [], 0
    for size in sizes:
        out, state = from_state(layer, (x[:, :, begin : begin + size] for x in inputs), state)
        outputs.append(out)
        begin += size
    return torch.cat(outputs, dim=2), state


def run_python(
    code: str, *arguments: Path | str, cwd: Path, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh interpreter that sees neither this folder nor the user's settings."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cwd / "modules")}
    return subprocess.run(
        [python, "-I", "-c", code, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def qkv(
    length: int,
    *,
    batch: int = 2,
    heads: int = 2,
    dim: int = 4,
    seed: int = 0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Random queries, keys and values, (batch, heads, length, dim); `scale` is that of queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, batch, heads, length, dim, generator=generator)
    return [x.to(dtype) for x in (query * scale, key * scale, value)]


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """Exact attention, logits q.k, over the keys where `seen` (broadcastable to batch, length, length) is True."""
    logits = query @ key.transpose(-1, -2)
    if seen is not None:
        logits = logits.masked_fill(~seen[:, None], float("-inf"))
    return logits.softmax(-1) @ value


def assert_values_and_gradients_agree(
    fast: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: list[Tensor],
    parameters: Iterable[nn.Parameter] = (),
    *,
    valid: Tensor | None = None,
    tolerance: float = 2e-5,
) -> None:
    """`fast` on the inputs in float32 against `reference` on them in float64, and without gradients against both.

    `valid` (batch, length) says which positions are read: others may differ, and pass no gradient back.
    """
    parameters = list(parameters)
    results = []
    for function, dtype in ((fast, torch.float32), (reference, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        if valid is not None:
            out = out.masked_fill(~valid[:, None, :, None], 0.0)
        # a weight per output, so that no two errors cancel
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        gradients = torch.autograd.grad((out * weight).sum(), [*leaves, *parameters], allow_unused=True)
        # much is done in place where no gradient is asked for, but never in what the caller gave
        given = [x.detach().clone() for x in leaves]
        with torch.no_grad():
            alone = function(*given)
        assert all(map(torch.equal, given, leaves))
        results.append([out, *gradients, alone if valid is None else alone.masked_fill(~valid[:, None, :, None], 0.0)])
    for found, expected in zip(*results, strict=True):
        # unused is the same as a gradient of zero
        found, expected = (torch.zeros(()) if x is None else x for x in (found, expected))
        assert found.isfinite().all()
        torch.testing.assert_close(
            *torch.broadcast_tensors(found.double(), expected.double()), rtol=tolerance, atol=tolerance
        )
