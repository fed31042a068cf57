"""Play a workload on a cluster under a policy: `simulate` for the whole, `Simulation` to stop anywhere and look."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import setup
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.policy import Policy
from foretrace.fleet.policy_rules import AdmitRule, OrderRule, PreemptRule
from foretrace.fleet.reasons import decisions_of
from foretrace.fleet.result import FleetResult
from foretrace.fleet.setup import Costs, Engine
from foretrace.fleet.speeds import Shape, Speeds
from foretrace.fleet.workload import Workload, nanoseconds


def simulate(
    workload: Workload,
    cluster: ClusterTree,
    policy: Policy,
    *,
    speeds: Speeds | None = None,
    costs: Costs | None = None,
    seed: int = 0,
    record: str = "nothing",
    explain: str | None = None,
    until_s: float | None = None,
    max_events: int | None = None,
) -> FleetResult:
    """Play the workload to its end (or to `until_s`, or until so many events); the same input gives the same result.

    speeds: how fast a job runs where it was placed (None: always as `work_s` says). record: "nothing", "segments"
    (who ran when and how wide) or "devices" (and on which GPUs). explain: a job's name or "all": decisions about it are
    in `decisions`. Policies that override a decision are played step by step in Python (`stepping`).
    Raises ForetraceError where workload, cluster and policy do not fit together.
    """
    workload = policy.takes(workload)
    engine: type[Engine] = Simulation
    if not policy.compiled or (workload.share < 1).any() or (workload.min_gpus < workload.max_gpus).any():
        from foretrace.fleet.stepping import Stepping as engine
    played = engine(workload, cluster, policy, speeds=speeds, costs=costs, seed=seed, record=record, explain=explain)
    return played.run(until_s=until_s, max_events=max_events).result()


class Simulation(Engine):
    """The compiled engine at one moment. `run(until_s=...)` continues from there; look at it in between."""

    def __init__(self, workload: Workload, cluster: ClusterTree, policy: Policy, **options: Any) -> None:
        if not policy.compiled:
            raise ForetraceError(f"policy {policy.name!r} decides in Python; play it with simulate().")
        super().__init__(workload, cluster, policy, **options)
        self.state = _state(self)

    @property
    def now_s(self) -> float:
        """Time of the last event in seconds after the workload's zero."""
        return float(self.state.s["now"][0]) * 1e-9

    @property
    def finished(self) -> bool:
        """Whether nothing is left to happen."""
        s = self.state.s
        return bool(s["heap"][0] == 0 and s["next"][0] == len(self.workload))

    def play(self, until: int, events: int) -> bool:
        """See `Engine.play`."""
        import numba

        # Its arrays are reached by address, which plain Python cannot.
        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # set from the environment
            raise ForetraceError("the fleet's engine needs numba's compiler; unset NUMBA_DISABLE_JIT.")
        from foretrace.fleet.engine import memory as engine
        from foretrace.fleet.engine.decisions import run

        self.state.s["limit"][0] = events
        while True:
            why = run(self.state, min(until, self.foreseen))
            if why == engine.NEED_SPEED:
                self._learn()
            elif why == engine.NEED_ROOM:
                self._make_room()
            elif why == engine.STOPPED and self.foreseen < until and self.state.s["events"][0] < events:
                self.foresee()
                self.state = self.state._replace(fails=_failures(self))
            else:
                return bool(why == engine.STOPPED)

    def _learn(self) -> None:
        """Ask the model for the speed that the engine has not met, and put it into its table."""
        state, levels = self.state, len(self.cluster.levels)
        ask = state.ask
        job = int(ask[4 + levels])
        shape = Shape(
            gpus=int(ask[1]),
            units=tuple(int(each) for each in ask[4 : 4 + levels]),
            even=bool(ask[2]),
            gpu_type=self.cluster.types[int(ask[3])],
        )
        speed = self.speed(job, shape)
        at = int(ask[5 + levels])
        state.rows[at] = ask[: 4 + levels]
        state.table[at] = (1, speed.progress, speed.communication)
        state.s["filled"][0] += 1
        if state.s["filled"][0] * 2 > len(state.table):  # a table twice as large; what is asked again is known
            state.s["filled"] = 0
            size = 2 * len(state.table)
            rows, table = np.zeros((size, state.rows.shape[1]), np.int64), np.zeros(size, state.table.dtype)
            self.state = state._replace(rows=rows, table=table)

    def _make_room(self) -> None:
        state = self.state
        grown = {
            name: np.concatenate([getattr(state, name), np.zeros_like(getattr(state, name))])
            for name in ("seg", "devices", "log", "samples")
        }
        self.state = state._replace(**grown)

    def devices_of(self, job: int) -> list[int]:
        """Return GPUs that a job holds now, in ascending order."""
        from foretrace.fleet.engine import memory as engine

        found: list[int] = []
        if self.state.jobs["status"][job] == engine.RUNNING:
            gpu = int(self.state.jobs["head"][job])
            while gpu >= 0:
                found.append(gpu)
                gpu = int(self.state.devs["nxt"][gpu])
        return sorted(found)

    def result(self) -> FleetResult:
        """Return what happened so far."""
        from foretrace.fleet.engine import memory as engine

        state, now = self.state, int(self.state.s["now"][0])
        waiting, running = (
            np.flatnonzero(state.jobs["status"] == status) for status in (engine.WAITING, engine.RUNNING)
        )
        stretches, devices = state.seg[: state.s["segments"][0]], state.devices[: state.s["devices"][0]]
        columns = np.array([stretches[name] for name in ("job", "start", "end", "gpus", "level", "dead")])
        return self.answer(
            state.jobs,
            state.waited,
            waiting=waiting,
            running=running,
            part=self.workload.gpus,
            now=now,
            engine="compiled",
            never=self.facts.never,
            ended=(columns, stretches["gpus"] if len(devices) else np.zeros(len(stretches), np.int64), devices),
            decisions=decisions_of(state.log[: state.s["log"][0]], self.workload, self.cluster),
            events=int(state.s["events"][0]),
        )


def _state(played: Simulation) -> Any:
    from foretrace.fleet.engine import memory as engine

    workload, cluster, policy, facts = played.workload, played.cluster, played.policy, played.facts
    n, levels, kinds = len(workload), len(cluster.levels), len(cluster.types)
    level_at, lo, hi, parent = cluster.numbered()
    units = len(lo)
    # the first child of each unit; those of the last unit of a level end where that level begins
    child = np.searchsorted(parent[:-1], np.arange(units + 1))
    free = np.array(
        [np.concatenate([cluster.counts(i, cluster.gpu_type == kind) for i in range(levels)]) for kind in range(kinds)]
    )
    waits, machine = setup.waits_ns(policy, cluster)
    floors, caps = setup.tuned_leases(policy, cluster)
    keep, track = setup.RECORDS.index(played.record), engine.UNWATCHED if played.watched is None else played.watched
    index = policy.index or {"service_gpu_s": (), "value": ()}
    timers = 100_000 if keep and policy.place_rule == "auto" else 0
    return engine.EngineState(
        s=_records(
            1, engine.NUMBERS, free=cluster.gpus, order=get_args(OrderRule).index(policy.order_rule),
            admit=get_args(AdmitRule).index(policy.admit_rule),
            preempt=get_args(PreemptRule).index(policy.preempt_rule),
            lease=nanoseconds(policy.lease_s) if policy.preempt_rule == "lease" else 0, machine=machine,
            auto=policy.place_rule == "auto", history=policy.history_leases, migrate=policy.migrate,
            final=setup.alike(policy, cluster), share=round(policy.share * 1e6), keep=keep,
            checkpoint=nanoseconds(played.costs.checkpoint_s), first_cost=played.costs.first_start, track=track,
        ),
        jobs=_records(
            n, engine.JOB, submit=workload.submit_ns, gpus=workload.gpus, work=facts.work_ns, remaining=facts.work_ns,
            kind=played.kinds, demand=facts.demand, size=facts.size, tenant=facts.tenant,
            restart=facts.restart_ns, estimate=facts.estimate_ns, key=facts.key,
            eager=facts.eager, status=np.where(facts.never, engine.DONE, engine.FUTURE), first=-1, ended=-1,
            head=-1, pos=-1,
        ),
        waited=np.zeros((n, engine.CAUSES), np.int64),
        heap=np.zeros(n, np.int64),
        queue=np.zeros(n, np.int64),
        order=np.zeros(n, np.int64),
        merged=np.zeros(n, np.int64),
        newly=np.zeros(2 * n, np.int64),
        devs=_records(
            cluster.gpus, engine.DEVICE, owner=-1, nxt=-1, reclaimer=-1, kind=cluster.gpu_type, unit=cluster.units_of(0)
        ),
        units=_records(
            units + 1, engine.UNIT, lo=np.append(lo, 0), hi=np.append(hi, 0), parent=np.append(parent, 0), child=child
        ),
        free=free,
        levels=_records(
            levels + 1, engine.LEVEL, at=level_at, wait=np.append(waits, 0), floor=np.append(floors, 0),
            cap=np.append(caps, 0),
        ),
        capacity=facts.capacity,
        allowed=facts.allowed[facts.demands].astype(np.int64),
        demands=_records(len(facts.demands), engine.DEMAND, gpus=workload.gpus[facts.demands]),
        thresholds=np.asarray(policy.thresholds_gpu_s, np.float64) * 1e9,
        index=_records(
            len(index["value"]), engine.INDEX, service=np.asarray(index["service_gpu_s"], np.float64) * 1e9,
            value=index["value"],
        ),
        tenants=_records(len(facts.quota), engine.TENANT, quota=facts.quota),
        windows=_records((facts.size.max() + 1) * levels, engine.WINDOW, head=-1, tail=-1, said=-1, asked=-1),
        samples=np.zeros(1024, engine.SAMPLE),
        timer_log=np.zeros(timers, engine.TIMER),
        rows=np.zeros((1024, 4 + levels), np.int64),
        table=np.zeros(1024, engine.RATE),
        ask=np.zeros(6 + levels, np.int64),
        fails=_failures(played),
        seg=np.zeros(1024 if keep else 0, engine.SEGMENT),
        devices=np.zeros(4 * cluster.gpus if keep > 1 else 0, np.int64),
        log=np.zeros(1024 if track > engine.UNWATCHED else 0, engine.EVENT),
    )  # fmt: skip


def _failures(played: Simulation) -> Any:
    from foretrace.fleet.engine import memory as engine

    times, units, ups = played.failures
    return _records(len(times), engine.FAILURE, at=times, unit=units, up=ups)


def _records(n: int, kind: np.dtype[Any], /, **columns: Any) -> Any:
    """Return (n,) records with these fields filled, the others 0."""
    made = np.zeros(n, kind)
    for name, values in columns.items():
        made[name] = values
    return made
