"""The table of supported architectures: what differs between them, as far as a conversion is concerned."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import transformers
from packaging.version import Version


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of Transformers whose attention goes through the attention interface.

    Attributes:
        model_type: its `model_type` in Transformers.
        prefix: the start of its class names.
        attention: name of its self-attention class, one instance of which serves one layer.
        causal: a decoder: a token sees itself and earlier ones.
        position_table: where the learned position embeddings stand in the base model; None for rotary positions.
        positions_after_padding: position ids start at pad_token_id + 1, and `max_position_embeddings` counts
            the rows before them.
        extra_rows: rows of the table before position 0 that `max_position_embeddings` does not count.
        shares_layers: one attention module serves several layers.
        body: the part of the base model that is called with the inputs, where it is not the base model.
        other_heads: classes that no auto class loads.
        query_key: names of the modules with the weights of queries and keys; some have values in the same matrix.
        embeddings: names of the modules that embed tokens and positions.
        conv1d: linear layers are Transformers' `Conv1D`, which keeps its matrix the other way round.
        since: the first version of Transformers in which its attention goes through the attention interface.
    """

    model_type: str
    prefix: str
    attention: str
    causal: bool = False
    position_table: str | None = "embeddings.position_embeddings.weight"
    positions_after_padding: bool = False
    extra_rows: int = 0
    shares_layers: bool = False
    body: str = ""
    other_heads: tuple[str, ...] = ()
    query_key: tuple[str, ...] = ("query", "key")
    embeddings: tuple[str, ...] = ("embeddings",)
    conv1d: bool = False
    since: str = "5.8.0"

    @property
    def available(self) -> bool:
        """Whether the installed Transformers has it."""
        new_enough = Version(transformers.__version__) >= Version(self.since)
        return new_enough and f"{self.prefix}Config" in _names()


@cache
def _names() -> frozenset[str]:
    """What Transformers has, by name, which imports none of it; the list takes a while to make."""
    return frozenset(dir(transformers))


def _like_llama(model_type: str, prefix: str, **fields: Any) -> Architecture:
    """A decoder with rotary positions whose modules have Llama's names; `fields` are those that differ."""
    names = {"attention": f"{prefix}Attention", "query_key": ("q_proj", "k_proj"), "embeddings": ("embed_tokens",)}
    return Architecture(model_type=model_type, prefix=prefix, causal=True, position_table=None, **{**names, **fields})


def _rotary_encoder(model_type: str, prefix: str, **fields: Any) -> Architecture:
    """An encoder without a table of positions; `fields` are those that differ from the first of them."""
    names = {"attention": f"{prefix}Attention", "query_key": ("q_proj", "k_proj")}
    return Architecture(model_type=model_type, prefix=prefix, position_table=None, **{**names, **fields})


_ARCHITECTURES = (
    Architecture(model_type="albert", prefix="Albert", attention="AlbertAttention", shares_layers=True),
    Architecture(model_type="bert", prefix="Bert", attention="BertSelfAttention"),
    Architecture(
        model_type="camembert", prefix="Camembert", attention="CamembertSelfAttention", positions_after_padding=True
    ),
    Architecture(
        model_type="distilbert", prefix="DistilBert", attention="DistilBertSelfAttention", query_key=("q_lin", "k_lin")
    ),
    Architecture(model_type="electra", prefix="Electra", attention="ElectraSelfAttention"),
    Architecture(model_type="ernie", prefix="Ernie", attention="ErnieSelfAttention"),
    Architecture(model_type="esm", prefix="Esm", attention="EsmSelfAttention", positions_after_padding=True),
    _rotary_encoder("eurobert", "EuroBert", embeddings=("embed_tokens",)),
    _like_llama("gemma", "Gemma"),
    _like_llama("gemma2", "Gemma2"),
    _like_llama("gemma3_text", "Gemma3Text", attention="Gemma3Attention"),
    Architecture(
        model_type="gpt2",
        prefix="GPT2",
        attention="GPT2Attention",
        causal=True,
        position_table="wpe.weight",
        other_heads=("GPT2DoubleHeadsModel",),
        query_key=("c_attn",),
        embeddings=("wte", "wpe"),
        conv1d=True,
    ),
    Architecture(
        model_type="gpt_neox",
        prefix="GPTNeoX",
        attention="GPTNeoXAttention",
        causal=True,
        position_table=None,
        query_key=("query_key_value",),
        embeddings=("embed_in",),
    ),
    Architecture(
        model_type="gptj",
        prefix="GPTJ",
        attention="GPTJAttention",
        causal=True,
        position_table=None,
        query_key=("q_proj", "k_proj"),
        embeddings=("wte",),
        since="5.24.0",
    ),
    _like_llama("granite", "Granite"),
    _rotary_encoder("gte", "Gte", since="5.18.0"),
    _rotary_encoder("jina_embeddings_v3", "JinaEmbeddingsV3"),
    _like_llama("llama", "Llama"),
    _like_llama("mistral", "Mistral"),
    Architecture(model_type="mobilebert", prefix="MobileBert", attention="MobileBertSelfAttention"),
    _rotary_encoder("modernbert", "ModernBert", query_key=("Wqkv",)),
    _rotary_encoder("nomic_bert", "NomicBert"),
    _like_llama("olmo2", "Olmo2"),
    Architecture(
        model_type="opt",
        prefix="OPT",
        attention="OPTAttention",
        causal=True,
        position_table="decoder.embed_positions.weight",
        extra_rows=2,
        body="decoder",
        query_key=("q_proj", "k_proj"),
        embeddings=("embed_tokens", "embed_positions"),
    ),
    _like_llama("phi3", "Phi3", query_key=("qkv_proj",)),
    _like_llama("qwen2", "Qwen2"),
    _like_llama("qwen3", "Qwen3"),
    Architecture(
        model_type="roberta", prefix="Roberta", attention="RobertaSelfAttention", positions_after_padding=True
    ),
    Architecture(
        model_type="roberta-prelayernorm",
        prefix="RobertaPreLayerNorm",
        attention="RobertaPreLayerNormSelfAttention",
        positions_after_padding=True,
    ),
    _like_llama("smollm3", "SmolLM3"),
    _like_llama("starcoder2", "Starcoder2"),
    Architecture(
        model_type="xlm-roberta", prefix="XLMRoberta", attention="XLMRobertaSelfAttention", positions_after_padding=True
    ),
    Architecture(
        model_type="xlm-roberta-xl",
        prefix="XLMRobertaXL",
        attention="XLMRobertaXLSelfAttention",
        positions_after_padding=True,
    ),
)

#: the rows that come with the package: code that travels with a checkpoint knows these
BUILT_IN = frozenset(row.model_type for row in _ARCHITECTURES)
#: model_type in Transformers -> Architecture
ARCHITECTURES = {row.model_type: row for row in _ARCHITECTURES if row.available}
#: the same of those that the installed Transformers lacks
UNAVAILABLE = {row.model_type: row for row in _ARCHITECTURES if not row.available}
#: model_type -> why it is not supported, where the reason is not that nobody wrote a row
REFUSED = {
    **dict.fromkeys(
        ("deberta", "deberta-v2"),
        "its disentangled attention adds products of contents and relative positions to the logits, which no summary "
        "of keys has",
    ),
    "mpnet": "its attention adds a relative position bias to the logits, which no summary of keys has",
}

# What the `model_type` of every converted checkpoint starts with.
MODEL_TYPE_PREFIX = "linattn_"
