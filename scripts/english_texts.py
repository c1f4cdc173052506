"""Unlabelled English text of several kinds to adapt on, from packages that install by name.

    python scripts/english_texts.py --output texts.jsonl [--novels NOVELS.jsonl.gz]

Pieces of the kernel's documentation (linux-doc-6.1), of a handbook of administration (debian-handbook) and of essays
(anarchism), fetched with `apt-get download` on Debian; with --novels also of novels, rows of a JSON lines file with
`text`. The help texts of Python, which much is measured on, are in none of them.
"""

import argparse
import gzip
import json
import random
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

# package -> files to read
PACKAGES = {
    "linux-doc-6.1": "usr/share/doc/linux-doc-6.1/Documentation/**/*.rst.gz",
    "debian-handbook": "usr/share/doc/debian-handbook/html/en-US/*.html",
    "anarchism": "usr/share/doc/anarchism/html/*.html",
}
# Translations and lists of bindings are no English prose.
SKIPPED = ("/translations/", "/bindings/", "/sound/hd-audio/models")


class _Text(HTMLParser):
    """The text of a page without its scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipped += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.skipped -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.parts.append(data)


def read(path: Path) -> str:
    """The text of a file of a package."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8", errors="replace")
    if path.suffix == ".html":
        parser = _Text()
        parser.feed(text)
        text = "".join(parser.parts)
    return text


def packaged(package: str) -> Iterator[str]:
    """The texts of a package, in the order of their paths."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
        (archive,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg", "-x", archive, folder], check=True)
        for path in sorted(Path(folder).glob(PACKAGES[package])):
            if not any(part in str(path) for part in SKIPPED):
                yield read(path)


def novels(path: Path) -> Iterator[str]:
    """The texts of a JSON lines file."""
    with gzip.open(path, "rt") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def pieces(texts: Iterator[str], characters: int, count: int, seed: str) -> list[str]:
    """At most `count` pieces of that many characters, drawn from all texts alike."""
    found = [
        text[begin : begin + characters].strip()
        for text in texts
        for begin in range(0, len(text) - characters + 1, characters)
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file to write.")
    parser.add_argument("--novels", type=Path, help="JSON lines file, gzipped, of novels.")
    parser.add_argument("--characters", type=int, default=3000, help="Length of a piece.")
    parser.add_argument("--pieces", type=int, default=800, help="Pieces of each kind, at most.")
    options = parser.parse_args()
    sources = {package: packaged(package) for package in PACKAGES}
    if options.novels is not None:
        sources["novels"] = novels(options.novels)
    rows = [
        {"kind": kind, "text": text}
        for kind, texts in sources.items()
        for text in pieces(texts, options.characters, options.pieces, kind)
    ]
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} pieces of {', '.join(sources)}: {options.output}")


if __name__ == "__main__":
    main()
