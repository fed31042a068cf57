"""`plan_soap`: the fastest strategy found in the SOAP space for a model on a cluster, beside what people do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import msgspec

from foretrace.errors import ForetraceError
from foretrace.executor import check_place
from foretrace.hardware.cluster import Cluster, Link, parse_link
from foretrace.model.target import HERE, NODE, target
from foretrace.plan.placement.source import of_model
from foretrace.plan.soap.problem import MOST_DEVICES, SYNCHRONISATIONS, Codes, LeastMemory, SoapProblem, best_strategy
from foretrace.plan.soap.source import CapturedSoap
from foretrace.search.minimise import Found
from foretrace.search.strategies import MCMC
from foretrace.simulate.timeline import Timeline, simulate

# Chosen on the published shapes: colder than the published rule (0.05 per ms), and it goes back to its best later.
COLD, RESET = 500.0, 1000  # acceptance per start's step; proposals
CHAINS = 4
_INSIDE_US, _BETWEEN_US = 10.0, 20.0  # latencies of messages, where links say none


class SplitOperator(msgspec.Struct, frozen=True, kw_only=True):
    """One operator, with what follows it alone."""

    name: str
    parts: tuple[int, int, int, int]  # by samples, height (or time), width, channels
    devices: tuple[int, ...]  # of the parts


class SoapStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest strategy found for one way to exchange gradients."""

    synchronisation: str  # all-reduce: a ring; gather: to the first holder and back
    step_s: float
    interval_s: tuple[float, float]  # with every operator as fast and as slow as it may be
    baselines_s: dict[str, float | None]  # data parallel, expert, one device; null where it does not fit
    gain: float | None  # over data parallelism
    gain_interval: tuple[float, float] | None
    moved_bytes: int  # activations and their gradients
    exchanged_bytes: int  # gradients of weights, and weights
    memory_bytes: tuple[int, ...]  # of every device
    calls: int  # strategies that were simulated
    operators: tuple[SplitOperator, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class SoapPlan:
    """Strategies by how gradients are exchanged, the fastest first, whose step is simulated as tasks."""

    device: str
    cluster: Cluster
    batch: int
    memory_limit: float  # bytes
    strategies: tuple[SoapStrategy, ...]
    simulated: Timeline
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
        found.append((best.cost, _strategy((expected, fast, slow), best), expected, best.best or ()))
        if progress is not None:
            progress((number + 1) / len(SYNCHRONISATIONS))
    found.sort(key=lambda each: each[0])
    return SoapPlan(
        device=to.device.short, cluster=cluster, batch=model.operators[0].sizes[0], memory_limit=placed.memory_limit,
        strategies=tuple(each for _, each, _, _ in found), simulated=simulate(found[0][2].expand(found[0][3])),
        seconds=time.process_time() - begun, notes=placed.graph.notes,
    )  # fmt: skip


def _strategy(problems: tuple[SoapProblem, ...], found: Found[Codes]) -> SoapStrategy:
    """Return what was found, with operators as expected, as fast and as slow as they may be."""
    problem, point = problems[0], found.best or ()
    starts = {"data parallel": problem.data_parallel(), "expert": problem.expert(), "one device": problem.alone()}
    costs = {name: problem.cost(at) for name, at in starts.items()}
    took = [each.counted(point) for each in problems]
    # With faster operators others may go first, and the step be longer (Graham, 1969): the expected one is an end then.
    steps = [each.milliseconds / 1e3 for each in took]
    gains = [
        problem.counted(starts["data parallel"]).milliseconds / mine.milliseconds
        for problem, mine in zip(problems, took, strict=True)
    ] if costs["data parallel"] < inf else None  # fmt: skip
    return SoapStrategy(
        synchronisation=problem.synchronisation, step_s=steps[0], interval_s=(min(steps), max(steps)),
        baselines_s={name: cost / 1e3 if cost < inf else None for name, cost in costs.items()},
        gain=gains[0] if gains else None, gain_interval=(min(gains), max(gains)) if gains else None,
        moved_bytes=took[0].moved_bytes, exchanged_bytes=took[0].exchanged_bytes, memory_bytes=took[0].held_bytes,
        calls=found.calls,
        operators=tuple(
            SplitOperator(name=operator.name, parts=split.degrees, devices=problem.space.places(split))
            for operator, split in zip(problem.model.operators, map(problem.space.split, range(len(point)), point),
                                       strict=True)
        ),
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
