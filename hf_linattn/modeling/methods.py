"""The table of methods: what each is called, its settings, and its far part in encoders and in decoders."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .configuration_linattn import AttentionConfig, LinformerConfig, PerformerConfig
from .far_clusters import CausalClusterFarPart, ClusterFarPart
from .far_kept_clusters import CausalKeptClusterFarPart
from .far_linformer import CausalLinformerFarPart, LinformerFarPart
from .far_part import FarPart
from .far_performer import CausalPerformerFarPart, PerformerFarPart


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of linear attention.

    Attributes:
        label: its name in cards and reports.
        paper: where it comes from.
        config: the class of its settings, whose `method` is its name.
        encoder, decoder: what makes its far part, called with the settings of a layer and, by keyword, num_heads,
            head_dim and seed.
    """

    label: str
    paper: str
    config: type[AttentionConfig]
    encoder: Callable[..., FarPart]
    decoder: Callable[..., FarPart]


def _linformer_encoder(config: Any, **shape: int) -> FarPart:
    return (ClusterFarPart if config.projection == "cluster" else LinformerFarPart)(config, **shape)


def _linformer_decoder(config: Any, **shape: int) -> FarPart:
    if config.projection != "cluster":
        return CausalLinformerFarPart(config, **shape)
    return (CausalKeptClusterFarPart if config.selected_tokens else CausalClusterFarPart)(config, **shape)


#: name in `AttentionConfig.method` -> Method
METHODS: dict[str, Method] = {
    "linformer": Method(
        label="Linformer",
        paper="Wang et al. 2020, arXiv:2006.04768",
        config=LinformerConfig,
        encoder=_linformer_encoder,
        decoder=_linformer_decoder,
    ),
    "performer": Method(
        label="Performer",
        paper="Choromanski et al. 2021, arXiv:2009.14794",
        config=PerformerConfig,
        encoder=PerformerFarPart,
        decoder=CausalPerformerFarPart,
    ),
}
