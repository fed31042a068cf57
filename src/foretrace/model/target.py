"""`Target`: a device to predict for, and the cost models that answer for it."""

from __future__ import annotations

from dataclasses import dataclass

from foretrace.cost.devices.defaults import AsRun, standard
from foretrace.cost.model import CostModel
from foretrace.cost.network.link_network import cluster_network
from foretrace.cost.network.network import CollectiveKind, Cost, Network
from foretrace.cost.network.parse import network
from foretrace.errors import ForetraceError
from foretrace.hardware.cluster import Cluster, Link
from foretrace.hardware.devices import Device, named
from foretrace.hardware.processor import operator_threads
from foretrace.hardware.wiring import FULL_MESH
from foretrace.model.memory.memory import Sharding
from foretrace.model.messages import DATA, TENSOR
from foretrace.model.on_processor import Processor, with_own
from foretrace.model.operator_graph import OperatorGraph

HERE = "here"
NODE = 8  # devices of a machine, where the catalog does not say


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device, or the processor that this runs on, whose operators run on the thread that calls them."""

    device: Device
    processor: Processor | None = None
    threads: int | None = None  # of an operator on the processor
    measure: int = 0  # operators of a graph that are timed on the processor before it is costed

    def costs(self, graph: OperatorGraph) -> CostModel:
        """Return what to ask for the costs of these operators."""
        if self.processor is not None:
            if not self.measure:
                return self.processor.costs(graph)
            with operator_threads(self.threads):
                return with_own(graph, self.measure).costs(graph)
        recipe = graph.recipe
        return AsRun(
            costs=standard(),
            channels_last=recipe.get("layout") == "channels last",
            first_attention=recipe.get("attention") == "flash-1",
        )


def networks_of(device: Device, sharding: Sharding, text: str = "") -> dict[str, Network]:
    """Return the network of every lane of messages: what `text` says (`cost.network.parse`), else what machines with
    this device usually have, by NCCL's model or, where that has no constants, by the catalog's rates.

    A tensor group is inside a machine; so its machines hold fewer workers. Raises ForetraceError where the catalog
    does not know what joins machines.
    """
    node = device.node_devices or NODE
    found = {}
    if sharding.tensor > 1:
        if sharding.tensor > node:
            raise ForetraceError(f"`tensor={sharding.tensor}` is more than the {node} devices of a machine; give less.")
        found[TENSOR] = _usual(device, sharding.tensor, node)
    if sharding.workers > 1:
        near = max(node // sharding.tensor, 1)
        found[DATA] = network(text, sharding.workers) if text else _usual(device, sharding.workers, near)
    return found


class Either(Network):
    """One of two networks, nobody knows which: between both, as wide as both together.

    Machines with V100s come with cables between some pairs (DGX-1) and with switches between all (DGX-2).
    """

    def __init__(self, one: Network, other: Network) -> None:
        self.one, self.other = one, other
        self.name, self.workers, self.in_flight = f"{one.name} by cables or switches", one.workers, one.in_flight

    def cost(self, kind: CollectiveKind, nbytes: float, *, workers: int | None = None) -> Cost:
        a, b = (each.cost(kind, nbytes, workers=workers) for each in (self.one, self.other))
        return Cost(
            seconds=(a.seconds * b.seconds) ** 0.5,
            low_s=min(a.low_s, b.low_s),
            high_s=max(a.high_s, b.high_s),
            why=f"{a.why}; or {b.why}",
        )


def _usual(device: Device, workers: int, node: int) -> Network:
    if workers > node and not device.network_gb_s:
        raise ForetraceError(
            f"the catalog does not know what joins machines with {device.short}; name it: `network=200gbit`, or "
            f'`network="nccl:{device.short},nics={node},nic=200gbit"`.'
        )
    if device.short == "V100-SXM2" and 1 < workers <= NODE:
        ways = (f"nccl:{device.short},per-node={workers}", f"nccl:{device.short},per-node={2 * NODE}")
        return Either(*(network(way, workers) for way in ways))
    if device.vendor == "NVIDIA":
        nic = f",nics={node},nic={8 * device.network_gb_s:g}gbit" if workers > node else ""
        return network(f"nccl:{device.short},per-node={min(node, workers)}{nic}", workers)
    inside = device.scaleup_gb_s / 2 or device.pcie_gb_s
    if not inside:
        raise ForetraceError(f"the catalog knows no link of {device.short}; name one: `network=200gbit`.")
    # Eight MI300X are joined pair by pair: few of them have few of the links.
    wiring = FULL_MESH if device.short == "MI300X" else None
    each = inside / (FULL_MESH.devices - 1) if wiring else inside
    cluster = Cluster(
        name=f"machines with {device.short}",
        nodes=-(-workers // node),
        per_node=min(node, workers),
        inside=Link(name="link inside", gbit_s=8 * each, latency_us=10.0, source="catalog"),
        between=Link(name="link between", gbit_s=8 * device.network_gb_s * node, latency_us=20.0, source="catalog"),
        wiring=wiring,
    )
    return cluster_network(cluster, workers)


def target(name: str, *, threads: int | None = None, measure: int = 0) -> Target:
    """Return the device that a user names: of the catalog, or "here" for this processor with so many threads.

    `measure` operators of what it is asked about are timed here first.

    Raises ForetraceError for an unknown name, with those that come near, and for a device without a float32 rate. Of a
    processor that no operator was timed on only three probes tell.
    """
    if name != HERE:
        if measure:
            raise ForetraceError(f"`measure=` is for `device=here`, not for {name}; leave it out.")
        found = named(name)
        if not found.fp32_tflops:
            raise ForetraceError(
                f"the catalog has no float32 rate of {found.short}, which normalisation and sums need; choose another."
            )
        return Target(device=found)
    from foretrace.cost.operators import store
    from foretrace.cost.operators.machine import fingerprint

    with operator_threads(threads):
        machine = fingerprint()
        known = store.load(machine)
        processor = Processor.of(known).now() if known else Processor.probed()
        device = _processor(machine["cpu"] or "processor")
        return Target(device=device, processor=processor, threads=threads, measure=measure)


def _processor(name: str) -> Device:
    """Return the processor of this machine as a device: rates from a short probe, memory as the system has it."""
    import os

    import torch

    from foretrace.hardware.probe import cpu_peaks

    peaks = cpu_peaks(torch.get_num_threads())
    return Device(
        name=name,
        short=HERE,
        vendor="",
        arch="processor",
        fp32_tflops=peaks.fp32 / 1e12,
        bf16_tflops=peaks.bf16 / 1e12,
        memory_gb_s=peaks.bytes_per_s / 1e9,
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        sms=peaks.threads,
        source="measured in a short probe",
    )
