"""`plan_soap`: the fastest strategy found in the SOAP space for a model on a cluster, beside what people do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf

from foretrace.errors import ForetraceError
from foretrace.executor import check_place
from foretrace.hardware.cluster import Cluster, Link, parse_link
from foretrace.model.target import HERE, NODE, target
from foretrace.plan.placement.source import of_model
from foretrace.plan.soap.expand import expand
from foretrace.plan.soap.problem import (
    MOST_DEVICES,
    SYNCHRONISATIONS,
    Codes,
    LeastMemory,
    SoapProblem,
    Split,
    StepCounts,
    Synchronisation,
    best_strategy,
)
from foretrace.plan.soap.source import CapturedSoap
from foretrace.search.minimise import Found
from foretrace.search.strategies import MCMC
from foretrace.simulate.timeline import Timeline, simulate

# Chosen on the published shapes: colder than the published rule (0.05 per ms), and it goes back to its best later.
COLD, RESET = 500.0, 1000  # acceptance per start's step; proposals
CHAINS = 4
_INSIDE_US, _BETWEEN_US = 10.0, 20.0  # latencies of messages, where links say none


@dataclass(frozen=True, kw_only=True, eq=False)
class SoapStrategy:
    """The strategy found where gradients are exchanged in one way, and what it is compared with."""

    problems: tuple[SoapProblem, SoapProblem, SoapProblem]  # operators as expected, as fast and as slow as they may be
    found: Found[Codes]

    @property
    def synchronisation(self) -> Synchronisation:
        """How gradients are exchanged."""
        return self.problems[0].synchronisation

    @property
    def point(self) -> Codes:
        """What was found."""
        assert self.found.best is not None
        return self.found.best

    @cached_property
    def counts(self) -> StepCounts:
        """Of the step."""
        return self.problems[0].counted(self.point)

    @cached_property
    def baselines(self) -> dict[str, tuple[Codes, float | None]]:
        """Strategies with their seconds, None where they do not fit."""
        problem = self.problems[0]
        each = {"data parallel": problem.data_parallel(), "expert": problem.expert(), "one device": problem.alone()}
        costs = {name: problem.cost(point) / 1e3 for name, point in each.items()}
        return {name: (point, costs[name] if costs[name] < inf else None) for name, point in each.items()}

    @property
    def interval_s(self) -> tuple[float, float]:
        """The step with every operator as fast, and as slow, as it may be."""
        fast, slow = (each.counted(self.point).milliseconds / 1e3 for each in self.problems[1:])
        return fast, slow

    @property
    def gain(self) -> tuple[float, float, float] | None:
        """Over data parallelism: as expected, and the least and most at the ends; None where that does not fit."""
        point, seconds = self.baselines["data parallel"]
        if seconds is None:
            return None
        each = [
            problem.counted(point).milliseconds / problem.counted(self.point).milliseconds for problem in self.problems
        ]
        return each[0], min(each), max(each)

    @property
    def splits(self) -> tuple[tuple[str, Split, tuple[int, ...]], ...]:
        """Of every operator: its name, its split, and the devices of its parts."""
        problem, found = self.problems[0], []
        devices = problem.machine.devices
        for op, code in enumerate(self.point):
            split = problem.space.split(op, code)
            a, b, c, d = split.degrees
            order = [start + i for start in range(split.stride) for i in range(0, devices, split.stride)]
            places = tuple((split.first + order[part]) % devices for part in range(a * b * c * d))
            found.append((problem.model.operators[op].name, split, places))
        return tuple(found)

    @cached_property
    def simulated(self) -> Timeline:
        """The step as tasks."""
        return simulate(expand(self.problems[0], self.point))


@dataclass(frozen=True, kw_only=True, eq=False)
class SoapPlan:
    """Strategies by how gradients are exchanged, the fastest first."""

    device: str
    cluster: Cluster
    batch: int
    memory_limit: float  # bytes
    strategies: tuple[SoapStrategy, ...]
    seconds: float  # CPU time of the search, pricing included
    notes: tuple[str, ...]


def plan_soap(
    source: str, *, device: str, devices: int, per_node: int = 0, link: str = "", between: str = "",
    memory_limit: float | None = None, batch: int | None = None, precision: str = "", size: str = "full",
    calls: int = 4000, seed: int = 0, on: str = "here", progress: Callable[[float], None] | None = None,
) -> SoapPlan:  # fmt: skip
    """Search ways to split and place every operator of a training step, for each way to exchange gradients.

    `source` is a model as `estimate` takes it or a recording; `batch` samples are a step of all devices, and links are
    of a device, and of a machine with `per_node` of them; what is not given is as the catalog has it. Never slower than
    data parallelism, an expert's strategy and one device alone, which it starts from. Raises ForetraceError where
    nothing that was met fits, with what would, and for what cannot be searched.
    """
    check_place(on)
    if device == HERE:
        raise ForetraceError("`device=here` is one processor, and operators are split over several; name another.")
    if devices > MOST_DEVICES:
        raise ForetraceError(f"`devices={devices}` must be at most {MOST_DEVICES}, over which operators are split.")
    begun = time.process_time()
    placed = of_model(
        source, device=device, devices=devices, memory_limit=memory_limit, link=link, batch=batch, precision=precision,
        size=size,
    )  # fmt: skip
    to = target(device)
    node = min(per_node or to.device.node_devices or NODE, devices)
    if devices % node:
        raise ForetraceError(f"`devices={devices}` must be whole machines of `per_node={node}`; change one of them.")
    inside = parse_link(link).latency_us if link else 0.0
    outside = parse_link(between) if between else Link(name="between", gbit_s=8 * node * to.device.network_gb_s)
    if devices > node and not outside.gbit_s:
        raise ForetraceError(f"the catalog has no network of {to.device.short}; give it: `between=100gbit`.")
    cluster = Cluster(
        name=f"machines with {to.device.short}", nodes=devices // node, per_node=node,
        inside=Link(name="inside", gbit_s=8e-9 * placed.bytes_per_s, latency_us=inside or _INSIDE_US),
        between=Link(name="between", gbit_s=outside.gbit_s or 1.0, latency_us=outside.latency_us or _BETWEEN_US),
    )  # fmt: skip
    model = CapturedSoap(placed, to.costs(placed.graph), to.device)
    ends = [model.at_end(end) for end in range(3)]
    found = []
    for number, way in enumerate(SYNCHRONISATIONS):
        expected, fast, slow = (SoapProblem(each, cluster, way, memory_bytes=placed.memory_limit) for each in ends)
        best = _searched(expected, calls=calls, seed=seed, on=on)
        found.append(SoapStrategy(problems=(expected, fast, slow), found=best))
        if progress is not None:
            progress((number + 1) / len(SYNCHRONISATIONS))
    return SoapPlan(
        device=to.device.short, cluster=cluster, batch=model.operators[0].sizes[0],
        memory_limit=placed.memory_limit,
        strategies=tuple(sorted(found, key=lambda each: each.found.cost)), seconds=time.process_time() - begun,
        notes=placed.graph.notes,
    )  # fmt: skip


def _searched(problem: SoapProblem, *, calls: int, seed: int, on: str) -> Found[Codes]:
    """Return the search; costs are milliseconds. Raises ForetraceError where nothing fits."""
    alone = (problem.alone(),)
    start = min(map(problem.cost, (problem.data_parallel(), problem.expert(), *alone)))
    scale = start if start < inf else problem.counted(problem.data_parallel()).milliseconds
    strategy = MCMC(beta=COLD / scale, reset=RESET)
    where = None if on == "here" else on
    best = best_strategy(problem, calls=calls, chains=CHAINS, seed=seed, strategy=strategy, on=where, more=alone)
    if best.best is None:
        lean = LeastMemory(problem.model, problem.cluster, problem.synchronisation)
        least = best_strategy(lean, calls=calls, seed=seed, strategy=MCMC(beta=1e-6, reset=RESET)).cost
        raise ForetraceError(
            f"no strategy that was met keeps within the {problem.limit / 1e9:.3g} GB of a device; the least needs "
            f"{least / 1e9:.3g} GB: give `memory_limit=`, more devices or a smaller batch."
        )
    return best
