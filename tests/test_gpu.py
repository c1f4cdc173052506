"""The same on a CUDA device as on the CPU. Skipped where there is none."""

import pytest
import torch

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig

from .helpers import config_id, converted_model, tokens

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
