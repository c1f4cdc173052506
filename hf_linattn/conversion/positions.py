"""Positions beyond the checkpoint's: which lengths it can be given, and the table of their embeddings."""

import copy
import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..modeling.architectures import ARCHITECTURES, MODEL_TYPE_PREFIX, REFUSED, UNAVAILABLE
from ..modeling.modeling_linattn import position_offset

POSITION_EXTENSIONS = ("repeat", "interpolate")
# Rotary scalings that read the original length out of max_position_embeddings.
_ROPE_TYPES_BOUND_TO_LENGTH = ("dynamic", "longrope")


def extend_positions(model: PreTrainedModel, max_length: int, *, position_extension: str = "repeat") -> PreTrainedModel:
    """The same softmax model with room for `max_length` tokens, its positions made longer as `convert` does it.

    What a converted model is compared with on long documents. A model with room enough is returned as it is.

    Raises:
        ValueError: the architecture is not supported, or `position_extension` is not "repeat" or "interpolate".
    """
    check_extension(position_extension)
    if model.config.model_type not in ARCHITECTURES:
        raise unsupported(model.config)
    config = copy.deepcopy(model.config)
    offset = position_offset(config)
    if config.max_position_embeddings - offset >= max_length:
        return model
    config.max_position_embeddings = max_length + offset
    state = dict(model.state_dict())
    extend_table(state, model, config, position_extension)
    longer: Any = type(model)
    options = init_options(model)
    extended = longer.from_pretrained(None, config=config, state_dict=state, dtype=model.dtype, **options)
    return extended.to(model.device).eval()


def check_extension(position_extension: str) -> None:
    """Whether `position_extension` is one of `POSITION_EXTENSIONS`.

    Raises:
        ValueError: it is not.
    """
    if position_extension not in POSITION_EXTENSIONS:
        allowed = ", ".join(map(repr, POSITION_EXTENSIONS))
        raise ValueError(f"position_extension={position_extension!r} is not one of {allowed}.")


def checked_length(base: PreTrainedConfig, of_settings: int | None, max_length: int | None) -> int:
    """The longest document in tokens of a conversion of `base`.

    Args:
        of_settings: what the attention's settings say, None where they say nothing.
        max_length: what was asked for. Default: the settings', or else as many tokens as `base` has positions.

    Raises:
        ValueError: the two differ, or the length is not one that `base` can be given.
    """
    if of_settings is not None and max_length not in (None, of_settings):
        raise ValueError(f"max_length={max_length}, but the config says max_length={of_settings}.")
    positions = base.max_position_embeddings - position_offset(base)
    if max_length is None:
        max_length = positions if of_settings is None else of_settings
    # rotary positions have no table that a shorter length would have to cut
    least = 1 if ARCHITECTURES[base.model_type].position_table is None else positions
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < least:
        raise ValueError(
            f"max_length={max_length!r} must be an integer of at least {least}; leave it out to keep the checkpoint's "
            f"{positions} positions."
        )
    bound = [rope for rope in _rope_types(base) if rope in _ROPE_TYPES_BOUND_TO_LENGTH]
    if max_length > positions and bound:
        raise ValueError(
            f"max_length={max_length}: rope_type={bound[0]!r} scales rotary positions by max_position_embeddings, "
            f"which a longer conversion would change; leave max_length out to keep {positions}."
        )
    return max_length


def _rope_types(config: PreTrainedConfig) -> list[str]:
    """The kinds of rotary positions: one, or one by type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    return [each.get("rope_type", "default") for each in by_layer or [parameters]]


def extend_table(
    state: dict[str, Tensor], base: PreTrainedModel, config: PreTrainedConfig, position_extension: str
) -> None:
    """Lengthen the table of position embeddings in `state` to what the config asks for; rotary models have none."""
    architecture = ARCHITECTURES[base.config.model_type]
    if architecture.position_table is None:
        return
    name = architecture.position_table
    if base.base_model is not base:
        name = f"{base.base_model_prefix}.{name}"
    if name not in state:
        # ESM has a table or rotary positions, as its config says
        return
    table, offset = state[name], position_offset(config) + architecture.extra_rows
    length = config.max_position_embeddings - position_offset(config)
    if table.shape[0] == offset + length:
        return
    reserved, positions = table[:offset], table[offset:]
    if position_extension == "repeat":
        # the whole table again and again: neighboring positions stay neighbors almost everywhere
        longer = positions.repeat(-(-length // positions.shape[0]), 1)[:length]
    else:
        # (rows, dim) as a batch of one signal per dimension, stretched along the rows
        signal = positions.float().T[None]
        longer = nn.functional.interpolate(signal, size=length, mode="linear", align_corners=True)[0].T
    state[name] = torch.cat((reserved, longer.to(table.dtype)))


def init_options(base: PreTrainedModel) -> dict[str, Any]:
    """What a model was made with beside its config: whether it has a pooler."""
    takes = "add_pooling_layer" in inspect.signature(type(base).__init__).parameters
    return {"add_pooling_layer": False} if takes and getattr(base, "pooler", None) is None else {}


def unsupported(config: PreTrainedConfig) -> ValueError:
    """What to raise where no conversion of this `model_type` is possible."""
    return unsupported_type(config.model_type)


def unsupported_type(model_type: str) -> ValueError:
    """The same, for a `model_type` that the installed Transformers may not have."""
    if model_type.startswith(MODEL_TYPE_PREFIX):
        return ValueError(f"model_type={model_type!r}: the checkpoint is converted already; start from its base.")
    if model_type in UNAVAILABLE:
        since = UNAVAILABLE[model_type].since
        return ValueError(
            f"model_type={model_type!r} can be converted with Transformers {since} or newer; installed is "
            f"{transformers.__version__}. Upgrade with `pip install 'transformers>={since},<6'`."
        )
    reason = f" ({REFUSED[model_type]})" if model_type in REFUSED else ""
    return ValueError(
        f"model_type={model_type!r} is not supported{reason}. Supported are: {', '.join(sorted(ARCHITECTURES))}."
    )
