"""Weights and Adam's moments of a model that DeepSpeed trains (ZeRO-1 and ZeRO-2), whole, out of its partitions.

DeepSpeed keeps float32 weights and the optimizer's tensors in flat partitions, one for each process, and hides them
behind functions of each parameter (`deepspeed.utils`), which all processes must call together. Nothing of DeepSpeed
is imported before it is used.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# what Adam keeps for each weight; the number of steps is one for all
_MOMENTS, _STEP = ("exp_avg", "exp_avg_sq"), "step"


def partitioned(parameter: Tensor) -> bool:
    """Whether DeepSpeed has this parameter's float32 weights in its partitions."""
    return hasattr(parameter, "_hp_mapping")


def weights(parameter: Tensor) -> Tensor:
    """The float32 weights, of which the parameter has a copy in the precision of the training."""
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter).cpu()


def set_weights(parameter: nn.Parameter, value: Tensor) -> None:
    """The inverse of `weights`."""
    from deepspeed.utils import safe_set_full_fp32_param

    safe_set_full_fp32_param(parameter, value.to(parameter.device))


def optimizer_state(optimizer: Any, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """Adam's tensors as <name of the parameter>|<name>; none before the first step."""
    from deepspeed.utils import safe_get_full_optimizer_state

    states = list(_states(optimizer))
    if not states:
        return {}
    _link(optimizer)
    tensors = {}
    for parameter, name in names.items():
        if partitioned(parameter):
            for key in _MOMENTS:
                tensors[f"{name}|{key}"] = safe_get_full_optimizer_state(parameter, key).cpu()
            tensors[f"{name}|{_STEP}"] = states[0][_STEP].cpu().clone()
    return tensors


@torch.no_grad()
def load_optimizer_state(optimizer: Any, names: dict[nn.Parameter, str], state: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_state`, also from a checkpoint of a run without DeepSpeed."""
    from deepspeed.utils import safe_set_full_optimizer_state

    if not state:
        return
    step = next(value for key, value in state.items() if key.endswith(f"|{_STEP}"))
    # the first step would make these, and link the parameters to them
    for partition in optimizer.single_partition_of_fp32_groups:
        moments = {key: torch.zeros_like(partition) for key in _MOMENTS}
        optimizer.state[partition] = {_STEP: step.clone(), **moments}
    _link(optimizer)
    for parameter, name in names.items():
        for key in _MOMENTS:
            if partitioned(parameter) and f"{name}|{key}" in state:
                safe_set_full_optimizer_state(parameter, state[f"{name}|{key}"].to(parameter.device), key)


def _link(optimizer: Any) -> None:
    """Make the parameters know their parts of the partitions' moments.

    DeepSpeed does so after the step of the first group of parameters, when the others have no moments yet.
    """
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def _states(optimizer: Any) -> Iterator[dict[str, Any]]:
    """What the optimizer keeps for each partition, once there has been a step."""
    for partition in optimizer.single_partition_of_fp32_groups:
        if partition in optimizer.state:
            yield optimizer.state[partition]
