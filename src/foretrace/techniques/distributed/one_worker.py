"""What techniques assume of several workers of which one was recorded: their network, their copies, their delays."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.network.network import CollectiveKind, Network
from foretrace.cost.network.parse import network
from foretrace.graph.edit import scale
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.model.messages import MIB
from foretrace.simulate.noise import expected_max
from foretrace.simulate.replay import replay
from foretrace.simulate.timeline import simulate
from foretrace.techniques.base import Prior, Technique
from foretrace.techniques.compute.updates import update_bandwidth

_UNITS = {"us": "µs", "s": "GB/s"}
IN_FLIGHT = {"gloo": 2, "nccl": 1}  # collectives at a time of one process group


def back_end(graph: TaskGraph, given: str = "") -> str:
    """Return what exchanges messages: as given, else what PyTorch takes on the recorded device."""
    return given or ("gloo" if graph.info.platform == "cpu" else "nccl")


def required(technique: Technique, graph: TaskGraph) -> None:
    """Refuse, in the name of `technique`, a graph in which workers exchange messages already."""
    if graph.info.recording.get("distributed") or bool((graph.kind == TaskKind.COLLECTIVE).any()):
        raise technique.refuse("the recording already exchanges messages between workers; record one worker alone.")


def copying(graph: TaskGraph, net: Network | None = None) -> Prior:
    """Return the bandwidth of copying into and out of buffers."""
    found = measured(graph, net).get("copy_gb_s") if net else None
    return found or update_bandwidth(graph) or Prior(500.0, 150.0, 1500.0, unit="GB/s", why="devices copy so much")


def company(graph: TaskGraph) -> Prior:
    """Return slow-down of computing while messages are exchanged."""
    if graph.info.platform == "cpu":
        return Prior(1.02, 1.0, 1.10, why="threads of the backend take memory bandwidth and cycles from computing")
    why = "NCCL's kernels occupy multiprocessors: 1.04 to 1.1 measured by Agarwal et al. (MLSys 2022)"
    return Prior(1.06, 1.0, 1.15, why=why)


def measured(graph: TaskGraph, net: Network) -> dict[str, Prior]:
    """Return what the hosts of this network, processors, were measured to take beside collectives, by parameter."""
    return {
        name: Prior(*ends, unit=_UNITS.get(name.rpartition("_")[2], "×"), why=f"measured on {net.name}")
        for name, ends in (net.hosts.items() if graph.info.platform == "cpu" else ())
    }


def transfer(net: Network, nbytes: float = 4 * MIB) -> Prior:
    """Return how far the network's model may be off, at a typical size."""
    typical = net.cost(CollectiveKind.ALL_REDUCE, nbytes)
    share = typical.seconds or 1.0
    return Prior(1.0, typical.low_s / share, typical.high_s / share, why=typical.why)


def waiting(graph: TaskGraph, workers: int) -> Prior:
    """Return the last of W workers relative to the mean, in steps made together or varying as the recorded ones do.

    With what steps that wait for each other compute longer, where that was measured.
    """
    if together := graph.info.recording.get("together"):
        more = expected_max(workers) / expected_max(together["workers"])
        why = f"the last of {together['workers']} workers in {together['steps']} steps made together, beside their mean"
        late, resumed = together["late_ms"], together.get("resumed_ms", (0.0, 0.0, 0.0))
        if resumed[2]:
            why += "; and what steps compute that wait for each other, beside steps that do not"
        return Prior(*(more * a + b for a, b in zip(late, resumed, strict=True)), unit="ms", why=why)
    times = simulate(graph).step_times_ns / 1e9
    spread = float(np.std(times, ddof=1)) if len(times) > 2 else 0.02 * float(np.mean(times))
    late = 1e3 * spread * expected_max(workers)
    why = f"the last of {workers} workers whose steps vary as the {len(times)} recorded ones do"
    return Prior(late, 0.0, 2.5 * late, unit="ms", why=why)


def network_between(graph: TaskGraph, text: str, workers: int, backend: str = "") -> Network:
    """Return the network between these workers, with as many collectives at a time as the back end allows."""
    return network(text, workers, in_flight=IN_FLIGHT[back_end(graph, backend)])


def slowed_beside(graph: TaskGraph, first: Int64, last: Int64, company: float, busy_s: float) -> TaskGraph:
    """Return backward work between two rows of every step slowed by messages that are under way for `busy_s` of it."""
    start, end = replay(graph)
    step = np.clip(graph.step, 0, graph.n_steps - 1)
    rows = (graph.step == step) & (graph.phase == Phase.BACKWARD) & ~graph.gone
    rows &= (start >= start[first][step]) & (start <= end[last][step])
    rows &= ~np.isin(graph.kind, (TaskKind.MARK, TaskKind.JOIN, TaskKind.COLLECTIVE))
    if graph.on_device.any():
        rows &= graph.on_device  # messages of a device leave the host alone
    length = float(np.mean(end[last] - start[first])) / 1e9
    share = min(busy_s / length, 1.0) if length > 0 else 0.0
    return scale(graph, rows, 1 + (company - 1) * share)
