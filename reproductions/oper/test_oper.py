"""The protocol in small, and that rows are told from sums."""

from __future__ import annotations

import pytest

from reproductions.oper.protocol import main, measure


def test_the_protocol_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batches", "4", "--samples", "64", "--rows", "500", "--pooling", "1", "--print"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n| 1 |") == 12 and "## Training: 2.3 times" in text and "## Inference" in text


def test_skew_and_pooling_decide() -> None:
    """Rows are sent once per batch: more is gained where they repeat, and nothing over sums of many."""
    cells = {
        (pooling, skew): measure(True, pooling, skew, 0.0, samples=512, batches=6, rows=[20_000] * 4)
        for pooling, skew in ((1, 0.8), (1, 1.2), (20, 0.8))
    }
    gains = {key: cell.gain("column-wise") or 0.0 for key, cell in cells.items()}
    assert gains[1, 1.2] > gains[1, 0.8] > 1
    assert {each.mode for each in cells[20, 0.8].plan.placement.tables} <= {"pooled", "columns"}
