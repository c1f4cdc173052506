"""What every promise is tested of: derived from the registries of methods and of architectures."""

import dataclasses
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel
from hf_linattn.modeling.architectures import ARCHITECTURES
from hf_linattn.modeling.feature_maps import FEATURE_MAPS
from hf_linattn.modeling.methods import METHODS as REGISTRY
from hf_linattn.modeling.modeling_linattn import position_offset

from ... import helpers
from ...helpers import (
    CAUSAL,
    CAUSAL_FEW,
    METHODS,
    SHARED,
    SPLIT,
    as_trained,
    converted_model,
    small,
    with_moments,
)

#: the architectures on which every way to attend is tested; on the others it is a few
ENCODER, DECODER = "bert", "gpt2"
#: causal -> one architecture of each kind
FAMILIES = {False: helpers.ENCODERS, True: helpers.DECODERS}
#: the class of settings of every method
CLASSES = [method.config for method in REGISTRY.values()]
#: one config of each, with near keys
ONE_EACH = [small(config_class, window_size=4, global_tokens=1) for config_class in CLASSES]
#: of the rows that the promises are tested of, the shorter ones are exact
EXACT_ROWS = [dataclasses.replace(config, exact_length=25) for config in ONE_EACH]
#: every way of an encoder to attend
WAYS = [
    *METHODS,
    *(config for config in SHARED if config not in METHODS),
    *SPLIT,
    *EXACT_ROWS,
    *(dataclasses.replace(config, global_queries=False) for config in ONE_EACH),
]


def architectures(*, causal: bool) -> tuple[str, ...]:
    """One of each kind."""
    return FAMILIES[causal]


def _cases(
    main: str, ways: list[AttentionConfig], few: list[AttentionConfig], *, causal: bool
) -> list[tuple[str, AttentionConfig]]:
    others = [(name, config) for name in architectures(causal=causal) if name != main for config in few]
    return [*((main, config) for config in ways), *others]


#: (architecture, settings)
ENCODERS = _cases(ENCODER, WAYS, ONE_EACH, causal=False)
DECODERS = _cases(DECODER, [*CAUSAL, *SPLIT, *(c for c in CAUSAL_FEW if c.layers)], CAUSAL_FEW, causal=True)
CASES = [*ENCODERS, *DECODERS]

#: half precision and autocast take the same code whatever the settings are: every way meets each dtype once
DTYPES: list[torch.dtype | str] = [torch.float32, torch.bfloat16, torch.float16, "autocast"]
#: a few roundings of the dtype, as hidden states of size 1 to 3 go through two layers
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2, "autocast": 6e-2}


def is_causal(architecture: str) -> bool:
    return ARCHITECTURES[architecture].causal


def is_signed(config: AttentionConfig) -> bool:
    """Positive and negative features cancel, which multiplies rounding."""
    name = getattr(config, "feature_map", None)
    return name is not None and FEATURE_MAPS[name].signed


def make_model(architecture: str, config: AttentionConfig, **options: Any) -> LinAttnPreTrainedModel:
    """A converted body, or a causal language model, as after training."""
    auto = "AutoModelForCausalLM" if is_causal(architecture) else "AutoModel"
    model = converted_model(config, architecture, auto, **options)
    return as_trained(model) if is_causal(architecture) else with_moments(model)


def in_dtype(
    model: LinAttnPreTrainedModel, dtype: torch.dtype | str
) -> tuple[LinAttnPreTrainedModel, AbstractContextManager[Any]]:
    """The model in the dtype, or in float32 with the context of bfloat16 autocast."""
    if dtype == "autocast":
        return model.float(), torch.autocast("cpu", dtype=torch.bfloat16)
    return model.to(dtype), nullcontext()


def takes_positions(model: LinAttnPreTrainedModel) -> bool:
    """Whether position ids can be given: without them, absolute positions count the padding before a row too."""
    return "position_ids" in inspect.signature(model.forward).parameters


def output_of(model: LinAttnPreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Last hidden states or logits, (batch, length, _), with positions counted over valid tokens where it can be."""
    if mask is not None and takes_positions(model):
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0) + position_offset(model.config)
    return model(input_ids=input_ids, attention_mask=mask, **options)[0]
