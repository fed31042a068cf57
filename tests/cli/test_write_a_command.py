"""docs/write-a-command.md: its command is found, answers in all ways, and is as short as promised."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretrace.report.views import Result
from tests.cli.conftest import Cli

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-command.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's blocks as an installed package would lay them out."""
    entry = re.search(r"```toml\n\[project\.entry-points\.\"([^\n]+)\"\]\n(.*?)```", PAGE, re.DOTALL)
    assert entry is not None
    (tmp_path / "lanes.py").write_text("\n\n".join(BLOCKS))
    facts = tmp_path / "lanes-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: lanes\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2].replace(chr(34), '')}")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("lanes", None)


def test_the_command_answers_in_all_ways(cli: Cli, cnn: Path, installed: Path) -> None:
    text = cli("lanes", cnn)
    assert text.code == 0, text.err
    assert re.match(r".* is busiest: it works [\d.]+ of [\d.]+ ms\.\n", text.out)
    assert re.search(r"lane +busy +share", text.out)
    page = installed / "lanes.html"
    answer = cli("lanes", cnn, "--top", "1", "--json", "--html", page).json
    assert answer["command"] == "lanes"
    assert answer["headline"] in text.out
    assert all(0 <= each["share"] <= 1 for each in answer["lanes"])
    assert answer["lanes"][0]["name"] in page.read_text(encoding="utf-8")
    assert "lanes" in cli("--help").out


def test_the_page_is_short() -> None:
    lines = [line for block in BLOCKS for line in block.splitlines() if line.strip()]
    assert len(lines) <= 60


def test_a_result_needs_its_blocks() -> None:
    from foretrace.report.blocks import blocks

    class Silent(Result, frozen=True, kw_only=True):
        command: str = "silent"

    with pytest.raises(TypeError, match="write-a-command"):
        blocks(Silent())
