"""A report in Markdown as one HTML file with its pictures inside."""

import base64
import html
import mimetypes
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

# The text is as wide as a page of a book; a table that is wider scrolls by itself, and not the page.
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
p, pre, code { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; padding: .75rem; border: 1px solid #8886; border-radius: .25rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #8886; text-align: left; vertical-align: top; }
th { border-bottom-width: 2px; }
img { max-width: 100%; height: auto; background: #fff; }
"""


def html_page(markdown: str, folder: Path) -> str:
    """A page without anything beside it.

    Args:
        markdown: the report. HTML in it is shown as text.
        folder: where its pictures are.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    title = next((tokens[index + 1].content for index, token in enumerate(tokens) if token.type == "heading_open"), "")
    for token in tokens:
        for child in token.children or []:
            if child.type == "image":
                _put_inside(child, folder)
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n"
        "</body>\n</html>\n"
    )


def _put_inside(image: Token, folder: Path) -> None:
    """The picture's own bytes in place of its name."""
    path = folder / str(image.attrs["src"])
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    image.attrs["src"] = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
