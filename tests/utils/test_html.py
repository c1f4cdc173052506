"""The HTML of a report: one file, with its pictures and their descriptions, which a browser shows without scrolling."""

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hf_linattn import LinformerConfig
from hf_linattn.data import DataConfig
from hf_linattn.evaluate import CompareConfig, TaskConfig, compare
from hf_linattn.utils.html import html_page

from ..adapt.runs import write_documents
from ..helpers import save_tokenizer, tiny_model

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")


class Elements(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_a_page_has_all_that_it_shows_inside(tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_bytes(PIXEL)
    table = "| x | y |\n| --- | --- |\n| 1 < 2 | `code` |"
    text = f"# a & b\n\n{table}\n\n![what it shows](plot.png)\n\n<script>alert(1)</script>\n"
    page = html_page(text, tmp_path)
    elements = Elements(page)
    (image,) = elements.all("img")
    assert image["alt"] == "what it shows"
    assert base64.b64decode(str(image["src"]).removeprefix("data:image/png;base64,")) == PIXEL
    assert "<title>a &amp; b</title>" in page and elements.all("html") == [{"lang": "en"}]
    assert len(elements.all("td")) == 2 and "1 &lt; 2" in page
    # what a model is called is text
    assert not elements.all("script")
    assert not [a for _, a in elements.found if str(a.get("src") or a.get("href") or "data:")[:5] != "data:"]


def report_page(folder: Path) -> Path:
    """The page of a comparison, whose tables have many columns."""
    save_tokenizer(folder / "base")
    tiny_model().save_pretrained(folder / "base")
    documents = write_documents(folder / "documents.jsonl")
    compare(
        folder / "base",
        {"a model with a long name": LinformerConfig(window_size=4, global_tokens=1, projection_length=8)},
        "embeddings",
        folder / "report",
        data=DataConfig(dataset=documents.dataset),
        task_config=TaskConfig(lengths=[8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48], truncate=True),
        config=CompareConfig(footprint=False, resamples=20, fidelity_documents=2, fidelity_length=16),
    )
    return folder / "report" / "report.html"


def test_a_report_is_written_as_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = report_page(tmp_path)
    images = Elements(page.read_text()).all("img")
    plots = {path.read_bytes() for path in page.parent.glob("*.png")}
    assert {base64.b64decode(str(image["src"]).partition(",")[2]) for image in images} == plots and len(plots) == 3
    assert all(len(str(image["alt"]).split()) > 3 for image in images)
    assert page.read_text().count("<table>") == page.with_suffix(".md").read_text().count("| --- |\n")


MEASURE = """<script>
addEventListener("load", () => {
  const images = [...document.images];
  document.title = JSON.stringify({
    width: document.documentElement.scrollWidth,
    screen: innerWidth,
    images: images.length,
    loaded: images.filter(image => image.complete && image.naturalWidth > 100).length,
    described: images.filter(image => image.alt).length,
    tables: document.querySelectorAll("table").length,
    heading: document.querySelector("h1").textContent,
  });
});
</script></head>"""


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="there is no Chromium")
@pytest.mark.parametrize("width", [1280, 800])
def test_a_browser_shows_the_page_without_scrolling_sideways(width: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = report_page(tmp_path)
    measured = tmp_path / "measured.html"
    # alone in a folder: nothing can come from beside it
    measured.write_text(page.read_text().replace("</head>", MEASURE))
    shutil.rmtree(page.parent)
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", measured.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(title[1].replace("&quot;", '"'))
    assert found["width"] <= found["screen"] <= width
    assert found["images"] == found["loaded"] == found["described"] == 3
    assert found["tables"] > 3 and "softmax and linear attention" in found["heading"]
