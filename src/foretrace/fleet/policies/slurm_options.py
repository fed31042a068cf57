"""What a site and its users say to Slurm, by its own names: settings of the schedulers, weights, arrays, dependencies,
drained and reserved nodes, partitions, QOS. `slurm` decides by it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.formats.slurm import duration
from foretrace.fleet.policy import Policy
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload
from foretrace.names import keyed

if TYPE_CHECKING:
    from foretrace.fleet.cluster import ClusterTree

DEFAULTS = ("yes", "defaults")
BACKGROUND_S = 1.005  # the background thread sleeps ten times 0.1 s, and works a little; 1.002 on an idle machine
MODES = ("off", "requeue", "suspend")  # PreemptMode; suspended jobs keep their GPUs (gres.html)
MOST_TASKS = 1001  # MaxArraySize as it is by default
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_WINDOW = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?@(\d{1,9}(?:\.\d+)?)(?:-(\d{1,9}(?:\.\d+)?))?")
_NAME = re.compile(r"[A-Za-z][\w-]{0,40}")


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


def switch_request(text: str, most_s: int) -> tuple[int, float]:
    """Parse `N@TIME` as sbatch has it: leaf switches, (0: any), and how long to insist, s. Raises ForetraceError."""
    count, at, time = text.partition("@")
    try:
        if text and not (count.isdecimal() and int(count)):
            raise ValueError(count)
        return int(count or 0), min(duration(time), most_s) if at else float(most_s)
    except ValueError:
        raise ForetraceError(f"`switches` must be N@minutes:seconds, such as 1@2:30, got {text!r}.") from None


def limits_min(workload: Workload) -> Int64:
    """Return (n,) time limits in minutes, rounded up as sbatch does; above the true run time where none is stated."""
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


def fair_tree(workload: Workload, used: Mapping[str, float]) -> Float64:
    """Return (n,) fair share of each job's user, all of one share (fair_tree.c): 1 for who used least."""
    users = sorted(set(workload.user.tolist()))
    above = {user: sum(used.get(other, 0.0) < used.get(user, 0.0) for other in users) for user in users}
    return np.array([1 - above[user] / len(users) for user in workload.user.tolist()])


def dependencies(workload: Workload) -> dict[int, list[tuple[str, list[int]]]]:
    """Return what each job waits for, from the column `dependency`: afterok:JOB, afterany:JOB:JOB, singleton; all of
    them with commas; an array is all its tasks. Raises ForetraceError for anything else, or jobs that come no earlier.
    """
    found: dict[int, list[tuple[str, list[int]]]] = {}
    names: dict[str, list[int]] = {}
    for at, name in (*enumerate(workload.job), *enumerate(workload.details.get("array_of", ()))):
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
    """Return the jobs with a row for each task of arrays (column `array`, as sbatch has it: 0-9%2, 1,3,5-9:2).

    Tasks are called JOB_TASK; columns `array_of` and `array_task` say of which array which. Raises ForetraceError.
    """
    given = workload.details.get("array")
    if given is None or "array_of" in workload.details:
        return workload
    listed = []
    for name, text in zip(map(str, workload.job), map(str, given), strict=True):
        ranges = []
        with suppress(ValueError):
            ranges = array_ranges(text)[0] if text else [range(-1, 0)]
        indices = list(itertools.chain(*ranges)) if sum(map(len, ranges)) <= MOST_TASKS else []
        if not 0 < len(set(indices)) == len(indices):
            form = f"0-9%2 or 1,3,5-9:2, at most {MOST_TASKS:,} tasks"
            raise ForetraceError(f"job {name!r}: `array` must be such as {form}, got {text[:60]!r}.")
        listed.append(sorted(indices))
    made = workload.take(np.repeat(np.arange(len(workload)), list(map(len, listed))))
    tasks, job = np.array(list(itertools.chain(*listed)), np.int64), made.job.astype(object)
    names = np.where(tasks < 0, job, job + "_" + tasks.astype(str).astype(object))
    columns = {"array_of": np.where(tasks < 0, "", job), "array_task": tasks}
    made = replace(made, job=names, details={**made.details, **columns})
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


def arrays_of(workload: Workload) -> tuple[Int64, Int64]:
    """Return (n,) array of each job of `tasks_of`, −1 none; (n,) how many of its tasks may run at once (0: all)."""
    names = workload.details.get("array_of", np.full(len(workload), "", object)).astype(str)
    specs = workload.details.get("array", names).astype(str)
    of = np.where(names == "", -1, np.unique(names, return_inverse=True)[1])
    return of, np.array([int(text.partition("%")[2] or 0) for text in specs])


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


def within(option: str, given: Iterable[NodeWindow], nodes: int) -> None:
    """Raise ForetraceError where one names a node that a cluster of so many does not have."""
    for each in given:
        if each.last >= nodes:
            raise ForetraceError(f"`{option}` must name nodes from 0 to {nodes - 1}, got {each.last}.")


def levels(option: str, text: str) -> dict[str, int]:
    """Return numbers by name, from high=10,low=1. Raises ForetraceError."""
    made: dict[str, int] = {}
    for word in text.split(",") if text else ():
        name, _, value = word.partition("=")
        if not (_NAME.fullmatch(name) and value.isdecimal() and int(value) < 2**16) or name in made:
            raise ForetraceError(f"`{option}` must be NAME=NUMBER, such as high=10,low=1, got {word!r}.")
        made[name] = int(value)
    return made


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Policy):
    """What is stated of one Slurm.

    tiers: PriorityTier by partition, which a job's tenant is; qos: Priority by QOS, a column `qos` of the jobs.
    """

    parameters: SchedulerParameters = field(default_factory=SchedulerParameters)
    backfill: bool = False
    by_priority: bool = False
    switches: int = 0  # leaf switches that all jobs insist on, for so long; 0: any
    switch_wait_s: float = 0.0
    exclusive: bool = False  # and nobody else on their nodes
    backfill_s: float = 0.0  # a time at which the backfill scheduler looks
    background_s: float = 0.0  # a time at which the background thread wakes
    background_every_s: float = BACKGROUND_S
    checks_s: float = 0.0  # and one at which it enforces limits and priorities are weighted
    weights: PriorityWeights | None = None  # None: priorities as stated
    drains: tuple[NodeWindow, ...] = ()
    reservations: tuple[NodeWindow, ...] = ()  # for maintenance: nobody may use them, who runs there runs on
    preempt_mode: str = "off"
    tiers: Mapping[str, int] = field(default_factory=dict)
    qos: Mapping[str, int] = field(default_factory=dict)
    resizes = False

    def validate(self) -> None:
        """See `Policy.validate`."""
        if self.preempt_mode not in MODES:
            raise ForetraceError(f"`preempt-mode` must be one of {', '.join(MODES)}, got {self.preempt_mode!r}.")
        if self.preempt_mode != "off" and not self.tiers:
            raise ForetraceError("`preempt-mode` needs to know who comes before whom; add priority-tier=high=10,low=1.")
        Policy.validate(self)

    def key(self, workload: Workload) -> Float64:
        """Return (n,) sorted ascending."""
        return -workload.priority if self.by_priority else np.zeros(len(workload))

    def takes(self, workload: Workload) -> Workload:
        """Return a row for each task of an array."""
        return tasks_of(workload)

    def fits(self, nodes: int) -> None:
        """Raise ForetraceError where an option names nodes that the cluster does not have."""
        within("drain", self.drains, nodes)
        within("reservation", self.reservations, nodes)

    def qos_of(self, workload: Workload) -> list[str]:
        """Return (n,) QOS of each job, "" where it has none. Raises ForetraceError for one that `qos` does not name."""
        names = [str(each) for each in workload.details.get("qos", np.full(len(workload), "", object)).tolist()]
        for job, name in enumerate(names):
            if name and self.qos and name not in self.qos:
                raise ForetraceError(
                    f"job {workload.job[job]!r}: `qos` {name!r} is not among {', '.join(self.qos)}; name it in qos=."
                )
        return names

    @property
    def makes_room(self) -> bool:
        """Whether it continues where no GPU is free: GPUs of a suspended job stay its own (gres.html)."""
        return self.preempt_mode == "requeue"
