"""The table of supported architectures: what differs between them, as far as a conversion is concerned."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of Transformers whose attention goes through the attention interface.

    Attributes:
        model_type: its `model_type` in Transformers.
        prefix: the start of its class names.
        attention: name of its self-attention class, one instance of which serves one layer.
        position_table: where the learned position embeddings stand in the base model.
        positions_after_padding: position ids start at pad_token_id + 1, not at 0.
        shares_layers: one attention module serves several layers.
    """

    model_type: str
    prefix: str
    attention: str
    position_table: str = "embeddings.position_embeddings.weight"
    positions_after_padding: bool = False
    shares_layers: bool = False


_FAMILIES = (
    Family(model_type="albert", prefix="Albert", attention="AlbertAttention", shares_layers=True),
    Family(model_type="bert", prefix="Bert", attention="BertSelfAttention"),
    Family(
        model_type="camembert", prefix="Camembert", attention="CamembertSelfAttention", positions_after_padding=True
    ),
    Family(model_type="distilbert", prefix="DistilBert", attention="DistilBertSelfAttention"),
    Family(model_type="electra", prefix="Electra", attention="ElectraSelfAttention"),
    Family(model_type="ernie", prefix="Ernie", attention="ErnieSelfAttention"),
    Family(model_type="roberta", prefix="Roberta", attention="RobertaSelfAttention", positions_after_padding=True),
    Family(
        model_type="xlm-roberta",
        prefix="XLMRoberta",
        attention="XLMRobertaSelfAttention",
        positions_after_padding=True,
    ),
)

#: model_type in Transformers -> Family
FAMILIES = {family.model_type: family for family in _FAMILIES}

# What the `model_type` of every converted checkpoint starts with.
MODEL_TYPE_PREFIX = "linattn_"
