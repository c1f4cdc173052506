"""Documents longer than the checkpoint: position tables, config, buffers and tokenizer."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from hf_linattn import LinAttnPreTrainedModel, PerformerConfig, convert, convert_checkpoint
from hf_linattn.modeling.architectures import ARCHITECTURES

from ..helpers import ENCODERS, HEADS, POSITIONS, tiny_model, tokens

pytestmark = pytest.mark.core

CONFIG = PerformerConfig(num_features=16, window_size=8)
ALL_FAMILIES = pytest.mark.parametrize("family", ENCODERS)
OFFSETS = {family: 2 if ARCHITECTURES[family].positions_after_padding else 0 for family in ENCODERS}


def position_table(model: torch.nn.Module) -> Tensor:
    return model.base_model.embeddings.position_embeddings.weight.detach()


def test_roberta_reserves_the_rows_up_to_its_padding() -> None:
    rows = {"roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "esm"}
    assert {name for name, row in ARCHITECTURES.items() if row.positions_after_padding} == rows


@pytest.mark.parametrize("max_length", [POSITIONS + 1, 3 * POSITIONS - 7, 3 * POSITIONS])
@ALL_FAMILIES
def test_the_table_is_repeated(family: str, max_length: int) -> None:
    base = tiny_model(family)
    table, longer = position_table(base), position_table(convert(base, CONFIG, max_length=max_length))
    offset = OFFSETS[family]
    assert longer.shape == (max_length + offset, table.shape[1])
    assert torch.equal(longer[:offset], table[:offset])
    for position in range(max_length):
        assert torch.equal(longer[offset + position], table[offset + position % POSITIONS])


@ALL_FAMILIES
def test_the_table_is_interpolated(family: str) -> None:
    base = tiny_model(family)
    offset, length = OFFSETS[family], 2 * POSITIONS - 1
    model = convert(base, CONFIG, max_length=length, position_extension="interpolate")
    table, longer = position_table(base), position_table(model)
    assert torch.equal(longer[:offset], table[:offset])
    # twice as many points less one: each old row, and between two of them their mean
    torch.testing.assert_close(longer[offset::2], table[offset:])
    torch.testing.assert_close(longer[offset + 1 :: 2], (table[offset:-1] + table[offset + 1 :]) / 2)


def assert_reads(model: LinAttnPreTrainedModel, length: int, offset: int) -> None:
    """Config, buffers and table agree on `length`, and a document of it goes through."""
    assert model.config.max_position_embeddings == length + offset
    assert model.config.attention.max_length == model.attention_config.max_length == length
    assert all(m.config.max_length == length for _, m in model.linear_attentions())
    assert model.base_model.embeddings.position_embeddings.num_embeddings == length + offset
    for name, buffer in model.named_buffers():
        if name.endswith(("position_ids", "token_type_ids")):
            assert buffer.shape == (1, length + offset)
    input_ids = tokens(length)
    if "MultipleChoice" in type(model).__name__:
        input_ids = input_ids[:, None]
    with torch.no_grad():
        out = model(input_ids)
    assert all(x.isfinite().all() for x in out.to_tuple() if isinstance(x, Tensor))
    with pytest.raises(ValueError, match=f"{length + 1} tokens.*max_length={length}"):
        model(torch.cat((input_ids, input_ids[..., :1]), dim=-1))


@pytest.mark.parametrize(("family", "auto"), HEADS)
def test_everything_agrees_at_once_and_after_a_reload(tmp_path: Path, family: str, auto: str) -> None:
    model = convert(tiny_model(family, auto), CONFIG, max_length=150)
    if auto == "AutoModelForMultipleChoice" and family in ("camembert", "xlm-roberta"):
        pytest.skip("the base class of this head does not run with every Transformers")
    assert_reads(model, 150, OFFSETS[family])
    if auto in ("AutoModel", "AutoModelForMaskedLM"):
        model.save_pretrained(tmp_path)
        assert_reads(type(model).from_pretrained(tmp_path), 150, OFFSETS[family])


@ALL_FAMILIES
def test_positions_of_the_checkpoint_keep_their_meaning(family: str) -> None:
    """A short document is read the same, however long the table has become."""
    base = tiny_model(family)
    config = PerformerConfig(num_features=16, window_size=POSITIONS)
    with torch.no_grad():
        expected = base(tokens(40)).last_hidden_state
        found = convert(base, config, max_length=200)(tokens(40)).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_table_keeps_the_dtype() -> None:
    for extension in ("repeat", "interpolate"):
        model = convert(tiny_model().half(), CONFIG, max_length=100, position_extension=extension)
        assert position_table(model).dtype == torch.float16


def test_the_tokenizer_reads_as_long_documents(minilm: Path, tmp_path: Path) -> None:
    model = convert_checkpoint(minilm, tmp_path / "out", CONFIG, max_length=1024)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.model_max_length == model.config.attention.max_length == 1024
    text = "word " * 5000
    assert len(tokenizer(text, truncation=True).input_ids) == 1024
    assert len(tokenizer(text).input_ids) == 5002
    assert len(tokenizer("word").input_ids) == 3
