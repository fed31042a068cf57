"""Charts: the same lines on a page and as heights in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from foretrace.report import page
from foretrace.report.blocks import Block, Chart, Curve, Headline, LaneChart, LaneSpan
from foretrace.report.terminal import Terminal, render


class _Charted(msgspec.Struct, frozen=True, kw_only=True):
    """What holds one chart."""

    command: str = "charted"
    chart: Chart | LaneChart

    def shown(self, top: int) -> Iterator[Block]:
        """The chart."""
        yield Headline("A chart.")
        yield self.chart


RAMP = Curve(name="ramp", x=(0.0, 10.0), y=(0.0, 8.0))
FLAT = Curve(name="flat <b>", x=(0.0, 10.0), y=(4.0, 4.0))


def test_a_curve_between_its_points_and_beyond_them() -> None:
    assert RAMP.at([-1, 0, 2.5, 10, 99]) == [0, 0, 2, 8, 8]


def test_a_terminal_draws_heights_on_one_scale() -> None:
    chart = Chart(title="load", curves=(RAMP, FLAT), x_kind="seconds")
    text = render(_Charted(chart=chart), Terminal(width=60, bars=True))
    lines = [each for each in text.splitlines() if each]
    assert lines[1] == "  load, up to 8.00, 0 to 10.0 s"
    assert lines[2].split() == ["ramp", lines[2].split()[-1]]
    assert lines[2].rstrip().endswith("█") and set(lines[3].removeprefix("  flat <b>").strip()) == {"▄"}
    assert "ramp" not in render(_Charted(chart=chart), Terminal(width=60))


def test_a_page_draws_lines_and_escapes_names() -> None:
    found = _Charted(chart=Chart(title="load", curves=(RAMP, FLAT)))
    for text in (page.render(found), page.fragment(found)):
        assert text.count("<polyline") == 2 and "flat &lt;b&gt;" in text
        assert "0.0,150.0" in text and "640.0,0.0" in text and "320.0,75.0" in text


def test_a_page_draws_work_on_lanes_and_a_terminal_does_not() -> None:
    spans = (
        LaneSpan(lane="a", name="x <b>", begin_s=0.0, end_s=1.0),
        LaneSpan(lane="b", name="y", begin_s=1.0, end_s=4.0),
    )
    found = _Charted(chart=LaneChart(title="cores", spans=spans))
    text = page.render(found)
    assert text.count("<rect") == 2 and "x &lt;b&gt;: 1.00 s" in text and "cores" in text
    assert 'x="160.0" y="18" width="479.5"' in text
    assert "cores" not in render(found, Terminal(width=60, bars=True))


def test_a_logarithmic_axis_has_equal_ratios() -> None:
    chart = Chart(title="", curves=(Curve(name="", x=(0.0, 0.01, 100.0), y=(0.0, 0.1, 1.0)),), log_x=True)
    assert chart.places(3) == pytest.approx([0.01, 1.0, 100.0])
