"""When, why and what sooner: draws, ranges, changes; and a real Slurm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.fleet.formats.slurm_cluster import pairs
from foretrace.fleet.live import questions, queue
from foretrace.fleet.live.history import drawn, read_past, with_queue
from foretrace.fleet.live.records import QueuedJob, stamp
from foretrace.fleet.live.sources import ask_slurm, read_folder
from tests.fleet.live.queues import EXAMPLE, job, write_queue


def past(user: str, *ran: float, **more: Any) -> list[QueuedJob]:
    said: dict[str, Any] = {"job": "", "account": "lab", "name": "j#", "gpus": 1, "limit_s": 600.0} | more
    return [QueuedJob(state="COMPLETED", user=user, ran_s=each, **said) for each in ran]


def test_run_times_are_those_of_the_same_user(tmp_path: Path) -> None:
    seen = read_folder(write_queue(tmp_path, job(1), job(2, UserId="bob(2)")))
    known = past("ann", *[100.0] * 40) + past("bob", *[10.0] * 40)
    made = drawn(seen.jobs, known, 400, np.random.default_rng(0))
    assert 70 < np.median(made[:, 0]) < 140 and 7 < np.median(made[:, 1]) < 14


def test_who_runs_has_more_ahead_than_behind_and_ends_at_the_limit(tmp_path: Path) -> None:
    seen = read_folder(write_queue(tmp_path, job(1, "RUNNING", ran="00:05:00", on="n0")))
    made = drawn(seen.jobs, past("ann", *[100.0] * 40, 400.0), 300, np.random.default_rng(0))
    assert (made > 300).all() and (made <= 600).all()
    alone = drawn(seen.jobs, [], 300, np.random.default_rng(0))
    assert alone.min() < 330 and alone.max() == 600.0


def test_nothing_gains_where_all_start_now(tmp_path: Path) -> None:
    seen = read_folder(write_queue(tmp_path, job(1), job(2)))
    rack = questions.ask(seen, past("ann", *[100.0] * 40), draws=40, racks=1).changes[0]
    assert rack.before_s == rack.after_s < questions.AT_LEAST_S
    assert (rack.ratio, rack.low, rack.high) == (1.0, 1.0, 1.0)


def test_past_jobs_are_read_from_jobcomp_and_sacct(tmp_path: Path) -> None:
    found = read_past(EXAMPLE / "history.txt")
    assert len(found) == 22 and {each.user for each in found} == {"root"} and found[0].account == "ann"
    assert all(each.limit_s >= 60 for each in found)
    log = tmp_path / "sacct.txt"
    log.write_text(
        "JobID|User|Account|Partition|State|Submit|Start|End|ElapsedRaw|TimelimitRaw|ReqTRES\n"
        "5|ann|lab|all|COMPLETED|2026-11-23T10:00:00|2026-11-23T10:01:00|2026-11-23T10:03:00|120|10|gres/gpu=4\n"
    )
    row = read_past(log)[0]
    assert (row.user, row.account, row.gpus, row.limit_s, row.ran_s, row.job) == ("ann", "lab", 4, 600.0, 120.0, "5")
    broken = tmp_path / "jobcomp"
    broken.write_text("JobId=1 JobState=COMPLETED EndTime=never StartTime=2026-11-23T10:00:00\n")
    with pytest.raises(ForetraceError, match="job '1' has no times"):
        read_past(broken)


def test_a_job_that_ended_counts_once(tmp_path: Path) -> None:
    seen = read_folder(write_queue(tmp_path, job(1, "COMPLETED", ran="00:01:00"), job(2)))
    assert len(with_queue([], seen.jobs)) == 1
    assert len(with_queue(past("ann", 5.0, job="1"), seen.jobs)) == 1


def test_every_start_has_a_range_and_whoever_has_none_a_reason() -> None:
    found = questions.ask(read_folder(EXAMPLE), read_past(EXAMPLE / "history.txt"), draws=60)
    assert len(found.starts) == sum(each.waiting for each in found.seen.jobs)
    for each in found.starts:
        if each.start_s is None:
            assert each.why and each.job in found.left_out
        else:
            assert each.low_s is not None and each.low_s <= each.start_s and (each.high_s or np.inf) > each.start_s
    assert "scontrol release" in found.left_out["57"]
    again = questions.ask(read_folder(EXAMPLE), read_past(EXAMPLE / "history.txt"), draws=60)
    assert again.starts == found.starts


def test_what_helps_is_tried(tmp_path: Path) -> None:
    """n0 is held for long, n1 for 9 minutes more at most: who requests less passes the head."""
    ran = [job(1, "RUNNING", gpus=4, ran="00:01:00", on="n0", limit="10:00:00")]
    asked = job(3, gpus=4, limit="20:00:00", Reason="Priority")
    seen = read_folder(write_queue(tmp_path, *ran, job(2, nodes=2, gpus=4), asked))
    known = past("ann", *np.linspace(20000, 36000, 40))
    found = questions.ask(seen, known, job="3", draws=40, racks=1, settings=["bf_interval=600"])
    assert found.asked is not None and (found.asked.start_s or 0) > 1000
    best = max(found.sooner, key=lambda each: each.sooner_s or 0.0)
    assert best.change == "time limit 300 min instead of 1,200"
    assert best.helps and (best.start_s or 0) < 10 and best.command == "scontrol update JobId=3 TimeLimit=300"
    assert best.risk == "100 % of 40 such jobs ran longer"
    rack = next(each for each in found.changes if "rack" in each.change)
    assert rack.ratio < 0.6 and rack.low <= rack.ratio <= rack.high


def test_settings_that_are_not_played_are_refused() -> None:
    for word, says in {"bf_yield=1": "has no parameter bf_yield", "bf_interval=soon": "a whole number from 1"}.items():
        with pytest.raises(ForetraceError, match=says):
            questions.ask(read_folder(EXAMPLE), [], draws=20, settings=[word])
    with pytest.raises(ForetraceError, match="has no job 'x'"):
        questions.ask(read_folder(EXAMPLE), [], job="x", draws=20)


@pytest.mark.parametrize(
    ("reason", "says"),
    [("Resources", "first in line"), ("QOSMaxJobsPerUserLimit", "a limit of its account or QOS"),
     ("ReqNodeNotAvail, UnavailableNodes:n1", "down, drained or reserved"), ("SomethingNew", "Slurm says SomethingNew"),
     ("Nodes_required_for_job_are_DOWN,_DRAINED", "down, drained, or kept"), ("None", "has not looked at it yet")],
)  # fmt: skip
def test_reasons_in_plain_words(tmp_path: Path, reason: str, says: str) -> None:
    seen = read_folder(write_queue(tmp_path, job(1, Reason=reason)))
    assert says in queue.pending(seen.jobs[0]).words


def test_drained_nodes_take_nobody(tmp_path: Path) -> None:
    folder = write_queue(tmp_path, job(1, nodes=2, gpus=4))
    (folder / "node.txt").write_text((folder / "node.txt").read_text().replace("State=IDLE", "State=IDLE+DRAIN", 1))
    found = questions.ask(read_folder(folder), [], draws=20)
    assert found.starts[0].start_s is None and "no set of nodes" in found.starts[0].why


def test_a_real_queue_starts_when_it_is_said_to() -> None:
    from foretrace.fleet.rig.cluster import SlurmSetup, missing, private

    if why := missing():
        pytest.skip(why)
    setup = SlurmSetup(
        nodes=2, gpus=4, racks=1, lines=("DefMemPerNode=1",), parameters={"bf_interval": 1, "batch_sched_delay": 0}
    )
    with private(setup) as slurm:

        def submit(nodes: int, run: int) -> str:
            words = (f"--nodes={nodes}", "--gpus-per-node=4", "--time=1", "--output=/dev/null", "--parsable")
            return slurm.run("sbatch", *words, text=f"#!/bin/sh\nexec sleep {run}\n").strip()

        first, then = submit(2, 6), submit(2, 1)
        time.sleep(2.5)
        seen = ask_slurm(lambda words: slurm.run(*words))
        known = past("root", *[6.0] * 50, account="", name="sbatch", gpus=8, limit_s=60.0)
        found = questions.ask(seen, known, job=then, draws=50)
        for _ in range(120):
            if f"JobId={then} " in (slurm.completed.read_text() if slurm.completed.exists() else ""):
                break
            time.sleep(0.2)
        starts = dict(line.split(" ", 1) for line in slurm.completed.read_text().splitlines())
    running, waiting = (next(pairs(f"JobId={each} {starts[f'JobId={each}']}", "JobId")) for each in (first, then))
    begin_s, end_s = stamp(running["StartTime"]), stamp(running["EndTime"])
    real = stamp(waiting["StartTime"]) - seen.now_s
    asked = found.asked
    assert asked is not None and asked.low_s is not None
    high_s = asked.high_s or np.inf
    assert end_s <= seen.now_s + real and asked.low_s - 2 <= real <= high_s + 15  # machines of tests may be slow
    assert begin_s + 6 - seen.now_s <= high_s + 2  # without what this one took to end a job and to start the next
    assert asked.slurm_s is None or asked.slurm_s > 20, "Slurm counts with the limit of a minute"
