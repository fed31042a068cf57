"""The protocol in small."""

from __future__ import annotations

import pytest

from foretrace.graph.taskgraph import Phase
from foretrace.plan.codesign.answer import codesign
from foretrace.plan.codesign.schedule import LayerOperator, LayerSchedule
from reproductions.phaze.protocol import front_svg, layer_svg, main


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert "| gpt2-medium | training |" in said and "| gpt2-medium | inference |" in said
    for line in said.splitlines():
        cells = [each.strip() for each in line.split("|")]
        if len(cells) > 9 and cells[1] == "gpt2-medium" and cells[2] == "training" and cells[3][:1].isdigit():
            four, fifty, most = (float(cells[at]) for at in (3, 5, 7))
            assert 1 <= four <= fifty <= most


def test_pictures() -> None:
    found = codesign("gpt2-medium", devices=8, batch=64, area=8e6)
    assert front_svg(found).count("<circle") == len(found.pareto)
    one = LayerOperator(name="a", tensor=True, one_ns=5, all_ns=2)
    layer = LayerSchedule(
        operators=(one, one), cores=(2, 1), begins=(0, 2), core=(-1, 0), bound_ns=0, phase=Phase.FORWARD
    )
    assert layer_svg(layer).count("<rect") == 2
