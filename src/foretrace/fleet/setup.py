"""What both engines are given, and what they know before they start: who can be held where, costs, failures by seed."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.policy_rules import MACHINE, PolicyRules, estimates
from foretrace.fleet.result import FleetResult, Segments, up_to_now
from foretrace.fleet.speeds import ROUNDING, ProportionalSpeeds, Shape, Speed, Speeds
from foretrace.fleet.speeds.closed_form import ConstantSpeeds
from foretrace.fleet.workload import FARTHEST_S, SECOND, Float64, Int64, Workload, nanoseconds

NEVER = 2**62
_AT_ONCE = 8  # failures of a unit that are drawn together
MOST_FAILURES = 5_000_000  # more would be seconds between failures, or jobs that never end between two
RECORDS = ("nothing", "segments", "devices")
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What interruptions cost. A job that loses its GPUs has saved its state; one that a failure stops has not.

    restart_s + restart_s_per_gpu × GPUs: time on new GPUs without progress; at the first start only with
    `first_start`. restart_s_by_model overrides both (from the size of a checkpoint, `checkpoint_cost`).
    checkpoint_s: how often a running job saves by itself (0: a failure loses the whole stretch).
    mtbf_h, mttr_h: mean hours between failures of one innermost unit and to its repair, exponential (0: no failures).
    failures: stated ones instead, of innermost units: when (s), which unit, when it is repaired (s, inf: never).
    """

    restart_s: float = 0.0
    restart_s_per_gpu: float = 0.0
    restart_s_by_model: tuple[tuple[str, float], ...] = ()
    first_start: bool = False
    checkpoint_s: float = 0.0
    mtbf_h: float = 0.0
    mttr_h: float = 1.0
    failures: tuple[tuple[float, int, float], ...] = ()

    @property
    def random(self) -> bool:
        """Whether failures are drawn."""
        return self.mtbf_h > 0 and not self.failures

    def validate(self) -> None:
        """Raise ForetraceError where a cost is negative or not a number."""
        for name in ("restart_s", "restart_s_per_gpu", "checkpoint_s", "mtbf_h"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ForetraceError(f"`{name}=` is a number from 0 up, not {value:g}; give one.")
        if self.mtbf_h > 0 and not (np.isfinite(self.mttr_h) and self.mttr_h > 0):
            raise ForetraceError(f"`mttr_h=`, the mean time to repair, is above 0 h, not {self.mttr_h:g}; give more.")
        for model, value in self.restart_s_by_model:
            if not (np.isfinite(value) and value >= 0):
                raise ForetraceError(f"the restart of {model!r} takes a number of seconds from 0 up, not {value:g}.")

    def restart_ns(self, workload: Workload) -> Int64:
        """Return (n,) restart of each job."""
        costs = self.restart_s + self.restart_s_per_gpu * workload.gpus
        for model, value in self.restart_s_by_model:
            costs = np.where(workload.model == model, value, costs)
        return nanoseconds(costs)


def checkpoint_cost(nbytes: float, *, write_gb_s: float, read_gb_s: float, start_s: float = 0.0) -> float:
    """Return seconds that moving a job costs: its checkpoint written and read again, its process started."""
    if nbytes < 0 or write_gb_s <= 0 or read_gb_s <= 0:
        raise ForetraceError("a checkpoint has 0 bytes or more, and storage a bandwidth above 0 GB/s.")
    return nbytes / (write_gb_s * 1e9) + nbytes / (read_gb_s * 1e9) + start_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """Workload and cluster put into numbers.

    allowed: (n, kinds) kinds of GPU a job may use; demand: (n,) class of jobs that fit alike; demands: one job of each
    class; capacity: (classes, levels) GPUs of the largest unit of a level for such a job; never: (n,) True where no
    unit can ever hold it or its tenant may never have so many; tenant: (n,) codes; quota: (tenants,); size: (n,) class
    of GPUs alone; eager: (n,) no timer holds it; key: (n,) what the order "key" sorts by.
    """

    allowed: Bool
    demand: Int64
    demands: Int64
    capacity: Int64
    never: Bool
    tenant: Int64
    quota: Int64
    estimate_ns: Float64
    restart_ns: Int64
    work_ns: Float64
    size: Int64
    eager: Bool
    key: Float64


class Engine(ABC):
    """A simulation at one moment; arguments as `simulate` has them."""

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterTree,
        policy: PolicyRules,
        *,
        speeds: Speeds | None = None,
        costs: Costs | None = None,
        seed: int = 0,
        record: str = "nothing",
        explain: str | None = None,
    ) -> None:
        if record not in RECORDS:
            raise ValueError(f"record is nothing, segments or devices, not {record!r}")
        self.workload, self.cluster, self.policy, self.record = workload, cluster, policy, record
        elastic = bool((workload.min_gpus != workload.gpus).any() or (workload.max_gpus != workload.gpus).any())
        self.speeds = speeds or (ProportionalSpeeds() if elastic else ConstantSpeeds())
        self.kinds: list[int] = self.speeds.kinds(workload).tolist()
        self.known: dict[tuple[int, Shape], Speed] = {}
        self.costs = costs or Costs()
        self.facts = prepare(workload, cluster, policy, self.costs)
        self.watched = None if explain is None else -1 if explain == "all" else workload.position(explain)
        self.seed, self.stopped = seed, False
        # up to where failures are drawn; further where the simulation comes there
        alone = (workload.gpus * self.facts.work_ns).sum() / cluster.gpus
        self.foreseen = (
            int(workload.submit_ns[-1] + 2 * alone + self.facts.work_ns.max()) if self.costs.random else NEVER
        )
        self.failures = failures(cluster, self.costs, self.foreseen, seed=seed)

    def run(self, *, until_s: float | None = None, max_events: int | None = None) -> Self:
        """Play to this time (inclusive), so many events, or the end. Raises ForetraceError for an impossible wish."""
        until = int(nanoseconds(until_s)) if until_s is not None else NEVER - 1
        self.stopped = self.play(until, NEVER if max_events is None else max_events)
        return self

    def foresee(self) -> None:
        """Draw failures for four times as long; those known so far stay. Raises ForetraceError for too many."""
        self.foreseen *= 4
        self.failures = failures(self.cluster, self.costs, self.foreseen, seed=self.seed)

    def speed(self, job: int, shape: Shape) -> Speed:
        """Return what the model says of a job alone in a shape, which it is asked once for each kind of job.

        Raises ForetraceError where it makes no progress.
        """
        key = self.kinds[job], shape
        if key in self.known:
            return self.known[key]
        found = self.speeds.speed(self.workload, job, shape)
        if not (np.isfinite(found.progress) and found.progress > 0):
            raise ForetraceError(
                f"speed model {self.speeds.name!r} says that job {self.workload.job[job]!r} makes no progress on "
                f"{shape.gpus} GPUs ({shape}); a speed is above 0."
            )
        self.known[key] = found
        return found

    @abstractmethod
    def play(self, until: int, events: int) -> bool:
        """Play on until this time (ns) or so many events; whether something is left to happen."""

    @abstractmethod
    def devices_of(self, job: int) -> list[int]:
        """Return GPUs that a job holds now, in ascending order."""

    @abstractmethod
    def result(self) -> FleetResult:
        """Return what happened so far."""

    def answer(
        self, jobs: Mapping[str, Any], waited: Int64, *, waiting: Int64, running: Int64, part: npt.NDArray[Any],
        now: int, engine: str, ended: tuple[Int64, Int64, Int64], **known: Any,
    ) -> FleetResult:  # fmt: skip
        """Return the result, from the books of an engine (`up_to_now`) and what else it knows.

        ended: stretches that are over, as `Segments.of` takes them.
        """
        known |= up_to_now(jobs, waited, waiting=waiting, running=running, part=part, now=now)
        return FleetResult(
            **known,
            segments=None if self.record == "nothing" else self._segments(jobs, running, now, *ended),
            workload=self.workload,
            policy=self.policy.name,
            cluster=self.cluster.name,
            gpus=self.cluster.gpus,
            facts={
                "engine": engine,
                "speeds": self.speeds.name,
                "machines_are": self.cluster.levels[waits_ns(self.policy, self.cluster)[1]],
                "distinct_speeds": len(self.known),
            },
            stopped_ns=now if self.stopped else None,
        )

    def _segments(
        self, jobs: Mapping[str, Any], running: Int64, now: int, ended: Int64, sizes: Int64, devices: Int64
    ) -> Segments:
        """Return the stretches that are over, and those of the jobs that run."""
        held = [self.devices_of(job) for job in running.tolist()]
        start, count = jobs["stretch"][running], np.array([len(each) for each in held], np.int64)
        dead = np.minimum(jobs["stretch_dead"][running], now - start)
        going = np.array([running, start, np.full(len(running), now), count, jobs["level"][running], dead], np.int64)
        if self.record == "segments":
            held, count = [], np.zeros_like(count)
        devices = np.concatenate([devices, *(np.array(each, np.int64) for each in held)])
        return Segments.of(np.hstack([ended, going]), np.append(sizes, count), devices)


def prepare(workload: Workload, cluster: ClusterTree, policy: PolicyRules, costs: Costs) -> Facts:
    """Check that the parts fit together; raises ForetraceError with what to mend."""
    policy.validate()
    costs.validate()
    where = workload.origin.path or workload.name or "the workload"
    if not len(workload):
        raise ForetraceError(f"{where} has no jobs; nothing to play.")
    if workload.submit_ns[-1] >= NEVER:
        raise ForetraceError(
            f"{where} has jobs that come after 146 years, which cannot be played; count from the first."
        )
    if np.isnan(workload.work_s).any():
        raise ForetraceError(
            f"{where} says how much its jobs compute but not how long they run; give a table of speeds with "
            "`speeds=table=FILE`."
        )
    types, code = np.unique(workload.gpu_type.astype(str), return_inverse=True)
    allowed = np.array([cluster.usable(str(text)) for text in types])[code]
    eager = policy.eager(workload)
    same = (code * (int(workload.gpus.max()) + 1) + workload.gpus) * 2 + eager
    _, first, demand = np.unique(same, return_index=True, return_inverse=True)
    sizes = cluster.largest()
    capacity = np.array([sizes[allowed[job]].max(axis=0, initial=0) for job in first], np.int64)
    tenants, tenant = np.unique(workload.tenant.astype(str), return_inverse=True)
    quotas = cluster.quotas or {}
    unknown = set(quotas) - set(tenants.tolist())
    if unknown and not set(quotas) & set(tenants.tolist()):
        raise ForetraceError(
            f"no job belongs to {sorted(unknown)[0]!r}, which has a quota; tenants are {_some(tenants)}."
        )
    quota = np.array([quotas.get(str(each), NEVER) for each in tenants], np.int64)
    never = (workload.gpus > capacity[demand, -1]) | (workload.gpus * workload.share > quota[tenant] + ROUNDING)
    restart = costs.restart_ns(workload)
    if policy.preempt_rule == "lease" and (nanoseconds(policy.lease_s) <= restart).any():
        worst = int(np.argmax(restart))
        raise ForetraceError(
            f"policy {policy.name!r}: a lease of {policy.lease_s:g} s is no longer than the restart of job "
            f"{workload.job[worst]!r} ({restart[worst] / SECOND:g} s), which may never end; lengthen the lease."
        )
    key = np.asarray(policy.key(workload), np.float64)
    if key.shape != (len(workload),):
        raise ForetraceError(
            f"policy {policy.name!r}: key gives {key.shape} numbers for {len(workload):,} jobs; one each."
        )
    return Facts(
        allowed=allowed,
        demand=demand.astype(np.int64),
        demands=first.astype(np.int64),
        capacity=capacity,
        never=never,
        tenant=tenant.astype(np.int64),
        quota=quota,
        estimate_ns=estimates(workload) * SECOND,
        restart_ns=restart,
        work_ns=np.rint(workload.work_s * SECOND),
        size=np.unique(workload.gpus, return_inverse=True)[1],
        eager=eager,
        key=key,
    )


def alike(policy: PolicyRules, cluster: ClusterTree) -> bool:
    """Return whether a job that does not fit says the same of its class: no timers and no quotas tell them apart."""
    return policy.compiled and policy.place_rule in ("strict", "greedy") and not cluster.quotas


def _some(names: npt.NDArray[np.str_]) -> str:
    shown = ", ".join(repr(str(each)) for each in names[:3])
    return shown + (", ..." if len(names) > 3 else "")


def waits_ns(policy: PolicyRules, cluster: ClusterTree) -> tuple[Int64, int]:
    """Return (levels,) wait before spreading over a unit of each level, and the widest level that needs none."""
    machine = cluster.machine_level if policy.machine == MACHINE else cluster.level(policy.machine)
    waits = np.zeros(len(cluster.levels), np.int64)
    for level in range(machine + 1, len(cluster.levels)):
        if policy.place_rule == "strict":
            waits[level] = NEVER
        elif policy.place_rule == "delay":
            wait = policy.waits_s[min(level - machine, len(policy.waits_s)) - 1]
            waits[level] = NEVER if np.isinf(wait) else int(nanoseconds(wait))
    return waits, machine


def tuned_leases(policy: PolicyRules, cluster: ClusterTree) -> tuple[Float64, Float64]:
    """Return (levels,) the least and the most leases that a tuned timer waits before a unit of each level will do."""
    above = np.arange(len(cluster.levels)) - waits_ns(policy, cluster)[1]
    floors = np.array(policy.floors_leases)[np.clip(above, 1, len(policy.floors_leases)) - 1]
    most = float(policy.history_leases)
    return np.where(above > 0, floors, 0.0), np.where(above == 1, np.ceil(0.8 * most), most)


def failures(cluster: ClusterTree, costs: Costs, until_ns: int, *, seed: int) -> tuple[Int64, Int64, Int64]:
    """Return when innermost units break and are repaired, by seed: times (ns, ascending), units, 1 for a repair.

    Times between failures and to repair are exponential; a broken unit does not break again before its repair. Drawn
    are those that begin by `until_ns`; neither a later one nor further units change them.
    """
    if not costs.random:
        return _in_order([row for at, unit, back in costs.failures for row in ((at, unit, 0), (back, unit, 1))])
    count, until = cluster.units(0), until_ns / SECOND
    if until > FARTHEST_S or count * until / (costs.mtbf_h * 3600) > MOST_FAILURES:
        raise ForetraceError(
            f"with mtbf-h {costs.mtbf_h:g}, machines break more than {MOST_FAILURES:,} times, or for centuries, before "
            "all jobs end; give more hours, or let jobs save with checkpoint-s."
        )
    rows, repaired = list[Float64](), np.zeros((count, 1))
    for turn in itertools.count():
        lasts, takes = (  # a row of each unit, whichever others there are
            np.random.default_rng([seed, turn, kind]).exponential(hours * 3600, (count, _AT_ONCE)) + 1e-9
            for kind, hours in enumerate((costs.mtbf_h, costs.mttr_h))
        )
        back = repaired + np.cumsum(lasts + takes, axis=1)
        broken, repaired = back - takes, back[:, -1:]
        unit, at = np.nonzero(broken <= until)
        if not len(unit):
            break
        for times, up in ((broken, 0), (back, 1)):
            rows.append(np.stack([times[unit, at], unit, np.full(len(unit), up)], axis=1))
    return _in_order(np.concatenate([np.zeros((0, 3)), *rows]))


def _in_order(rows: Sequence[tuple[float, int, int]] | Float64) -> tuple[Int64, Int64, Int64]:
    """Return times (s), units and repairs as columns, by time; what never happens is left out."""
    columns = np.asarray(rows, np.float64).reshape(-1, 3).T
    columns = columns[:, np.isfinite(columns[0])]
    times, (units, ups) = nanoseconds(columns[0]), columns[1:].astype(np.int64)
    order = np.lexsort((units, ups, times))
    return times[order], units[order], ups[order]
