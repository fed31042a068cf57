"""Waits and transfers of several ranks, who is last, and why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph.builder import build
from foretrace.graph.join import join
from foretrace.simulate.breakdown import over_ranks
from foretrace.simulate.ranks import Parts, StragglerCause, lateness, parts, shares, straggler
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.trace.read import read
from tests.graph.rank_sets import Collective, Job, work

RANDOM = np.random.default_rng(23)


def timeline_of(job: Job, folder: Path) -> tuple[Timeline, Parts]:
    timeline = simulate(join(job.graphs(folder)))
    return timeline, parts(timeline)


def test_waits_and_transfers_of_a_known_job(tmp_path: Path) -> None:
    job = Job(work_us=[[[100.0]], [[400.0]], [[250.0]]], collectives=(Collective(transfer_us=33),))
    timeline, found = timeline_of(job, tmp_path)
    assert found.count == 1
    assert found.rank.tolist() == [0, 1, 2]
    assert found.wait_ns.tolist() == [300_000, 0, 150_000]
    assert found.transfer_ns.tolist() == [33_000] * 3
    assert found.rank[found.last_arriver].tolist() == [1]
    rows = shares(timeline, found)
    assert [row.last for row in rows] == [0, 1, 0]
    assert rows[1].caused_s == pytest.approx(450e-6)


def test_subgroups_are_collectives_of_their_own(tmp_path: Path) -> None:
    job = Job(work_us=work(RANDOM, 4, 2), collectives=(Collective(groups=((0, 2), (1, 3))),))
    timeline, found = timeline_of(job, tmp_path)
    assert found.count == 4
    members = [tuple(found.rank[found.first[i] : found.first[i + 1]].tolist()) for i in range(4)]
    assert sorted(members) == [(0, 2), (0, 2), (1, 3), (1, 3)]
    assert all(row.last <= 2 for row in shares(timeline, found))


@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 5))
@settings(max_examples=15)
def test_waiting_and_transfer_are_what_the_recorded_kernels_took(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int
) -> None:
    random = np.random.default_rng(seed)
    job = Job(work_us=work(random, ranks, 3), offset_us=random.integers(-5000, 5000, size=ranks).tolist())
    graphs = job.graphs(tmp_path_factory.mktemp("job"))
    timeline = simulate(join(graphs))
    found = parts(timeline)
    assert np.all(found.wait_ns >= 0) and np.all(found.transfer_ns >= 0)
    for row, graph in zip(shares(timeline, found), graphs, strict=True):
        recorded = graph.dur[graph.kind == 9].sum() / 3e9
        assert row.wait_s + row.transfer_s == pytest.approx(recorded, abs=5e-9)
    at_last = found.wait_ns[found.last_arriver]
    assert np.all(at_last == 0)


def test_a_rank_whose_host_works_longer_is_named_with_the_operator(tmp_path: Path) -> None:
    times = np.full((3, 6, 1), 200.0)
    times[2] = 700.0
    timeline, found = timeline_of(Job(work_us=times.tolist()), tmp_path)
    late = straggler(timeline, found)
    assert late is not None
    row, why = late
    assert (row.rank, row.last) == (2, 6)
    assert (why.cause, why.name) == (StragglerCause.HOST, "aten::work")
    assert why.more_s == pytest.approx(500e-6, abs=1e-6)
    assert why.by_s == pytest.approx(500e-6, abs=1e-6)
    assert why.sentence("500 us", "500 us", "work") == "its host works 500 us longer (500 us of that is work)"


def test_a_rank_that_enters_later_is_late_for_reasons_outside_the_recording(tmp_path: Path) -> None:
    job = Job(work_us=np.full((3, 1, 1), 200.0).tolist(), entry_us=(0, 6000, 30))
    timeline, found = timeline_of(job, tmp_path)
    why = lateness(timeline, found, 0)
    assert (why.rank, why.cause) == (1, StragglerCause.ENTRY)
    assert why.more_s == pytest.approx(6e-3, abs=40e-6)
    assert "step-entry skew from outside the recording" in why.sentence("6.00 ms", "", "")


def test_only_the_last_stretch_counts_against_a_rank(tmp_path: Path) -> None:
    times = np.full((2, 4, 1), 300.0)
    times[0, :3] = 900.0  # rank 0 was slow before, and is not any more
    times[1, 3] = 800.0
    timeline, found = timeline_of(Job(work_us=times.tolist()), tmp_path)
    why = lateness(timeline, found, 3)
    assert (why.rank, why.cause) == (1, StragglerCause.HOST)
    assert why.more_s == pytest.approx(500e-6, abs=1e-6)


def test_nobody_is_a_straggler_where_nobody_waits(tmp_path: Path) -> None:
    timeline, found = timeline_of(Job(work_us=np.full((3, 3, 1), 100.0).tolist()), tmp_path)
    assert straggler(timeline, found) is None
    assert found.wait_ns.tolist() == [0] * 9


def test_the_graph_of_one_rank_has_no_parts(tmp_path: Path) -> None:
    graph = Job(work_us=work(RANDOM, 2, 2)).graphs(tmp_path)[0]
    assert len(parts(simulate(graph))) == 0
    timeline, found = timeline_of(Job(work_us=work(RANDOM, 2, 2)), tmp_path)
    with pytest.raises(GraphError, match="collective 2 does not exist; this graph has 2, from 0"):
        lateness(timeline, found, found.count)


def test_waiting_counts_as_communication_of_the_rank_that_waits(tmp_path: Path) -> None:
    job = Job(work_us=[[[100.0]], [[5000.0]]], collectives=(Collective(transfer_us=33),))
    timeline, _ = timeline_of(job, tmp_path)
    first, second = (timeline.breakdown(rank=rank).total_ns() for rank in (0, 1))
    assert first["exposed_communication"] == 4_933_000
    assert second["exposed_communication"] == 33_000
    mean = over_ranks(timeline.graph, timeline.start, timeline.end)
    assert mean.rank == -1 and mean.steps_ns.sum(axis=1).tolist() == timeline.step_times_ns.tolist()
    assert mean.total_ns()["exposed_communication"] == (4_933_000 + 33_000) / 2


def test_the_eight_ranks_of_a_recommender(shared_data: Path) -> None:
    trace = read(shared_data / "traces/param/dlrm_kineto_8rank")
    timeline = simulate(join([build(trace, info.rank) for info in trace.ranks]))
    found = parts(timeline)
    assert found.count == 8
    assert found.rank[found.last_arriver].tolist() == [7, 7, 7, 7, 7, 5, 5, 4]
    spread = [np.ptp(found.arrived[found.first[i] : found.first[i + 1]]) / 1e3 for i in range(8)]
    ends = [np.ptp(found.ended[found.first[i] : found.first[i + 1]]) / 1e3 for i in range(8)]
    wait = [found.wait_ns[found.first[i] : found.first[i + 1]].mean() / 1e3 for i in range(8)]
    transfer = [found.transfer_ns[found.first[i] : found.first[i + 1]].mean() / 1e3 for i in range(8)]
    assert spread == pytest.approx([7624, 1101, 168, 125, 223, 534, 584, 885], abs=2)
    assert max(ends) < 8
    assert wait == pytest.approx([3304, 779, 145, 109, 107, 363, 422, 626], abs=1)
    assert transfer == pytest.approx([10.1, 7.5, 7.3, 7.3, 84.8, 9.6, 19.6, 66.3], abs=0.5)
    rows = shares(timeline, found)
    assert np.mean([row.wait_s for row in rows]) == pytest.approx(5.86e-3, abs=0.01e-3)
    assert np.mean([row.transfer_s for row in rows]) == pytest.approx(0.21e-3, abs=0.01e-3)
    why = lateness(timeline, found, 0)
    assert (why.rank, why.cause) == (7, StragglerCause.ENTRY)
    late = straggler(timeline, found)
    assert late is not None and late[0].rank == 7 and late[1].cause == StragglerCause.ENTRY


def test_a_collective_of_one_rank_has_no_last_arriver(tmp_path: Path) -> None:
    timeline, found = timeline_of(Job(work_us=work(RANDOM, 2, 2)), tmp_path)
    alone = Parts(
        **{key: getattr(found, key)[:1] for key in ("collective", "rank", "arrival", "transfer", "arrived", "began")},
        ended=found.ended[:1],
        step=found.step[:1],
    )
    with pytest.raises(GraphError, match="has one rank in this graph"):
        lateness(timeline, alone, 0)
