"""Tiny models of every family, their inputs, and the settings that the tests go over."""

import copy
import inspect
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

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, LinformerConfig, PerformerConfig, convert
from hf_linattn.modeling.architectures import FAMILIES
from hf_linattn.modeling.feature_maps import FEATURE_MAPS
from hf_linattn.modeling.modeling_linattn import MODEL_CLASSES
from hf_linattn.modeling.projections import PROJECTIONS, SHARING

POSITIONS = 64
VOCABULARY = 100
#: the families that read in both directions
ENCODERS = ("albert", "bert", "camembert", "distilbert", "electra", "ernie", "roberta", "xlm-roberta")
#: (family, auto class) of every head of theirs that can be converted
HEADS = [(family, auto) for auto, by_family in MODEL_CLASSES.items() for family in ENCODERS if family in by_family]

PURE: list[AttentionConfig] = [
    *(LinformerConfig(projection_length=8, projection=projection) for projection in PROJECTIONS),
    *(PerformerConfig(num_features=16, feature_map=feature_map) for feature_map in FEATURE_MAPS),
]
JOINED: list[AttentionConfig] = [
    LinformerConfig(projection_length=8, window_size=4, global_tokens=1),
    LinformerConfig(projection_length=8, projection="gaussian", window_size=4),
    LinformerConfig(projection_length=8, projection="max", window_size=4),
    LinformerConfig(projection_length=8, projection="conv", global_tokens=2),
    PerformerConfig(num_features=16, window_size=4, global_tokens=1),
    PerformerConfig(num_features=16, feature_map="trigonometric", window_size=4),
    PerformerConfig(num_features=16, feature_map="relu", global_tokens=2),
    PerformerConfig(num_features=16, window_size=4, global_tokens=1, far=False),
]
#: every way to attend, each once
METHODS = PURE + JOINED
#: one config each of what has its own code for sharing
SHARED = [LinformerConfig(projection_length=8, sharing=sharing) for sharing in SHARING]

#: the families whose tokens see earlier ones only
DECODERS = ("gpt2", "gpt_neox", "llama", "opt")
# (window_size, global_tokens)
_NEAR = ((0, 0), (4, 0), (0, 2), (6, 1))
#: every causal way to attend, each alone and joined with what is near
CAUSAL: list[AttentionConfig] = [
    *(
        LinformerConfig(projection_length=8, projection=projection, window_size=window, global_tokens=first)
        for projection in PROJECTIONS
        if projection != "gaussian"
        for window, first in _NEAR
    ),
    *(LinformerConfig(projection_length=8, sharing=sharing, window_size=4) for sharing in SHARING),
    *(
        PerformerConfig(num_features=16, feature_map=feature_map, window_size=window, global_tokens=first)
        for feature_map in FEATURE_MAPS
        for window, first in _NEAR
    ),
]
#: one config each of what a decoder has its own code for, for tests that go over much else
CAUSAL_FEW: list[AttentionConfig] = [
    LinformerConfig(projection_length=8),
    LinformerConfig(projection_length=8, projection="max", window_size=4, global_tokens=1),
    PerformerConfig(num_features=16),
    PerformerConfig(num_features=16, feature_map="learned", window_size=4, global_tokens=1),
    LinformerConfig(projection_length=8, window_size=4, layers=[0]),
    PerformerConfig(num_features=16, layers=[1]),
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


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """A config with two layers of four heads of eight; attention sharp enough for its approximations to differ."""
    offset = 2 if FAMILIES[family].positions_after_padding else 0
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": POSITIONS + offset,
        "pad_token_id": 1,
        "initializer_range": 0.2,
        **overrides,
    }
    if family == "distilbert":
        settings["hidden_dim"] = settings.pop("intermediate_size")
    if family in ("albert", "electra"):
        settings.setdefault("embedding_size", 16)
    if FAMILIES[family].causal:
        # no token ends a text, and no dropout: what the tests train is the attention
        settings = {"eos_token_id": None, "bos_token_id": 2, **settings}
        names = ("attn_pdrop", "embd_pdrop", "resid_pdrop") if family == "gpt2" else ("dropout", "attention_dropout")
        settings |= dict.fromkeys(names, 0.0)
    if family == "gpt2":
        settings["n_inner"] = settings.pop("intermediate_size")
    if family == "llama":
        settings.setdefault("num_key_value_heads", 2)
    if family == "opt":
        settings |= {"ffn_dim": settings.pop("intermediate_size"), "word_embed_proj_dim": settings["hidden_size"]}
    return getattr(transformers, f"{FAMILIES[family].prefix}Config")(**settings)


@cache
def _base_model(family: str, auto: str, overrides: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    torch.manual_seed(1)
    return getattr(transformers, auto).from_config(tiny_config(family, **dict(overrides))).eval()


def tiny_model(family: str = "bert", auto: str = "AutoModel", **overrides: Any) -> PreTrainedModel:
    """A random model of its own in eval mode; the same arguments give the same weights."""
    return copy.deepcopy(_base_model(family, auto, tuple(sorted(overrides.items()))))


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


@cache
def _converted(family: str, auto: str, config: str, options: tuple[tuple[str, Any], ...]) -> LinAttnPreTrainedModel:
    # the text of a settings object is the call that makes it
    settings = eval(config, {cls.__name__: cls for cls in (LinformerConfig, PerformerConfig)})
    return convert(tiny_model(family, auto), settings, **dict(options))


def converted_model(
    config: AttentionConfig, family: str = "bert", auto: str = "AutoModel", **options: Any
) -> LinAttnPreTrainedModel:
    """`convert(tiny_model(family, auto), config, **options)`, a model of its own."""
    return copy.deepcopy(_converted(family, auto, repr(config), tuple(sorted(options.items()))))


def as_trained(model: LinAttnPreTrainedModel) -> LinAttnPreTrainedModel:
    """The model with noise on what its methods learn: most of it starts as zeros or ones, which hide mistakes."""
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


def run_python(code: str, *arguments: Path | str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh interpreter that sees neither this folder nor the user's settings."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cwd / "modules")}
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def qkv(
    length: int, *, batch: int = 2, heads: int = 2, dim: int = 4, seed: int = 0, scale: float = 1.0
) -> list[Tensor]:
    """Random queries, keys and values, (batch, heads, length, dim), float32; `scale` is that of queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, batch, heads, length, dim, generator=generator)
    return [query * scale, key * scale, value]


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
    real: Tensor | None = None,
    tolerance: float = 2e-5,
) -> None:
    """`fast` on the inputs in float32 against `reference` on them in float64, and without gradients against both.

    `real` (batch, length) says which positions are read: others may differ, and pass no gradient back.
    """
    parameters = list(parameters)
    results = []
    for function, dtype in ((fast, torch.float32), (reference, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        if real is not None:
            out = out.masked_fill(~real[:, None, :, None], 0.0)
        # a weight per output, so that no two errors cancel
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        gradients = torch.autograd.grad((out * weight).sum(), [*leaves, *parameters], allow_unused=True)
        # much is done in place where no gradient is asked for, but never in what the caller gave
        given = [x.detach().clone() for x in leaves]
        with torch.no_grad():
            alone = function(*given)
        assert all(map(torch.equal, given, leaves))
        results.append([out, *gradients, alone if real is None else alone.masked_fill(~real[:, None, :, None], 0.0)])
    for found, expected in zip(*results, strict=True):
        # unused is the same as a gradient of zero
        found, expected = (torch.zeros(()) if x is None else x for x in (found, expected))
        assert found.isfinite().all()
        torch.testing.assert_close(
            *torch.broadcast_tensors(found.double(), expected.double()), rtol=tolerance, atol=tolerance
        )
