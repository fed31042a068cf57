"""The interval of a step from few recorded steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.graph.builder import build
from foretrace.simulate.timeline import simulate
from tests.kineto_files import Recording


@given(first=st.integers(50, 500), second=st.integers(50, 500))
def test_the_interval_of_two_steps_holds_both(first: int, second: int) -> None:
    r = Recording()
    at = 0
    for i, length in enumerate((first, second)):
        r.note(f"ProfilerStep#{i}", at, length)
        r.op("aten::mm", at + 10, length - 20)
        at += length
    timeline = simulate(build(r.trace()))
    found = timeline.interval_s(0.8)
    assert found.low_s <= min(first, second) * 1e-6 + 1e-9
    assert found.high_s >= max(first, second) * 1e-6 - 1e-9
    assert timeline.step_time_s == pytest.approx((first + second) / 2e6, rel=1e-6)
