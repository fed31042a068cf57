"""`SoapCluster`: published devices in nodes, with the roofline that times operators on them."""

from __future__ import annotations

from dataclasses import dataclass

from foretrace.errors import ForetraceError
from foretrace.hardware.cluster import Cluster, Link
from foretrace.hardware.devices import Device


@dataclass(frozen=True, kw_only=True)
class SoapCluster:
    """Bandwidths are of one direction, in bytes per second; directions do not disturb each other."""

    name: str
    device: Device
    nodes: int
    per_node: int
    link: float
    network: float  # of the interface that the devices of a node share
    link_s: float = 5e-6  # latency of a message
    network_s: float = 15e-6
    launch_s: float = 5e-6  # before each kernel
    compute: float = 0.6  # share of the peak that operators reach
    memory: float = 0.75  # share of the bandwidth, likewise

    def __post_init__(self) -> None:
        """Raise ForetraceError for a device without FP32 units."""
        if not self.device.fp32_tflops:
            raise ForetraceError(f"cluster {self.name} must have a device with FP32 units, got {self.device.short}.")

    @property
    def links(self) -> Cluster:
        """Its nodes and links alone."""
        inside, between = (
            Link(name=name, gbit_s=8e-9 * rate, latency_us=1e6 * latency)
            for name, rate, latency in (("inside", self.link, self.link_s), ("between", self.network, self.network_s))
        )
        return Cluster(name=self.name, nodes=self.nodes, per_node=self.per_node, inside=inside, between=between)

    @property
    def devices(self) -> int:
        """In all nodes."""
        return self.nodes * self.per_node

    @property
    def flop_s(self) -> float:
        """FP32 operations per second of a device, as operators reach them."""
        return self.compute * 1e12 * self.device.fp32_tflops

    @property
    def byte_s(self) -> float:
        """Bytes per second of a device's memory, likewise."""
        return self.memory * 1e9 * self.device.memory_gb_s
