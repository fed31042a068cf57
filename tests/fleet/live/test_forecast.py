"""The queue is played on as Slurm decides: known answers by hand, and what always holds."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.fleet.live.forecast import FOREVER, Queue, play
from foretrace.fleet.live.queue import line_up
from foretrace.fleet.live.sources import read_folder
from foretrace.fleet.policies.slurm_options import SchedulerParameters
from tests.fleet.live.queues import job, write_queue


def at_once(folder: Path, *jobs: str, backfill: bool = True, **cluster: int) -> Queue:
    """A queue whose schedulers look every second and at each event."""
    seen = read_folder(write_queue(folder, *jobs, **cluster))  # type: ignore[arg-type]
    return replace(line_up(seen), backfill=backfill, lag_s=0.0)


def starts(
    folder: Path, run_s: dict[str, float], *jobs: str, backfill: bool = True, **cluster: int
) -> dict[str, float]:
    """When each waiting job starts where each runs so long in all."""
    lined = at_once(folder, *jobs, backfill=backfill, **cluster)
    run = np.array([[run_s[each.job] for each in lined.jobs]])
    found = play(lined, run, np.zeros(1))[0]
    return {each.job: float(at) for each, at in zip(lined.jobs, found, strict=True) if each.waiting}


def test_the_head_starts_when_those_before_it_end_and_not_at_their_limits(tmp_path: Path) -> None:
    ran = job(1, "RUNNING", nodes=2, gpus=4, ran="00:00:20", on="n[0-1]")
    found = starts(tmp_path, {"1": 50, "2": 10}, ran, job(2, nodes=2, gpus=4))
    assert found == {"2": 30.0}


def test_a_short_job_passes_and_a_long_one_does_not(tmp_path: Path) -> None:
    """n0 is held for its limit of 10 min, n1 is free; the head wants both."""
    ran = job(1, "RUNNING", gpus=4, ran="00:00:20", on="n0")
    short, long = job(3, gpus=4, limit="00:09:00"), job(4, gpus=4, limit="00:30:00")
    found = starts(tmp_path, {"1": 50, "2": 10, "3": 5, "4": 5}, ran, job(2, nodes=2, gpus=4), long, short)
    assert found["3"] == 0.0, "by its limit it ends before the head's turn"
    assert found["2"] == 30.0
    assert found["4"] == 40.0, "it would have delayed the head by its limit"


def test_without_backfill_nobody_passes(tmp_path: Path) -> None:
    ran = job(1, "RUNNING", gpus=4, ran="00:00:20", on="n0")
    order = (ran, job(2, nodes=2, gpus=4), job(3, gpus=4, limit="00:01:00"))
    found = starts(tmp_path, {"1": 50, "2": 10, "3": 5}, *order, backfill=False)
    assert found == {"2": 30.0, "3": 40.0}


def test_a_job_that_insists_on_a_switch_waits_for_it_or_its_timer(tmp_path: Path) -> None:
    """One node of each of two leaf switches is held; a job of two nodes wants them below one switch."""
    held = [job(i, "RUNNING", gpus=4, ran="00:00:20", on=f"n{2 * i}") for i in (0, 1)]
    run = {"0": 520.0, "1": 520.0, "5": 10.0}
    spread = starts(tmp_path / "a", run, *held, job(5, nodes=2, gpus=4), nodes=4)
    patient = starts(tmp_path / "b", run, *held, job(5, nodes=2, gpus=4, Switches="1@00:01:00"), nodes=4)
    ends = starts(tmp_path / "c", run | {"0": 60.0}, *held, job(5, nodes=2, gpus=4, Switches="1@00:01:00"), nodes=4)
    assert spread == {"5": 0.0}
    assert patient == {"5": 40.0}, "submitted 20 s ago, it insists for a minute"
    assert ends == {"5": 40.0}


def test_gpus_on_a_node_are_shared_and_a_held_job_has_no_start(tmp_path: Path) -> None:
    ran = job(1, "RUNNING", gpus=3, ran="00:00:10", on="n0")
    held = job(4, Priority="0", Reason="JobHeldUser")
    found = starts(tmp_path, {"1": 40, "2": 10, "3": 10}, ran, job(2, gpus=1), job(3, gpus=2), held, nodes=1)
    assert found == {"2": 0.0, "3": 30.0}


def test_arrays_and_dependencies_wait_for_their_own(tmp_path: Path) -> None:
    array = job(2, ArrayJobId="2", ArrayTaskId="1-3%1", ArrayTaskThrottle="1")
    after = job(3, Reason="Dependency", Dependency="afterany:1(unfulfilled)", gpus=1)
    ran = job(1, "RUNNING", ran="00:00:10", on="n0")
    run = {"1": 25.0, "2": 10.0, "2+1": 10.0, "2+2": 10.0, "3": 1.0}
    found = starts(tmp_path, run, ran, array, after)
    assert [found[each] for each in ("2", "2+1", "2+2")] == [0.0, 10.0, 20.0]
    assert found["3"] == 15.0


def test_the_pace_is_read_from_the_configuration(tmp_path: Path) -> None:
    seen = read_folder(
        write_queue(tmp_path, job(1), parameters="bf_interval=60,bf_window=10,bf_continue,bf_max_job_test=x")
    )
    assert seen.parameters == SchedulerParameters(bf_interval=60, bf_window=10) and seen.backfill
    assert line_up(seen).lag_s == 1.5, "half of batch_sched_delay"


@settings(max_examples=30)
@given(data=st.data())
def test_no_node_holds_more_than_it_has(data: st.DataObject) -> None:
    """Everybody starts, nobody before there is room, and the first in line never later than by limits alone."""
    count = data.draw(st.integers(1, 8))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=count, max_size=count))
    limits = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    shares = data.draw(st.lists(st.floats(0.05, 1.0), min_size=count, max_size=count))
    jobs = [
        job(i + 1, nodes=n, gpus=g, limit=f"{limit // 60:02d}:{limit % 60:02d}:00")
        for i, ((n, g), limit) in enumerate(zip(sizes, limits, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        lined = at_once(Path(folder), *jobs, nodes=4)
    run = np.array([limit * 60 * share for limit, share in zip(limits, shares, strict=True)])
    found = play(lined, run[None], np.zeros(1))[0]
    assert (found < FOREVER).all() and found[0] == 0.0
    for now in found:
        busy = sum(n * g for (n, g), at, long in zip(sizes, found, run, strict=True) if at <= now < at + long)
        assert busy <= 16
    whole = play(lined, np.array([limits]) * 60.0, np.zeros(1))[0]
    assert whole.max() <= sum(limits) * 60.0 + count, "one after the other at worst"


def test_backfill_looks_a_second_after_something_changed_at_last(tmp_path: Path) -> None:
    """It looks at 0 and 600 s; from then on every second, as nothing changes until the first job ends after 1,000 s."""
    held = (job(1, "RUNNING", gpus=4, on="n0", limit="10:00:00"), job(2, "RUNNING", gpus=2, on="n1", limit="10:00:00"))
    lined = at_once(tmp_path, *held, job(3, nodes=2, gpus=4, limit="10:00:00"), job(4, gpus=4, limit="01:00:00"))
    slow = replace(lined, parameters=replace(lined.parameters, bf_interval=600))
    found = play(slow, np.array([[20_000.0, 1000.5, 10.0, 10.0]]), np.zeros(1))[0]
    assert found[3] == 1001.0 and found[2] == 20_000.0
