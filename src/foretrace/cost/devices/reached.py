"""What kernels of one kind reach on one generation of devices, each figure with the recording or table it was seen in.

Most kernels follow from FLOPs, bytes and a share of the peaks common to a vendor's devices (`scaled`). These
are not: how a kernel loads its numbers decides, and that depends on the generation.

- `WIDE`: elementwise kernels that load 16 bytes at once; share of the bandwidth.
- `ODD_ROWS`: softmax of rows that are longer than one warp keeps and no multiple of 16 bytes, so every number is loaded
  alone; numbers per clock cycle and multiprocessor (on A100 as many in 32 bit as in 16).
- `ODD_PRODUCT`: 16-bit products with such rows; share of the bandwidth, because they stay far below the peak.
- `ROWS`: normalisation; numbers per clock cycle and multiprocessor, where that is below the share of the bandwidth.

A figure counts for its own generation only, and a kind of kernel counts only between two generations that both have
one (ROWS also alone): elsewhere the ratio of the bandwidths holds. `python benchmarks/device_pairs.py --reached` prints
what recordings and the table of kernels say. `without` leaves out what was seen in one recording, so that a
prediction of that recording can be scored (`benchmarks/device_pairs.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from foretrace.hardware.devices import Device


class LoadKind(IntEnum):
    """How kernels load what they work on."""

    WIDE = 0
    ODD_ROWS = 1
    ODD_PRODUCT = 2
    ROWS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One figure. `generation` is the first word of `Device.arch`."""

    kind: LoadKind
    generation: str
    value: float
    seen: str


PER_CYCLE = (LoadKind.ODD_ROWS, LoadKind.ROWS)  # numbers; the others are shares of the bandwidth
LONG_ROW = 1024  # numbers of a row up to which one warp keeps it (PyTorch, PersistentSoftmax.cuh)
ROW_BYTES = 16

_OWLV2, _QWEN, _BERT = "owlv2-large-patch14-ensemble", "Qwen1.5-0.5B-Chat", "bert-small-uncased"
#: Sums of bytes (or numbers) over sums of time beyond the start, kernels of more than three starts.
REACHED = (
    Reached(kind=LoadKind.WIDE, generation="Hopper", value=0.92, seen=_QWEN),
    Reached(kind=LoadKind.WIDE, generation="Hopper", value=0.95, seen=_OWLV2),
    Reached(kind=LoadKind.WIDE, generation="CDNA3", value=0.82, seen=_QWEN),
    Reached(kind=LoadKind.WIDE, generation="CDNA3", value=0.69, seen=_OWLV2),
    Reached(kind=LoadKind.ODD_ROWS, generation="Ampere", value=0.78, seen="table of kernels, A100"),
    Reached(kind=LoadKind.ODD_ROWS, generation="Volta", value=0.63, seen="table of kernels, V100"),
    Reached(kind=LoadKind.ODD_ROWS, generation="Hopper", value=0.75, seen=_OWLV2),
    Reached(kind=LoadKind.ODD_ROWS, generation="CDNA1", value=0.32, seen="table of kernels, MI100"),
    Reached(kind=LoadKind.ODD_ROWS, generation="CDNA2", value=0.32, seen="table of kernels, MI210"),
    Reached(kind=LoadKind.ODD_ROWS, generation="CDNA3", value=0.53, seen=_OWLV2),
    Reached(kind=LoadKind.ODD_PRODUCT, generation="Hopper", value=0.31, seen=_BERT),
    Reached(kind=LoadKind.ODD_PRODUCT, generation="Hopper", value=0.28, seen=_OWLV2),
    Reached(kind=LoadKind.ODD_PRODUCT, generation="CDNA3", value=0.34, seen=_BERT),
    Reached(kind=LoadKind.ODD_PRODUCT, generation="CDNA3", value=0.42, seen=_OWLV2),
    Reached(kind=LoadKind.ROWS, generation="CDNA3", value=0.47, seen="table of kernels, MI100 and MI210"),
    Reached(kind=LoadKind.ROWS, generation="CDNA3", value=0.49, seen=_OWLV2),
)


def without(seen: str) -> tuple[Reached, ...]:
    """Return all figures but those of one recording."""
    return tuple(each for each in REACHED if each.seen != seen)


def rate(kind: LoadKind, device: Device, table: Iterable[Reached] = REACHED) -> float | None:
    """Return bytes (WIDE, ODD_PRODUCT) or numbers per second of such kernels; None where nobody saw it.

    The geometric mean, where several recordings say so.
    """
    generation = (device.arch or "").split(" ")[0]
    found = [each.value for each in table if each.kind == kind and each.generation == generation]
    if not found:
        return None
    value, hertz = float(np.exp(np.mean(np.log(found)))), device.boost_mhz * 1e6
    return value * (device.sms * hertz if kind in PER_CYCLE else device.memory_gb_s * 1e9) or None
