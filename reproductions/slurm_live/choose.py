"""Choose the settings of `fleet.live.history` on workloads that are not scored.

They come from another part of the trace (`PART`) and run on the simulated cluster: `fleet.live.forecast` plays them
from an empty queue with their true run times, and snapshots are taken on the way. With the true run times it says the
starts on a real Slurm to a few seconds, so what is left to choose is how run times are drawn.

    python -m reproductions.slurm_live.choose
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.fleet.live import forecast, history, questions, queue
from foretrace.fleet.live.records import QueuedJob, SlurmNode, SlurmPartition, Snapshot
from foretrace.fleet.policies.slurm_options import SchedulerParameters
from reproductions import shared_data
from reproductions.slurm_live.rig import SETUP
from reproductions.slurm_live.workloads import RigJob, jobs

PART = (0.3, 0.6)
SEEDS, EVERY_S, COUNT = range(300, 324), 90.0, 200
GRID: dict[str, tuple[float, ...]] = {
    "DRIFT": (0.0, 0.4, 0.8), "PRIOR": (1.0, 3.0),
}  # fmt: skip
Moments = list[tuple[Snapshot, dict[str, float], list[QueuedJob]]]


def main() -> None:
    """Print a row per setting: over all workloads, and the spread of coverage between them."""
    trace = shared_data() / "fleet" / "philly" / "philly.csv.gz"
    workloads = [list(moments(trace, seed)) for seed in SEEDS]
    print("settings | median error s | coverage | worst, best workload | bias s")
    for values in itertools.product(*GRID.values()):
        for name, value in zip(GRID, values, strict=True):
            if name in history.SAME:
                history.SAME[name] = value
            else:
                setattr(history, name, value)
        found = [each for each in map(scored, workloads) if len(each) > 20]  # with a queue
        rows = np.concatenate(found)
        cover = [float(each[:, 1].mean()) for each in found]
        said = dict(zip(GRID, values, strict=True))
        error, bias = np.median(np.abs(rows[:, 0])), np.median(rows[:, 0])
        print(f"{said} {error:.1f} {np.mean(cover):.3f} {min(cover):.2f} {max(cover):.2f} {bias:.1f}", flush=True)


def scored(workload: Moments) -> Any:
    """(predictions, 2): error in seconds, and whether the start came within the range."""
    rows = []
    for at, (seen, starts, past) in enumerate(workload):
        for each in questions.ask(seen, past, draws=30, seed=at).starts:
            if each.start_s is not None:
                came = starts[each.job] - seen.now_s
                inside = (each.low_s or 0.0) <= came <= (math.inf if each.high_s is None else each.high_s)
                rows.append((each.start_s - came, float(inside)))
    return np.array(rows).reshape(-1, 2)


def moments(trace: Path, seed: int) -> Iterator[tuple[Snapshot, dict[str, float], list[QueuedJob]]]:
    """Snapshots of a simulated cluster, when each job starts, and what accounting knows then."""
    load = 1.2 + 1.8 * np.random.default_rng(seed).random()
    gpus = SETUP.nodes * SETUP.gpus
    played, past = jobs(trace, count=COUNT, load=load, gpus=gpus, seed=seed, part=PART)
    whole = [_job(i, each) for i, each in enumerate(played)]
    lined = queue.line_up(_seen(0.0, whole))
    order = [int(each.job) - 1 for each in lined.jobs]
    submits = np.array([played[i].submit_s for i in order])
    rows = lined.rows.copy()
    rows["eligible"] = np.maximum(submits, 1e-3)
    made = replace(lined, rows=rows)
    run = np.array([[played[i].run_s for i in order]])
    all_held: list[Any] = []
    found = forecast.play(made, run, np.zeros(1), all_held)
    held = all_held[0]
    starts = {lined.jobs[at].job: float(found[0, at]) for at in range(len(order))}
    nodes = {lined.jobs[at].job: np.flatnonzero(held[at]) for at in range(len(order))}
    old = [
        QueuedJob(job="", state="COMPLETED", user="root", account=job.user, gpus=job.gpus, limit_s=job.limit_min * 60.0,
                  ran_s=job.run_s)
        for job in past
    ]  # fmt: skip
    for now in np.arange(EVERY_S, max(starts.values()), EVERY_S):
        shown = []
        for i, each in enumerate(played):
            name = str(i + 1)
            start, end = starts[name], starts[name] + each.run_s
            if each.submit_s > now:
                continue
            state = "PENDING" if start > now else "RUNNING" if end > now else "COMPLETED"
            where = {f"n{at:03d}": whole[i].per_node for at in nodes[name]} if state == "RUNNING" else {}
            ran = 0.0 if state == "PENDING" else min(now - start, each.run_s)
            shown.append(replace(whole[i], state=state, held=where, ran_s=float(ran), start_s=math.nan))
        ended = [job for job in shown if job.state == "COMPLETED"]
        if any(job.waiting for job in shown):
            yield _seen(float(now), shown), starts, history.with_queue(old, ended)


def _job(at: int, job: RigJob) -> QueuedJob:
    nodes = -(-job.gpus // SETUP.gpus)
    return QueuedJob(
        job=str(at + 1), state="PENDING", reason="Priority", name=f"train{at}", user="root", account=job.user,
        partition="all", priority=float(10**6 - at), nodes=nodes, per_node=job.gpus // nodes, gpus=job.gpus,
        limit_s=job.limit_min * 60.0, submit_s=job.submit_s,
    )  # fmt: skip


def _seen(now: float, shown: list[QueuedJob]) -> Snapshot:
    told = ",".join(f"{key}={value}" for key, value in SETUP.parameters.items())
    names = [SETUP.node(at) for at in range(SETUP.nodes)]
    size = SETUP.nodes // SETUP.racks
    return Snapshot(
        source="simulated", now_s=now, version="", jobs=tuple(shown), parameters=SchedulerParameters.shown(told),
        nodes=tuple(SlurmNode(name=each, gpus=SETUP.gpus, cpus=SETUP.gpus, state="IDLE") for each in names),
        partitions={"all": SlurmPartition(nodes=frozenset(names))},
        leaves={f"rack{at}": tuple(names[at * size : (at + 1) * size]) for at in range(SETUP.racks)},
    )  # fmt: skip


if __name__ == "__main__":
    main()
