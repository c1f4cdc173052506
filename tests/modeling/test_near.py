"""The kernel that returns the mass, beside the exact part that it stands in for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import PerformerConfig
from hf_linattn.modeling import near
from hf_linattn.modeling.far_part import Rows, Settings
from hf_linattn.modeling.near import NearPart, _can_fuse

from ..helpers import linear_attention, qkv

pytestmark = pytest.mark.core

LENGTH, WINDOW = 37, 4


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, Tensor]]:
    """Outputs with the kernel and without it."""

    monkeypatch.setattr(near, "_LEAST_WINDOW", 1)

    def run(inputs: list[Tensor], lengths: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
        layer = linear_attention(PerformerConfig(num_features=16, window_size=WINDOW, **settings))

        def attend() -> Tensor:
            return layer(*inputs, lengths)

        with torch.no_grad():
            fused = attend()
            with monkeypatch.context() as patch:
                patch.setattr(near, "_can_fuse", lambda *_: False)
                return fused, attend()

    return run


@pytest.mark.parametrize("chunk", [4, 12, 512])
@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize("global_tokens", [0, 1, 6, 11])
@pytest.mark.parametrize("lengths", [None, [20], [37, 1], [0, 6], [36, 13]])
def test_the_kernel_gives_what_the_exact_part_gives(
    lengths: list[int] | None, global_tokens: int, far: bool, chunk: int, both_ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Global tokens beyond the window too, and rows that end anywhere, or have nothing at all."""
    monkeypatch.setattr("hf_linattn.modeling.blocks._CPU_CHUNK", chunk)
    inputs = [x.detach().float() for x in qkv(LENGTH, scale=1.0)]
    with torch.no_grad():
        assert _can_fuse(*inputs)
    given = None if lengths is None else torch.tensor(lengths)
    fused, exact = both_ways(inputs, lengths=given, global_tokens=global_tokens, far=far)
    assert fused.isfinite().all()
    valid = torch.arange(LENGTH) < (torch.tensor([LENGTH]) if given is None else given)[:, None]
    torch.testing.assert_close(fused * valid[:, None, :, None], exact * valid[:, None, :, None], rtol=1e-5, atol=1e-5)


def test_small_blocks_are_gathered() -> None:
    query, key, value = (torch.randn(1, 2, 100, 4) for _ in range(3))
    with torch.no_grad():
        small, large = (
            NearPart(query, key, value, Rows(None, 100, 0, query.device), Settings(window_size=size))
            for size in (16, 64)
        )
    assert not small.fused and large.fused


@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_logits_of_any_size(size: float, both_ways) -> None:
    """Where one key has all the weight, and where all have the same."""
    query, key, value = (x.detach().float() for x in qkv(LENGTH, scale=1.0))
    fused, exact = both_ways([query * size, key * size, value], global_tokens=1)
    torch.testing.assert_close(fused, exact, rtol=1e-4, atol=1e-5)


def test_it_is_not_used_where_it_does_not_fit() -> None:
    """With gradients, on memory that it would read wrongly, and on no CPU."""
    query, key, value = (torch.randn(1, 2, 8, 4) for _ in range(3))
    assert not _can_fuse(query, key, value)
    with torch.no_grad():
        assert _can_fuse(query, key, value)
        assert not _can_fuse(query, key.mT.contiguous().mT, value)
        assert not _can_fuse(query, key, value[..., :3])
        assert not _can_fuse(*(x.to("meta") for x in (query, key, value)))


@pytest.mark.parametrize("which", range(3))
def test_any_layout_of_the_inputs(which: int, both_ways) -> None:
    inputs = [x.detach().float() for x in qkv(LENGTH, scale=1.0)]
    expected, _ = both_ways(inputs)
    inputs[which] = inputs[which].mT.contiguous().mT
    torch.testing.assert_close(both_ways(inputs)[0], expected)
