"""The data planner: memory, orders and timelines by known answers; one real plan with its trial."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="trains; install the extra torch")

from msgspec.structs import replace as but

from foretrace.errors import ForetraceError
from foretrace.plan.data.costs import AccessCosts, Probe, epoch_graph, measure_one
from foretrace.plan.data.plan import DataCandidate, GraphSource, candidate_jobs, plan_data, priced, ranked, untimed
from foretrace.simulate.timeline import simulate
from foretrace.training.rows.out_of_core import TrainingJob
from foretrace.training.rows.partitions import GraphSizes

SIZES = GraphSizes(nodes=1_000_000, edges=10_000_000, partitions=0, features=0, classes=0)
BASE = TrainingJob(folder="", task="links", loader="in memory")
COSTS = AccessCosts(
    step_s=(0.02, 0.02, 0.02), few_s=(0.005, 0.005, 0.005), batch=10_000, few=2_500, edge_s=(1e-8, 1e-8, 1e-8),
    read_s=(0.01, 0.01, 0.01), commit_s=(0.04, 0.04, 0.04),
)  # fmt: skip


def test_disk_and_compute_overlap() -> None:
    assert play([1.0, 1.0, 1.0], [4, 1, 1], 0.1, 0.2, 1) == pytest.approx(3.4)  # all hidden but the first state
    assert play([1.0, 1.0, 1.0], [4, 1, 1], 2.0, 0.0, 1) == pytest.approx(8 + 2 + 2 + 1)  # the disk is slower
    assert play([1.0, 1.0], [4, 1], 0.5, 0.0, 0) == pytest.approx(2 + 1 + 0.5 + 1)  # nothing is read ahead
    assert play([1.0, 1.0], [2, 2], 0.5, 0.0, 1) == pytest.approx(1 + 1 + 0.5 + 1)  # one of two is
    assert play([1.0], [1], 0.5, 9.0, 1) == pytest.approx(1.5)  # what leaves last is in the commit


def play(compute_s: list[float], fresh: list[int], read_s: float, write_s: float, spare: int) -> float:
    graph = epoch_graph(compute_s, fresh, read_s=read_s, write_s=write_s, spare=spare)
    return simulate(graph).window_ns / 1e9


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 4)), min_size=1, max_size=9), st.floats(0, 2), st.floats(0, 2),
    st.integers(0, 2),
)  # fmt: skip
def test_an_epoch_runs_as_two_clocks_say(
    states: list[tuple[float, int]], read_s: float, write_s: float, spare: int
) -> None:
    compute_s, fresh = [each[0] for each in states], [*(each[1] for each in states), 0]
    now = disk = fresh[0] * read_s
    for k, seconds in enumerate(compute_s):
        ahead = min(spare, fresh[k + 1])
        disk = max(disk, now) + (fresh[k] * write_s if k else 0.0) + ahead * read_s
        now += seconds
        if fresh[k + 1] > ahead:
            disk = max(disk, now) + (fresh[k + 1] - ahead) * read_s
        now = max(now, disk) if fresh[k + 1] else now
    found = play(compute_s, fresh[:-1], read_s, write_s, spare)
    assert found == pytest.approx(max(now, disk), abs=1e-7)


def test_steps_are_linear_between_the_sizes_that_were_timed() -> None:
    assert COSTS.steps_s(10_000, 1)[0] == pytest.approx(0.02)
    assert COSTS.steps_s(2_500, 1)[0] == pytest.approx(0.005)
    assert COSTS.steps_s(20_000, 2)[0] == pytest.approx(0.04)


def test_the_largest_buffer_that_fits_is_tried() -> None:
    for limit in (60_000_000, 100_000_000, 400_000_000):
        found = list(candidate_jobs(BASE, SIZES, 0, limit))
        assert (
            [job.loader for job, _ in found].count("in memory")
            == 1
            == [j.loader for j, _ in found].count("rows from disk")
        )
        for job, cut in found:
            if job.buffer and untimed(job, cut, 0).memory_bytes <= limit and 2 * job.buffer < cut.partitions:
                step = 2 if job.order == "comet" else 1
                more = untimed(but(job, buffer=job.buffer + step), cut, 0)
                assert more.memory_bytes > limit or 2 * (job.buffer + step) >= cut.partitions


def test_a_buffer_is_as_quick_as_memory_where_the_disk_is_hidden() -> None:
    buffer = but(BASE, loader="partition buffer", buffer=4, order="beta")
    cut = but(SIZES, partitions=16)
    memory, held = (priced(untimed(job, cut, 0), job, cut, 0, COSTS) for job in (BASE, buffer))
    assert memory.batches == 1_000 and memory.epoch_s == pytest.approx(20 + 0.1 + 0.04)
    assert (held.swaps, held.swaps_bound) == (42, 38)
    assert held.epoch_s == pytest.approx(20 + 0.1 + 4 * 0.01 + 0.04, rel=0.02)
    assert held.memory_bytes < memory.memory_bytes / 2
    slow = replace_cost(COSTS, read_s=(1.0, 1.0, 1.0))
    assert priced(untimed(buffer, cut, 0), buffer, cut, 0, slow).epoch_s > 42


def replace_cost(costs: AccessCosts, **changes: tuple[float, float, float]) -> AccessCosts:
    return but(costs, **changes)


def test_ranks_what_fits_and_names_the_least_that_would() -> None:
    def made(s: float, memory: int) -> DataCandidate:
        name = f"of {memory}"
        return DataCandidate(
            name=name, loader=name, parameters={}, memory_bytes=memory, batches=10, epoch_s=s, low_s=s, high_s=s
        )

    every = [made(1.0, 5_000_000), made(0.5, 9_000_000), made(2.0, 3_500_000)]
    assert [each.loader for each in ranked(every, 6_000_000)] == ["of 5000000", "of 3500000"]
    with pytest.raises(ForetraceError, match=r"memory=1MB.*least that works is 4MB \(of 3500000\)"):
        ranked(every, 1_000_000)


@pytest.mark.parametrize("task", ["links", "nodes"])
@pytest.mark.parametrize("held", [0, 3])
def test_probes_measure_every_part(tmp_path: Path, task: str, held: int) -> None:
    job = but(
        BASE, folder=str(tmp_path), task=task, loader="partition buffer" if held else "rows from disk", buffer=held,
        width=4, batch=40, fanouts=(3, 3),
    )  # fmt: skip
    probe = Probe(job, GraphSizes(nodes=1600, edges=8000, partitions=8, features=6, classes=3))
    found = measure_one(probe)
    assert 0 < found.step_s[1] <= found.step_s[0] <= found.step_s[2]
    assert found.edge_s[0] > 0 and (found.read_s[0] > 0) == bool(held)
    assert not list(tmp_path.iterdir())


def test_a_task_that_the_graph_does_not_allow_is_refused() -> None:
    source = GraphSource.of("planted:nodes=1000 edges=3000")
    for task in ("nodes", "graphs"):
        with pytest.raises(ForetraceError, match="task="):
            plan_data(source, memory_bytes=10**9, task=task)
    with pytest.raises(ForetraceError, match="the least that works is"):
        plan_data(source, memory_bytes=1_000_000)
