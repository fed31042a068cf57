"""Company of kernels on other streams, before and after a change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.graph.builder import build
from foretrace.simulate.overlap import covered, overlap_assumption, overlap_change, shared_time
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.whatif import whatif
from tests.kineto_files import Recording

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), min_size=1, max_size=8)


@given(intervals, intervals)
def test_covered_time_is_counted_by_the_nanosecond(cover: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    begin = np.array([s for s, _ in cover], dtype=np.int64)
    finish = np.array([s + d for s, d in cover], dtype=np.int64)
    start = np.array([s for s, _ in asked], dtype=np.int64)
    end = np.array([s + d for s, d in asked], dtype=np.int64)
    expected = [
        sum(any(b <= t < f for b, f in zip(begin, finish, strict=True)) for t in range(s, e))
        for s, e in zip(start, end, strict=True)
    ]
    assert covered(begin, finish, start, end).tolist() == expected


def test_a_kernel_that_loses_its_company_is_marked() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 1000)
    r.launch("long", 10, 5, 20, 500)
    r.launch("beside", 30, 5, 40, 100, stream=9)
    graph = build(r.trace())
    before = simulate(graph)
    assert sorted(shared_time(graph, before.start, before.end)[graph.on_device].tolist()) == [100_000, 100_000]
    after = simulate(graph.with_columns(gone=np.array([graph.names[n] == "long" for n in graph.name])))
    change = overlap_change(before, after)
    assert change is not None and change.alone_now.sum() == 1 and change.alone_ns == 100_000
    assumption = overlap_assumption(change)
    assert assumption is not None and "1 kernels" in assumption.why
    assert overlap_assumption(overlap_change(before, before)) is None


def test_a_whatif_says_whose_company_changed() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 1000)
    r.launch("long", 10, 5, 20, 500)
    r.launch("beside", 30, 5, 40, 100, stream=9)
    r.call("cudaDeviceSynchronize", 50, 475)
    answer = whatif(build(r.trace()), [parse("remove name=long")])
    [weighed] = [a for a in answer.assumptions if a.assumption.name == "slow-down by other streams"]
    assert weighed.faster_s == pytest.approx(100e-6 * (1 - 1 / 1.3), rel=0.05)
