"""The written-out training runs of `foretrace.testing`."""

from foretrace.testing.workloads import LOADER, MULTI, STEP, STREAM, THREAD, ZERO, Cpu, Gpu, Writer, optimizer_facts

__all__ = ["LOADER", "MULTI", "STEP", "STREAM", "THREAD", "ZERO", "Cpu", "Gpu", "Writer", "optimizer_facts"]
