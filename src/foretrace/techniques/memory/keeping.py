"""What keeping saved tensors in another form adds to a step: storing, restoring, and hooks. Shared by compression and
offloading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.graph.insert import DeviceTask, HostTask, insert
from foretrace.graph.select import launching_call, previous_on_lane
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.hardware.devices import find
from foretrace.techniques.base import Prior, Technique
from foretrace.techniques.compute.updates import streaming
from foretrace.techniques.memory.saved import Saved, Savings
from foretrace.training.saved_tensors import HOOKED, hooks_operator, restore_operator, store_operator

_SHORTEST_NS = 2_000  # of a kernel


def keeping_operators(codec: str, chosen: Iterable[Saved]) -> tuple[Operator, ...]:
    """Return what to time alone: both directions for every distinct size, and the hooks themselves."""
    sizes = dict.fromkeys((each.numel, each.dtype) for each in chosen)
    pairs = [make(codec, *size) for size in sizes for make in (store_operator, restore_operator)]
    return (*pairs, hooks_operator(hooked=False), hooks_operator(hooked=True)) if pairs else ()


def keeping_times(graph: TaskGraph, codec: str, chosen: Iterable[Saved]) -> dict[Saved, tuple[float, float]] | None:
    """Return measured seconds for storing and restoring each; None unless all were measured."""
    known = Calibration.of(graph)
    found: dict[Saved, tuple[float, float]] = {}
    for each in chosen:
        there = known.time_s(store_operator(codec, each.numel, each.dtype))
        back = known.time_s(restore_operator(codec, each.numel, each.dtype))
        if there is None or back is None:
            return None
        found[each] = there, back
    return found or None


def hook_time_s(graph: TaskGraph) -> float | None:
    """Return measured seconds that the hooks take per saved variable, both directions; None if not measured."""
    known = Calibration.of(graph)
    plain, hooked = (known.time_s(hooks_operator(hooked=each)) for each in (False, True))
    return None if plain is None or hooked is None else max(hooked - plain, 0.0) / HOOKED


def hook_tasks(savings: Savings, hook_s: float, kind: TaskKind = TaskKind.CPU) -> list[HostTask]:
    """Return the hooks of all saved variables, at the end of every forward pass."""
    rows = savings.last_forward[savings.last_forward >= 0].tolist()
    each_ns = round(1e9 * hook_s * savings.variables / max(len(rows), 1))
    return [HostTask(after=row, name="saved tensor hooks", dur_ns=each_ns, kind=kind) for row in rows]


def step_times(
    technique: Technique,
    graph: TaskGraph,
    chosen: Collection[Saved],
    codec: str,
    rates: tuple[str, str],
    moved: float = 1.0,
) -> tuple[dict[Saved, tuple[float, float]], float]:
    """Return seconds of storing and of restoring each in a step, and of the hooks per saved variable.

    As measured, unless the user says otherwise: then `moved` bytes per byte at the technique's two `rates`. Refuses a
    recording that needs none of them: without a backward pass autograd saves nothing.
    """
    if all(each.use < 0 for each in chosen):
        raise technique.refuse("the recording shows no backward pass that needs the activations.")
    values, hook_s, times = technique.values(graph), hook_time_s(graph), keeping_times(graph, codec, chosen)
    if hook_s is None or _stated(technique, "hook_us"):
        hook_s = 1e-6 * values["hook_us"]
    if times is None or _stated(technique, *rates):
        there, back = (1e-9 * moved / values[rate] for rate in rates)
        return {each: (each.nbytes * there, each.nbytes * back) for each in chosen}, hook_s
    factor = values["measured"]
    return {each: (factor * there, factor * back) for each, (there, back) in times.items()}, factor * hook_s


def _stated(technique: Technique, *fields: str) -> bool:
    return any(getattr(technique, field) is not None for field in fields)


def insert_keeping(
    graph: TaskGraph, savings: Savings, times: dict[Saved, tuple[float, float]], hook_s: float, names: tuple[str, str]
) -> TaskGraph:
    """Return the graph with every storing after the operator that saves, every restoring before the backward operator
    that asks, and the hooks of all saved variables at the end of the forward pass; on a device each is a kernel with
    its launch. `names` are those of the two kinds of tasks.
    """
    device = bool(graph.on_device.any())
    call, previous = launching_call(graph), previous_on_lane(graph)
    new: list[HostTask | DeviceTask] = []
    for each, seconds in times.items():
        use = each.use if each.use >= 0 else each.row
        asked = int(previous[use]) if each.use >= 0 and previous[use] >= 0 else use  # ahead of what needs it
        places = ((each.row, each.row, Phase.FORWARD), (asked, use, Phase.BACKWARD))
        for (row, like, phase), name, time_s in zip(places, names, seconds, strict=True):
            if not device:
                op = "aten::_to_copy" if each.dtype == "float" else "aten::copy_"
                dur_ns = round(1e9 * time_s)
                kind = TaskKind.OPERATOR
                new.append(HostTask(after=row, name=name, dur_ns=dur_ns, kind=kind, like=like, phase=phase, op=op))
            elif call[row] >= 0:
                new.append(
                    DeviceTask(
                        after=row,
                        launched_after=int(call[row]),
                        name=name,
                        dur_ns=max(round(1e9 * time_s), _SHORTEST_NS),
                        phase=phase,
                        op="aten::_to_copy",
                        nbytes=each.nbytes * 3 // 2,
                    )
                )
    return insert(graph, [*new, *hook_tasks(savings, hook_s, TaskKind.CPU if device else TaskKind.PYTHON)])


def saved_note(graph: TaskGraph, savings: Savings, chosen: Iterable[Saved], kept_share: float, where: str) -> Change:
    """Return what the step no longer keeps, per step, in bytes."""
    tensors = list(chosen)
    steps = max(len({int(graph.step[each.row]) for each in tensors}), 1)
    nbytes = round(sum(each.nbytes for each in tensors) / steps)
    freed = round(nbytes * (1 - kept_share))
    what = (
        f"{round(len(tensors) / steps)} saved tensors of a step, {nbytes / 1e6:.4g} MB, {where}: "
        f"{freed / 1e6:.4g} MB ({freed:,} bytes) less between forward and backward"
    )
    if savings.unsized:
        what += f"; the recording does not tell what {savings.unsized} calls save, which stays as it is"
    return Change(what=what, tasks=len(tensors))


def cast_bandwidth(graph: TaskGraph) -> Prior:
    """Return the rate of casts, bytes read and written."""
    device = find(graph.info.devices[0]) if graph.info.devices else None
    if graph.info.platform == "cpu" or device is None:
        low, value, high = (4.0, 10.0, 25.0) if graph.info.platform == "cpu" else (200.0, 600.0, 2500.0)
        return Prior(value, low, high, unit="GB/s", why="what casts of large tensors usually reach")
    return streaming(device)
