"""Builds the documentation: `bash scripts/docs.sh`. The source is the whole repository, so that links to it resolve."""

import dataclasses
import inspect
from typing import Any

from sphinx.application import Sphinx

import hf_linattn

project = "hf-linattn"
author = "The hf-linattn authors"
release = version = hf_linattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**",
    "examples/README.md",
    "scripts/README.md",
    "model_cards/**",
]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
# pages lead to the reports, which are not in the contents and which the commands wrote without a title
suppress_warnings = ["toc.not_included", "myst.header"]
# anchors of headings as GitHub makes them
myst_heading_anchors = 4

# docstrings have names of code in single backticks
default_role = "code"
autodoc_typehints = "description"
autodoc_member_order = "bysource"

#: title of a part of the contents -> its pages
CONTENTS = {
    "Start": ["../README"],
    "How to": [
        f"how-to/{page}"
        for page in (
            "convert",
            "architectures",
            "choose",
            "analyze",
            "evaluate",
            "adapt",
            "distributed",
            "decoders",
            "publish",
        )
    ],
    "Concepts": [f"concepts/{page}" for page in ("near-and-far", "masks-and-padding", "numerics", "architecture")],
    "Results": [*(f"results/{page}" for page in ("minilm", "smollm2", "synthetic", "speed")), "../model_cards/README"],
    "Reference": ["reference"],
    "Project": ["../examples/README", "../scripts/README", "../CONTRIBUTING", "../CHANGELOG"],
}


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the contents to the index, where GitHub would show them as code."""
    if page == root_doc:
        for title, pages in CONTENTS.items():
            source[0] += "\n```{toctree}\n" + f":hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"


def add_fields(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Describe the fields of a dataclass by their `help` texts, which the command line shows too."""
    if what != "class" or not dataclasses.is_dataclass(obj):
        return
    described = [f for f in dataclasses.fields(obj) if "help" in f.metadata]
    if described:
        lines += ["", "Args:"]
        lines += [f"    {f.name}: {inspect.cleandoc(f.metadata['help'])}" for f in described]
        lines.append("")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    # before napoleon reads the docstring
    app.connect("autodoc-process-docstring", add_fields, priority=400)
