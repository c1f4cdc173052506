"""The table of methods: what each is called, its settings, and its far part in encoders and in decoders."""

from collections.abc import Callable
from dataclasses import dataclass

from .configuration_linattn import AttentionConfig, LinformerConfig, PerformerConfig
from .far_linformer import CausalLinformerFarPart, LinformerFarPart
from .far_part import FarPart
from .far_performer import PerformerFarPart


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


#: name in `AttentionConfig.method` -> Method
METHODS: dict[str, Method] = {
    "linformer": Method(
        label="Linformer",
        paper="Wang et al. 2020, arXiv:2006.04768",
        config=LinformerConfig,
        encoder=LinformerFarPart,
        decoder=CausalLinformerFarPart,
    ),
    "performer": Method(
        label="Performer",
        paper="Choromanski et al. 2021, arXiv:2009.14794",
        config=PerformerConfig,
        encoder=PerformerFarPart,
        decoder=PerformerFarPart,
    ),
}
