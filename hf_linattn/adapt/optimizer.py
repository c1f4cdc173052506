"""The optimizer: which parameters a stage trains, in which groups, at which learning rates, on which schedule."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..modeling.architectures import ARCHITECTURES
from .config import AdaptConfig

#: What the methods learn, query and key weights, and all other weights.
GROUPS = ("features", "projections", "query_key", "rest")


def _is_in(parameter: str, modules: Iterable[str]) -> bool:
    """Whether the name of a parameter has one of these modules in it."""
    return not set(parameter.split(".")[:-1]).isdisjoint(modules)


def _query_key() -> set[str]:
    # not once at import: `register_architecture` adds rows
    return {name for row in ARCHITECTURES.values() for name in row.query_key}


def _embeddings() -> set[str]:
    return {name for row in ARCHITECTURES.values() for name in row.embeddings}


def group_of(name: str) -> str:
    """The group of a parameter, by its name."""
    if ".linattn." in name:
        return "features" if ".feature_map." in name else "projections"
    return "query_key" if _is_in(name, _query_key()) else "rest"


def learning_rates(config: AdaptConfig, stage: str) -> dict[str, float]:
    """Group -> peak learning rate; a group without one, or with 0, is not trained.

    The settings are complete (`AdaptConfig.for_model`).
    """
    if stage == "transfer":
        return {
            "features": config.transfer_feature_lr,
            "projections": config.transfer_projection_lr,
            "query_key": config.transfer_query_key_lr,
        }
    assert config.query_key_lr is not None and config.learning_rate is not None
    return {
        "features": config.feature_lr,
        "projections": config.projection_lr,
        "query_key": config.query_key_lr,
        "rest": config.learning_rate,
    }


def choose_trained(model: nn.Module, config: AdaptConfig, stage: str) -> None:
    """Set `requires_grad` of every parameter for the stage.

    Raises:
        ValueError: nothing is left to train.
    """
    rates = learning_rates(config, stage)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(rates.get(group_of(name), 0.0) > 0 and _may_train(name, config))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"The stage {stage!r} has nothing to train: the learning rates are {rates}, and feature maps learn with "
            "feature_map='learned' only, projections with projection='learned' or 'conv'."
        )


def _may_train(name: str, config: AdaptConfig) -> bool:
    if not config.train_embeddings and _is_in(name, _embeddings()):
        return False
    if not config.lora_rank:
        return True
    # PEFT trains a copy of these modules, and leaves the original as it is
    own = ".linattn." in name and ".original_module." not in name
    return own or ".lora_" in name or ".modules_to_save." in name


def trained_by_group(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """The groups that have trained parameters, each with their names."""
    for group in GROUPS:
        members = [(name, p) for name, p in model.named_parameters() if p.requires_grad and group_of(name) == group]
        if members:
            yield group, members


def make_optimizer(model: nn.Module, config: AdaptConfig, stage: str) -> torch.optim.AdamW:
    """AdamW over the trained parameters; weight decay on matrices only.

    Each of its groups has "group", one of `GROUPS`, and "peak", the learning rate at the top of the schedule.
    """
    rates = learning_rates(config, stage)
    groups: list[dict[str, Any]] = []
    for name, members in trained_by_group(model):
        matrices = [p for _, p in members if p.ndim > 1]
        others = [p for _, p in members if p.ndim <= 1]
        for parameters, decay in ((matrices, config.weight_decay), (others, 0.0)):
            if parameters:
                rate = rates[name]
                groups.append({"params": parameters, "group": name, "lr": rate, "peak": rate, "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=(0.9, config.adam_beta2))


def schedule(step: int, steps: int, warmup_steps: int) -> float:
    """The learning rate as a share of the peak: linear warm-up, then half a cosine down to 0."""
    warmup = min(warmup_steps, steps)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def set_learning_rates(optimizer: Any, share: float) -> None:
    """Set each group to `share` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share


def current_rates(optimizer: Any) -> dict[str, float]:
    """The learning rate of each group of parameters, for the log."""
    return {f"learning_rate/{group['group']}": group["lr"] for group in optimizer.param_groups}
