"""Company of kernels on other streams, before and after a change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretrace.graph.builder import build
from foretrace.simulate.overlap import _covered, overlap_assumption, overlap_change, shared_time
from foretrace.simulate.replay import replay
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
    assert _covered(begin, finish, start, end).tolist() == expected


def test_a_kernel_that_loses_its_company_is_marked() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 1000)
    r.launch("long", 10, 5, 20, 500)
    r.launch("beside", 30, 5, 40, 100, stream=9)
    graph = build(r.trace())
    start, end = replay(graph)
    assert sorted(shared_time(graph, start, end)[graph.on_device].tolist()) == [100_000, 100_000]
    gone = graph.with_columns(gone=np.array([graph.names[n] == "long" for n in graph.name]))
    change = overlap_change((graph, start, end), (gone, *replay(gone)))
    assert change is not None and change.alone_now.sum() == 1 and change.alone_ns == 100_000
    assumption = overlap_assumption(change)
    assert assumption is not None and "1 kernels" in assumption.why
    assert overlap_assumption(overlap_change((graph, start, end), (graph, start, end))) is None
