"""LoRA by peft: low-rank adapters on the linear layers, with feature maps and projections saved beside them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..modeling.architectures import ARCHITECTURES
from ..modeling.modeling_linattn import MODEL_CLASSES, LinAttnPreTrainedModel
from .config import AdaptConfig


def add_adapter(model: LinAttnPreTrainedModel, config: AdaptConfig, drawn: Iterable[str] = ()) -> PeftModel:
    """The model in an adapter; the linear attention is copied into the adapter and trained there in full.

    Args:
        model: the model.
        config: the settings.
        drawn: parameters that no checkpoint had. The modules that are made of them alone are trained in full too, and
            saved with the adapter, which would not fit what another load draws.

    Raises:
        ValueError: the projections are shared by all layers, of which the adapter would make copies; or the output
            layer, which is the embedding too, is to have an adapter.
    """
    if getattr(model.attention_config, "sharing", None) == "layers":
        raise ValueError("lora_rank: sharing='layers' cannot go into an adapter; train the whole model.")
    heads = [name for name in ("classifier", "score", "qa_outputs") if hasattr(model, name)]
    in_full = list(dict.fromkeys([*heads, *_modules_of(model, set(drawn))]))
    # PEFT trains in full whatever ends in such a name, and fails where that has an adapter already
    matched = [name for name, _ in model.named_modules() if name.endswith(tuple(in_full))] if in_full else []
    options: dict[str, Any] = {
        "r": config.lora_rank,
        "lora_alpha": 2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": "all-linear" if config.lora_targets is None else config.lora_targets,
        "modules_to_save": ["linattn", *in_full],
        "exclude_modules": matched or None,
        "fan_in_fan_out": ARCHITECTURES[model.config.base_model_type].conv1d,
    }
    # half of each adapter is drawn: the same on every start
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        try:
            adapted = get_peft_model(model, LoraConfig(**options))
        except ValueError as error:
            linear = {
                name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))
            }
            raise ValueError(
                f"lora_targets={config.lora_targets!r}: linear layers of this model are {', '.join(sorted(linear))} "
                f"({error})"
            ) from error
    output = model.get_output_embeddings()
    if getattr(model.config, "tie_word_embeddings", False) and isinstance(output, BaseTunerLayer):
        raise ValueError(
            f"lora_targets={config.lora_targets!r}: the output layer is the embedding too, and cannot be merged."
        )
    return adapted


def _modules_of(model: nn.Module, parameters: set[str]) -> list[str]:
    """The largest modules all of whose parameters are in `parameters`."""
    largest: list[str] = []
    for name, module in model.named_modules():
        own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        if own and parameters.issuperset(own) and not any(name.startswith(f"{outer}.") for outer in largest):
            largest.append(name)
    return largest


def save_adapter(model: PeftModel, folder: str | Path) -> None:
    """Write an adapter that `AutoPeftModel` loads together with the model that it was put on."""
    model.save_pretrained(str(folder))
    inner: Any = model.get_base_model()
    for name, by_type in MODEL_CLASSES.items():
        if by_type.get(inner.config.base_model_type) is type(inner):
            # PEFT wrote the class itself, and refuses to import it from a package that it does not know
            config = PeftConfig.from_pretrained(str(folder))
            config.save_pretrained(
                str(folder), auto_mapping_dict={"base_model_class": name, "parent_library": "transformers"}
            )
            return


def merged(model: PeftModel) -> LinAttnPreTrainedModel:
    """The model itself again, with what the adapter learned."""
    return model.merge_and_unload()
