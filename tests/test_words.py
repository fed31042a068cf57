"""Plain English in everything that people read: tests/words.txt lists phrases to avoid, and what to write instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORDS = [
    (re.compile(avoid, re.IGNORECASE), instead)
    for line in (ROOT / "tests" / "words.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for avoid, _, instead in [line.partition(" => ")]
]
# The rows and remarks of docs/accuracy/ are written with measurements, and change with the next one.
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "rooms").glob("*.md")]
# Still to be reread.
LATER: set[str] = set()
ROOMS = sorted(
    path for path in (ROOT / "src" / "foretrace").iterdir() if path.suffix in ("", ".py") and path.name not in LATER
)
# Between the lines of one comment, docstring or text that is written in several parts.
_JOINT = re.compile(r"""(?:(?<=[^\\])["'])?\s*\n\s*(?:# ?|[rf]*["'](?!["']))?""")


def found(path: Path) -> list[str]:
    text = _JOINT.sub(" ", path.read_text(encoding="utf-8"))
    return [
        f"{path.relative_to(ROOT)}: ...{text[max(each.start() - 40, 0) : each.end() + 30]}... write: {instead}"
        for avoid, instead in WORDS
        for each in avoid.finditer(text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain(page: Path) -> None:
    assert not found(page)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_docstrings_and_texts_are_plain(room: Path) -> None:
    files = sorted(room.rglob("*.py")) if room.is_dir() else [room]
    assert not [each for path in files for each in found(path)]


def test_the_list_finds_what_it_lists() -> None:
    assert WORDS and all(instead for _, instead in WORDS)
    avoid = {instead: pattern for pattern, instead in WORDS}["noise floor"]
    assert avoid.search('"the\nhonest "\n    "floor"'.replace("\n", " ")) is None
    assert avoid.search(_JOINT.sub(" ", '"the honest"\n    "floor"'))


# First words of what a function returns, or of when it is called, instead of what it does.
NO_VERBS = {
    "The", "A", "An", "What", "Whether", "How", "Which", "Where", "When", "Why", "Who", "Every", "All", "One", "As",
    "Of", "From", "Per", "So", "By", "In", "With", "At", "For", "After", "Without", "Only", "While", "Its", "Those",
    "These", "Both", "Seconds", "Bytes", "Rows", "Numbers", "Until", "Nothing",
}  # fmt: skip


def _functions(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and docstring of each function that has one. Properties are named as what they are."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            kinds = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
            if not kinds & {"property", "cached_property", "setter"}:
                yield node.lineno, text


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_docstrings_of_functions_begin_with_a_verb(room: Path) -> None:
    files = sorted(room.rglob("*.py")) if room.is_dir() else [room]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        if path.parent.name != "policies"  # what policies do is shown to users, by name
        for line, text in _functions(path)
        if text.split()[0] in NO_VERBS
    ]
    assert not found
