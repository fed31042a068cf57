"""Plain English in everything that people read: tests/words.txt lists phrases to avoid, and what to write instead."""

from __future__ import annotations

import re
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
