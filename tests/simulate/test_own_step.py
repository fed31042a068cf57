"""A one-step recording: what is another step's or the process's own is counted, named and left out, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace import flow
from foretrace.errors import GraphError
from foretrace.graph.builder import build
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.overhead import unprofiled
from foretrace.simulate.own_step import MOST, alone
from foretrace.simulate.timeline import simulate
from foretrace.trace.read import read
from tests.graph.rank_sets import Collective, Job
from tests.kineto_files import Recording

KERNELS = 40


def one_step(
    *, backlog_us: float = 0.0, load_us: float = 0.0, annotated: bool = True, unseen_us: float = 0.0
) -> Recording:
    """40 launches of 5 us and kernels of 30 us, behind what is asked for; the last kernels outlive the host's step."""
    r = Recording()
    at = 10.0
    if backlog_us:
        for i in range(10):
            r.on_device("kernel", "earlier", -5 + backlog_us / 10 * i, backlog_us / 10, 900_000 + i, 7)
        r.call("cudaDeviceSynchronize", at, backlog_us - at)
        at = backlog_us + 5
    begins = 0.0
    free = at + unseen_us
    for i in range(KERNELS):
        cost = load_us if load_us and i == 20 else 5.0
        if cost > 5:  # the device has done all its work by then
            at = max(at, free + 20)
        r.op("aten::mm", at - 1, cost + 3)
        start = max(at + (cost if cost > 5 else 7), free)
        r.launch("gemm", at, cost, start, 30.0)
        free, at = start + 31, at + cost + 5
    if annotated:
        r.note("ProfilerStep#3", begins, at + 5)
    return r


def step_us(graph: TaskGraph) -> float:
    return simulate(graph).step_time_s * 1e6


def test_work_launched_before_the_step_is_counted_and_left_out() -> None:
    plain = unprofiled(build(one_step().trace()))
    behind = unprofiled(build(one_step(backlog_us=600).trace()))
    (found,) = behind.info.not_of_step
    assert found.tasks == 10 and found.time_s == pytest.approx(600e-6)
    assert found.share == pytest.approx(600 / (600 + 30 * KERNELS))
    assert step_us(behind) == pytest.approx(step_us(plain), rel=0.02)
    assert "10 tasks, 0.6 ms" in behind.changes[0].what
    assert simulate(behind.with_columns(dur=np.where(behind.on_device, 0, behind.dur))).step_time_s > 0


def test_the_only_step_is_over_when_its_device_work_is() -> None:
    graph = build(one_step().trace())
    assert graph.info.step_clock == "gpu"
    assert step_us(graph) == pytest.approx(17 + 31 * KERNELS - 1, abs=2)
    start = simulate(graph).start
    assert np.array_equal(start, graph.recorded)


def test_waiting_for_work_that_is_not_in_the_recording_is_left_out() -> None:
    plain = unprofiled(build(one_step(annotated=False).trace()))
    behind = unprofiled(build(one_step(annotated=False, unseen_us=5000).trace()))
    (found,) = behind.info.not_of_step
    assert found.tasks == 1 and "not in the recording" in found.reason
    assert step_us(behind) == pytest.approx(step_us(plain), rel=0.02)


def test_one_time_work_is_left_out_and_refused_beyond_the_stated_share() -> None:
    plain = unprofiled(build(one_step().trace()))
    loading = unprofiled(build(one_step(load_us=3500).trace()))
    (found,) = loading.info.not_of_step
    assert found.tasks == 1 and found.share < MOST and "cudaLaunchKernel" in found.reason
    assert step_us(loading) == pytest.approx(step_us(plain), rel=0.15)
    with pytest.raises(GraphError, match=r"at most 75 % can be left out; record a step after a few others") as refused:
        alone(build(one_step(load_us=20_000).trace()))
    assert "\n" not in str(refused.value)


def test_what_may_be_done_once_or_every_time_stays_with_a_range() -> None:
    plain, unsure = (simulate(unprofiled(build(one_step(load_us=us).trace()))) for us in (0, 2000))
    assert not unsure.graph.info.not_of_step
    [said] = [each for each in unsure.shifts if each.source == "long calls"]
    assert said.slower_s == 0
    assert said.at_low_s == pytest.approx(plain.step_time_s, rel=0.15)
    assert unsure.interval_s(0.8).low_s < plain.step_time_s * 1.15


def test_a_long_launch_while_the_device_works_is_the_steps_own() -> None:
    r = one_step(annotated=False)
    r.launch("busy", 415, 4, 422, 3600, stream=9)
    r.launch("long", 425, 3000, 3426, 30)
    assert not unprofiled(build(r.trace())).info.not_of_step


def test_steps_after_one_another_stay_as_they_are() -> None:
    r = one_step(backlog_us=600)
    r.note("ProfilerStep#4", 3000, 100)
    graph = build(r.trace())
    assert alone(graph) is graph


@pytest.mark.parametrize(
    ("name", "expected_ms", "tasks", "share"),  # annotated on the host: 47.2 and 42.7 ms
    [
        ("h100_Qwen_Qwen1.5-0.5B-Chat__1016005", 35.3, 509, 0.30),
        ("mi300_Qwen_Qwen1.5-0.5B-Chat__1016005", 33.8, 463, 0.31),
    ],
)
def test_the_end_of_the_step_before_is_not_in_this_one(
    shared_data: Path, name: str, expected_ms: float, tasks: int, share: float
) -> None:
    graph = unprofiled(build(read(shared_data / "traces" / "tracelens" / f"{name}.json.gz")))
    (found,) = graph.info.not_of_step
    assert found.tasks == tasks and found.share == pytest.approx(share, abs=0.01)
    assert simulate(graph).step_time_s * 1e3 == pytest.approx(expected_ms, abs=0.1)


def test_opening_the_device_is_no_step(shared_data: Path) -> None:
    traces = sorted((shared_data / "traces" / "hta").glob("critical_path_alexnet*"))
    with pytest.raises(GraphError, match="one-time work of the process"):
        unprofiled(build(read(traces[0])))


def test_the_backlog_of_joined_ranks_is_left_out_as_on_one(tmp_path: Path) -> None:
    """Two ranks whose only step begins with waiting 100 us for kernels of the step before."""
    for folder, backlog in ((tmp_path / "plain", False), (tmp_path / "behind", True)):
        folder.mkdir()
        job = Job(work_us=[[[300.0, 200.0]], [[320.0, 150.0]]], collectives=(Collective(), Collective()))
        for rank, file in enumerate(job.run()[0]):
            file.extra["distributedInfo"] = {"rank": rank, "world_size": 2, "backend": "nccl"}
            [step] = [each for each in file.events if each["name"].startswith("ProfilerStep")]
            if backlog:
                begin = step["ts"] - 100
                step.update(ts=begin, dur=step["dur"] + 100)
                for i in range(10):
                    file.on_device("kernel", "earlier", begin - 5 + 10 * i, 9, 900_000 + i, 7)
                file.call("cudaDeviceSynchronize", begin + 1, 96)
            file.write(folder / f"rank{rank}.json")
    plain, behind = (flow.read(tmp_path / name).global_graph() for name in ("plain", "behind"))
    [found] = behind.graph.info.not_of_step
    assert found.tasks == 20 and found.time_s == pytest.approx(90e-6)
    assert plain.simulate().step_time_s == pytest.approx(618e-6, rel=0.01)
    assert behind.simulate().step_time_s == pytest.approx(plain.simulate().step_time_s, rel=0.03)
    assert not plain.graph.info.not_of_step
