"""Play a workload on a private Slurm in real time, and read what became of each job."""

from __future__ import annotations

import itertools
import pwd
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.export.ask import clock
from foretrace.fleet.formats.slurm_cluster import expand, pairs
from foretrace.fleet.policies.slurm import REQUEUE_S, SlurmPolicy
from foretrace.fleet.policies.slurm_options import NodeWindow, dependencies, limits_min, tasks_of
from foretrace.fleet.rig.cluster import PrivateSlurm, SlurmSetup
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload

Told = Callable[[float], None]
MOST_JOBS, MOST_USERS = 5000, 12
LONGEST_S = 4 * 3600.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RigRun:
    """What the scheduler did, in the order of the workload; times in seconds after its zero, whole ones as Slurm has.

    submit_s, start_s (of the last start), end_s: (n,) float64; nodes: numbers of the nodes of each; epoch_s: Unix time
    of the zero; backfill_s: when the backfill scheduler last woke before it; passes_s: when the background thread made
    passes; checks_s: when it began, from which on it enforces limits; launch_s: mean seconds that a job took beyond its
    own run time.
    """

    submit_s: Float64
    start_s: Float64
    end_s: Float64
    nodes: tuple[tuple[int, ...], ...]
    epoch_s: float
    launch_s: float
    backfill_s: float = 0.0
    checks_s: float = 0.0
    passes_s: tuple[float, ...] = ()

    @property
    def background_s(self) -> float:
        """When the background thread last woke before the zero."""
        return _last(self.passes_s)

    @property
    def jct_s(self) -> Float64:
        """(n,) completion minus submission."""
        return self.end_s - self.submit_s


def for_rig(workload: Workload, setup: SlurmSetup, speedup: float) -> Workload:
    """Return the jobs (tasks) on the rig's clock: whole seconds, limits in whole minutes, nodes with as many GPUs each.

    Raises ForetraceError for jobs that the rig cannot hold or that would take hours.
    """
    if not (np.isfinite(speedup) and speedup > 0):
        raise ForetraceError(f"`speedup` must be above 0, got {speedup:g}.")
    workload = tasks_of(workload)
    if not 0 < len(workload) <= MOST_JOBS:
        raise ForetraceError(f"the rig plays 1 to {MOST_JOBS:,} jobs, got {len(workload):,}; take fewer with jobs=.")
    if (workload.share < 1).any():
        raise ForetraceError("the rig's jobs have whole GPUs; take a workload without shares of GPUs.")
    if np.isnan(workload.work_s).any():
        raise ForetraceError("the rig needs the run time of every job; this workload does not say it.")
    if setup.accounting and len(set(workload.user.tolist())) > len(users()):
        raise ForetraceError(f"the rig has {len(users())} users; take a workload with no more where accounts matter.")
    nodes = -(-workload.gpus // setup.gpus)
    gpus = nodes * -(-workload.gpus // nodes)
    worst = int(np.argmax(nodes))
    if nodes[worst] > setup.nodes:
        raise ForetraceError(
            f"job {workload.job[worst]!r} needs {nodes[worst]} nodes of {setup.gpus} GPUs; the rig has {setup.nodes}."
        )
    submit = workload.submit_ns - workload.submit_ns.min()
    made = workload.with_columns(
        gpus=gpus, min_gpus=gpus, max_gpus=gpus, work_s=np.maximum(np.rint(workload.work_s / speedup), 1.0),
        submit_ns=np.rint(submit / SECOND / speedup).astype(np.int64) * SECOND,
        estimate_s=workload.estimate_s / speedup,
    )  # fmt: skip
    made = made.with_columns(estimate_s=limits_min(made) * 60.0)
    lasts = float(made.submit_ns.max() / SECOND + made.gpu_seconds.sum() / (setup.nodes * setup.gpus))
    if lasts > LONGEST_S:
        raise ForetraceError(f"this would take {lasts / 3600:.1f} h or more in real time; give a larger speedup=.")
    return made


def in_time(
    epoch: float, events: list[tuple[float, Callable[[], object]]], count: int, ended: Callable[[], int],
    quiet_s: float, progress: Told | None,
) -> None:  # fmt: skip
    """Call each event so many seconds after a Unix time, until so many jobs ended.

    Raises ForetraceError where nothing happens for `quiet_s`.
    """
    events, done, since = sorted(events, key=lambda each: each[0]), 0, time.monotonic()
    while done < count:
        while events and events[0][0] <= time.time() - epoch:
            events.pop(0)[1]()
            since = time.monotonic()
        before, done = done, ended()
        since = time.monotonic() if done != before else since
        if progress is not None:
            progress(done / count)
        if time.monotonic() - since > quiet_s:
            raise ForetraceError(
                f"nothing has happened on the rig for {quiet_s:.0f} s, {done} of {count} jobs ended; is this machine "
                "overloaded?"
            )
        soon_s = events[0][0] + epoch - time.time() if events else POLL_S
        time.sleep(min(max(soon_s, 0.0), POLL_S))


def play(
    slurm: PrivateSlurm, workload: Workload, policy: SlurmPolicy, *, failures: Sequence[NodeWindow] = (),
    progress: Told | None = None, script: Callable[[Workload, int], str] | None = None,
) -> RigRun:  # fmt: skip
    """Submit each job when its time has come, let nodes fail when theirs has, and wait for the last to end.

    The workload is on the rig's clock (`for_rig`). script: what the job at a position does; by default it sleeps for
    its run time. Raises ForetraceError where Slurm refuses a job or stands still.
    """
    count, setup = len(workload), slurm.setup
    epoch = int(time.time()) + 2  # a whole second: what Slurm rounds, the simulation rounds alike
    events: list[tuple[float, Callable[[], object]]] = []
    for begins, given in (("DOWN", failures), ("DRAIN", policy.drains)):
        for each in given:
            words = ("scontrol", "update", f"NodeName={setup.listed(each.first, each.last)}", "Reason=rig")
            events.append((each.begin_s, partial(slurm.run, *words, f"State={begins}")))
            if np.isfinite(each.end_s):
                events.append((each.end_s, partial(slurm.run, *words, "State=RESUME")))
    for each in policy.reservations:  # who runs there runs on
        ends_s = epoch + min(each.end_s, each.begin_s + 10**7)
        times = [datetime.fromtimestamp(at_s).isoformat(timespec="seconds") for at_s in (epoch + each.begin_s, ends_s)]
        slurm.run(
            "scontrol", "create", "reservation", f"StartTime={times[0]}", f"EndTime={times[1]}",
            f"Nodes={setup.listed(each.first, each.last)}", "Users=root", "Flags=MAINT,IGNORE_JOBS",
        )  # fmt: skip
    arrays = workload.details.get("array_of", np.full(count, "", object)).tolist()
    ids, awaits = list[str](), dependencies(workload)

    def submit(jobs: list[int]) -> None:
        words = _words(workload, jobs[0], setup, policy)
        if jobs[0] in awaits:
            after = [":".join([kind, *(ids[other] for other in others)]) for kind, others in awaits[jobs[0]]]
            words.append(f"--dependency={','.join(after)}")
        suffixes = [f"_{workload.details['array_task'][at]}" if arrays[at] else "" for at in jobs]
        text = script(workload, jobs[0]) if script is not None else _script(workload, jobs, suffixes)
        job = slurm.run("sbatch", *words, text=text).strip()
        ids.extend(job + suffix for suffix in suffixes)

    for _, tasks in itertools.groupby(range(count), lambda at: arrays[at] or at):  # an array's are submitted at once
        jobs = list(tasks)
        events.append((float(workload.submit_ns[jobs[0]] / SECOND), partial(submit, jobs)))
    held_s = max((w.end_s for w in (*policy.reservations, *policy.drains) if np.isfinite(w.end_s)), default=0.0)
    held_s += REQUEUE_S + 59 if failures or policy.makes_room else 0
    quiet_s = float(workload.work_s.max()) + held_s + 90.0
    sizes = {0: 0}  # of the file of completed jobs → how many ended for good

    def ended() -> int:
        size = slurm.completed.stat().st_size if slurm.completed.exists() else 0
        if size not in sizes:
            sizes[size] = len(_rows(slurm.completed, ids))
        return sizes[size]

    in_time(epoch, events, count, ended, quiet_s, progress)
    return _ran(slurm, workload, epoch, ids)


def _words(workload: Workload, at: int, setup: SlurmSetup, policy: SlurmPolicy) -> list[str]:
    gpus, limit = int(workload.gpus[at]), int(limits_min(workload)[at])
    nodes = -(-gpus // setup.gpus)
    words = [
        "--parsable", f"--job-name={workload.model[at] or 'job'}", f"--nodes={nodes}", f"--time={limit}",
        f"--ntasks-per-node={gpus // nodes}", f"--gpus-per-node={gpus // nodes}", "--output=/dev/null", "--requeue",
        *(["--exclusive"] if policy.exclusive else []),
    ]  # fmt: skip
    if policy.switches:
        words.append(f"--switches={policy.switches}@{clock(policy.switch_wait_s)}")
    if "array_of" in workload.details and workload.details["array_of"][at]:
        words.append(f"--array={workload.details['array'][at]}")
    if policy.by_priority and policy.weights is None:
        words.append(f"--priority={1_000_000 + int(workload.priority[at])}")
    if setup.accounting:
        known = list(dict.fromkeys(workload.user.tolist()))
        qos = policy.qos_of(workload)[at] if policy.qos else ""
        words += [f"--uid={users()[known.index(workload.user[at])]}", f"--qos={qos or 'normal'}"]
    if str(workload.tenant[at]) in policy.tiers:
        words.append(f"--partition={workload.tenant[at]}")
    return words


def users() -> list[str]:
    """Return users of this machine, as whom jobs are submitted where there is accounting."""
    return [each.pw_name for each in pwd.getpwall() if each.pw_uid][:MOST_USERS]


def _script(workload: Workload, tasks: Sequence[int], suffixes: Sequence[str]) -> str:
    """Sleep for the run time of the job, or of the task of an array that it is (_0, _1, ...)."""
    pairs = zip(suffixes, tasks, strict=True)
    cases = "".join(f"{suffix or '_'}) exec sleep {workload.work_s[at]:g};;\n" for suffix, at in pairs)
    return f'#!/bin/sh\ncase "_${{SLURM_ARRAY_TASK_ID}}" in\n{cases}esac\n'


def _rows(path: Path, ids: Sequence[str]) -> dict[int, dict[str, str]]:
    """Return rows of jobcomp/filetxt of jobs that ended for good, by position; ids: what sbatch called them."""
    rows: dict[int, dict[str, str]] = {}
    at, first = {job: position for position, job in enumerate(ids)}, dict[str, str]()
    for row in pairs(path.read_text(errors="replace"), "JobId"):
        name = f"{row['ArrayJobId']}_{row['ArrayTaskId']}" if "ArrayJobId" in row else row["JobId"]
        row["SubmitTime"] = first.setdefault(name, row.get("SubmitTime", ""))  # a requeue counts as a submission
        if name in at and row.get("JobState") in ("COMPLETED", "TIMEOUT"):
            rows[at[name]] = row
    return rows


def _ran(slurm: PrivateSlurm, workload: Workload, epoch: int, ids: Sequence[str]) -> RigRun:
    rows = [row for _, row in sorted(_rows(slurm.completed, ids).items())]
    submit, start, end = (
        np.array([datetime.fromisoformat(row[name]).timestamp() - epoch for row in rows])
        for name in ("SubmitTime", "StartTime", "EndTime")
    )
    nodes = tuple(tuple(int(name[1:]) for name in expand(row["NodeList"])) for row in rows)
    said = (slurm.folder / "slurmctld.log").read_text(errors="replace")
    return RigRun(
        submit_s=submit, start_s=start, end_s=end, nodes=nodes, epoch_s=float(epoch),
        backfill_s=_last(_times(said, epoch, "_attempt_backfill: beginning")),
        checks_s=_last(_times(said, epoch, "Running as primary controller")),
        passes_s=tuple(_times(said, epoch, "Running job scheduler")),
        launch_s=float(np.maximum(end - start - workload.work_s, 0).mean()),
    )  # fmt: skip


def _times(log: str, epoch: int, words: str) -> list[float]:
    """Return when slurmctld wrote these words, seconds after time zero."""
    lines = (line for line in log.splitlines() if words in line and line.startswith("[2"))
    return [datetime.fromisoformat(line[1 : line.index("]")]).timestamp() - epoch for line in lines]


def _last(times: Sequence[float]) -> float:
    """Return the last before time zero, or else the first after it; 0 where there is none."""
    return max((each for each in times if each <= 0), default=min(times, default=0.0))


def slurm_setup(setup: SlurmSetup, policy: SlurmPolicy) -> SlurmSetup:
    """Return the same cluster, with the scheduler that this policy is, in lines of slurm.conf and for sacctmgr."""
    policy.fits(setup.nodes)
    lines, told, weights = list(setup.lines), [], policy.weights
    if weights is not None:
        lines += [
            "PriorityType=priority/multifactor", "PriorityCalcPeriod=1", f"PriorityWeightAge={weights.age}",
            f"PriorityWeightJobSize={weights.size}", f"PriorityMaxAge={weights.max_age}",
            f"PriorityWeightQOS={weights.qos}", f"PriorityWeightFairshare={weights.fairshare}",
        ]  # fmt: skip
    suspends = policy.preempt_mode == "suspend"
    if policy.preempt_mode != "off":
        mode = policy.preempt_mode.upper() + ",GANG" * suspends
        lines += ["PreemptType=preempt/partition_prio", f"PreemptMode={mode}"]
    for name, tier in policy.tiers.items():
        shared = " OverSubscribe=FORCE:1" * suspends
        lines.append(f"PartitionName={name} Nodes=ALL MaxTime=INFINITE PriorityTier={tier}{shared}")
    if policy.qos or (weights is not None and weights.fairshare):  # all users of one account, with the same share
        told = ["add account foretrace", *(f"add qos {name} Priority={value}" for name, value in policy.qos.items())]
        told.append(f"add user {','.join(users())} account=foretrace qos={','.join(('normal', *policy.qos))}")
    return replace(
        setup, backfill=policy.backfill, parameters={**setup.parameters, **asdict(policy.parameters)},
        lines=tuple(lines), accounting=tuple(told),
    )  # fmt: skip


def switches_of(nodes: Sequence[int] | Int64, setup: SlurmSetup) -> int:
    """Return the number of racks that nodes lie in."""
    return len({int(each) // (setup.nodes // setup.racks) for each in nodes})
