"""Random workloads, clusters, rules and costs: what both engines are played on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.policy import OrderRule, PlaceRule, Policy, PreemptRule
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import Simulation
from foretrace.fleet.speeds import Speeds
from foretrace.fleet.workload import Workload
from tests.fleet.stepping_policies import Spread

ORDERS: tuple[OrderRule, ...] = ("key", "remaining", "service", "queues", "network", "last", "fairness")
PLACES: tuple[PlaceRule, ...] = ("strict", "greedy", "delay", "auto")
PREEMPTS: tuple[PreemptRule, ...] = ("keep", "lease", "always")
INDEX: Mapping[str, Sequence[float]] = {"service_gpu_s": [0.0, 10.0, 40.0], "value": [3.0, 5.0, 1.0]}
CLUSTERS = ("8", "2x3", "2x2x3", "2x3x2@a", "2x2@a+3x2@b", "2x2x2@a+1x1x3@b", "uneven", "quotas")


@dataclass(frozen=True)
class ByModel(Policy):
    """A key of its own: jobs of model e first."""

    def key(self, workload: Workload) -> Any:
        return np.where(workload.model == "e", 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to play."""

    workload: Workload
    cluster: ClusterTree
    policy: Policy
    costs: Costs
    speeds: Speeds | None
    seed: int

    @property
    def parts(self) -> tuple[Workload, ClusterTree, Policy]:
        """What engines take by position."""
        return self.workload, self.cluster, self.policy

    @property
    def options(self) -> dict[str, Any]:
        """What engines take by name."""
        return {"speeds": self.speeds, "costs": self.costs, "seed": self.seed, "record": "devices", "explain": "all"}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cluster = _cluster(draw(st.sampled_from(CLUSTERS)))
    order, preempt = draw(st.sampled_from(ORDERS)), draw(st.sampled_from(PREEMPTS))
    places = PLACES if preempt == "lease" else PLACES[:-1]  # tuned timers are counted in leases
    policy = draw(st.sampled_from((Policy, ByModel)))(
        name="drawn",
        order_rule=order,
        admit_rule=draw(st.sampled_from(("block", "skip", "backfill"))),
        place_rule=draw(st.sampled_from(places)),
        preempt_rule=preempt,
        thresholds_gpu_s=(20.0, 100.0),
        index=draw(st.sampled_from((None, INDEX))),
        share=draw(st.sampled_from((1.0, 0.3))),
        waits_s=draw(st.sampled_from(((5.0,), (10.0, 20.0), (0.0, float("inf"))))),
        lease_s=draw(st.sampled_from((7.0, 20.0, 60.0))),
        migrate=draw(st.booleans()),
        eager_models=frozenset(draw(st.sampled_from(((), ("e",))))),
        machine=draw(st.sampled_from(("node", cluster.levels[-1]))),
        history_leases=draw(st.sampled_from((3, 24))),
        floors_leases=draw(st.sampled_from(((1.0, 2.0), (6.0, 12.0)))),
    )
    costs = Costs(
        restart_s=draw(st.sampled_from((0.0, 3.0))),
        first_start=draw(st.booleans()),
        mtbf_h=draw(st.sampled_from((0.0, 0.05))),
        mttr_h=0.01,
        checkpoint_s=draw(st.sampled_from((0.0, 10.0))),
    )
    return Case(
        workload=_workload(draw, cluster),
        cluster=cluster,
        policy=policy,
        costs=costs,
        speeds=draw(st.sampled_from((None, Spread()))),
        seed=draw(st.integers(0, 3)),
    )


def _workload(draw: st.DrawFn, cluster: ClusterTree) -> Workload:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, largest = draw(st.sampled_from((3, 8, 20, 40))), draw(st.sampled_from((2, 4, 9)))
    span, unit = draw(st.sampled_from((1, 60, 600))), draw(st.sampled_from((1.0, 0.37)))
    work = random.uniform(1, 300, n) if draw(st.booleans()) else random.integers(1, 100, n).astype(float)
    stated = random.choice([np.nan, 10.0, 50.0, 200.0], n) if draw(st.booleans()) else np.full(n, np.nan)
    kinds = ("", "a", "a|b") if "a" in cluster.types and draw(st.booleans()) else ("",)
    return Workload.of(
        submit_s=np.sort(random.integers(0, span, n)) * unit,
        gpus=random.integers(1, largest + 1, n),
        work_s=work,
        tenant=random.choice(["red", "blue"], n),
        gpu_type=random.choice(kinds, n),
        model=random.choice(["m", "e"], n),
        estimate_s=stated,
    )


def _cluster(name: str) -> ClusterTree:
    if name == "uneven":
        return parse_cluster("1x4@a+1x2@b+1x1@a+1x3@b+1x4@a")
    if name == "quotas":
        return replace(parse_cluster("2x3x2"), quotas={"red": 5, "blue": 7})
    return parse_cluster(name)


def check_books(played: Simulation) -> None:
    """Every GPU is free, broken or in one running job's set, and all counts agree."""
    from foretrace.fleet.engine.memory import RUNNING

    state = played.state
    held: dict[int, int] = {}
    for job in np.flatnonzero(state.jobs["status"] == RUNNING):
        gpus = played.devices_of(int(job))
        assert len(gpus) == played.workload.gpus[job], f"job {job} holds {len(gpus)} GPUs"
        for gpu in gpus:
            assert gpu not in held, f"GPU {gpu} is held by jobs {held[gpu]} and {job}"
            held[gpu] = int(job)
    owners = {gpu: int(owner) for gpu, owner in enumerate(state.devs["owner"]) if owner >= 0}
    assert owners == held, "owners and holders differ"
    for unit in range(len(state.units) - 1):
        inside = slice(state.units["lo"][unit], state.units["hi"][unit])
        for kind in range(len(played.cluster.types)):
            free = int(((state.devs["owner"][inside] == -1) & (state.devs["kind"][inside] == kind)).sum())
            assert free == state.free[kind, unit], f"unit {unit} counts {state.free[kind, unit]} free of {free}"
    assert state.s["free"][0] == (state.devs["owner"] == -1).sum()
