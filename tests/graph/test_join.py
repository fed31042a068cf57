"""One graph of several ranks: exact replay, arrivals and transfers, and predictions held against a simulated job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph import join as joining
from foretrace.graph.builder import build
from foretrace.graph.collectives import collective_calls
from foretrace.graph.edit import remove, scale
from foretrace.graph.join import NO_RANK, join
from foretrace.graph.one_run import match_and_align
from foretrace.graph.store import load, save
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.ranks import entering_together
from foretrace.simulate.replay import replay
from foretrace.simulate.timeline import simulate
from foretrace.trace.read import read
from foretrace.trace.trace import LaneKind
from tests.graph.rank_sets import Collective, Job, work
from tests.kineto_files import Recording

RANDOM = np.random.default_rng(17)


def joined(job: Job, folder: Path) -> TaskGraph:
    return join(job.graphs(folder))


def off_ns(graph: TaskGraph) -> int:
    """How far the replay is from the recording at worst."""
    start, _ = replay(graph)
    return int(np.abs(start - graph.recorded).max())


def test_every_collective_is_an_arrival_and_a_transfer_on_every_rank(tmp_path: Path) -> None:
    graphs = Job(work_us=work(RANDOM, 3, 4), collectives=(Collective(transfer_us=25),)).graphs(tmp_path)
    graph = join(graphs)
    arrivals, transfers = graph.kind == TaskKind.ARRIVAL, graph.kind == TaskKind.COLLECTIVE
    assert arrivals.sum() == transfers.sum() == 12
    assert len(graph) == sum(map(len, graphs)) + 12 + 4  # and a mark of all ranks per step
    assert set(graph.dur[arrivals].tolist()) == {0}
    assert set(graph.dur[transfers].tolist()) == {25_000}
    assert set(graph.nbytes[transfers].tolist()) == {4096}
    tied = (graph.edge_kind == EdgeKind.COLLECTIVE) & (graph.kind[graph.src] == TaskKind.ARRIVAL)
    assert tied.sum() == 4 * 9
    assert set(graph.lag[tied].tolist()) == {0}
    assert {lane.rank for lane in graph.lanes} == {0, 1, 2}
    assert all(lane.label.startswith(f"rank {lane.rank} ") or lane.kind == LaneKind.MODEL for lane in graph.lanes)


@pytest.mark.parametrize("described", [True, False])
def test_the_replay_is_exact_on_the_aligned_clock(tmp_path: Path, described: bool) -> None:
    job = Job(
        work_us=work(RANDOM, 4, 5, 2),
        collectives=(Collective(), Collective(kind="AllGather", transfer_us=13)),
        offset_us=(0, 4999, -4321, 17),
        entry_us=(0, 300, 20, 5000),
        described=described,
    )
    graph = joined(job, tmp_path)
    assert off_ns(graph) == 0
    timeline = simulate(graph)
    assert timeline.window_ns == pytest.approx((max(job.ends) - 1000) * 1000, abs=3)


def test_the_first_step_begins_with_the_first_rank_and_ends_with_the_last(tmp_path: Path) -> None:
    job = Job(work_us=work(RANDOM, 3, 3), entry_us=(700, 0, 90))
    graph = joined(job, tmp_path)
    marks = graph.marks
    assert graph.lanes[graph.lane[marks[0]]].rank == 1
    assert graph.info.steps == (5, 6, 7)
    assert simulate(graph).step_times_ns.sum() == graph.recorded[marks[-1]] - graph.recorded[marks[0]]
    assert graph.info.window_ns == (graph.recorded[marks[0]], graph.recorded[marks[-1]])


def test_a_recording_of_drifting_clocks_replays_exactly(tmp_path: Path) -> None:
    steps = work(RANDOM, 3, 40, most=60_000)
    job = Job(work_us=steps, offset_us=(0, 2000, -5000), drift=(0, 4e-5, -1e-5))
    graphs = job.graphs(tmp_path)
    _, clock = match_and_align([collective_calls(graph) for graph in graphs])
    assert clock.drift[1:] == pytest.approx([4e-5, -1e-5], rel=0.05)
    graph = join(graphs)
    assert off_ns(graph) == 0
    assert np.all(graph.delay >= 0)
    transfers = graph.dur[graph.kind == TaskKind.COLLECTIVE]
    assert np.abs(transfers - 40_000).max() < 5_000


@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(2, 5),
    steps=st.integers(1, 4),
    described=st.booleans(),
    faster=st.floats(0.0, 1.5),
)
@settings(max_examples=25)
def test_a_change_on_one_rank_reaches_the_others_as_in_the_job_itself(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int, steps: int, described: bool, faster: float
) -> None:
    random = np.random.default_rng(seed)
    times = work(random, ranks, steps, 2)
    kinds = (Collective(transfer_us=30), Collective(kind="AllGather", transfer_us=7))
    offsets = random.integers(-5000, 5000, size=ranks).tolist()
    job = Job(work_us=times, collectives=kinds, offset_us=offsets, described=described)
    graph = join(job.graphs(tmp_path_factory.mktemp("job")))
    assert off_ns(graph) == 0
    rank = int(random.integers(ranks))
    changed = [[[w * faster if r == rank else w for w in step] for step in mine] for r, mine in enumerate(times)]
    truth = Job(work_us=changed, collectives=kinds)
    _, ends = truth.run()
    names = np.array([name == "aten::work" for name in graph.names])
    predicted = simulate(scale(graph, names[graph.op] & (graph.op >= 0) & (graph.rank == rank), faster))
    # A blocking call is its own cost and a wait: where the wait vanishes, a microsecond or two may remain.
    assert predicted.window_ns == pytest.approx((max(ends) - 1000) * 1000, abs=2_000 * 2 * steps)


def test_slower_transfers_slow_every_rank(tmp_path: Path) -> None:
    job = Job(work_us=work(RANDOM, 3, 4))
    graph = joined(job, tmp_path)
    slower = simulate(scale(graph, graph.kind == TaskKind.COLLECTIVE, 3.0))
    assert slower.window_ns - simulate(graph).window_ns == 4 * 80_000


def test_a_broadcast_waits_for_those_that_the_recording_shows(tmp_path: Path) -> None:
    times = [[[100.0, 100.0]], [[900.0, 100.0]], [[400.0, 100.0]]]
    job = Job(work_us=times, collectives=(Collective(kind="Broadcast", transfer_us=20), Collective()))
    graph = joined(job, tmp_path)
    assert off_ns(graph) == 0
    names = np.array(["Broadcast" in name for name in graph.names])[graph.name]
    tied = (graph.edge_kind == EdgeKind.COLLECTIVE) & names[graph.src] & (graph.kind[graph.src] == TaskKind.ARRIVAL)
    rank = graph.rank
    pairs = sorted(zip(rank[graph.src[tied]].tolist(), rank[graph.dst[tied]].tolist(), strict=True))
    assert pairs == [(0, 0), (0, 1), (0, 2), (1, 1), (2, 1), (2, 2)]  # what left before a rank came did not wait for it
    slower = scale(graph, (rank == 1) & (graph.kind == TaskKind.CPU), 2.0)
    assert simulate(slower).end[names & (rank == 0)].max() == simulate(graph).end[names & (rank == 0)].max()


def test_a_transfer_needs_both_sides(tmp_path: Path) -> None:
    files = [Recording(), Recording()]
    for rank, file in enumerate(files):
        file.extra["distributedInfo"] = {"rank": rank, "world_size": 2, "backend": "nccl"}
        begin = 1000.0 + 300 * rank
        file.op("aten::work", begin, 50)
        args = {"Collective name": "send" if rank == 0 else "recv", "In msg nelems": 64, "dtype": "Float"}
        args |= {"Dst Rank" if rank == 0 else "Src Rank": 1 - rank, "Process Group Name": "0", "Group size": 2}
        call = file.call("cudaLaunchKernel", begin + 50, 5)
        file.on_device("kernel", "ncclDevKernel_SendRecv(x)", begin + 57, 1390 - begin - 57, call, 30, **args)
        file.op("aten::after", 1400, 10)
        file.write(tmp_path / f"rank{rank}.json")
    trace = read(tmp_path)
    graph = join([build(trace, rank) for rank in (0, 1)])
    assert off_ns(graph) == 0
    assert graph.dur[graph.kind == TaskKind.COLLECTIVE].tolist() == [33_000, 33_000]
    assert graph.info.collectives["what"] == [["send", "the transfers from rank 0 to rank 1", 256]]


def test_many_members_meet_in_one_task_with_the_same_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Job(work_us=work(RANDOM, 5, 3), offset_us=(0, 9, -40, 800, 3)).graphs(tmp_path)
    pairs = join(graphs)
    monkeypatch.setattr(joining, "ALL_PAIRS", 4)
    met = join(graphs)
    assert met.lanes[-1].kind == LaneKind.MODEL and any(lane.rank == NO_RANK for lane in met.lanes)
    assert (met.kind == TaskKind.JOIN).sum() == (pairs.kind == TaskKind.JOIN).sum() + 3
    assert off_ns(met) == off_ns(pairs) == 0
    for factor in (0.0, 4.0):
        late = [scale(g, (g.rank == 2) & (g.kind == TaskKind.CPU), factor) for g in (pairs, met)]
        assert simulate(late[0]).window_ns == simulate(late[1]).window_ns
    # A rank whose collective is gone waits for nobody, either way.
    without = [remove(g, (g.kind == TaskKind.COLLECTIVE) & (g.rank == 1)) for g in (pairs, met)]
    ends = [simulate(g).end[g.rank == 1].max() for g in without]
    assert ends[0] == ends[1]


def test_ranks_that_enter_together_wait_less(tmp_path: Path) -> None:
    job = Job(work_us=[[[100.0]], [[100.0]]], entry_us=(0, 5000))
    graph = joined(job, tmp_path)
    before, after = simulate(graph), simulate(entering_together(graph))
    assert before.window_ns - after.window_ns == 5_000_000
    assert entering_together(graph).changes[-1].what == (
        "let 1 ranks enter the recording with the first one, up to 5 ms earlier"
    )


def test_steps_that_only_some_ranks_recorded_are_left_out(tmp_path: Path) -> None:
    graphs = Job(work_us=work(RANDOM, 2, 4)).graphs(tmp_path)
    graph = join(
        [graphs[0], replace(graphs[1], info=replace(graphs[1].info, steps=(5, 6, 7)), marks=graphs[1].marks[:4])]
    )
    assert graph.info.steps == (5, 6, 7)
    assert graph.n_steps == 3
    assert off_ns(graph) == 0
    assert set(graph.step.tolist()) == {-1, 0, 1, 2}


def test_a_rank_without_collectives_stays_beside_the_others(tmp_path: Path) -> None:
    graphs = Job(work_us=work(RANDOM, 3, 3)).graphs(tmp_path)
    quiet = graphs[2].with_columns(
        kind=np.where(graphs[2].kind == TaskKind.COLLECTIVE, TaskKind.KERNEL, graphs[2].kind).astype(np.uint8)
    )
    graph = join([*graphs[:2], quiet])
    assert off_ns(graph) == 0
    assert (graph.kind == TaskKind.ARRIVAL).sum() == 6
    assert graph.info.collectives["offset_ns"][2] is None
    assert any("rank 2 recorded no collective" in sentence for sentence in graph.info.collectives["missing"])
    assert any("clock of rank 2 could not be compared" in note for note in graph.info.notes)


def test_a_graph_of_all_ranks_is_stored_and_opened_again(tmp_path: Path) -> None:
    graph = joined(Job(work_us=work(RANDOM, 3, 2), offset_us=(0, 50, -70)), tmp_path)
    again = load(save(graph, tmp_path / "all.graph"))
    assert again.info == graph.info
    assert simulate(again).window_ns == simulate(graph).window_ns


def test_what_cannot_be_joined_is_refused(tmp_path: Path) -> None:
    graphs = Job(work_us=work(RANDOM, 2, 2)).graphs(tmp_path)
    with pytest.raises(GraphError, match="no graph was given"):
        join([])
    with pytest.raises(GraphError, match="rank 1 is given twice"):
        join([graphs[1], graphs[1]])
    with pytest.raises(GraphError, match="holds several ranks already"):
        join([join(graphs), graphs[0]])


def test_tables_of_graphs_that_were_read_apart_are_merged(tmp_path: Path) -> None:
    files = sorted(Job(work_us=work(RANDOM, 2, 3)).write(tmp_path).glob("*.json"))
    together = join([build(read(tmp_path), rank) for rank in (0, 1)])
    apart = join([_later(build(read(file)), together, rank) for rank, file in enumerate(files)])
    names = [[g.names[i] for i in g.name.tolist()] for g in (together, apart)]
    operators = [[g.names[i] if i >= 0 else "" for i in g.op.tolist()] for g in (together, apart)]
    assert names[0] == names[1]
    assert operators[0] == operators[1]
    assert off_ns(apart) == 0


def _later(graph: TaskGraph, whole: TaskGraph, rank: int) -> TaskGraph:
    """A graph of one file moved to where the whole recording puts it."""
    shift = int(whole.recorded[whole.rank == rank].min() - graph.recorded.min())
    release = np.where(graph.release > NO_RELEASE // 2, graph.release + shift, graph.release)
    return graph.with_columns(recorded=graph.recorded + shift, release=release)


def test_eight_ranks_of_a_recommender_in_one_graph(shared_data: Path) -> None:
    trace = read(shared_data / "traces/param/dlrm_kineto_8rank")
    graph = join([build(trace, info.rank) for info in trace.ranks])
    assert off_ns(graph) == 0
    assert 6_500 < len(graph) < 8_500
    recorded = simulate(graph)
    span = (recorded.end.max() - recorded.start.min()) / 1e6
    assert span == pytest.approx(20.9, abs=0.1)
    free = simulate(scale(graph, graph.kind == TaskKind.COLLECTIVE, 0.0))
    assert 0 <= recorded.step_time_s - free.step_time_s <= 20e-6
    together = simulate(entering_together(graph))
    assert (together.end.max() - together.start.min()) / 1e6 == pytest.approx(14.4, abs=0.1)
    assert together.step_time_s == pytest.approx(14.4e-3, abs=0.1e-3)


def test_questions_about_one_rank_are_answered_about_all(shared_data: Path) -> None:
    trace = read(shared_data / "traces/param/dlrm_kineto_8rank")
    timeline = simulate(join([build(trace, info.rank) for info in trace.ranks]))
    assert timeline.critical_path().total_ns == timeline.window_ns
    assert len(timeline.blame()) > 20
    for rank in range(8):
        assert timeline.breakdown(rank=rank).steps_ns.sum() == timeline.window_ns
    assert np.all(timeline.slack() >= 0)
    low, high = timeline.interval_s().low_s, timeline.interval_s().high_s
    assert low <= timeline.step_time_s <= high
