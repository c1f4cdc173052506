"""One token of decoding: in place, and compiled once. That it is the parallel form: see `conformance`."""

import copy

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

from hf_linattn import AttentionConfig
from hf_linattn.modeling.cache import LinAttnCacheLayer

from ..helpers import CACHE, CAUSAL_FEW, config_id, decoder, positions_of, prompts, tokens

pytestmark = pytest.mark.core

FEW_METHODS = pytest.mark.parametrize("config", CAUSAL_FEW, ids=config_id)
#: positions at which compiled steps are made, in rising order
POSITIONS = (100, 300, 1000, 2000)


def read(model: torch.nn.Module, ids: Tensor, mask: Tensor | None, begin: int, end: int, cache: DynamicCache) -> Tensor:
    """Logits of the tokens begin .. end - 1."""
    options = {CACHE: cache}
    if mask is not None:
        options |= {"attention_mask": mask[:, :end], "position_ids": positions_of(mask[:, :end])[:, begin:]}
    return model(ids[:, begin:end], **options).logits


@pytest.mark.parametrize("padded", [False, True])
@FEW_METHODS
def test_a_compiled_step_is_one_graph_at_all_positions(config: AttentionConfig, padded: bool) -> None:
    """Three at most: the second token makes the position a variable; later ones compile nothing."""
    torch.compiler.reset()
    model, counter = decoder(config, max_length=2100), CompileCounterWithBackend("eager")
    # a graph break is an error
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    ids, mask = tokens(2010, batch=2), torch.ones(2, 2010, dtype=torch.long) if padded else None
    if mask is not None:
        mask[0, :70] = 0
    cache, done, graphs = DynamicCache(), 0, []
    with torch.no_grad():
        for position in POSITIONS:
            read(model, ids, mask, done, position, cache)
            eager, done = copy.deepcopy(cache), position + 5
            for begin in range(position, done):
                found = read(compiled, ids, mask, begin, begin + 1, cache)
                graphs.append(counter.frame_count)
                expected = read(model, ids, mask, begin, begin + 1, eager)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert graphs[0] >= 1
    assert graphs[1] == graphs[-1] <= 3


@pytest.mark.parametrize("left", [0, 6])
@FEW_METHODS
def test_a_step_writes_where_the_state_is(config: AttentionConfig, left: int) -> None:
    model, inputs, cache = decoder(config), prompts(60, 60 - left), DynamicCache()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def addresses() -> list[int]:
        states = [layer.state for layer in cache.layers if isinstance(layer, LinAttnCacheLayer)]
        kept = [x for state in states for x in (state.seen, state.key, state.value, state.log_mass)]
        return [x.data_ptr() for x in kept if x.numel()]

    with torch.no_grad():
        read(model, ids, mask, 0, 20, cache)
        before = addresses()
        for begin in range(20, 60):
            read(model, ids, mask, begin, begin + 1, cache)
            assert addresses() == before
    assert before
