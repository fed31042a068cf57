"""docs/systems.md is what its blocks say, and blocks name files and commands that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from foretrace.cli.app import application
from foretrace.techniques.registry import techniques
from reproductions import ROOT
from reproductions.__main__ import NAMES, main
from reproductions.systems import PAGE, System, front, page, put, systems

EVERY = [system for group in systems() for system in group]
BY_PAPER = pytest.mark.parametrize("system", EVERY, ids=lambda system: re.sub(r"\W+", "-", system.paper)[:40])


def test_the_page_is_made_from_its_blocks() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m reproductions.systems"


def test_every_reproduction_has_a_block() -> None:
    named = {name for system in EVERY for name in re.findall(r"NAME=(\w+)", system.command)}
    assert named == set(NAMES)


@BY_PAPER
def test_a_system_is_where_its_block_says(system: System) -> None:
    for place in system.where:
        assert any((base / place).exists() for base in (ROOT / "src" / "foretrace", ROOT)), place
    for link in re.findall(r"\]\(([^)#]+)", f"{system.here} {system.checked} {system.ours}"):
        assert (PAGE.parent / link).exists(), link


@BY_PAPER
def test_the_command_of_a_system_is_there(system: System) -> None:
    words = system.command.strip("`").split()
    if words[0] == "foretrace":
        commands = typer.main.get_command(application()).commands  # type: ignore[attr-defined]
        assert words[1] in commands
        name = words[-1] if "--do" in words or "verify" in words else ""
        assert not name or name in techniques()
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    else:
        assert words[0] in ("make", "–")


def test_a_page_is_written_under_its_block(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("---\npaper: x\n---\n\n# Old\n", encoding="utf-8")
    put(path, "# New\n")
    assert front(path.read_text(encoding="utf-8")) == ("paper: x", "# New\n")


def test_an_unknown_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], ["dali"]):
        assert main(given) == 2
        said = capsys.readouterr().err
        assert "NAME must be one of adsp, aiconfigurator, bagpipe, " in said and said.count("\n") == 1
