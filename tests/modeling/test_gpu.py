"""The same on a CUDA device as on the CPU. Skipped where there is none."""

import importlib.util
from typing import Any

import pytest
import torch

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig
from hf_linattn.modeling import causal_performer
from hf_linattn.modeling.feature_maps import FeatureMap

from ..helpers import config_id, converted_model, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize(
    "config",
    [
        LinformerConfig(projection_length=8),
        LinformerConfig(projection_length=8, window_size=4, global_tokens=1),
        PerformerConfig(num_features=16),
        PerformerConfig(num_features=16, window_size=4, global_tokens=1),
    ],
    ids=config_id,
)
def test_cuda_gives_what_the_cpu_gives(family: str, config: AttentionConfig) -> None:
    model, input_ids = converted_model(config, family), tokens(40, batch=2)
    mask = torch.ones_like(input_ids)
    mask[1, 25:] = 0
    with torch.no_grad():
        expected = model(input_ids, attention_mask=mask).last_hidden_state[mask.bool()]
        found = model.cuda()(input_ids.cuda(), attention_mask=mask.cuda()).last_hidden_state.cpu()[mask.bool()]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("global_tokens", [0, 3])
def test_kernels_give_what_the_plain_path_gives(global_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    feature_map = FeatureMap(
        feature_map="learned", num_heads=2, head_dim=64, num_features=128, orthogonal=True, seed=0
    ).cuda()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 1000, 64, generator=generator).cuda().requires_grad_() for _ in range(3)]
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return kernels.gated_part(*args)

    monkeypatch.setattr(causal_performer, "gated_part", counted)
    settings = {"global_tokens": global_tokens, "lengths": torch.tensor([1000, 700]).cuda()}
    results = []
    for kernels in (True, False):
        monkeypatch.setattr(causal_performer, "kernels_for", lambda x, dtype, signed, use=kernels: use)
        out = causal_performer.causal_performer_attention(*inputs, feature_map, **settings)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    assert len(calls) == 1
    # products of the kernels are TF32 where the device has it
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-2 * expected.abs().max().item(), rtol=1e-2)
