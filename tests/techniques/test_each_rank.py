"""Techniques on the graph of several ranks: taken apart and tied together again, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import NotApplicableError
from foretrace.graph import edit
from foretrace.graph.clock import host_runs_ahead, joint_rows, measure_on_device, own_marks
from foretrace.graph.insert import HostTask, insert
from foretrace.graph.join import join
from foretrace.graph.select import select
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, TaskGraph, TaskKind
from foretrace.simulate.check import check
from foretrace.simulate.ranks import parts, shares
from foretrace.simulate.replay import replay
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.each_rank import first_rank, on_each_rank
from foretrace.techniques.registry import BUILT_IN
from foretrace.techniques.whatif import whatif
from tests.graph.rank_sets import Collective, Job, work
from tests.simulate.rank_graphs import rank_set

RANDOM = np.random.default_rng(5)


def small(ranks: int = 3, steps: int = 4, each: int = 2, *, seed: int = 0, transfer: int = 700) -> TaskGraph:
    """Joined ranks of kernels of 1 to 9 µs and all-reduces."""
    times = np.random.default_rng(seed).integers(1_000, 9_000, size=(ranks, steps, each))
    return join(rank_set(times, transfer))


def steps_ns(graph: TaskGraph) -> list[int]:
    found: list[int] = simulate(graph).step_times_ns.tolist()
    return found


def same(a: TaskGraph, b: TaskGraph) -> bool:
    """Equal columns, up to the numbers of lanes."""
    columns = [key for key in (*TASK_COLUMNS, *EDGE_COLUMNS, "in_ptr", "marks") if key != "lane"]
    lanes = [a.lanes[i] for i in a.lane.tolist()] == [b.lanes[i] for i in b.lane.tolist()]
    return lanes and all(np.array_equal(getattr(a, key), getattr(b, key)) for key in columns)


# -- apart and together ----------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(ranks=st.integers(2, 5), steps=st.integers(1, 4), each=st.integers(1, 3), seed=st.integers(0, 999))
def test_changing_nothing_changes_nothing(ranks: int, steps: int, each: int, seed: int) -> None:
    graph = small(ranks, steps, each, seed=seed)
    again = on_each_rank(graph, lambda rank: rank)
    assert check(again).ok
    start, end = replay(graph)
    start_again, end_again = replay(again)
    assert sorted(zip(start.tolist(), end.tolist(), strict=True)) == sorted(
        zip(start_again.tolist(), end_again.tolist(), strict=True)
    )
    assert (len(again), again.edges) == (len(graph), graph.edges)
    assert again.info == graph.info
    assert again.changes == graph.changes


def test_large_groups_meet_in_the_same_task_again() -> None:
    graph = small(20, 2, 1)
    assert (graph.kind == TaskKind.JOIN).sum() == 2
    again = on_each_rank(graph, lambda rank: rank)
    assert (again.kind == TaskKind.JOIN).sum() == 2
    assert steps_ns(again) == steps_ns(graph)
    assert same(on_each_rank(again, lambda rank: rank), again)


@settings(max_examples=25)
@given(by=st.floats(0, 3), seed=st.integers(0, 999), ranks=st.integers(2, 4))
def test_scaling_each_rank_is_scaling_all(by: float, seed: int, ranks: int) -> None:
    graph = small(ranks, seed=seed)

    def scaled(each: TaskGraph) -> TaskGraph:
        return edit.scale(each, select(each, kind="kernel"), by)

    assert steps_ns(on_each_rank(graph, scaled)) == steps_ns(scaled(graph))


@settings(max_examples=25)
@given(seed=st.integers(0, 999), chosen=st.sampled_from(["gemm", "nccl*"]))
def test_removing_from_each_rank_is_removing_from_all(seed: int, chosen: str) -> None:
    graph = small(seed=seed)

    def removed(each: TaskGraph) -> TaskGraph:
        return edit.remove(each, select(each, name=chosen))

    assert steps_ns(on_each_rank(graph, removed)) == steps_ns(removed(graph))


def _after_work(rank: TaskGraph, task: str, kind: TaskKind) -> TaskGraph:
    """Five microseconds more after the work of every step."""
    rows = np.flatnonzero(select(rank, op="aten::work", kind="cpu"))
    return insert(rank, [HostTask(after=int(row), name=task, dur_ns=5_000, kind=kind) for row in rows])


def test_work_put_in_on_every_rank_lengthens_every_step_by_as_much(tmp_path: Path) -> None:
    graph = join(Job(work_us=work(RANDOM, 3, 4)).graphs(tmp_path))
    changed = on_each_rank(graph, lambda rank: _after_work(rank, "more work", TaskKind.CPU))
    assert check(changed).ok
    assert steps_ns(changed) == [each + 5_000 for each in steps_ns(graph)]
    assert changed.changes[-1].what == "on each of 3 ranks: inserted 4 host tasks"
    assert changed.changes[-1].tasks == 12
    assert "more work" in changed.names
    assert [lane.rank for lane in changed.lanes] == [lane.rank for lane in graph.lanes]


def test_a_rank_alone_waits_as_long_as_among_the_others() -> None:
    graph = small(seed=3)
    alone = first_rank(graph)
    assert alone.ranks == (0,)
    assert alone.n_steps == graph.n_steps
    start, _ = replay(alone)
    there = (graph.rank == 0) & ~joint_rows(graph)
    assert start.tolist() == replay(graph)[0][there].tolist()


def test_a_change_of_what_ties_the_ranks_is_refused(tmp_path: Path) -> None:
    graph = join(Job(work_us=work(RANDOM, 3, 4)).graphs(tmp_path))
    with pytest.raises(NotApplicableError, match="changes which collectives rank 0 takes part in"):
        on_each_rank(graph, lambda rank: _after_work(rank, "nccl", TaskKind.COLLECTIVE))


# -- steps -----------------------------------------------------------------------------------------------------


def test_every_rank_has_marks_of_its_own(tmp_path: Path) -> None:
    graph = join(Job(work_us=work(RANDOM, 3, 4), entry_us=(700, 0, 90)).graphs(tmp_path))
    end = simulate(graph).end
    first = [int(end[own_marks(graph, rank)[0]]) for rank in range(3)]
    assert np.subtract(first, min(first)).tolist() == [700_000, 0, 90_000]
    last = [int(end[own_marks(graph, rank)[-1]]) for rank in range(3)]
    assert max(last) == int(end[graph.marks[-1]])
    again = measure_on_device(graph)
    assert own_marks(again, 2).shape == (5,)
    assert steps_ns(again) == steps_ns(graph)


def test_a_late_rank_is_no_device_that_lags_behind(tmp_path: Path) -> None:
    """Work that a rank launches between its own mark and that of the last rank belongs to the next step."""
    times = np.full((2, 4, 3), 100.0)
    times[1] = 900.0
    job = Job(
        work_us=times.tolist(),
        collectives=(Collective(groups=((0,), (1,))), Collective(groups=((0,), (1,))), Collective()),
    )
    graph = join(job.graphs(tmp_path))
    assert not host_runs_ahead(graph, simulate(graph).end)
    assert steps_ns(parse("scale kind=kernel|collective by=1").predict(graph)) == steps_ns(graph)


# -- techniques ------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(seed=st.integers(0, 999))
def test_a_faster_rank_shortens_a_step_only_where_it_came_last(seed: int) -> None:
    graph = small(each=1, seed=seed)
    times = np.random.default_rng(seed).integers(1_000, 9_000, size=(3, 4, 1))[:, :, 0]
    for rank in range(3):
        faster = parse(f"scale kind=kernel rank={rank} by=0.5").predict(graph)
        left = times.astype(np.float64)
        left[rank] = np.rint(left[rank] * 0.5)
        assert steps_ns(faster) == (left.max(axis=0) + 700).astype(int).tolist()


def test_the_straggler_made_faster_shortens_all_waits_and_another_rank_none() -> None:
    times = np.full((3, 5, 1), 2_000)
    times[2] = 8_000
    graph = join(rank_set(times, 700))

    def waits(of: TaskGraph) -> list[float]:
        timeline = simulate(of)
        return [round(row.wait_s * 1e9) for row in shares(timeline, parts(timeline))]

    assert waits(graph) == [6_000, 6_000, 0]
    assert waits(parse("scale kind=kernel rank=2 by=0.5").predict(graph)) == [2_000, 2_000, 0]
    assert waits(parse("scale kind=kernel rank=0 by=0.5").predict(graph)) == [7_000, 6_000, 0]


def test_a_free_network_saves_the_transfers_and_no_meeting_saves_the_waits_too() -> None:
    graph = small(each=1)
    before = steps_ns(graph)
    assert steps_ns(parse("scale kind=collective by=0").predict(graph)) == [each - 700 for each in before]
    apart = parse("remove kind=collective").predict(graph)
    alone = np.random.default_rng(0).integers(1_000, 9_000, size=(3, 4, 1))[:, :, 0]
    assert simulate(apart).window_ns == alone.sum(axis=1).max()
    assert parts(simulate(apart)).count == 0


def test_a_time_of_ones_own_for_transfers_and_so_many_per_rank() -> None:
    graph = small(each=1)
    slower = parse("replace-kernel kind=collective time_us=1.7").predict(graph)
    assert steps_ns(slower) == [each + 1_000 for each in steps_ns(graph)]
    fewer = parse("replace-kernel kind=kernel time_us=1 count=1").predict(small(each=2))
    assert steps_ns(fewer) == [1_000 + 2 * 700] * 4  # one kernel is left on every rank, not one in all


def test_a_prediction_of_several_ranks_has_an_interval(tmp_path: Path) -> None:
    graph = join(Job(work_us=work(RANDOM, 3, 6)).graphs(tmp_path))
    found = whatif(graph, [parse("faster-device ratio=2"), parse("scale kind=collective by=0.5")])
    low, high = found.interval_s
    assert 0 < low < found.after_s < high
    assert found.assumptions[0].assumption.name == "host"


def test_host_time_on_every_rank(tmp_path: Path) -> None:
    """Hosts of all ranks twice as fast: what they do before each collective halves, transfers stay."""
    times = np.full((3, 4, 1), 300.0)
    times[-1] = 800.0
    graph = join(Job(work_us=times.tolist()).graphs(tmp_path))
    faster = parse("faster-device copy=2 host=0.5").predict(graph)
    plain = edit.scale(graph, select(graph, kind=("cpu", "call", "data")), 0.5)
    assert steps_ns(faster) == steps_ns(plain)
    assert simulate(graph).step_time_s - simulate(faster).step_time_s == pytest.approx(400e-6, abs=10e-6)


@pytest.mark.parametrize("kind", [each for each in BUILT_IN if not each.across], ids=lambda each: each.name)
def test_what_reckons_with_one_rank_is_refused(kind: type[Technique]) -> None:
    wanted = {
        each.field: {"float": 2.0, "int": 2, "str": [*each.choices, "10gbit/50us"][0], "bool": True}[each.type]
        for each in kind.parameters()
        if each.required
    }
    with pytest.raises(NotApplicableError, match=rf"^{kind.name}: it reckons with one rank.*`rank=`"):
        kind(**wanted).predict(small())


def test_a_refusal_names_the_rank() -> None:
    with pytest.raises(NotApplicableError, match=r"^on rank 0: fused-optimizer: the recording shows no optimizer step"):
        parse("fused-optimizer").predict(small())


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(NotApplicableError, match=r"rank=7 is not in this graph, which holds 3 ranks, 0 to 2"):
        parse("scale rank=7 by=0.5").predict(small())
