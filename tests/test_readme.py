"""Every Python example of the README runs, in its order, with tiny models in place of those on the Hub."""

import json
import re
import string
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, BertTokenizerFast

from .helpers import POSITIONS, tiny_model
from .publish.hub_server import Hub
from .publish.test_upload import hub  # noqa: F401

ROOT = Path(__file__).parent.parent
#: Hub id in the README -> family and head of the tiny model that stands for it
IDS = {
    "google-bert/bert-base-uncased": ("bert", "AutoModelForMaskedLM"),
    "openai-community/gpt2": ("gpt2", "AutoModelForCausalLM"),
}
#: what takes long in the README -> what stands for it here
SHORTER = {
    "lengths=[512, 2048]": "lengths=[32, 64]",
    "distil_steps=500, batch_size=8": "distil_steps=2, batch_size=2, sequence_length=32, eval_sequences=2",
}


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def save_model(folder: Path, family: str, auto: str) -> None:
    folder.mkdir(parents=True)
    # of single letters, so that no two documents are the same to it
    letters = [mark + letter for mark in ("", "##") for letter in string.ascii_lowercase]
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *letters]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=POSITIONS).save_pretrained(folder)
    if family == "gpt2":
        # of a BERT, whose segments GPT-2 does not read
        file = folder / "tokenizer_config.json"
        values = {**json.loads(file.read_text()), "model_input_names": ["input_ids", "attention_mask"]}
        file.write_text(json.dumps(values))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    tiny_model(family, auto).save_pretrained(folder)


@pytest.mark.usefixtures("hub")
def test_every_example_runs(
    hub: Hub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["readme"])
    # what the reader brings along
    names: dict[str, Any] = {"__name__": "readme", "AutoTokenizer": AutoTokenizer, "long_prompt": "a long prompt " * 9}
    examples = blocks()
    assert len(examples) >= 3
    for repo_id, (family, auto) in IDS.items():
        save_model(tmp_path / "hub" / repo_id, family, auto)
    for number, example in enumerate(examples, start=1):
        for repo_id in IDS:
            example = example.replace(f'"{repo_id}"', repr(str(tmp_path / "hub" / repo_id)))
        for long, short in SHORTER.items():
            example = example.replace(long, short)
        # each goes on from those before it
        exec(compile(example, f"README.md, example {number}", "exec"), names)
