"""`Target`: a device to predict for, and the cost models that speak of it."""

from __future__ import annotations

from dataclasses import dataclass

from foretrace.cost.defaults import AsRun
from foretrace.cost.model import CostModel
from foretrace.cost.standard import standard
from foretrace.hardware.devices import Device, named
from foretrace.model.on_processor import Processor
from foretrace.model.operator_graph import OperatorGraph

HERE = "here"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device, or the processor that this runs on, whose operators run on the thread that calls them."""

    device: Device
    processor: Processor | None = None

    def costs(self, graph: OperatorGraph) -> CostModel:
        """What to ask for the costs of these operators."""
        if self.processor is not None:
            return self.processor.costs(graph)
        return AsRun(costs=standard())


def target(name: str, *, threads: int | None = None) -> Target:
    """What a user calls a device: a name of the catalog, or "here" for this machine's processor with so many threads.

    Raises ForetraceError for an unknown name, with those that come near, and for a processor that no operator was
    timed on.
    """
    if name != HERE:
        return Target(device=named(name))
    import torch

    from foretrace.cost import store
    from foretrace.cost.machine import fingerprint

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        machine = fingerprint()
        processor = Processor.of(store.load(machine))
        return Target(device=_processor(machine["cpu"] or "processor"), processor=processor)
    finally:
        torch.set_num_threads(before)


def _processor(name: str) -> Device:
    """The processor of this machine as a device: rates from a short probe, memory as the system has it."""
    import os

    import torch

    from foretrace.hardware.probe import cpu_peaks

    peaks = cpu_peaks(torch.get_num_threads())
    return Device(
        name=name,
        short=HERE,
        patterns=(),
        vendor="",
        arch="processor",
        fp32_tflops=peaks.fp32 / 1e12,
        tf32_tflops=0.0,
        fp16_tflops=0.0,
        bf16_tflops=peaks.bf16 / 1e12,
        memory_gb_s=peaks.bytes_per_s / 1e9,
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        sms=peaks.threads,
        source="measured in a short probe",
    )
