"""Play a workload on a private Slurm in real time, and read what became of each job."""

from __future__ import annotations

import pwd
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.formats.slurm_cluster import expand
from foretrace.fleet.policies.slurm import BACKGROUND_S, REQUEUE_S, SlurmPolicy
from foretrace.fleet.policies.slurm_options import NodeWindow, dependencies, limits_min, tasks_of
from foretrace.fleet.rig.cluster import PrivateSlurm, SlurmSetup
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload

Told = Callable[[float], None]
MOST_JOBS, MOST_USERS = 5000, 12
LONGEST_S = 4 * 3600.0
_POLL_S = 0.25
_PAIR = re.compile(r"(\w+)=(\S*)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RigRun:
    """What the scheduler did, in the order of the workload; times in seconds after its zero, whole ones as Slurm has.

    submit_s, start_s (of the last start), end_s: (n,) float64; nodes: numbers of the nodes of each; epoch_s: Unix time
    of the zero; backfill_s, background_s: when the backfill scheduler and the background thread last woke before it;
    checks_s: when the background thread began, from which on it enforces limits; background_every_s: how long a turn of
    it took on average; launch_s: mean seconds that a job took beyond its own run time.
    """

    submit_s: Float64
    start_s: Float64
    end_s: Float64
    nodes: tuple[tuple[int, ...], ...]
    epoch_s: float
    launch_s: float
    backfill_s: float = 0.0
    background_s: float = 0.0
    checks_s: float = 0.0
    background_every_s: float = BACKGROUND_S

    @property
    def jct_s(self) -> Float64:
        """(n,) completion minus submission."""
        return self.end_s - self.submit_s


def for_rig(workload: Workload, setup: SlurmSetup, speedup: float) -> Workload:
    """Return the jobs on the rig's clock: whole seconds, limits in minutes, as many GPUs on every node of a job.

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
    asked = policy.request.sbatch
    events: list[tuple[float, str, str]] = []
    for begins, given in (("DOWN", failures), ("DRAIN", policy.drains)):
        for each in given:
            names = setup.listed(each.first, each.last)
            events += [(each.begin_s, begins, names), (each.end_s, "RESUME", names)]
    events = sorted((each for each in events if np.isfinite(each[0])), key=lambda each: each[0])
    for each in policy.reservations:
        slurm.reserve(setup.listed(each.first, each.last), epoch + each.begin_s, epoch + each.end_s)
    limits, at, ids = limits_min(workload), 0, list[str]()
    awaits = dependencies(workload)
    arrays = workload.details.get("array_of", np.full(count, "", object)).tolist()
    ends = [each.end_s for each in (*policy.reservations, *policy.drains)]
    held_s = max((each for each in ends if np.isfinite(each)), default=0.0)
    held_s += REQUEUE_S + 59 if failures or policy.preemption.evicts else 0
    quiet_s = float(workload.work_s.max()) + held_s + 90.0
    done, ended, size, since = -1, 0, -1, time.monotonic()
    while True:
        now = time.time() - epoch
        while events and events[0][0] <= now:
            _, state, names = events.pop(0)
            slurm.set_state(names, state)
        while at < count and workload.submit_ns[at] / SECOND <= now:
            tasks = [at]  # those of an array are submitted at once
            while arrays[at] and tasks[-1] + 1 < count and arrays[tasks[-1] + 1] == arrays[at]:
                tasks.append(tasks[-1] + 1)
            words = [*_words(workload, at, int(limits[at]), setup, policy), *asked]
            if at in awaits:
                after = [":".join([kind, *(ids[other] for other in others)]) for kind, others in awaits[at]]
                words.append(f"--dependency={','.join(after)}")
            suffixes = [f"_{workload.details['array_task'][one]}" for one in tasks] if arrays[at] else [""]
            if arrays[at]:
                words.append(f"--array={workload.details['array'][at]}")
            text = script(workload, at) if script is not None else _script(workload, tasks, suffixes)
            job = slurm.run("sbatch", *words, text=text).strip()
            ids += [job + suffix for suffix in suffixes]
            at += len(tasks)
            since = time.monotonic()
        if slurm.completed.exists() and slurm.completed.stat().st_size != size:
            size, ended = slurm.completed.stat().st_size, len(_rows(slurm.completed, ids))
        if ended != done or at < count:
            done, since = ended, time.monotonic() if ended != done else since
            if progress is not None:
                progress(min((at + ended) / (2 * count), 1.0))
        if at == count and ended == count and not slurm.run("squeue", "--noheader").strip():
            return _ran(slurm, workload, epoch, ids)
        if time.monotonic() - since > quiet_s:
            raise ForetraceError(
                f"nothing has happened on the private Slurm for {quiet_s:.0f} s, {ended} of {count} jobs ended; "
                "is this machine overloaded?"
            )
        upcoming = [event[0] for event in events[:1]] + ([workload.submit_ns[at] / SECOND] if at < count else [])
        time.sleep(min([_POLL_S, *(max(each - (time.time() - epoch), 0.0) for each in upcoming)]))


def _words(workload: Workload, at: int, limit: int, setup: SlurmSetup, policy: SlurmPolicy) -> list[str]:
    gpus = int(workload.gpus[at])
    nodes = -(-gpus // setup.gpus)
    words = [
        "--parsable", f"--job-name={workload.model[at] or 'job'}", f"--nodes={nodes}", f"--time={limit}",
        f"--ntasks-per-node={gpus // nodes}", f"--gpus-per-node={gpus // nodes}", "--output=/dev/null", "--requeue",
    ]  # fmt: skip
    if policy.by_priority and policy.weights is None:
        words.append(f"--priority={1_000_000 + int(workload.priority[at])}")
    if setup.accounting:
        known = list(dict.fromkeys(workload.user.tolist()))
        qos = str(workload.details["qos"][at]) if policy.preemption.qos and "qos" in workload.details else ""
        words += [f"--uid={users()[known.index(workload.user[at])]}", f"--qos={qos or 'normal'}"]
    if str(workload.tenant[at]) in policy.preemption.tiers:
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
    """Return the last line and first submission of each job that ended, by position; ids: sbatch's numbers."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    rows: dict[int, dict[str, str]] = {}
    at = {job: position for position, job in enumerate(ids)}
    first: dict[str, str] = {}
    for line in lines:
        row = dict(_PAIR.findall(line))
        name = f"{row['ArrayJobId']}_{row['ArrayTaskId']}" if "ArrayJobId" in row else row.get("JobId", "")
        row["SubmitTime"] = first.setdefault(name, row.get("SubmitTime", ""))  # a requeue counts as a submission
        if name in at and row.get("JobState") in ("COMPLETED", "TIMEOUT", "PREEMPTED"):
            rows[at[name]] = row
    return rows


def _ran(slurm: PrivateSlurm, workload: Workload, epoch: int, ids: Sequence[str]) -> RigRun:
    rows = _rows(slurm.completed, ids)
    times: dict[str, list[float]] = {"SubmitTime": [], "StartTime": [], "EndTime": []}
    nodes = []
    for at in range(len(workload)):
        for name, column in times.items():
            column.append(datetime.fromisoformat(rows[at][name]).timestamp() - epoch)
        nodes.append(tuple(int(name[1:]) for name in expand(rows[at]["NodeList"])))
    submit, start, end = (np.array(each) for each in times.values())
    said = (slurm.folder / "slurmctld.log").read_text(errors="replace")
    passes = _times(said, epoch, "Running job scheduler")
    return RigRun(
        submit_s=submit, start_s=start, end_s=end, nodes=tuple(nodes), epoch_s=float(epoch),
        backfill_s=_last(_times(said, epoch, "_attempt_backfill: beginning")), background_s=_last(passes),
        checks_s=_last(_times(said, epoch, "Running as primary controller")),
        background_every_s=turn_s(passes), launch_s=float(np.maximum(end - start - workload.work_s, 0).mean()),
    )  # fmt: skip


def _times(log: str, epoch: int, words: str) -> list[float]:
    """Return when slurmctld wrote these words, seconds after time zero."""
    lines = (line for line in log.splitlines() if words in line and line.startswith("[2"))
    return [datetime.fromisoformat(line[1 : line.index("]")]).timestamp() - epoch for line in lines]


def _last(times: Sequence[float]) -> float:
    """Return the last before time zero, or else the first after it; 0 where there is none."""
    return max((each for each in times if each <= 0), default=min(times, default=0.0))


def turn_s(passes: Sequence[float]) -> float:
    """Return how long a turn of the background thread takes; its passes lie whole numbers of turns apart."""
    apart = np.diff(passes)
    apart = apart[(apart > 0.5) & (apart < 20)]  # beyond, who knows how many turns
    return float(apart.sum() / np.rint(apart).sum()) if len(apart) else BACKGROUND_S


def slurm_setup(setup: SlurmSetup, policy: SlurmPolicy) -> SlurmSetup:
    """Return the same cluster, with the scheduler that this policy is."""
    policy.fits(setup.nodes)
    lines = [*(() if policy.weights is None else policy.weights.lines), *policy.preemption.lines()]
    parameters = {**setup.parameters, **asdict(policy.parameters)}
    told = policy.preemption.accounting(users())
    if not (policy.preemption.qos or (policy.weights is not None and policy.weights.fairshare)):
        told = ()
    return replace(
        setup, backfill=policy.backfill, parameters=parameters, lines=(*setup.lines, *lines), accounting=told
    )


def switches_of(nodes: Sequence[int] | Int64, setup: SlurmSetup) -> int:
    """Return the number of racks that nodes lie in."""
    return len({int(each) // (setup.nodes // setup.racks) for each in nodes})
