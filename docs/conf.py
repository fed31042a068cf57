"""Sphinx: the pages as a web site, `make docs`. Sources are the repository's Markdown files where they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
_PAGE = re.compile(r"\]\(([^)#:\s]+\.md)\)")
# The pages below these are found by their names, the others by the lists of docs/index.md.
BELOW = {
    "docs/accuracy": "accuracy/*",
    "docs/architecture": "rooms/*\ndecisions",
    "reproductions/README": "*/README",
}

project = "foretrace"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "*.md", "reproductions/README.md", "reproductions/*/README.md"]
exclude_patterns = ["**/.*", ".venv"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "foretrace"
html_show_sourcelink = False
html_show_copyright = False
nitpicky = True


def add_contents(_: Any, page: str, text: list[str]) -> None:
    """Make the navigation out of the lists of docs/index.md."""
    if page == root_doc:
        for title, body in _SECTION.findall(text[0]):
            text[0] += _contents(f":caption: {title}\n", "\n".join(_PAGE.findall(body)))
    elif page in BELOW:
        text[0] += _contents(":glob:\n", BELOW[page])


def _contents(options: str, pages: str) -> str:
    return f"\n\n```{{toctree}}\n:hidden:\n{options}\n{pages}\n```\n"


def setup(app: Any) -> None:
    """Connect the above."""
    app.connect("source-read", add_contents)
