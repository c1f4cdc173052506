"""Real weights on real text: how close a swap without any training comes to the original."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert

from .helpers import config_id

LENGTH = 512


@pytest.fixture(scope="module")
def documents(minilm: Path) -> Tensor:
    """Documents of 512 tokens from Python's own documentation, cut from its longest topics."""
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    rows = [tokenizer(text, truncation=True, max_length=LENGTH).input_ids for text in topics.values()]
    return torch.tensor([row for row in rows if len(row) == LENGTH][:12])


def embeddings(model: PreTrainedModel, documents: Tensor) -> Tensor:
    with torch.no_grad():
        return model(documents).last_hidden_state.mean(1)


@pytest.mark.parametrize(
    ("config", "least"),
    [
        (PerformerConfig(num_features=256), 0.62),
        (LinformerConfig(projection_length=64, projection="mean"), 0.77),
        (LinformerConfig(projection_length=64, projection="mean", window_size=64, global_tokens=1), 0.965),
    ],
    ids=config_id,
)
def test_pooled_embeddings_stay_close(minilm: Path, documents: Tensor, config: AttentionConfig, least: float) -> None:
    base = AutoModel.from_pretrained(minilm).eval()
    expected = embeddings(base, documents)
    found = embeddings(convert(base, config), documents)
    assert torch.cosine_similarity(found, expected).mean() >= least
