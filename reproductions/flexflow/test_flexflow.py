"""The tables can be made, and what they show is what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproductions.flexflow import protocol
from reproductions.flexflow.layers import problem as made
from reproductions.flexflow.models import p100_cluster, rnntc


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "clusters", lambda: (p100_cluster(),))


def test_sections_are_made(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    assert protocol.main(["--calls", "40", "--model", "rnntc", "--out", str(out), "gains"]) == 0
    assert out.read_text().count("\n| P100, RNNTC | ") == 4  # two numbers of samples by two exchanges
    assert protocol.main(["--calls", "40", "--model", "rnntc", "--out", str(out), "speed", "longer"]) == 0
    assert out.read_text().count("\n| P100, RNNTC | ") == 9


def test_nothing_moves_where_nothing_changes() -> None:
    problem = made(rnntc(64), p100_cluster(), "gather")
    point = problem.data_parallel()
    assert 0 < protocol.moved(problem, point, 3) <= 1
    before, again = protocol.ends(problem, point), protocol.ends(problem, point)
    assert all((before[owner] == again[owner]).all() for owner in before)
    assert sum(map(len, before.values())) == problem.counted(point).tasks
