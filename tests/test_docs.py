"""Pages: links and anchors exist, files that they name exist, the table of errors agrees with its pages."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

import pytest

from reproductions.systems import front

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "reproductions").rglob("README.md")),
)
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    """A page without code, and without front matter, whose links are relative to docs/, where they are shown."""
    return _CODE.sub("", front(page.read_text(encoding="utf-8"))[1])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs both make them of plain titles."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text_of(page)):
        if "://" in target:
            continue
        aim = page.parent / target if target else page
        assert aim.exists(), f"links to {target}, which does not exist"
        if anchor and aim.suffix == ".md":
            assert anchor in anchors(aim), f"{target}#{anchor} is no heading of that page"


def test_every_page_can_be_reached_from_the_readme() -> None:
    """Nobody reads a page that nothing links to."""
    reached, open_pages = set[Path](), [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)", text_of(page))
        found = {(page.parent / link).resolve() for link in links if "://" not in link}
        open_pages += found - reached
    assert set(DOCS.rglob("*.md")) <= reached, sorted(set(DOCS.rglob("*.md")) - reached)


def test_the_table_of_errors_says_what_its_pages_say() -> None:
    """docs/accuracy.md is written by hand: every figure and date of a line stands on the page that the line names."""
    rows = [line.split("|")[1:-1] for line in (DOCS / "accuracy.md").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row) == 4][2:]
    page, named = Path(), set[Path]()
    for case, error, _, date in rows:
        if link := re.search(r"\]\(((?:accuracy/)?\w+\.md)[#)]", case):
            page = DOCS / link[1]
        named.add(page)
        text = page.read_text(encoding="utf-8")
        for figure in re.findall(r"[-+]?\d+\.\d+", error):
            assert re.search(rf"(?<![\d.]){re.escape(figure.lstrip('+-'))}(?![\d.]*\d)", text), f"{page.name}: {figure}"
        assert date.strip() in text, f"{page.name} was not made on {date.strip()}"
    assert named >= set((DOCS / "accuracy").glob("*.md"))


def test_pages_that_must_stay_short() -> None:
    for page, limit in (("README.md", 6000), ("docs/architecture.md", 8000)):
        assert len((ROOT / page).read_bytes()) <= limit, f"{page}: move details to docs/tour.md or docs/rooms/"


def test_files_named_by_the_architecture_exist() -> None:
    """`name.py`, `folder/name.py` or `stem*.py`, anywhere in the package: pages must follow moves."""
    package = ROOT / "src" / "foretrace"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    for folder in ("benchmarks", "tests"):
        files |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
    ends = {"/".join(parts[at:]) for parts in (file.split("/") for file in files) for at in range(len(parts))}
    for page in (DOCS / "architecture.md", DOCS / "decisions.md", *(DOCS / "rooms").glob("*.md")):
        for name in re.findall(r"`([\w/*]+\.py)`", page.read_text(encoding="utf-8")):
            known = name in ends or ("*" in name and any(PurePath("/", file).match(name) for file in files))
            assert known, f"{page.name} names {name}"
