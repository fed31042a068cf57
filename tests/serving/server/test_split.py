"""Splits of cores among instances: against every multiset of small problems, and the published optima."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.serving.server.split import CoreSplit, ModelInstance, split_table

THREADS, BATCH = 5, 6
POINTS = st.builds(ModelInstance, st.integers(1, THREADS), st.integers(1, BATCH))
LATENCIES = st.dictionaries(POINTS, st.integers(1, 50).map(float), max_size=8)


def multisets(points: list[ModelInstance], threads: int, batch: int) -> Iterator[tuple[ModelInstance, ...]]:
    """Every multiset of points for the whole batch on at most so many threads: what the table must not miss."""
    if batch == 0:
        yield ()
    for index, point in enumerate(points):
        if point.threads <= threads and point.batch <= batch:
            for rest in multisets(points[index:], threads - point.threads, batch - point.batch):
                yield (point, *rest)


@given(LATENCIES, st.integers(1, THREADS), st.integers(1, BATCH), st.booleans())
def test_every_best_split_is_the_best_of_all_multisets(
    latency: dict[ModelInstance, float], threads: int, batch: int, idle: bool
) -> None:
    table = split_table(latency, threads=threads, batch=batch, idle=idle)
    best: dict[int, float] = {}
    for found in multisets(sorted(latency), threads, batch):
        if idle or sum(each.threads for each in found) == threads:
            best[len(found)] = min(best.get(len(found), inf), max(latency[each] for each in found))
    assert {count: table.latency[count, batch] for count in best} == best
    assert len(table.splits(batch)) == len(best)
    for split in table.splits(batch):
        assert max(latency[each] for each in split.instances) == best[len(split)]
        assert split.batch == batch and (split.threads <= threads if idle else split.threads == threads)
    assert [len(each) for each in table.splits(batch)] == sorted(best, key=lambda count: (best[count], count))


@given(LATENCIES, st.integers(1, BATCH))
def test_more_threads_and_idle_ones_never_cost_anything(latency: dict[ModelInstance, float], batch: int) -> None:
    def least(threads: int, *, idle: bool = True) -> float:
        return float(split_table(latency, threads=threads, batch=batch, idle=idle).latency[:, batch].min())

    assert least(THREADS) <= least(THREADS, idle=False)
    assert least(THREADS) <= least(THREADS - 1) and least(THREADS) == min(
        least(threads, idle=False) for threads in range(1, THREADS + 1)
    )


def test_a_cap_on_instances_is_obeyed() -> None:
    latency = {ModelInstance(1, 1): 1.0, ModelInstance(4, 4): 10.0, ModelInstance(2, 2): 4.0}
    few = split_table(latency, threads=4, batch=4, instances=2)
    assert few.splits(4) == (CoreSplit((ModelInstance(2, 2),) * 2), CoreSplit.fat(4, 4))
    assert split_table(latency, threads=4, batch=4).splits(4)[0] == CoreSplit.thin(4, 4)


def test_a_batch_that_no_points_add_up_to_has_no_split() -> None:
    assert split_table({ModelInstance(1, 2): 1.0}, threads=4, batch=7).splits(7) == ()
    assert split_table({}, threads=4, batch=7).splits(7) == ()


@given(st.integers(1, 20), st.integers(1, 200))
def test_thin_shares_a_batch_out_evenly(threads: int, batch: int) -> None:
    thin = CoreSplit.thin(threads, batch)
    sizes = {each.batch for each in thin.instances}
    assert thin.batch == batch and len(thin) == thin.threads == min(threads, batch)
    assert max(sizes) - min(sizes) <= 1
    assert CoreSplit.fat(threads, batch).batch == batch


def test_a_split_says_what_it_is() -> None:
    split = CoreSplit((ModelInstance(1, 8), ModelInstance(4, 16), ModelInstance(4, 16)))
    assert str(split) == "2 × (4 threads, batch 16) + 1 × (1 thread, batch 8)"
    assert split.threads == 9 and split.batch == 40 and split == CoreSplit(split.instances[::-1])


def test_a_table_that_fits_no_memory_is_refused() -> None:
    with pytest.raises(ForetraceError, match="`batch=1000000` on 100 threads has too many splits"):
        split_table({ModelInstance(1, 1): 1.0}, threads=100, batch=1_000_000)


@given(st.lists(POINTS, min_size=1, max_size=6))
def test_a_split_is_read_as_it_is_written(instances: list[ModelInstance]) -> None:
    split = CoreSplit(tuple(instances))
    assert CoreSplit.parse(split.text) == split


def test_a_text_that_is_no_split_is_refused() -> None:
    with pytest.raises(ForetraceError, match="write 2x1:4"):
        CoreSplit.parse("2x1")
