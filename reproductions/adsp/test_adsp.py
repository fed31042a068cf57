"""The protocol on a corner of its grid; the kept cells make the page."""

from __future__ import annotations

import json
from itertools import islice

import pytest

pytest.importorskip("torch")

from reproductions.adsp import protocol


def test_a_cell_reaches_its_target_or_says_that_it_did_not() -> None:
    key = next(protocol.keys(1, ("clusters",), ((1, 1, 1, 3),)))
    found = protocol.measure(key)
    assert key["policy"] == "synchronous" and found["reached_s"] > 0
    assert found["steps"] == found["commits"] >= 4  # a commit after every step
    assert found["waited_s"] > 0  # three wait for the slowest


def test_kept_cells_are_those_of_the_grid_and_the_page_shows_their_best() -> None:
    lines = (protocol.HERE / "measured.jsonl").read_text(encoding="utf-8").splitlines()
    cells = [{**each["key"], **each["found"]} for each in map(json.loads, lines)]
    wanted = list(protocol.keys(3))
    names = {json.dumps({name: each[name] for name in wanted[0]}, sort_keys=True) for each in cells}
    assert {json.dumps(each, sort_keys=True) for each in wanted} <= names
    grid = protocol.Grid(cells)
    first = next(iter(islice(protocol.grid_rows(grid), 1)))
    assert f"| {' | '.join(first)} |" in (protocol.HERE / "README.md").read_text(encoding="utf-8")


def test_implicit_momentum_is_none_for_one_worker_and_falls_with_commits() -> None:
    assert protocol.implicit_momentum(period_s=10, commits=[1], step_s=[0.1]) == 0
    few, many = (protocol.implicit_momentum(period_s=10, commits=[each] * 4, step_s=[0.1] * 4) for each in (1, 10))
    assert 0 < many < few < 1
    assert many == pytest.approx(1 - 1 / (1 + 0.75 * 40))
