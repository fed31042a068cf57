"""The table of docs/zoo.md is that of the registry."""

from __future__ import annotations

from pathlib import Path

from zoo_table import table

DOC = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"


def test_table_is_up_to_date() -> None:
    assert table() in DOC.read_text(encoding="utf-8"), "copy the output of: python benchmarks/zoo_table.py"
