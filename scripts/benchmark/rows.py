"""What the benchmark compares: softmax, the limit, this package's methods, and other packages and models.

A row is made for a `Shape`. As attention alone it is a function of queries, keys and values (batch, heads, length,
head_dim), laid out as models lay them out, (batch, length, heads, head_dim) in memory. As a model it is a module that
takes `input_ids` (batch, length), as a decoder a causal language model of GPT-2's kind. Weights are random: time and
memory do not depend on them.

Of hf_linattn only the public names are used, so that older checkouts can be measured too (`--against`).
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    FNetConfig,
    FNetModel,
    GPT2Config,
    GPT2LMHeadModel,
    LongformerConfig,
    LongformerModel,
    NystromformerConfig,
    NystromformerModel,
    PreTrainedModel,
)

from hf_linattn import LinformerConfig, PerformerConfig, convert

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
SOFTMAX, LIMIT, CAUSAL_SOFTMAX = "softmax (SDPA)", "return v (the limit)", "causal softmax (SDPA)"
_CAUSAL = "causal "
_CONFIGS = {config.__name__: config for config in (LinformerConfig, PerformerConfig)}


@dataclass(frozen=True)
class Shape:
    """BERT-base's, or a smaller one."""

    length: int
    layers: int = 12
    heads: int = 12
    head_dim: int = 64
    vocabulary: int = 30522

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Row:
    """One line of the tables.

    Attributes:
        name: what the tables call it.
        attention: makes the attention alone, or None.
        model: makes the whole model, or None.
        decoder: makes the whole decoder with room for `length` tokens, or None.
        config: the call that makes the settings of hf_linattn, by which another checkout of it makes the same row.
        causal: whether a query sees earlier tokens only, so that causal SDPA is what it is compared with.
        package: what must be installed for it.
    """

    name: str
    attention: Callable[[Shape], Attention] | None = None
    model: Callable[[Shape], nn.Module] | None = None
    decoder: Callable[[Shape], PreTrainedModel] | None = None
    config: str | None = None
    causal: bool = False
    package: str | None = None

    @property
    def missing(self) -> bool:
        """Whether the package that it needs is not installed."""
        return self.package is not None and importlib.util.find_spec(self.package) is None


def _return_values(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return value.transpose(1, 2).contiguous(), None


AttentionInterface.register("benchmark_limit", _return_values)
AttentionMaskInterface.register("benchmark_limit", lambda *_, **__: None)


def _settings(shape: Shape) -> dict[str, Any]:
    """The size of a model, as all configs of the BERT kind call it."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": 4 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        # some models use a few positions for themselves
        "max_position_embeddings": shape.length + 8,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _bert(shape: Shape, implementation: str = "sdpa") -> nn.Module:
    config = BertConfig(**_settings(replace(shape, length=shape.length - 8)), attn_implementation=implementation)
    return BertModel(config)


def _gpt2(shape: Shape) -> PreTrainedModel:
    # no dropout: with it, SDPA on a CPU forms the whole matrix of probabilities
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    size = {"n_layer": shape.layers, "n_head": shape.heads, "n_embd": shape.hidden, "n_positions": shape.length}
    return GPT2LMHeadModel(GPT2Config(vocab_size=shape.vocabulary, **size, **dropout))


def _converted(base: Callable[[Shape], nn.Module], config: str, shape: Shape) -> Any:
    settings = eval(config, dict(_CONFIGS))
    if hasattr(settings, "exact_length"):
        # what is measured is linear attention, at every length
        settings.exact_length = 0
    return convert(base(shape), settings, max_length=shape.length)


def _model(model_class: type[nn.Module], config_class: type, shape: Shape, **options: Any) -> nn.Module:
    settings = _settings(shape) | options
    return model_class(config_class(**settings))


def _linear(config: str, causal: bool, shape: Shape) -> Attention:
    """The attention under the one layer of a converted model."""
    model = _converted(_gpt2 if causal else _bert, config, replace(shape, layers=1, vocabulary=8))
    linattn: Any = next(module for name, module in model.named_modules() if name.rpartition(".")[2] == "linattn")
    # causal attention takes a cache after the lengths; older checkouts have no default for it
    nothing = (None, None) if "cache" in inspect.signature(linattn.forward).parameters else (None,)
    scale = shape.head_dim**-0.5
    return _WithParameters(linattn, lambda q, k, v: linattn(q, k, v, *nothing, scale=scale))


class _WithParameters(nn.Module):
    """A function of queries, keys and values, and the module whose parameters it uses."""

    def __init__(self, module: nn.Module, function: Attention) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.function(query, key, value)


def _ours(name: str, config: str) -> list[Row]:
    """An encoder's row, and a decoder's."""
    return [
        Row(name, partial(_linear, config, False), model=partial(_converted, _bert, config), config=config),
        Row(
            f"{_CAUSAL}{name}",
            partial(_linear, config, True),
            decoder=partial(_converted, _gpt2, config),
            config=config,
            causal=True,
        ),
    ]


def _encoder(name: str, config: str) -> list[Row]:
    return _ours(name, config)[:1]


def _softmax(causal: bool, shape: Shape) -> Attention:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _performer_pytorch(causal: bool, shape: Shape) -> Attention:
    from performer_pytorch import FastAttention

    return FastAttention(dim_heads=shape.head_dim, nb_features=128, causal=causal)


def _linear_attention_transformer(causal: bool, shape: Shape) -> Attention:
    from linear_attention_transformer import linear_attention_transformer as package

    return package.causal_linear_attn if causal else package.linear_attn


def _merged(x: Tensor) -> Tensor:
    """(batch, heads, length, dim) -> (batch, length, heads * dim), without a copy for the layout of models."""
    return x.transpose(1, 2).flatten(2)


def _linformer(shape: Shape) -> Attention:
    from linformer import LinformerSelfAttention

    module = LinformerSelfAttention(shape.hidden, shape.length, k=256, heads=shape.heads, dim_head=shape.head_dim)
    # the attention alone: queries, keys and values are what goes in
    module.to_q, module.to_k, module.to_v, module.to_out = (nn.Identity() for _ in range(4))
    return _WithParameters(module, lambda q, k, v: module(_merged(q)))


def _nystrom(shape: Shape) -> Attention:
    from nystrom_attention import NystromAttention

    module = NystromAttention(
        shape.hidden, dim_head=shape.head_dim, heads=shape.heads, num_landmarks=64, residual=False
    )
    module.to_qkv, module.to_out = _Thrice(), nn.Identity()
    return _WithParameters(module, lambda q, k, v: module(_merged(q)))


class _Thrice(nn.Module):
    """In place of a projection to queries, keys and values, which `chunk` then takes apart: nothing is copied."""

    class _Parts(tuple):
        def chunk(self, *_: Any, **__: Any) -> Any:
            return self

    def forward(self, x: Tensor) -> Any:
        return self._Parts((x, x, x))


ROWS = [
    Row(SOFTMAX, partial(_softmax, False), _bert),
    Row(LIMIT, lambda shape: lambda q, k, v: v.clone(), partial(_bert, implementation="benchmark_limit")),
    Row(CAUSAL_SOFTMAX, partial(_softmax, True), decoder=_gpt2, causal=True),
    *_ours("Linformer, k=256", "LinformerConfig(projection='learned', projection_length=256)"),
    *_ours("Performer, m=128", "PerformerConfig(num_features=128)"),
    *_ours(
        "window 64 + first token + Linformer, k=64",
        "LinformerConfig(projection='learned', projection_length=64, window_size=64, global_tokens=1)",
    ),
    *_ours(
        "window 64 + first token + 64 segment means",
        "LinformerConfig(projection_length=64, window_size=64, global_tokens=1, projection='mean')",
    ),
    *_ours(
        "window 64 + first token + Performer, m=128",
        "PerformerConfig(num_features=128, window_size=64, global_tokens=1)",
    ),
    *_ours("64 clusters", "LinformerConfig(projection='cluster', projection_length=64)"),
    *_ours("256 clusters", "LinformerConfig(projection='cluster', projection_length=256)"),
    *_ours(
        "window 64 + first token + 64 clusters",
        "LinformerConfig(projection='cluster', projection_length=64, window_size=64, global_tokens=1)",
    ),
    *_encoder(
        "window 64 + first token + 128 clusters",
        "LinformerConfig(projection='cluster', projection_length=128, window_size=64, global_tokens=1)",
    ),
    *_encoder(
        "window 64 + first token + 64 clusters + 128 selected tokens",
        "LinformerConfig(projection='cluster', projection_length=64, window_size=64, global_tokens=1, "
        "selected_tokens=128)",
    ),
    *_encoder("Performer, row moments, m=128", "PerformerConfig(num_features=128, init='row_moments')"),
    Row("performer-pytorch, m=128", partial(_performer_pytorch, False), package="performer_pytorch"),
    Row("linformer, k=256", _linformer, package="linformer"),
    Row(
        "linear-attention-transformer",
        partial(_linear_attention_transformer, False),
        package="linear_attention_transformer",
    ),
    Row("nystrom-attention, 64 landmarks", _nystrom, package="nystrom_attention"),
    Row("causal performer-pytorch, m=128", partial(_performer_pytorch, True), causal=True, package="performer_pytorch"),
    Row(
        "causal linear-attention-transformer",
        partial(_linear_attention_transformer, True),
        causal=True,
        package="linear_attention_transformer",
    ),
    Row(
        "Longformer, window 192",
        # `attention_window` counts both sides: as many keys as the window of 64 and its neighbours
        model=lambda shape: _model(LongformerModel, LongformerConfig, shape, attention_window=192),
    ),
    Row("BigBird, blocks of 64", model=lambda shape: _model(BigBirdModel, BigBirdConfig, shape, block_size=64)),
    Row(
        "Nystromformer, 64 landmarks",
        model=lambda shape: _model(
            NystromformerModel, NystromformerConfig, shape, num_landmarks=64, segment_means_seq_len=shape.length
        ),
    ),
    Row("FNet", model=lambda shape: _model(FNetModel, FNetConfig, shape)),
]
BY_NAME = {row.name: row for row in ROWS}


def row_named(name: str) -> Row:
    """A row of the list, or of a config such as `PerformerConfig(num_features=64)`; of a decoder "causal " goes before.

    Raises:
        ValueError: neither.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    config = name.removeprefix(_CAUSAL)
    if config.partition("(")[0] not in _CONFIGS:
        allowed = ", ".join(map(repr, BY_NAME))
        raise ValueError(f"{name!r} must be the call of {' or '.join(_CONFIGS)}, or one of {allowed}.")
    return next(row for row in _ours(config, config) if row.name == name)
