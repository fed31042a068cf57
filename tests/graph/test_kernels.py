"""Compiled loops of the graph room against definitions that are slow and plain."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretrace.graph.kernels import innermost_at, longest_common, nearest, nest, topological_order

sequences = st.lists(st.integers(0, 3), max_size=14)


def common_length(a: list[int], b: list[int]) -> int:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@given(sequences, sequences)
def test_longest_common_subsequence(a: list[int], b: list[int]) -> None:
    pairs = longest_common(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64), 1000)
    assert len(pairs) == common_length(a, b)
    assert all(a[i] == b[j] for i, j in pairs.tolist())
    assert np.all(np.diff(pairs, axis=0) > 0)


@given(sequences, sequences, st.integers(0, 5))
def test_a_limit_on_edits_still_gives_a_common_subsequence(a: list[int], b: list[int], most: int) -> None:
    pairs = longest_common(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64), most)
    assert all(a[i] == b[j] for i, j in pairs.tolist())
    assert np.all(np.diff(pairs, axis=0) > 0)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), max_size=12)


@given(spans, st.lists(st.integers(0, 50), max_size=10))
def test_innermost_span_covers_the_time(given_spans: list[tuple[int, int]], times: list[int]) -> None:
    # Properly nested spans only: children are clipped to the span that is open when they start.
    ordered = sorted(given_spans, key=lambda s: (s[0], -s[1]))
    nested: list[tuple[int, int]] = []
    for start, length in ordered:
        end = min([start + length, *[e for s, e in nested if s <= start < e]])
        nested.append((start, end))
    nested.sort(key=lambda s: (s[0], -s[1]))
    start_column = np.array([s for s, _ in nested], dtype=np.int64)
    end_column = np.array([e for _, e in nested], dtype=np.int64)
    asked = np.array(sorted(times), dtype=np.int64)
    found = innermost_at(start_column, end_column, asked)
    for time, row in zip(asked.tolist(), found.tolist(), strict=True):
        covering = [i for i, (s, e) in enumerate(nested) if s <= time < e]
        assert row == (covering[-1] if covering else -1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 15)), max_size=15))
def test_parents_precede_and_enclose(rows: list[tuple[int, int, int]]) -> None:
    rows = sorted(rows, key=lambda r: (r[0], r[1], -r[2]))
    lane = np.array([r[0] for r in rows], dtype=np.int32)
    start = np.array([r[1] for r in rows], dtype=np.int64)
    end = start + np.array([r[2] for r in rows], dtype=np.int64)
    start, end = start * 10_000, end * 10_000  # far beyond the rounding that is forgiven
    parent = nest(lane, start, end)
    for i, p in enumerate(parent.tolist()):
        if p >= 0:
            assert p < i and lane[p] == lane[i] and start[p] <= start[i] < end[p] and end[i] <= end[p]
    roots = nearest(parent, np.where(parent < 0, np.arange(len(rows)), -1))
    assert np.all(roots >= 0)


@given(st.integers(1, 12), st.data())
def test_topological_order_respects_edges_and_prefers_early_rows(n: int, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=20))
    pairs = [(a, b) for a, b in pairs if a != b]
    place = np.array(data.draw(st.permutations(range(n))), dtype=np.int64)
    pairs = [(a, b) if a < b else (b, a) for a, b in pairs]
    out_ptr = np.zeros(n + 1, dtype=np.int64)
    for a, _ in pairs:
        out_ptr[a + 1] += 1
    order = topological_order(
        place, np.cumsum(out_ptr), np.array([b for _, b in sorted(pairs)], dtype=np.int32).reshape(-1)
    )
    position = {int(v): i for i, v in enumerate(order)}
    assert len(position) == n
    assert all(position[a] < position[b] for a, b in pairs)
    if not pairs:
        assert order.tolist() == np.argsort(place).tolist()


def test_a_cycle_is_reported_by_a_short_order() -> None:
    order = topological_order(np.arange(3), np.array([0, 1, 2, 2]), np.array([1, 0], dtype=np.int32))
    assert order.tolist() == [2]
