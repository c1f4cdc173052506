"""The same on a CUDA device as on the CPU. Skipped where there is none."""

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

from hf_linattn import AttentionConfig, PerformerConfig
from hf_linattn.modeling import far_performer, kernels

from ..helpers import PURE, SHARED, can_be_causal, config_id, converted_model, linear_attention, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


#: every method with every choice, alone and with near keys
CONFIGS = [
    dataclasses.replace(config, **near)
    for config in [*PURE, *SHARED]
    for near in ({}, {"window_size": 4, "global_tokens": 1})
]


@pytest.mark.parametrize(
    ("family", "config"),
    [("bert", config) for config in CONFIGS] + [("gpt2", config) for config in CONFIGS if can_be_causal(config)],
    ids=config_id,
)
def test_cuda_gives_what_the_cpu_gives(family: str, config: AttentionConfig) -> None:
    model, input_ids = converted_model(config, family), tokens(40, batch=2)
    mask = torch.ones_like(input_ids)
    mask[1, 25:] = 0
    with torch.no_grad():
        expected = model(input_ids, attention_mask=mask).last_hidden_state[mask.bool()]
        output = model.cuda()(input_ids.cuda(), attention_mask=mask.cuda()).last_hidden_state.cpu()[mask.bool()]
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("global_tokens", [0, 3])
def test_kernels_give_what_the_plain_path_gives(global_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PerformerConfig(num_features=128, feature_map="learned", global_tokens=global_tokens)
    layer = linear_attention(config, causal=True, head_dim=64).cuda()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 1000, 64, generator=generator).cuda().requires_grad_() for _ in range(3)]
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return kernels.gated_part(*args)

    monkeypatch.setattr(far_performer, "gated_part", counted)
    results = []
    for use in (True, False):
        monkeypatch.setattr(far_performer, "kernels_for", lambda x, dtype, signed, use=use: use)
        out = layer(*inputs, torch.tensor([1000, 700]).cuda())
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    assert len(calls) == 1
    # products of the kernels are TF32 where the device has it
    for output, expected in zip(*results, strict=True):
        torch.testing.assert_close(output, expected, atol=1e-2 * expected.abs().max().item(), rtol=1e-2)
