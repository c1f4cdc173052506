"""The table of supported architectures: what differs between them, as far as a conversion is concerned."""

from dataclasses import dataclass


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
        model_type="llama",
        prefix="Llama",
        attention="LlamaAttention",
        causal=True,
        position_table=None,
        query_key=("q_proj", "k_proj"),
        embeddings=("embed_tokens",),
    ),
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
    Architecture(
        model_type="roberta", prefix="Roberta", attention="RobertaSelfAttention", positions_after_padding=True
    ),
    Architecture(
        model_type="xlm-roberta", prefix="XLMRoberta", attention="XLMRobertaSelfAttention", positions_after_padding=True
    ),
)

#: model_type in Transformers -> Architecture
ARCHITECTURES = {architecture.model_type: architecture for architecture in _ARCHITECTURES}

# What the `model_type` of every converted checkpoint starts with.
MODEL_TYPE_PREFIX = "linattn_"
