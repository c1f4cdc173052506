"""Parameter groups: what the methods learn, query and key weights, and the rest, each with its learning rate."""

import re
from collections.abc import Iterator

from torch import nn

from .config import AdaptConfig

GROUPS = ("features", "projections", "query_key", "rest")

# What the architectures call them; some have queries, keys and values in one matrix.
_QUERY_KEY = re.compile(r"\.(query|key|q_lin|k_lin|q_proj|k_proj|c_attn|query_key_value)\.")
_EMBEDDINGS = re.compile(r"(^|\.)(embeddings|wte|wpe|embed_tokens|embed_positions|embed_in)\.")


def group_of(name: str) -> str:
    """The group of a parameter, by its name."""
    if ".linattn." in name:
        return "features" if ".feature_map." in name else "projections"
    return "query_key" if _QUERY_KEY.search(name) else "rest"


def learning_rates(config: AdaptConfig, stage: str) -> dict[str, float]:
    """Group -> learning rate; what has none, or 0, is not trained."""
    if stage == "transfer":
        return {
            "features": config.transfer_feature_lr,
            "projections": config.transfer_projection_lr,
            "query_key": config.transfer_query_key_lr,
        }
    return {
        "features": config.feature_lr,
        "projections": config.projection_lr,
        "query_key": config.query_key_lr,
        "rest": config.learning_rate,
    }


def choose_trained(model: nn.Module, config: AdaptConfig, stage: str) -> None:
    """Set `requires_grad` of every parameter as the stage wants it.

    Raises:
        ValueError: nothing is left to train.
    """
    rates = learning_rates(config, stage)
    for name, parameter in model.named_parameters():
        wanted = rates.get(group_of(name), 0.0) > 0
        if not config.train_embeddings and _EMBEDDINGS.search(name):
            wanted = False
        if config.lora_rank:
            # of the model itself, what the adapter replaces or stands beside is never trained
            own = ".linattn." in name and ".original_module." not in name
            wanted = wanted and (own or ".lora_" in name or ".modules_to_save." in name)
        parameter.requires_grad_(wanted)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"The stage {stage!r} has nothing to train: the learning rates are {rates}, and feature maps learn with "
            "feature_map='learned' only, projections with projection='learned' or 'conv'."
        )


def trained_by_group(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """The groups that have trained parameters, each with their names."""
    for group in GROUPS:
        members = [(name, p) for name, p in model.named_parameters() if p.requires_grad and group_of(name) == group]
        if members:
            yield group, members
