"""`PolicyRules`: the rules of a policy by name, with their parameters, as both engines know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.fleet.workload import Float64, Workload, plain

OrderRule = Literal["key", "remaining", "service", "queues", "network", "last", "fairness"]
AdmitRule = Literal["block", "skip", "backfill"]
PlaceRule = Literal["strict", "greedy", "delay", "auto"]
PreemptRule = Literal["keep", "lease", "always"]


MACHINE = "node"  # what clusters call a machine unless they say otherwise


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a job is not placed now (a `result.Cause`), and when it makes sense to look again (None: at any event)."""

    cause: int
    until_ns: int | None = None
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class PolicyRules:
    """Rules of a scheduling policy. The fields are its rules and their parameters; times in seconds.

    order_rule: "key" by `key` of each job, smallest first; "remaining" work; "service" GPU-seconds had; "queues" bands
    of service at `thresholds_gpu_s`, in a band by submission or, with `index`, by its value; "network" Dally's Nw;
    "last" who gained or lost GPUs longest ago; "fairness" who is slowed down most, the worst `share` first.
    admit_rule: "block" nobody passes one that does not fit; "skip" whoever fits; "backfill" who does not delay the
    first that does not fit, by stated run times (EASY). place_rule: "strict" the tightest level at which the job can
    ever be held; "greedy" any; "delay" wider than `machine` only after `waits_s`; "auto" the same with waits that are
    tuned from the past. preempt_rule: "keep"; "lease" GPUs are held for `lease_s` and bid for again; "always" any
    event may take GPUs from a job whose place in the order is worse.
    """

    name: str
    order_rule: OrderRule = "key"
    admit_rule: AdmitRule = "skip"
    place_rule: PlaceRule = "strict"
    preempt_rule: PreemptRule = "keep"
    thresholds_gpu_s: tuple[float, ...] = ()
    index: Mapping[str, Sequence[float]] | None = (
        None  # "service_gpu_s" ascending from 0, "value" larger is served first
    )
    share: float = 1.0
    machine: str = MACHINE  # the widest level that is taken without waiting
    waits_s: tuple[float, ...] = ()  # per level above `machine`, outwards; the last one counts for all further ones
    history_leases: int = 24
    floors_leases: tuple[float, ...] = (6.0, 12.0)
    lease_s: float = 3600.0
    migrate: bool = False
    eager_models: frozenset[str] = frozenset()  # models that spread without waiting
    note: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def key(self, workload: Workload) -> Float64:
        """Return (n,) what `order_rule` "key" sorts by, equal keys by submission; that order unless overridden."""
        return np.zeros(len(workload))

    def takes(self, workload: Workload) -> Workload:
        """Return the jobs as the policy plays them, rigid ones that may run on other numbers of GPUs included."""
        return workload

    def eager(self, workload: Workload) -> Bool:
        """Return (n,) jobs whose model spreads without waiting; names are compared without case, dashes and blanks."""
        named = {plain(each) for each in self.eager_models}
        yes = {model: plain(model) in named for model in dict.fromkeys(workload.model.tolist())}
        return np.array([yes[model] for model in workload.model.tolist()], bool)

    def overrides(self, decision: str) -> bool:
        """Return whether the policy takes a decision itself, by a method of this name; rules alone take none."""
        return False

    @property
    def compiled(self) -> bool:
        """Whether the compiled engine can play it: no decision is overridden."""
        decisions = ("order", "admit", "place", "preempt", "end", "requeue", "review")
        return not any(self.overrides(each) for each in decisions)

    @property
    def resizes(self) -> bool:
        """Whether `place` may run elastic jobs on other numbers of GPUs than they request."""
        return self.overrides("place")

    def validate(self) -> None:
        """Raise ForetraceError where a parameter makes no sense."""
        who = f"policy {self.name!r}"
        if self.preempt_rule == "lease" and not (np.isfinite(self.lease_s) and self.lease_s >= 1):
            raise ForetraceError(f"{who}: a lease or slice takes 1 s or more, not {self.lease_s:g}; give 600 or so.")
        if any(not wait >= 0 for wait in self.waits_s):
            raise ForetraceError(f"{who}: a delay timer is 0 s or more (inf: never); mend waits.")
        if self.place_rule == "delay" and not self.waits_s:
            raise ForetraceError(f"{who}: placement with a delay needs waits, e.g. waits=600,1200.")
        if self.history_leases < 1:
            raise ForetraceError(f"{who}: timers are tuned from 1 lease or more, not {self.history_leases}.")
        if self.place_rule == "auto" and self.preempt_rule != "lease":
            raise ForetraceError(f"{who}: tuned timers are counted in leases; choose preempt=lease or place=delay.")
        rising = all(a < b for a, b in zip(self.thresholds_gpu_s, self.thresholds_gpu_s[1:], strict=False))
        if any(not each > 0 for each in self.thresholds_gpu_s) or not rising:
            raise ForetraceError(f"{who}: thresholds are GPU-seconds above 0 that rise, e.g. thresholds=3600,57600.")
        if self.order_rule == "queues" and not self.thresholds_gpu_s:
            raise ForetraceError(f"{who}: bands of service need thresholds, e.g. thresholds=3600,57600.")
        if not 0 < self.share <= 1:
            raise ForetraceError(
                f"{who}: the part of jobs that fairness serves first is in (0, 1], not {self.share:g}."
            )


def estimates(workload: Workload) -> Float64:
    """Return (n,) stated run times in seconds, the true ones where nothing is stated."""
    return np.where(np.isnan(workload.estimate_s), workload.work_s, workload.estimate_s)


Bool = npt.NDArray[np.bool_]
