"""Runtime calls by what they do to the task graph. One table for CUDA and HIP, matched on the name."""

from __future__ import annotations

import re
from enum import IntEnum

import numpy as np

from foretrace.arrays import Int32, UInt8


class RuntimeCall(IntEnum):
    """What a runtime call does, as far as dependencies go."""

    CHEAP = 0  # attribute, occupancy and event queries, capture state: stays inside the host work around it
    LAUNCH = 1
    GRAPH = 2  # one call, many kernels
    COPY = 3  # asynchronous unless its memory is pageable
    COPY_SYNC = 4  # returns after its copy
    MEMSET = 5
    SYNC_DEVICE = 6
    SYNC_STREAM = 7
    SYNC_EVENT = 8
    RECORD = 9  # an event is recorded on a stream
    WAIT = 10  # a stream waits for an event
    ALLOC = 11  # own cost only; does not wait by itself
    LOAD = 12  # module load


_PATTERNS: tuple[tuple[RuntimeCall, str], ...] = (
    (RuntimeCall.GRAPH, r"(cuda|cu|hip)GraphLaunch"),
    (RuntimeCall.LAUNCH, r"(cuda|cu|hip)(Ext)?(Module)?Launch(Cooperative)?(Kernel|HostFunc)"),
    (RuntimeCall.COPY, r"(cuda|cu|hip)Memcpy\w*Async"),
    (RuntimeCall.COPY_SYNC, r"(cuda|cu|hip)Memcpy"),
    (RuntimeCall.MEMSET, r"(cuda|cu|hip)Memset"),
    (RuntimeCall.SYNC_DEVICE, r"(cudaDevice|cuCtx|hipDevice|hipCtx|cudaThread)Synchronize"),
    (RuntimeCall.SYNC_STREAM, r"(cuda|cu|hip)StreamSynchronize"),
    (RuntimeCall.SYNC_EVENT, r"(cuda|cu|hip)EventSynchronize"),
    (RuntimeCall.RECORD, r"(cuda|cu|hip)EventRecord"),
    (RuntimeCall.WAIT, r"(cuda|cu|hip)StreamWaitEvent"),
    (
        RuntimeCall.ALLOC,
        r"(cuda|cu|hip)(Malloc|Free|HostAlloc|HostRegister|HostMalloc|MemAlloc|MemFree|MemCreate|MemMap)",
    ),
    (RuntimeCall.LOAD, r"(cuModule|cuLibrary|hipModule|cudaLibrary)Load"),
)

_COLLECTIVE = re.compile(
    r"nccl(Dev)?Kernel|rccl|ncclSymk|multimem_all_reduce|cross_device_reduce|(one|two)_?[sS]hot_?[aA]ll_?[rR]educe"
    r"|all_reduce_kernel|allreduce_kernel|all_gather_kernel",
)


def classify_call(name: str) -> RuntimeCall:
    """Return the class of a runtime or driver call by its name; unknown names are CHEAP."""
    for call, pattern in _PATTERNS:
        if re.match(pattern, name):
            return call
    return RuntimeCall.CHEAP


def call_classes(names: tuple[str, ...], used: Int32) -> UInt8:
    """Return the class per row of a name table; only the rows in `used` are looked at, the others are CHEAP."""
    table = np.zeros(len(names), dtype=np.uint8)
    for index in np.unique(used):
        table[index] = classify_call(names[index])
    return table


def is_collective(kernel: str) -> bool:
    """Return whether a device kernel is a communication kernel (NCCL, RCCL, custom all-reduce)."""
    return _COLLECTIVE.search(kernel) is not None
