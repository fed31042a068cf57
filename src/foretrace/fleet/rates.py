"""What the GPUs of a simulated fleet cost and how much energy they take, by kind of GPU.

Prices and watts come from the catalogs; a kind that is in none has no figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.overtime import Only, chosen, own_part, span_ns
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import Float64, codes
from foretrace.hardware.devices import Device, named
from foretrace.hardware.instances import instances
from foretrace.hardware.power import IDLE_RANGE, IDLE_SHARE

HOUR_NS = 3600e9
_HELD = 0.3  # of the board power while held, at the least: a job whose kernels run half of the time, with few units


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """One kind of GPU: hours, cost, energy; null where no catalog states a rate."""

    gpu_type: str
    gpus: int
    used_gpu_h: float
    all_gpu_h: float
    usd_per_gpu_h: float | None = None
    price_from: str = ""
    usd_used: float | None = None  # for the hours that jobs held
    usd_all: float | None = None  # for the whole span, busy or idle
    busy_w: float | None = None  # of a GPU that a job holds, and of one that nobody holds, without host and cooling
    idle_w: float | None = None
    power_from: str = ""
    kwh: float | None = None  # busy and idle together
    kwh_low: float | None = None
    kwh_high: float | None = None


@cache
def _device(kind: str) -> Device | None:
    # A kind that a trace names without a model ("T4", "G2") may be in no catalog, or several devices.
    try:
        return named(kind) if kind else None
    except ForetraceError:
        return None


def _cost(kind: str, used_h: float, all_h: float) -> dict[str, Any]:
    """Return fields of a bill by the cheapest on-demand list price per GPU of a rented machine with this kind."""
    device = _device(kind)
    offers = [each for each in instances() if device is not None and each.device == device.short]
    if not offers:
        return {}
    best = min(offers, key=lambda each: (each.price_per_h / each.devices, each.name))
    rate = best.price_per_h / best.devices
    source = f"{best.name}, {best.provider} {best.region}, list price {best.date}"
    return {"usd_per_gpu_h": rate, "price_from": source, "usd_used": used_h * rate, "usd_all": all_h * rate}


def _energy(kind: str, used_h: float, free_h: float) -> dict[str, Any]:
    """Return fields of a bill by the catalog's board power while held, an upper bound, and IDLE_SHARE of it else."""
    device = _device(kind)
    if device is None or not device.tdp_w:
        return {}
    busy_w, idle_w = device.tdp_w, IDLE_SHARE * device.tdp_w
    says = f"{device.short}: board power {busy_w:g} W while held, {100 * IDLE_SHARE:.0f} % of it assumed when idle"

    def kwh(busy: float, idle: float) -> float:
        return (used_h * busy_w * busy + free_h * idle_w * idle) / 1000

    low, high = (kwh(busy, idle / IDLE_SHARE) for busy, idle in zip((_HELD, 1.0), IDLE_RANGE, strict=True))
    return {
        "busy_w": busy_w, "idle_w": idle_w, "power_from": says, "kwh": kwh(1.0, 1.0), "kwh_low": low, "kwh_high": high
    }  # fmt: skip


def bills(result: FleetResult, cluster: ClusterTree | None = None, only: Only = None) -> tuple[Bill, ...]:
    """Return hours, cost and energy by kind of GPU.

    Which kind a job used is known from its devices, or where the cluster has one kind.
    """
    at = chosen(result, only)
    kinds = [""] if cluster is None else list(cluster.types)
    gpus = np.array([result.gpus]) if cluster is None else np.bincount(cluster.gpu_type, minlength=len(kinds))
    used: Float64 = np.zeros(len(kinds))
    each = result.segments
    if len(kinds) == 1:
        used[0] = float(result.gpu_ns[at].sum())
    elif cluster is not None and each is not None and len(each.devices):
        asked = np.zeros(len(result.workload))
        asked[at] = own_part(result)[at]
        length = (each.end_ns - each.start_ns) * asked[each.job]
        used[:] = np.bincount(
            cluster.gpu_type[each.devices], np.repeat(length, np.diff(each.offset)), minlength=len(kinds)
        )
    else:  # only what jobs are bound to tells the kind; the rest stands under a kind without a name
        which, names = codes(result.workload.gpu_type[at].tolist())
        hours = np.bincount(which, result.gpu_ns[at], minlength=len(names))
        for name, value in zip(names, hours.tolist(), strict=True):
            if name not in kinds:
                kinds, gpus, used = [*kinds, name], np.append(gpus, 0), np.append(used, 0.0)
            used[kinds.index(name)] += value
    span_h = span_ns(result) / HOUR_NS
    found = []
    for kind, count, used_ns in zip(kinds, gpus.tolist(), used.tolist(), strict=True):
        used_h, all_h = used_ns / HOUR_NS, float(count) * span_h
        rates = _cost(kind, used_h, all_h) | _energy(kind, used_h, max(all_h - used_h, 0.0))
        found.append(Bill(gpu_type=kind, gpus=count, used_gpu_h=used_h, all_gpu_h=all_h, **rates))
    return tuple(found)
