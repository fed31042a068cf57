"""`foretrace ledger`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretrace.experiment.ledger import Ledger
from tests.cli.conftest import Cli, cli
from tests.experiment.ledger_rows import make_row

__all__ = ["cli"]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).add([make_row(), make_row(model="gpt2"), make_row(model="gpt2", techniques="x", parameters={"x": {}})])
    return path


def test_rows_are_shown_and_chosen(cli: Cli, kept: Path) -> None:
    assert cli("ledger", "--ledger", kept).out.startswith("3 verifications:")
    assert cli("ledger", "--ledger", kept, "--model", "gpt2").out.startswith("2 verifications:")
    answer = cli("ledger", "--ledger", kept, "--technique", "x", "--json")
    assert [row["techniques"] for row in answer.json["rows"]] == ["x"]
    assert cli("ledger", "--ledger", kept, "--summary", "--json").json["rows"] == []
    assert cli("ledger", "--ledger", kept, "--model", "none").out.startswith("No verification matches")


def test_exports(cli: Cli, kept: Path, tmp_path: Path) -> None:
    for name in ("rows.csv", "rows.jsonl"):
        answer = cli("ledger", "--ledger", kept, "--model", "gpt2", "--export", tmp_path / name)
        assert answer.code == 0
        assert f"wrote {tmp_path / name}" in answer.out
    assert (tmp_path / "rows.csv").read_text().splitlines()[0].startswith("id,time,techniques,model")
    assert len([json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]) == 2
    other = tmp_path / "other.sqlite"
    for added in (2, 0):
        answer = cli("ledger", "--ledger", other, "--import", tmp_path / "rows.jsonl")
        assert answer.code == 0
        assert f"{added} new rows" in answer.err
        assert answer.out.startswith("2 verifications:")


def test_mistakes_are_one_sentence(cli: Cli, kept: Path, tmp_path: Path) -> None:
    for arguments, part in (
        (("--ledger", tmp_path / "none.sqlite"), "there is no ledger"),
        (("--ledger", kept, "--export", "rows.xls"), "ends in .csv or .jsonl"),
        (("--ledger", kept, "--export", tmp_path / "none" / "rows.csv"), "cannot write"),
        (("--ledger", kept, "--import", tmp_path / "none.jsonl"), "cannot read"),
        (("--ledger", Path(__file__)), "no readable ledger"),
    ):
        answer = cli("ledger", *arguments)
        assert answer.code == 2
        assert part in answer.err
        assert answer.err.count("\n") == 1
