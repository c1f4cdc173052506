"""Tiny models of every family, their inputs, and the settings that the tests go over."""

import copy
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import BertTokenizerFast, PreTrainedConfig, PreTrainedModel

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel, LinformerConfig, PerformerConfig, convert
from hf_linattn.modeling.families import FAMILIES
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
    """`fast` on the inputs in float32 against `reference` on them in float64.

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
        results.append([out, *gradients])
    for found, expected in zip(*results, strict=True):
        # unused is the same as a gradient of zero
        found, expected = (torch.zeros(()) if x is None else x for x in (found, expected))
        assert found.isfinite().all()
        torch.testing.assert_close(
            *torch.broadcast_tensors(found.double(), expected.double()), rtol=tolerance, atol=tolerance
        )
