"""The surroundings of a recording that Kineto does not store: machine, threads, allocator, numerics.

Page faults, preemption, thread counts and allocator settings move a CPU step by tens of per cent, and none of
them is in the trace; a prediction made from a recording needs them to know what it compares.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from foretrace.hardware import processor
from foretrace.trace.observe import pytorch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "DNNL_", "ONEDNN_")
_NAMES = (
    "ATEN_CPU_CAPABILITY",
    "GLIBC_TUNABLES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NTHREADS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
)


class Stamp(NamedTuple):
    """A point in time of this process; counters are cumulative, times in nanoseconds."""

    wall_ns: int
    cpu_ns: int  # user + system time of all threads of the process
    page_faults: int  # without disk access
    preemptions: int  # involuntary context switches


def stamp() -> Stamp:
    """Return now, in about 2 µs."""
    faults = switches = 0
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        faults, switches = usage.ru_minflt, usage.ru_nivcsw
    return Stamp(time.perf_counter_ns(), time.process_time_ns(), faults, switches)


def machine() -> dict[str, Any]:
    """Return processor, memory and clock, and what this process may use of them; never the machine's name."""
    sets = processor.instruction_sets()
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    libc = " ".join(part for part in platform.libc_ver() if part)
    return {
        "system": sys.platform,
        "architecture": platform.machine(),
        "libc": libc,
        "cpu": _cpu_model(),
        "instruction_sets": None if sets is None else list(sets),
        "cores": os.cpu_count(),
        "affinity": affinity,
        "cpu_quota": processor.cpu_quota(),
        "usable_cores": processor.usable_cores(),
        "memory_bytes": _memory("MemTotal"),
        "memory_available_bytes": _memory("MemAvailable"),
        "clock": _clock(),
    }


def load() -> list[float] | None:
    """Load average over 1, 5 and 15 minutes, None where the system has none."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None


def environment() -> dict[str, str]:
    """Return variables that change how fast the same program runs; paths are cut to their last part."""
    kept = {k: v for k, v in os.environ.items() if k.startswith(_PREFIXES) or k in _NAMES}
    if preload := os.environ.get("LD_PRELOAD"):  # an allocator, most often
        kept["LD_PRELOAD"] = ":".join(Path(part).name for part in re.split("[ :]", preload) if part)
    return dict(sorted(kept.items()))


def peak_rss_bytes() -> int | None:
    """Return the largest resident memory of this process so far."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def torch_settings() -> dict[str, Any]:
    """Return versions, threads, libraries, numerics and device of the PyTorch in this process."""
    torch = pytorch()
    cuda = torch.cuda.is_available()
    device: dict[str, Any] = {"type": "cpu", "name": _cpu_model(), "count": 1}
    if cuda:
        current = torch.cuda.current_device()
        found = torch.cuda.get_device_properties(current)
        device = {
            "type": "cuda",
            "name": found.name,
            "count": torch.cuda.device_count(),
            "index": current,
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
            "capability": [found.major, found.minor],
        }
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "device": device,
        "threads": {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "libraries": {
            "mkl": torch.backends.mkl.is_available(),
            "onednn": torch.backends.mkldnn.is_available(),
            "openmp": torch.backends.openmp.is_available(),
        },
        "numerics": {
            "float32_matmul": torch.get_float32_matmul_precision(),
            "default_dtype": _dtype(torch.get_default_dtype()),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        },
        "allocator": torch.cuda.get_allocator_backend() if cuda else "system",
    }


def device_memory() -> dict[str, int]:
    """Return peak device memory in bytes, empty without an accelerator."""
    torch = pytorch()
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def distributed() -> dict[str, Any]:
    """Return rank, world size and backend: from `torch.distributed`, else from the launcher, else a single rank."""
    dist = pytorch().distributed
    if dist.is_available() and dist.is_initialized():
        return {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "backend": str(dist.get_backend()),
        }
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return {
        "rank": int(rank) if rank.isdecimal() else 0,
        "world_size": int(world) if world.isdecimal() else 1,
        "backend": "",
    }


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^(?:model name|cpu model|Model)\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _clock() -> str | None:
    """Return equal for processes that read the same clock: made of the random id of this boot, which Linux tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return None
    return hashlib.sha256(boot.strip().encode()).hexdigest()[:16]


def _memory(field: str) -> int | None:
    info = Path("/proc/meminfo")
    if info.is_file():
        found = re.search(rf"^{field}:\s*(\d+) kB$", info.read_text(), re.MULTILINE)
        if found:
            return int(found.group(1)) * 1024
    return None
