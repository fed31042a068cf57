"""What a step of a model takes on a device that nobody has at hand: time with its range, memory, and who said so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Family, Precision
from foretrace.cost.defaults import as_run
from foretrace.cost.model import CostModel
from foretrace.cost.roofline import MATRIX, peak_flops
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.hardware.cluster import Cluster
from foretrace.hardware.devices import Device
from foretrace.model.lower import HostCosts, Lowered, lower
from foretrace.model.memory import Fit, Memory, Sharding, peak
from foretrace.model.operator_graph import OperatorGraph
from foretrace.model.repeat import again
from foretrace.model.strategy import Strategy
from foretrace.simulate.doubt import doubted
from foretrace.simulate.timeline import simulate

_HOST = (TaskKind.CPU, TaskKind.CALL)
_MUCH = 0.01  # a share of the time that is worth a warning


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """The time of a step. `interval_s` is meant to hold it 4 times out of 5."""

    lowered: Lowered
    step_time_s: float
    interval_s: tuple[float, float]
    device_busy_s: float  # sum of the kernels, on the busiest device
    host_busy_s: float  # sum of what the host does
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
    strategy: Strategy | None = None,
    cluster: Cluster | None = None,
    host: HostCosts | None = None,
    own_processor: bool = False,
) -> StepEstimate:
    """Simulate one step of `operators`; the range from simulating the ends of what each model and the host may take.

    What one model says is taken to be wrong in the same direction for all its calls (errors of a model on a device it
    has not seen are), and models and host independently of each other. Raises ForetraceError as `lower` does.
    """
    host = host or HostCosts()
    lowered = lower(
        operators,
        device=device,
        costs=costs,
        strategy=strategy,
        cluster=cluster,
        host=host,
        own_processor=own_processor,
    )
    lowered = replace(lowered, graph=_doubted(lowered, None if own_processor else host))
    graph, found = lowered.graph, lowered.costs
    timeline = simulate(graph)
    step_s, interval = timeline.step_time_s, timeline.interval_s()
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
        launch_bound=not own_processor and faster[0] < faster[1],
        cost_sources=found.shares(),
        whys=dict(zip(found.sources, found.whys, strict=True)),
        utilisation=_peak_s(operators, device) / max(step_s, 1e-30),
        unknown_share=share,
        warnings=tuple(_warnings(operators, device, share)),
    )


def _step_s(graph: TaskGraph) -> float:
    return simulate(graph).step_time_s


def _scaled(graph: TaskGraph, rows: npt.NDArray[np.bool_], factor: float) -> TaskGraph:
    return graph.with_columns(dur=np.where(rows, np.rint(graph.dur * factor), graph.dur).astype(np.int64))


def _doubted(lowered: Lowered, host: HostCosts | None) -> TaskGraph:
    """The graph with the range of every cost on its task, which then goes wherever the graph goes."""
    graph, found = lowered.graph, lowered.costs
    for i, source in enumerate(found.sources):
        nodes = np.flatnonzero((found.source == i) & (lowered.task >= 0) & (found.seconds > 0))
        low, high = (ends[nodes] / found.seconds[nodes] for ends in (found.low_s, found.high_s))
        graph = doubted(graph, lowered.task[nodes], source, low, high, found.whys[i])
    if host is not None:
        rows = np.flatnonzero(np.isin(graph.kind, _HOST))
        low, high = (np.full(len(rows), end) for end in (host.low, host.high))
        graph = doubted(graph, rows, "host", low, high, "what a host spends on an operator; see HostCosts")
    return graph


def _peak_s(operators: OperatorGraph, device: Device) -> float:
    """Seconds that all products would take at the device's peak."""
    calls = as_run(operators.calls, device)
    matrix = np.isin(calls.family, MATRIX)
    return sum(
        float(calls.flops[matrix & (calls.precision == each)].sum()) / peak_flops(device, Precision(each))
        for each in np.unique(calls.precision[matrix]).tolist()
    )


def _defaults(operators: OperatorGraph, device: Device) -> list[str]:
    """What PyTorch's default settings are taken to do."""
    changed = as_run(operators.calls, device).precision != operators.calls.precision
    if not changed.any():
        return []
    return [
        f"{int(changed.sum())} float32 convolutions and recurrent layers run in TF32, as PyTorch has it by default."
    ]


def _warnings(operators: OperatorGraph, device: Device, share: float) -> list[str]:
    found = list(operators.notes)
    half = {Precision.FP16: device.fp16_tflops, Precision.BF16: device.bf16_tflops}
    used = set(operators.calls.precision[np.isin(operators.calls.family, MATRIX)].tolist())
    missing = [each.name for each, peak in half.items() if each in used and not peak]
    if missing and device.vendor == "NVIDIA":
        found.append(f"{device.name} has no units for {' and '.join(missing)}: its products are costed at fp32's peak.")
    unknown = operators.unknown()
    if unknown:
        names = sorted(unknown, key=lambda name: -unknown[name])
        shown = ", ".join(f"{name} ({unknown[name]}x)" for name in names[:3]) + (", ..." if len(names) > 3 else "")
        what = f"{sum(unknown.values())} calls of operators that nothing is known of but their bytes: {shown}"
        found.append(f"{what}; they make {share:.1%} of the kernel time.")
    return found


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A model on a device: the time of a step, its memory, and whether that is there."""

    operators: OperatorGraph
    device: Device
    training: bool
    step: StepEstimate
    memory: Memory
    fit: Fit
    room_bytes: float  # memory of the device
    techniques: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def estimate(
    operators: OperatorGraph,
    *,
    device: Device,
    costs: Callable[[OperatorGraph], CostModel],
    sharding: Sharding | None = None,
    recompute: bool = False,
    accumulate: int = 1,
    own_processor: bool = False,
    techniques: tuple[str, ...] = (),
) -> Estimate:
    """Time and memory of a step. `operators` is one micro-batch where `accumulate` is above 1; `costs` says what to ask
    for the costs of the operators that run.

    Raises ForetraceError as `lower` and `memory.peak` do.
    """
    training = any(node.phase in (Phase.BACKWARD, Phase.OPTIMIZER) for node in operators.nodes)
    if not training and (recompute or accumulate > 1 or sharding is not None):
        raise ForetraceError(
            f"{operators.name} has no backward pass, which recomputation, accumulation and ZeRO need; leave them out."
        )
    repeated = again(operators, recompute=recompute, accumulate=accumulate)
    step = estimate_step(repeated, device=device, costs=costs(repeated), own_processor=own_processor)
    memory = peak(
        operators,
        recompute=recompute,
        sharding=sharding,
        accumulate=accumulate,
        allocator="none" if own_processor else "cuda",
    )
    room = device.memory_gb * 1e9
    warnings = list(memory.notes)
    if sharding is not None and sharding.workers > 1:
        warnings.append(f"what {sharding.workers} workers send each other is not in the step time.")
    return Estimate(
        operators=repeated,
        device=device,
        training=training,
        step=step,
        memory=memory,
        fit=memory.fits(room),
        room_bytes=room,
        techniques=techniques,
        warnings=tuple(warnings),
    )
