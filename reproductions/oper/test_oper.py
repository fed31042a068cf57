"""The protocol in small, and that rows are told from sums."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from foretrace.plan.rows.costs import RowCosts, profile
from foretrace.training.rows.lookups import Lookups, parse
from reproductions.oper.protocol import main, measure
from reproductions.oper.torchrec import torchrec


def test_the_protocol_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    few = "--batches 4 --samples 64 --rows 500 --pooling 1 --problems 3 --print"
    assert main(few.split()) == 0
    text = capsys.readouterr().out
    assert text.count("\n| 1 |") == 12 and "## Training: 2.3 times" in text and "## Inference" in text
    assert "3 of 3 at most 1.1" in text


def test_skew_and_pooling_decide() -> None:
    """Rows are sent once per batch: more is gained where they repeat, and nothing over sums of many."""
    cells = {
        (pooling, skew): measure(pooling, skew, 0.0, samples=512, batches=6, rows=[20_000] * 4)[0]
        for pooling, skew in ((1, 0.8), (1, 1.2), (20, 0.8))
    }
    gains = {key: cell.gain("column-wise") or 0.0 for key, cell in cells.items()}
    assert gains[1, 1.2] > gains[1, 0.8] > 1
    assert {each.mode for each in cells[20, 0.8].plan.placement.tables} <= {"pooled", "columns"}


def test_torchrec_by_its_formula() -> None:
    """A small table is copied, a large one with one id per sample is kept whole."""
    lookups = parse("zipf:1 tables=1 rows=10 samples=2048 batches=2")
    for rows, mode in ((10, "data-parallel"), (50_000_000, "row-wise")):
        large = Lookups(tables=(replace(lookups.tables[0], rows=rows),), samples=2048)
        found = torchrec(RowCosts(profile(large, 4, range(2)), 64, training=True), inf)
        assert found is not None and found.tables[0].mode == mode
