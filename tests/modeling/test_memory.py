"""No tensor of length x length elements, whatever the method, the mask and the direction."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig

from ..helpers import PURE, config_id, converted_model, tiny_model, tokens

pytestmark = pytest.mark.core

LENGTH = 1024

CONFIGS = [
    *PURE,
    *(
        LinformerConfig(projection_length=8, projection=p, window_size=8)
        for p in ("learned", "max", "conv", "gaussian")
    ),
    LinformerConfig(projection_length=8, window_size=8, global_tokens=1),
    PerformerConfig(num_features=16, window_size=8, global_tokens=1),
    PerformerConfig(num_features=16, feature_map="trigonometric", window_size=8),
]


class LargestTensor(TorchDispatchMode):
    """Watches the size of everything that any operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            # an expanded view has elements that no memory stands behind
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() // leaf.element_size() > self.elements:
                self.elements = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.operation = str(func)
        return out


def largest(model: torch.nn.Module, mask: Tensor | None, length: int = LENGTH) -> LargestTensor:
    input_ids = tokens(length)
    with LargestTensor() as watch:
        model(input_ids, attention_mask=mask).last_hidden_state.sum().backward()
    return watch


def masks(length: int) -> dict[str, Tensor | None]:
    ones = torch.ones(1, length, dtype=torch.long)
    padded = ones.clone()
    padded[:, length - 300 :] = 0
    return {"none": None, "right": padded, "left": padded.flip(1)}


@pytest.mark.parametrize("mask", ["none", "right", "left"])
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_nothing_quadratic_is_allocated(config: AttentionConfig, mask: str) -> None:
    model = converted_model(config, max_length=LENGTH)
    watch = largest(model, masks(LENGTH)[mask])
    assert watch.elements < LENGTH * LENGTH // 4, watch.operation


@pytest.mark.parametrize("config", [PURE[0], PURE[-1], *CONFIGS[-3:]], ids=config_id)
def test_the_largest_tensor_grows_linearly(config: AttentionConfig) -> None:
    model = converted_model(config, max_length=2 * LENGTH)
    once = largest(model, masks(LENGTH)["right"]).elements
    assert largest(model, masks(2 * LENGTH)["right"], 2 * LENGTH).elements <= 2 * once


def test_the_watch_sees_what_eager_attention_allocates() -> None:
    model = tiny_model(max_position_embeddings=LENGTH)
    model.set_attn_implementation("eager")
    assert largest(model, None).elements >= LENGTH * LENGTH
