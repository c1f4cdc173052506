"""Every Python example of README and docs runs, page by page, with tiny models in place of those on the Hub."""

import importlib
import json
import re
import string
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizerFast

from hf_linattn import LinformerConfig, convert_checkpoint

from .helpers import POSITIONS, tiny_model
from .publish.hub_server import Hub
from .publish.test_upload import hub  # noqa: F401

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "scripts" / "README.md",
    ROOT / "model_cards" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
#: Hub id in an example -> architecture and head of the tiny model that stands for it
IDS = {
    "google-bert/bert-base-uncased": ("bert", "AutoModelForMaskedLM"),
    "openai-community/gpt2": ("gpt2", "AutoModelForCausalLM"),
}
#: what takes long in an example -> what stands for it here
SHORTER = {
    "lengths=[512, 2048]": "lengths=[32]",
    "distil_steps=500, batch_size=8": "distil_steps=2, batch_size=2, sequence_length=32, eval_sequences=2",
    "max_documents=24": "max_documents=4",
    "max_new_tokens=100": "max_new_tokens=4",
}
# a Python block, unless the line before it is a comment such as <!-- not run: needs the Hub -->
_BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[str]:
    """The examples of a page that run."""
    return [code for not_run, code in _BLOCK.findall(page.read_text()) if not not_run]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def save_model(folder: Path, architecture: str, auto: str) -> None:
    folder.mkdir(parents=True)
    # of single letters, so that no two documents are the same to it
    letters = [mark + letter for mark in ("", "##") for letter in string.ascii_lowercase]
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *letters]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=POSITIONS).save_pretrained(folder)
    if architecture == "gpt2":
        # of a BERT, whose segments GPT-2 does not read
        file = folder / "tokenizer_config.json"
        values = {**json.loads(file.read_text()), "model_input_names": ["input_ids", "attention_mask"]}
        file.write_text(json.dumps(values))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    tiny_model(architecture, auto).save_pretrained(folder)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_example_runs(
    page: Path,
    hub: Hub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["readme"])
    # what the reader brings along
    texts = ["letters of a short text", "and of a second one"] * 4
    names: dict[str, Any] = {"__name__": "readme", "long_prompt": "a long prompt " * 9, "texts": texts}
    for repo_id, (architecture, auto) in IDS.items():
        save_model(tmp_path / "hub" / repo_id, architecture, auto)
    if page != ROOT / "README.md":
        # what README has made
        base = tmp_path / "hub" / "google-bert/bert-base-uncased"
        convert_checkpoint(base, "bert-linformer", LinformerConfig(window_size=64, global_tokens=1), max_length=4096)
    for number, example in enumerate(blocks(page), start=1):
        for repo_id in IDS:
            example = example.replace(f'"{repo_id}"', repr(str(tmp_path / "hub" / repo_id)))
        for long, short in SHORTER.items():
            example = example.replace(long, short)
        # each goes on from those before it
        exec(compile(example, f"{page.relative_to(ROOT)}, example {number}", "exec"), names)


def test_there_are_examples() -> None:
    assert len(blocks(ROOT / "README.md")) >= 3
    assert sum(bool(blocks(page)) for page in PAGES) >= 6


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs" / "reference.rst").read_text()
    for package in ("", ".adapt", ".analyze", ".data", ".evaluate", ".publish"):
        module = importlib.import_module(f"hf_linattn{package}")
        # tables, such as TASKS, are not called
        names = [name for name in module.__all__ if not name.isupper()]
        assert names and not [name for name in names if not re.search(rf":: (\S+\.)?{name}$", reference, re.MULTILINE)]


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in _LINK.findall(_CODE.sub("", page.read_text())):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []
