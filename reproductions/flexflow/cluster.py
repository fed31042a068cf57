"""`SoapCluster`: devices in nodes; a link for each pair of a node's devices, one network interface for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from foretrace.errors import ForetraceError
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
        """Raise ForetraceError for what is no cluster that can be searched on."""
        if not 1 <= self.devices <= 64 or self.per_node < 1:
            raise ForetraceError(f"a cluster must have 1 to 64 devices, got {self.nodes} nodes × {self.per_node}.")
        if min(self.link, self.network) <= 0 or not self.device.fp32_tflops:
            raise ForetraceError(f"cluster {self.name} must have bandwidths and a device with FP32 units above 0.")

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
