"""LoRA by peft: low-rank adapters on the linear layers, with feature maps and projections saved beside them."""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from ..modeling.modeling_linattn import LinAttnPreTrainedModel
from .config import AdaptConfig


def add_adapter(model: LinAttnPreTrainedModel, config: AdaptConfig) -> PeftModel:
    """The model in an adapter; the linear attention is copied into the adapter and trained there in full.

    Raises:
        ValueError: the projections are shared by all layers, of which the adapter would make copies.
    """
    if getattr(model.attention_config, "sharing", None) == "layers":
        raise ValueError("lora_rank: sharing='layers' cannot go into an adapter; train the whole model.")
    head = [name for name in ("classifier", "score", "qa_outputs") if hasattr(model, name)]
    options: dict[str, Any] = {
        "r": config.lora_rank,
        "lora_alpha": 2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": "all-linear" if config.lora_targets is None else config.lora_targets,
        "modules_to_save": ["linattn", *head],
        # Conv1D keeps its matrix the other way round
        "fan_in_fan_out": model.config.base_model_type == "gpt2",
    }
    # half of each adapter is drawn: the same on every start
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        return get_peft_model(model, LoraConfig(**options))


def merged(model: PeftModel) -> LinAttnPreTrainedModel:
    """The model itself again, with what the adapter learned."""
    return model.merge_and_unload()
