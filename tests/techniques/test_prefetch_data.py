"""`prefetch-data`: the pipeline of workers, contention as stated assumptions, and the one recorded pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.builder import build
from foretrace.graph.select import select
from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.timeline import simulate
from foretrace.techniques import PrefetchData
from foretrace.techniques.data import prefetch_data
from foretrace.techniques.data.prefetch_data import WORKER, find_fetches
from foretrace.techniques.whatif import whatif
from foretrace.testing import small_training
from foretrace.testing.workloads import LOADER, MULTI, Cpu, Gpu
from foretrace.trace.read import read
from foretrace.trace.trace import LaneKind

ALONE: dict[str, Any] = {"host_contention": 1, "copy_contention": 1, "fetch": 1, "hand_over_ms": 0}


def steps_ms(graph: TaskGraph) -> list[float]:
    return [round(float(step) / 1e6, 3) for step in simulate(graph).step_times_ns]


def host(**recording: Any) -> dict[str, Any]:
    return {"machine": {"cores": 8, "affinity": None, "cpu_quota": None}, "threads": {"intra_op": 1}, **recording}


def test_a_loader_that_keeps_up_disappears() -> None:
    with_loader, without = Gpu(data_us=3000).graph(), Gpu(data_us=0).graph()
    predicted = PrefetchData(workers=2, **ALONE).predict(with_loader)
    assert steps_ms(predicted)[1:] == steps_ms(without)[1:]


@pytest.mark.parametrize(("workers", "expected"), [(1, 90.0), (2, 45.0), (3, 30.0)])
def test_a_loader_that_does_not_keep_up_sets_the_pace(workers: int, expected: float) -> None:
    graph = Cpu(data_us=90_000, steps=12).graph()
    predicted = PrefetchData(workers=workers, **ALONE).predict(graph)
    assert np.mean(steps_ms(predicted)[2:]) == pytest.approx(expected, rel=0.04)


def test_more_workers_never_make_it_slower() -> None:
    graph = Gpu(data_us=20_000, steps=8).graph()
    times = [simulate(PrefetchData(workers=n, **ALONE).predict(graph)).step_time_s for n in range(1, 8)]
    assert times == sorted(times, reverse=True)


def test_workers_are_lanes_that_prepare_in_turn_and_no_further_ahead_than_ordered() -> None:
    graph = Cpu(steps=9).graph()
    predicted = PrefetchData(workers=2, prefetch_factor=2, **ALONE).predict(graph)
    lanes = [lane for lane in predicted.lanes if lane.kind == LaneKind.MODEL]
    assert [lane.label for lane in lanes] == ["loader worker 0", "loader worker 1"]
    batches = np.flatnonzero(select(predicted, name=WORKER))
    assert len(batches) == 9
    timeline = simulate(predicted)
    order = batches[np.lexsort((predicted.step[batches],))]
    assert [int(lane) for lane in predicted.lane[order]] == [1 + i % 2 for i in range(9)]
    taken = find_fetches(predicted)[0].first
    for i in range(4, 9):
        assert timeline.start[order[i]] >= timeline.end[taken[i - 4]], "at most 2 x 2 batches are ordered ahead"
    ready = (predicted.edge_kind == EdgeKind.DATA) & np.isin(predicted.src, batches)
    assert ready.sum() == 9


def test_batches_are_runs_of_loading_tasks() -> None:
    fetches = find_fetches(Cpu(steps=3, data_us=900).graph())
    assert len(fetches) == 1
    assert fetches[0].ns.tolist() == [900_000] * 3
    assert len(fetches[0].rest) == 6 and not fetches[0].processes


def test_contention_slows_the_host_while_workers_run() -> None:
    graph = Gpu(kernel_us=1, small_us=1, data_us=2000).graph()  # bound by its host
    plain = simulate(PrefetchData(**ALONE).predict(graph)).step_time_s
    slow = simulate(PrefetchData(**ALONE | {"host_contention": 1.5}).predict(graph)).step_time_s
    assert 1.2 * plain < slow < 1.5 * plain
    rare = Gpu(kernel_us=1, small_us=1, data_us=50).graph()
    plain = simulate(PrefetchData(**ALONE).predict(rare)).step_time_s
    slow = simulate(PrefetchData(**ALONE | {"host_contention": 1.5}).predict(rare)).step_time_s
    assert slow < 1.03 * plain, "a worker that hardly works disturbs hardly"


def test_pageable_copies_slow_down_and_pinned_ones_do_not() -> None:
    graph = Gpu().graph()
    copies = select(graph, kind="copy")
    predicted = PrefetchData(**ALONE | {"copy_contention": 2}).predict(graph)
    assert predicted.dur[select(predicted, kind="copy")].sum() == 2 * graph.dur[copies].sum()
    assert predicted.dur[select(predicted, name="cudaMemcpyAsync", kind="call")].sum() == 2 * 4 * 6000
    names = tuple(name.replace("Pageable", "Pinned") for name in graph.names)
    pinned = replace(graph, names=names)
    predicted = PrefetchData().predict(pinned)
    assert predicted.dur[select(predicted, kind="copy")].sum() == graph.dur[copies].sum()
    assert "copy_contention" not in {each.flag for each in predicted.assumptions}


def test_cores_are_shared_by_count() -> None:
    def step(cores: int) -> float:
        machine = {"cores": cores, "affinity": None, "cpu_quota": None}
        graph = Cpu(data_us=4000, steps=8, recording={"machine": machine, "threads": {"intra_op": 1}}).graph()
        return simulate(PrefetchData(workers=2, **ALONE).predict(graph)).step_time_s

    work_s = simulate(Cpu(data_us=0, steps=8).graph()).step_time_s
    assert step(8) == pytest.approx(work_s, rel=0.01)
    assert step(1) == pytest.approx(work_s + 4e-3, rel=0.02), "one core: nothing is hidden"


@pytest.mark.parametrize(
    ("cores", "quota", "threads", "workers"),
    [
        (1, None, 1, 1),
        (2, None, 1, 1),
        (2, None, 2, 1),
        (4, None, 1, 3),
        (64, None, 1, 4),
        (64, 2.5, 1, 1),
        (8, None, 6, 2),
    ],
)
def test_by_default_there_are_as_many_workers_as_free_cores(
    cores: int, quota: float | None, threads: int, workers: int
) -> None:
    machine = {"cores": 64, "affinity": list(range(cores)), "cpu_quota": quota}
    graph = Cpu(recording={"machine": machine, "threads": {"intra_op": threads}}).graph()
    assert {each.label for each in PrefetchData().predict(graph).lanes if each.kind == LaneKind.MODEL} == {
        f"loader worker {i}" for i in range(workers)
    }
    assert PrefetchData().workers_for(Gpu().graph()) == 4, "nobody says how many cores"
    assert PrefetchData(workers=7).workers_for(graph) == 7


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # this machine may have fewer
def test_the_real_loader_gets_the_workers_that_this_process_has_cores_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for cores, workers in ((1.0, 1), (2.0, 1), (2.5, 1), (3.0, 2), (32.0, 4)):
        monkeypatch.setattr(prefetch_data, "usable_cores", lambda cores=cores: cores)
        assert PrefetchData().apply(small_training()).loader.num_workers == workers  # type: ignore[attr-defined]


def test_known_cores_narrow_the_assumption_on_a_processor() -> None:
    known, unknown = Cpu(recording=host()).graph(), Cpu().graph()
    ranges = [
        next(each.high - each.low for each in PrefetchData().uncertain(graph) if each.flag == "host_contention")
        for graph in (known, unknown)
    ]
    assert ranges[0] < ranges[1]


def test_a_loader_with_workers_can_get_more() -> None:
    loaders = [{"read_by_step_thread": True, "num_workers": 1}]
    slow = Gpu(data_us=30_000, steps=8, loader=MULTI, recording={"loaders": loaders}).graph()
    before = simulate(slow).step_time_s
    predicted = PrefetchData(workers=2, **ALONE).predict(slow)
    assert simulate(predicted).step_time_s == pytest.approx(before / 2, rel=0.1)


@pytest.mark.parametrize(
    ("loaders", "data_us", "said"),
    [
        ([], 5000, "does not say how many"),
        ([{"read_by_step_thread": True, "num_workers": 8}], 5000, "already has 8 workers"),
        ([{"read_by_step_thread": True, "num_workers": 1}], 10, "nothing to hide"),
    ],
)
def test_other_loaders_with_workers_are_refused(loaders: list[dict[str, Any]], data_us: int, said: str) -> None:
    graph = Gpu(data_us=data_us, loader=MULTI, recording={"loaders": loaders}).graph()
    with pytest.raises(NotApplicableError, match=said):
        PrefetchData(workers=4).predict(graph)


def test_runs_without_a_loader_are_refused() -> None:
    with pytest.raises(NotApplicableError, match="no data loading"):
        PrefetchData().predict(Gpu(data_us=0).graph())
    with pytest.raises(NotApplicableError, match="workers must be 1 or more and at most 10,000, got 0"):
        PrefetchData(workers=0).predict(Gpu(loader=LOADER).graph())
    with pytest.raises(NotApplicableError, match="in this graph already"):
        PrefetchData().predict(PrefetchData().predict(Gpu().graph()))


def test_the_recorded_pair(shared_data: Path) -> None:
    """ResNet-50, workers 0 -> 4: the step recorded with workers, predicted from the recording without."""
    folder = shared_data / "traces" / "kineto"
    before, after = (build(read(next(folder.glob(f"resnet50_num_workers_{n}.*")))) for n in (0, 4))
    measured = float(np.median(simulate(after).step_times_ns[1:])) / 1e9  # the first step fills the pipeline
    assert measured == pytest.approx(0.1263, abs=1e-3)
    prediction = whatif(before, [PrefetchData(workers=4)])
    assert prediction.after_s == pytest.approx(measured, rel=0.1)
    low, high = prediction.interval_s
    assert low <= measured <= high
    assert high - low < 0.5 * measured, "an interval that covers everything says nothing"
    assert prediction.critical_path_moved
    first = next(each.assumption for each in prediction.assumptions if each.assumption.flag)
    assert first.flag == "host_contention"  # of those that a user can replace


def test_copies_from_pinned_memory_do_not_block_the_host() -> None:
    graph = Gpu().graph()
    pageable, pinned = (PrefetchData(workers=2, pinned=pinned).predict(graph) for pinned in (False, True))
    assert simulate(pinned).step_time_s < simulate(pageable).step_time_s
    waits = (pinned.edge_kind == EdgeKind.SYNC) & (pinned.kind[pinned.src] == TaskKind.COPY)
    assert not waits.any()
    assert {"pinned_copy"} == {each.flag for each in pinned.assumptions if "copy" in each.flag}
    with pytest.raises(NotApplicableError, match="pinned memory matters for copies to a device"):
        PrefetchData(workers=1, pinned=True).predict(Cpu().graph())
