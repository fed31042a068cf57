"""What a site and its users say to Slurm, by its own names: settings of the schedulers, weights, arrays, dependencies,
drained and reserved nodes, partitions, QOS. `slurm` decides by it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload
from foretrace.names import keyed

if TYPE_CHECKING:
    from foretrace.fleet.cluster import ClusterTree

MODES = ("OFF", "REQUEUE", "CANCEL", "SUSPEND")
DEFAULTS = ("yes", "defaults")
MOST_TASKS = 1001  # MaxArraySize as it is by default
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_WINDOW = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?@(\d{1,9}(?:\.\d+)?)(?:-(\d{1,9}(?:\.\d+)?))?")
_NAME = re.compile(r"[A-Za-z][\w-]{0,40}")
_QOS = {"Priority": "priority", "MaxJobsPU": "max_jobs_pu", "MaxTRESPU": "max_tres_pu", "GrpTRES": "grp_tres"}


def numbers(
    option: str, words: Iterable[str], known: Iterable[str], *, sign: str = "_", may: str = ""
) -> dict[str, int]:
    """Return whole numbers above 0 (`may`: the one that may be 0) by name, from NAME=NUMBER. Raises ForetraceError."""
    given = keyed(words, known, f"`{option}`", sign)
    for key, value in given.items():
        if not (value.isdecimal() and int(key != may) <= int(value) <= 10**7):
            raise ForetraceError(
                f"`{option}`: {key.replace('_', sign)} must be a whole number from {int(key != may)} up, got {value!r}."
            )
    return {key: int(value) for key, value in given.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParameters:
    """Those of slurm.conf(5) that are simulated, by its names and with its defaults: seconds, bf_window in minutes."""

    sched_interval: int = 60
    batch_sched_delay: int = 3
    bf_interval: int = 30
    bf_window: int = 1440
    bf_max_job_test: int = 500
    bf_resolution: int = 60
    max_switch_wait: int = 300

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `bf_interval=5,bf_resolution=1`; "yes": all as by default. Raises ForetraceError."""
        words = [] if text in DEFAULTS else text.split(",")
        return cls(**numbers("slurm", words, (each.name for each in fields(cls)), may="batch_sched_delay"))

    @classmethod
    def shown(cls, text: str) -> Self:
        """Read what `scontrol show config` prints; what is not simulated, or is no number, is passed over."""
        given = {key.strip(): value for key, _, value in (word.partition("=") for word in text.split(","))}
        known = [each.name for each in fields(cls) if given.get(each.name, "").isdecimal()]
        return cls(**{name: min(int(given[name]), 10**7) for name in known})


def limits_min(workload: Workload) -> Int64:
    """Return (n,) time limits in whole minutes, as sbatch rounds them up; where none is stated, above the true run
    time.
    """
    stated = np.where(np.isnan(workload.estimate_s), workload.work_s + 5, workload.estimate_s)
    return np.maximum(np.ceil(stated / 60), 1).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityWeights:
    """priority/multifactor: PriorityWeightAge, -JobSize, -QOS, -Fairshare; PriorityMaxAge in minutes."""

    age: int = 0
    size: int = 0
    qos: int = 0
    fairshare: int = 0
    max_age: int = 10_080

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse `age=1000,size=500,max-age=60`; None of "". Raises ForetraceError."""
        given = text.split(",") if text else []
        return cls(**numbers("weights", given, (each.name for each in fields(cls)), sign="-")) if given else None

    def priorities(
        self, workload: Workload, cluster: ClusterTree, at_ns: int, qos: Float64, shares: Float64 | float
    ) -> Int64:
        """Return (n,) as weighted at that time; jobs that came later have no age (priority_multifactor.c).

        qos: (n,) priority of a job's QOS over the highest; shares: (n,) its user's factor of fair share.
        """
        nodes = np.diff(cluster.starts[cluster.level("node")])
        size = (-(-workload.gpus // nodes.max()) / len(nodes) + workload.gpus / cluster.gpus) / 2
        age = np.clip((at_ns - workload.submit_ns) / SECOND / (60 * max(self.max_age, 1)), 0, 1)
        return np.asarray(self.age * age + self.size * size + self.qos * qos + self.fairshare * shares, np.int64)

    @property
    def lines(self) -> tuple[str, ...]:
        """The same in slurm.conf."""
        return (
            "PriorityType=priority/multifactor", "PriorityCalcPeriod=1", f"PriorityWeightAge={self.age}",
            f"PriorityWeightJobSize={self.size}", f"PriorityMaxAge={self.max_age}",
            f"PriorityWeightQOS={self.qos}", f"PriorityWeightFairshare={self.fairshare}",
        )  # fmt: skip


def fair_tree(workload: Workload, used: Mapping[str, float]) -> Float64:
    """Return (n,) factor of fair share of each job's user, all of them with one share (fair_tree.c): who used least has
    1, and those who used as much have as much.
    """
    users = sorted(set(workload.user.tolist()))
    above = {user: sum(used.get(other, 0.0) < used.get(user, 0.0) for other in users) for user in users}
    return np.array([1 - above[user] / len(users) for user in workload.user.tolist()])


def dependencies(workload: Workload) -> dict[int, list[tuple[str, list[int]]]]:
    """Return what each job waits for, from the column `dependency` (afterok:JOB, afterany:JOB:JOB, singleton; with
    commas all of them; an array is all its tasks). Raises ForetraceError for anything else, or jobs that come no
    earlier.
    """
    found: dict[int, list[tuple[str, list[int]]]] = {}
    names = {str(name): [at] for at, name in enumerate(workload.job)}
    for at, name in enumerate(workload.details.get("array_of", ())):
        if name:
            names.setdefault(str(name), []).append(at)
    for job, text in enumerate(workload.details.get("dependency", ())):
        for word in filter(None, str(text).split(",")):
            kind, *others = word.split(":")
            known = [at for other in others for at in names.get(other, [job])]
            if (
                kind not in ("afterok", "afterany", "singleton")
                or bool(others) == (kind == "singleton")
                or max(known, default=-1) >= job
            ):
                raise ForetraceError(
                    f"job {workload.job[job]!r}: `dependency` must be afterok or afterany with earlier jobs, or "
                    f"singleton, such as afterok:3:4, got {word!r}."
                )
            found.setdefault(job, []).append((kind, known))
    return found


def tasks_of(workload: Workload) -> Workload:
    """Return the jobs with a row for each task of those that are arrays (column `array`, as sbatch has it: 0-9%2,
    1,3,5-9:2).

    Tasks are called JOB_TASK; columns `array_of` and `array_task` say of which array which. Raises ForetraceError.
    """
    given = workload.details.get("array")
    if given is None or "array_of" in workload.details:
        return workload
    rows: list[int] = []
    tasks: list[int] = []
    for job, text in enumerate(given.tolist()):
        found = _indices(str(text), str(workload.job[job])) if text else [-1]
        rows += [job] * len(found)
        tasks += found
    made = workload.take(np.array(rows))
    of = np.array([name if task >= 0 else "" for name, task in zip(made.job, tasks, strict=True)], object)
    names = [f"{name}_{task}" if task >= 0 else name for name, task in zip(made.job, tasks, strict=True)]
    made = replace(
        made, job=np.array(names, object), details={**made.details, "array_of": of, "array_task": np.array(tasks)}
    )
    made.validate()
    return made


def array_ranges(text: str) -> tuple[list[range], int]:
    """Return tasks of an array and how many may run at once (0: all), from 0-9%2 or 1,3,5-9:2. Raises ValueError."""
    body, percent, most = text.partition("%")
    if percent and not (most.isdecimal() and 0 < int(most) < 10**9):
        raise ValueError(f"{most[:20]!r} is no number of tasks")
    found = []
    for part in body.split(","):
        said = _RANGE.fullmatch(part.strip())
        if not said:
            raise ValueError(f"{part[:20]!r} is no range of tasks")
        found.append(range(int(said[1]), int(said[2] or said[1]) + 1, max(int(said[3] or 1), 1)))
    return found, int(most or 0)


def _indices(text: str, job: str) -> list[int]:
    try:
        ranges, _ = array_ranges(text)
    except ValueError:
        ranges = []
    indices = list(itertools.chain(*ranges)) if sum(map(len, ranges)) <= MOST_TASKS else []
    if not 0 < len(set(indices)) == len(indices):
        most = f"at most {MOST_TASKS:,} tasks"
        raise ForetraceError(f"job {job!r}: `array` must be such as 0-9%2 or 1,3,5-9:2, {most}, got {text[:60]!r}.")
    return sorted(indices)


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """Tasks by array: of (n,) its number, −1 where a job is none; limits: how many may run at once (0: all)."""

    of: Int64
    limits: tuple[int, ...] = ()

    @classmethod
    def read(cls, workload: Workload) -> Self:
        """Read it from a workload of tasks (`tasks_of`)."""
        names = workload.details.get("array_of", np.full(len(workload), "", object)).tolist()
        known = list(dict.fromkeys(name for name in names if name))
        specs = {name: str(workload.details["array"][at]) for at, name in enumerate(names) if name}
        at = {name: number for number, name in enumerate(known)}
        return cls(
            np.array([at.get(name, -1) for name in names], np.int64),
            tuple(int(specs[name].partition("%")[2] or 0) for name in known),
        )


class NodeWindow(NamedTuple):
    """Nodes from one number to another, from one time to another (seconds; inf: for good)."""

    first: int
    last: int
    begin_s: float
    end_s: float = float("inf")


def windows(option: str, text: str) -> tuple[NodeWindow, ...]:
    """Parse NODES@SECONDS-SECONDS, such as 0-3@600-1200,7@30 (no end: for good). Raises ForetraceError."""
    made = []
    for word in text.split(",") if text else ():
        found = _WINDOW.fullmatch(word)
        first, last, begin, end = found.groups() if found else ("1", "0", "0", None)
        one = NodeWindow(int(first), int(last or first), float(begin), float(end or "inf"))
        if one.last < one.first or not one.begin_s < one.end_s:
            raise ForetraceError(
                f"`{option}` must be NODES@SECONDS-SECONDS, the end later, such as 0-3@600-1200 or 7@30, got {word!r}."
            )
        made.append(one)
    return tuple(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """A quality of service: Priority, whom it preempts, and limits (0: none): MaxJobsPU, GPUs of MaxTRESPU, GrpTRES."""

    priority: int = 0
    preempt: tuple[str, ...] = ()
    max_jobs_pu: int = 0
    max_tres_pu: int = 0
    grp_tres: int = 0


def qos_of(text: str) -> dict[str, Qos]:
    """Parse NAME:FIELD=VALUE:..., such as high:Priority=10:Preempt=low,low:MaxJobsPU=2. Raises ForetraceError."""
    made: dict[str, Qos] = {}
    for word in text.split(",") if text else ():
        name, *rest = word.split(":")
        if not _NAME.fullmatch(name) or name in made:
            raise ForetraceError(f"`qos` must be NAME:FIELD=VALUE, such as high:Priority=10,low, got {word!r}.")
        preempt = "".join(each.removeprefix("Preempt=") for each in rest if each.startswith("Preempt="))
        given = numbers("qos", (each for each in rest if not each.startswith("Preempt=")), [*_QOS, "Preempt"])
        made[name] = Qos(
            preempt=tuple(filter(None, preempt.split("+"))), **{_QOS[key]: value for key, value in given.items()}
        )
    for name, one in made.items():
        for other in one.preempt:
            if other not in made or other == name or name in made[other].preempt:
                raise ForetraceError(f"`qos`: {name!r} must preempt another one that is named, got {other!r}.")
    return made


def tiers_of(text: str) -> dict[str, int]:
    """Return PriorityTier by partition, from high=10,low=1. Raises ForetraceError."""
    made: dict[str, int] = {}
    for word in text.split(",") if text else ():
        name, _, value = word.partition("=")
        if not (_NAME.fullmatch(name) and value.isdecimal() and int(value) < 2**16) or name in made:
            raise ForetraceError(f"`priority-tier` must be PARTITION=NUMBER, such as high=10,low=1, got {word!r}.")
        made[name] = int(value)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Who stands before whom, and who makes room how: PreemptMode, PriorityTier of partitions, QOS.

    A job's partition is its tenant, its QOS a column `qos`. PreemptType is preempt/qos where a QOS preempts another,
    else preempt/partition_prio.
    """

    mode: str = "OFF"
    tiers: Mapping[str, int] = field(default_factory=dict)
    qos: Mapping[str, Qos] = field(default_factory=dict)

    @classmethod
    def parse(cls, mode: str, tiers: str, qos: str) -> Self:
        """Parse the words of `preempt-mode`, `priority-tier` and `qos`. Raises ForetraceError."""
        if (mode or "OFF").upper() not in MODES:
            raise ForetraceError(f"`preempt-mode` must be one of {', '.join(MODES).lower()}, got {mode!r}.")
        made = cls(mode=(mode or "OFF").upper(), tiers=tiers_of(tiers), qos=qos_of(qos))
        if made.tiers and made.by_qos:
            raise ForetraceError("`priority-tier` and a `qos` with Preempt both say who makes room; give one of them.")
        if made.mode != "OFF" and not (made.tiers or made.by_qos):
            raise ForetraceError(
                "`preempt-mode` needs to know who comes before whom; add priority-tier=high=10,low=1 or a qos= with "
                "Preempt=."
            )
        return made

    @property
    def by_qos(self) -> bool:
        """Whether a QOS preempts another."""
        return any(each.preempt for each in self.qos.values())

    @property
    def evicts(self) -> bool:
        """Whether anybody's GPUs are ever taken: those of a suspended job stay its own (gres.html)."""
        return self.mode in ("REQUEUE", "CANCEL")

    def named(self, workload: Workload) -> list[str]:
        """Return (n,) QOS of each job; "" where it has none. Raises ForetraceError for one that `qos` does not name."""
        names = [str(each) for each in workload.details.get("qos", np.full(len(workload), "", object)).tolist()]
        for job, name in enumerate(names):
            if name and name not in self.qos and self.qos:
                raise ForetraceError(
                    f"job {workload.job[job]!r}: `qos` {name!r} is not among {', '.join(self.qos)}; name it in qos=."
                )
        return names if self.qos else [""] * len(names)

    def ranks(self, workload: Workload) -> tuple[Int64, Int64]:
        """Return (n,) who stands before whom, the largest first; (n,) who makes room first, the smallest."""
        if self.by_qos:
            depth: dict[str, int] = {}
            for _ in self.qos:  # a QOS stands before all that it preempts
                depth = {n: 1 + max((depth.get(o, 0) for o in q.preempt), default=-1) for n, q in self.qos.items()}
            names = self.named(workload)
            firsts = [self.qos[name].priority if name else 0 for name in names]
            return np.array([depth.get(name, 0) for name in names]), np.array(firsts)
        tiers = np.array([self.tiers.get(str(name), 1) for name in workload.tenant.tolist()])
        return tiers, tiers

    def lines(self) -> tuple[str, ...]:
        """Return the same in slurm.conf."""
        shared = " OverSubscribe=FORCE:1" if self.mode == "SUSPEND" else ""
        made = [f"PartitionName={n} Nodes=ALL MaxTime=INFINITE PriorityTier={t}{shared}" for n, t in self.tiers.items()]
        if self.mode != "OFF":
            kind = "qos" if self.by_qos else "partition_prio"
            mode = "SUSPEND,GANG" if self.mode == "SUSPEND" else self.mode
            made = [f"PreemptType=preempt/{kind}", f"PreemptMode={mode}", *made]
        return tuple(made)

    def accounting(self, users: Sequence[str]) -> tuple[str, ...]:
        """Return the same for sacctmgr, and these users, all of one account and with the same share."""
        made = ["add account foretrace"]
        for name, each in self.qos.items():
            said = {key + "=gres/gpu" * ("TRES" in key): getattr(each, known) for key, known in _QOS.items()}
            made.append(f"add qos {name} " + " ".join(f"{key}={value}" for key, value in said.items() if value))
        preempts = [(name, each.preempt) for name, each in self.qos.items() if each.preempt]
        made += [f"modify qos {name} set Preempt={','.join(others)}" for name, others in preempts]
        return (*made, f"add user {','.join(users)} account=foretrace qos={','.join(('normal', *self.qos))}")
