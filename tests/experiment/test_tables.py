"""The tables that docs/accuracy/techniques.md is made of."""

from __future__ import annotations

import pytest

from foretrace.experiment.ledger import summaries
from ledger_tables import markdown, markdown_summary
from tests.experiment.ledger_rows import make_row


def test_rows_as_a_table() -> None:
    rows = [
        make_row(techniques="a + b", parameters={"a": {}, "b": {}}),
        make_row(model="gpt2", size="full"),
        make_row(),
    ]
    lines = markdown(rows).splitlines()
    assert len(lines) == 5
    assert lines[2] == (
        "| mixed-precision | bert | 100.0 | 0.700 | 0.660 – 0.750 | 0.720 | −2.8 % | yes | 3.0 % | covered |"
    )
    assert "gpt2 (full)" in lines[3]
    assert lines[4].startswith("| a + b |")


def test_summaries_by_hand() -> None:
    rows = [
        make_row(error=-0.02),
        make_row(error=0.06, covered=False, verdict="missed"),
        make_row(error=0.9, covered=False, verdict="inconclusive"),
        make_row(error=0.01, parameters={"a": {}, "b": {}}, verdict="no measurable change"),
    ]
    both, one, total = summaries(rows)
    assert (both.name, both.rows, both.median_error) == ("a + b", 1, 0.01)
    assert (one.name, one.rows, one.concluded, one.coverage) == ("mixed-precision", 3, 2, 0.5)
    assert one.median_error == pytest.approx(0.04)
    assert one.worst_error == 0.06
    assert (total.name, total.rows, total.concluded, total.median_error) == ("all", 4, 3, 0.02)
    last = markdown_summary(rows).splitlines()[-1]
    assert last == "| **all** | 4 | 3 | 2.0 % | 6.0 % | 66.7 % |"


def test_without_rows() -> None:
    assert summaries([]) == ()
    assert markdown([]).count("\n") == 2
    refused = summaries([make_row(verdict="inconclusive")])[-1]
    assert (refused.median_error, refused.worst_error, refused.coverage) == (None, None, None)
    assert "–" in markdown_summary([make_row(verdict="inconclusive")])
