"""What a step of a model takes on a device that is not available: time with its range, memory, and who said so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Calls, Family, Precision
from foretrace.cost.devices.defaults import as_run, standard
from foretrace.cost.devices.roofline import MATRIX, peak_flops
from foretrace.cost.devices.utilisation import Usage, usage
from foretrace.cost.model import CostModel
from foretrace.cost.network.network import Network
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Carried, Phase, TaskGraph, TaskKind
from foretrace.hardware.devices import Device
from foretrace.model.lower import HostCosts, Lowered, lower
from foretrace.model.memory.memory import MemoryFit, Sharding, StepMemory, peak
from foretrace.model.messages import ModelCollective, collectives
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.repeat import again
from foretrace.simulate.doubt import doubted
from foretrace.simulate.noise import expected_max
from foretrace.simulate.timeline import simulate

_HOST = (TaskKind.CPU, TaskKind.CALL)
# Slow-down of kernels for as long as NCCL's run beside them, which also take longer than alone: 1.04 to 1.1 in all by
# Agarwal et al., On the Utility of Gradient Compression (MLSys 2022), where little was sent; chosen with the eight-GPU
# rows of `benchmarks/training_figures.py`, where up to a third of the time is.
COMPANY, COMPANY_RANGE = 1.3, (1.0, 1.6)
# Of a step: what no model here sees (data, logging, the framework), less and more; and how much the steps of workers
# vary, the last of whom all wait for.
UNSEEN, LATE = (0.03, 0.05), 0.02


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """The time of a step. `interval_s` is meant to hold it 4 times out of 5."""

    lowered: Lowered
    step_time_s: float
    interval_s: tuple[float, float]
    device_busy_s: float  # sum of the kernels, on the busiest device
    host_busy_s: float  # sum of what the host does
    exchange_s: float  # sum of the messages to other workers
    exposed_s: float  # of it, what a network that takes no time would save
    launch_bound: bool  # whether a host twice as fast would save more than kernels twice as fast
    cost_sources: Mapping[str, float]  # share of kernel time by model
    whys: Mapping[str, str]  # per model: where its numbers come from
    utilisation: float  # achieved over peak FLOP/s, of products at the precision they run in
    unknown_share: float  # of kernel time: operators that nothing is known of but their bytes
    warnings: tuple[str, ...]


def estimate_step(
    operators: OperatorGraph,
    *,
    device: Device,
    costs: CostModel,
    own_processor: bool = False,
    messages: Sequence[ModelCollective] = (),
    network: Mapping[str, Network] | None = None,
    workers: int = 1,
) -> StepEstimate:
    """Simulate one step of `operators`; the range from simulating the ends of what each model and the host may take.

    What one model says is taken to be wrong in the same direction for all its calls (errors of a model on a device it
    has not seen are), and models and host independently of each other. Raises ForetraceError as `lower` does.
    """
    lowered = lower(
        operators,
        device=device,
        costs=costs,
        own_processor=own_processor,
        messages=messages,
        network=network,
    )
    slowed = _company(lowered)
    if lowered.sent:
        kernels = lowered.graph.kind == TaskKind.KERNEL
        slower = _scaled(lowered.graph, kernels, slowed(COMPANY))
        lowered = replace(lowered, graph=slower.with_columns(recorded=simulate(slower).start))
    graph = _doubted(lowered, None if own_processor else HostCosts(), slowed)
    step_s = _step_s(graph)
    late = UNSEEN[1] + LATE * expected_max(workers)
    unseen = Carried(
        source="what no model sees", faster_s=UNSEEN[0] * step_s, slower_s=late * step_s, of_s=step_s,
        why="data, logging and the framework, and the last of workers that vary",
    )  # fmt: skip
    graph = replace(graph, info=replace(graph.info, carried=(unseen,)))
    lowered = replace(lowered, graph=graph)
    interval, found = simulate(graph).interval_s(), lowered.costs
    on_host = np.isin(graph.kind, _HOST)
    work = np.isin(graph.kind, (TaskKind.KERNEL, TaskKind.OPERATOR))
    busy = np.bincount(graph.lane[work], weights=graph.dur[work]) if work.any() else np.zeros(1)
    unknown = operators.calls.family == Family.OTHER
    share = float(found.seconds[unknown].sum() / max(found.seconds.sum(), 1e-30))
    faster = [_step_s(_scaled(graph, rows, 0.5)) for rows in (on_host, work)]
    return StepEstimate(
        lowered=lowered,
        step_time_s=step_s,
        interval_s=(interval.low_s, interval.high_s),
        device_busy_s=float(busy.max()) / 1e9,
        host_busy_s=0.0 if own_processor else float(graph.dur[on_host].sum()) / 1e9,
        exchange_s=sum(each.seconds for each in lowered.sent),
        exposed_s=_exposed_s(lowered, step_s),
        launch_bound=not own_processor and faster[0] < faster[1],
        cost_sources=found.shares(),
        whys=dict(zip(found.sources, found.whys, strict=True)),
        utilisation=_peak_s(as_run(operators.calls, device), device) / max(step_s, 1e-30),
        unknown_share=share,
        warnings=tuple(_warnings(operators, device, share)),
    )


def _company(lowered: Lowered) -> Callable[[float], float]:
    """Return how many times longer all kernels take for a slow-down of those that run beside what is sent."""
    graph = lowered.graph
    computing = float(graph.dur[graph.kind == TaskKind.KERNEL].sum())
    share = min(float(graph.dur[lowered.messages].sum()) / computing, 1.0) if computing else 0.0
    return lambda company: 1 + (company - 1) * share


def _doubted(lowered: Lowered, host: HostCosts | None, slowed: Callable[[float], float]) -> TaskGraph:
    """Return the graph with the range of every cost on its task, which then goes wherever the graph goes."""
    graph, found = lowered.graph, lowered.costs
    for i, source in enumerate(found.sources):
        nodes = np.flatnonzero((found.source == i) & (lowered.task >= 0) & (found.seconds > 0))
        low, high = (ends[nodes] / found.seconds[nodes] for ends in (found.low_s, found.high_s))
        graph = doubted(graph, lowered.task[nodes], source, low, high, found.whys[i])
    if lowered.sent:
        took = np.array([(each.low_s, each.seconds, each.high_s) for each in lowered.sent])
        some = took[:, 1] > 0
        low, high = (took[some, end] / took[some, 1] for end in (0, 2))
        graph = doubted(graph, lowered.messages[some], "messages", low, high, "what the network takes for a message")
        rows = np.flatnonzero(graph.kind == TaskKind.KERNEL)
        low, high = (np.full(len(rows), slowed(end) / slowed(COMPANY)) for end in COMPANY_RANGE)
        graph = doubted(graph, rows, "company", low, high, "how far messages slow the kernels beside them")
    if host is not None:
        rows = np.flatnonzero(np.isin(graph.kind, _HOST))
        low, high = (np.full(len(rows), end) for end in (host.low, host.high))
        graph = doubted(graph, rows, "host", low, high, "what a host spends on an operator; see HostCosts")
    return graph


def _exposed_s(lowered: Lowered, step_s: float) -> float:
    if not lowered.sent:
        return 0.0
    at_once = np.zeros(len(lowered.graph), dtype=np.bool_)
    at_once[lowered.messages] = True
    return max(step_s - _step_s(_scaled(lowered.graph, at_once, 0.0)), 0.0)


def _step_s(graph: TaskGraph) -> float:
    return simulate(graph).step_time_s


def _scaled(graph: TaskGraph, rows: npt.NDArray[np.bool_], factor: float) -> TaskGraph:
    return graph.with_columns(dur=np.where(rows, np.rint(graph.dur * factor), graph.dur).astype(np.int64))


def _peak_s(calls: Calls, device: Device) -> float:
    """Return seconds that all products would take at the device's peak."""
    matrix = np.isin(calls.family, MATRIX)
    return sum(
        float(calls.flops[matrix & (calls.precision == each)].sum()) / peak_flops(device, Precision(each))
        for each in np.unique(calls.precision[matrix]).tolist()
    )


def _warnings(operators: OperatorGraph, device: Device, share: float) -> list[str]:
    found = list(operators.notes)
    used = set(operators.calls.precision[np.isin(operators.calls.family, MATRIX)].tolist())
    half, least = (Precision.FP16, Precision.BF16), peak_flops(device, Precision.FP32)
    missing = [each.name for each in half if each in used and peak_flops(device, each) <= least]
    if missing and device.vendor == "NVIDIA":
        found.append(f"{device.name} has no units for {' and '.join(missing)}: its products are costed at fp32's peak.")
    unknown = operators.unknown()
    if unknown:
        names = sorted(unknown, key=lambda name: -unknown[name])
        shown = ", ".join(f"{name} ({unknown[name]}x)" for name in names[:3]) + (", ..." if len(names) > 3 else "")
        what = f"{sum(unknown.values())} calls of operators that nothing is known of but their bytes: {shown}"
        found.append(f"{what}; they make {100 * share:.1f} % of the kernel time.")
    return found


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A model on a device: the time of a step, its memory, and whether that is there."""

    operators: OperatorGraph
    device: Device
    training: bool
    step: StepEstimate
    memory: StepMemory
    fit: MemoryFit
    room_bytes: float  # memory of the device
    sharding: Sharding = field(default_factory=Sharding)
    recompute: int = 0
    reentrant: bool = False  # recomputed blocks run to their end
    accumulate: int = 1
    networks: tuple[str, ...] = ()  # what messages go over
    techniques: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def tokens_per_sample(self) -> int:
        """Words of a sample; 0 where no input is a matrix of words, a row per sample."""
        batch = self.operators.batch // self.accumulate
        storages = self.operators.storages
        found = [
            each.dims[1]
            for each in self.operators.tensors
            if storages[each.storage].role == Role.INPUT and each.dtype == "int64" and len(each.dims) == 2
            and each.dims[0] == batch
        ]  # fmt: skip
        return max(found, default=0)

    @cached_property
    def _forward(self) -> Calls:
        phases = np.array([node.phase for node in self.operators.nodes], dtype=np.int64)
        calls = as_run(self.operators.calls, self.device)
        passes = (Phase.FORWARD, Phase.NONE) if not self.training else (Phase.FORWARD,)
        return calls.take(np.isin(phases, passes) & np.isin(calls.family, MATRIX))

    @property
    def model_flops(self) -> float:
        """Of the products of the forward pass, three times in a training; what is computed again does not count."""
        return float(self._forward.flops.sum()) * (3 if self.training else 1)

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the device's dense peak does in the time of a step (Chowdhery et al., PaLM, 2022)."""
        return _peak_s(self._forward, self.device) * (3 if self.training else 1) / max(self.step.step_time_s, 1e-30)


def estimate(
    operators: OperatorGraph,
    *,
    device: Device,
    costs: Callable[[OperatorGraph], CostModel],
    sharding: Sharding | None = None,
    recompute: int = 0,
    reentrant: bool = False,
    accumulate: int = 1,
    own_processor: bool = False,
    network: Mapping[str, Network] | None = None,
    techniques: tuple[str, ...] = (),
) -> Estimate:
    """Return time and memory of a step. `operators` is one micro-batch where `accumulate` is above 1; `costs` says what
    to ask for the costs of the operators that run.

    Raises ForetraceError as `lower` and `memory.peak` do.
    """
    training = any(node.phase in (Phase.BACKWARD, Phase.OPTIMIZER) for node in operators.nodes)
    shared = sharding is not None and (sharding.workers > 1 or sharding.master)
    if not training and (recompute or accumulate > 1 or shared):
        raise ForetraceError(
            f"{operators.name} has no backward pass, which recomputation, accumulation and ZeRO need; leave them out."
        )
    repeated, origin = again(
        operators, recompute=recompute, reentrant=reentrant, accumulate=accumulate, sharding=sharding
    )
    messages = collectives(operators, repeated, origin, sharding=sharding) if sharding is not None and network else []
    step = estimate_step(
        repeated,
        device=device,
        costs=costs(repeated),
        own_processor=own_processor,
        messages=messages,
        network=network,
        workers=1 if sharding is None else sharding.workers * sharding.tensor,
    )
    memory = peak(
        operators,
        recompute=recompute,
        sharding=sharding,
        accumulate=accumulate,
        allocator="none" if own_processor else "cuda",
    )
    room = device.memory_gb * 1e9
    return Estimate(
        operators=repeated,
        device=device,
        training=training,
        step=step,
        memory=memory,
        fit=memory.fits(room, 0.0 if own_processor else device.memory_gb * 2.0**30),
        room_bytes=room,
        sharding=sharding or Sharding(),
        recompute=recompute,
        reentrant=reentrant,
        accumulate=accumulate,
        networks=tuple(each.name for each in (network or {}).values()),
        techniques=techniques,
        warnings=tuple(memory.notes),
    )


@dataclass(frozen=True, kw_only=True)
class ModelUsage:
    """A model on a device: its usage, the ends of its range, and the estimate that it rests on."""

    operators: OperatorGraph
    device: Device
    usage: Usage
    of_peak_flops_range: tuple[float, float]
    step: StepEstimate
    notes: tuple[str, ...]


def model_usage(operators: OperatorGraph, *, device: Device, known: Sequence[CostModel] = ()) -> ModelUsage:
    """Simulate one step of `operators` on `device`; what is `known`, as measured times, is preferred to predictions.

    Raises ForetraceError as `estimate_step` does.
    """
    step = estimate_step(operators, device=device, costs=standard(known))
    unheard = known and not {each.name for each in known} & set(step.cost_sources)
    said = ("no call of the model is among the measured ones: operator and inputs must be the same.",)
    found = usage(operators.calls, device, step_s=step.step_time_s, busy_s=step.device_busy_s)
    low, high = step.interval_s
    at = found.of_peak_flops * found.step_s
    return ModelUsage(
        operators=operators,
        device=device,
        usage=found,
        of_peak_flops_range=(at / high if high else 0.0, min(at / low, 1.0) if low else 1.0),
        step=step,
        notes=(*step.warnings, *(said if unheard else ())),
    )
