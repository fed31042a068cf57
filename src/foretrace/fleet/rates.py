"""What the GPUs of a simulated fleet cost and how much energy they take, by kind of GPU.

Prices and watts come from the catalogs; a kind that is in none has no figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.overtime import Only, chosen, span_ns
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import Float64, codes
from foretrace.hardware.devices import Device, named
from foretrace.hardware.instances import instances
from foretrace.hardware.power import IDLE_RANGE, IDLE_SHARE

HOUR_NS = 3600e9
_HELD = 0.3  # of the board power while held, at the least: a job whose kernels run half of the time, with few units


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for one GPU and hour, and where that comes from."""

    usd_per_h: float
    source: str


@dataclass(frozen=True, slots=True)
class Power:
    """Watts of one GPU that a job holds, and of one that nobody holds; without host, network and cooling."""

    busy_w: float
    idle_w: float
    source: str
    shares: tuple[tuple[float, float], tuple[float, float]]  # ends of the range of each

    def kwh(self, used_h: float, free_h: float, end: int | None = None) -> float:
        """Return kWh of hours held and not held; `end`: 0 and 1 are those of the range."""
        busy, idle = (1.0, 1.0) if end is None else (self.shares[0][end], self.shares[1][end])
        return (used_h * self.busy_w * busy + free_h * self.idle_w * idle) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """One kind of GPU: hours, cost, energy; null where no catalog states a rate."""

    gpu_type: str
    gpus: int
    used_gpu_h: float
    all_gpu_h: float
    usd_per_gpu_h: float | None
    price_from: str
    usd_used: float | None  # for the hours that jobs held
    usd_all: float | None  # for the whole span, busy or idle
    busy_w: float | None
    idle_w: float | None
    power_from: str
    kwh: float | None  # busy and idle together
    kwh_low: float | None
    kwh_high: float | None

    @classmethod
    def of(
        cls, gpu_type: str, gpus: int, used_h: float, all_h: float, price: Price | None, power: Power | None
    ) -> Bill:
        """Return hours at these rates."""
        free_h = max(all_h - used_h, 0.0)
        return cls(
            gpu_type=gpu_type,
            gpus=gpus,
            used_gpu_h=used_h,
            all_gpu_h=all_h,
            usd_per_gpu_h=price.usd_per_h if price else None,
            price_from=price.source if price else "",
            usd_used=used_h * price.usd_per_h if price else None,
            usd_all=all_h * price.usd_per_h if price else None,
            busy_w=power.busy_w if power else None,
            idle_w=power.idle_w if power else None,
            power_from=power.source if power else "",
            kwh=power.kwh(used_h, free_h) if power else None,
            kwh_low=power.kwh(used_h, free_h, 0) if power else None,
            kwh_high=power.kwh(used_h, free_h, 1) if power else None,
        )


@cache
def _device(kind: str) -> Device | None:
    # A kind that a trace names without a model ("T4", "G2") may be in no catalog, or several devices.
    try:
        return named(kind) if kind else None
    except ForetraceError:
        return None


@cache
def default_price(kind: str) -> Price | None:
    """Return the cheapest on-demand list price per GPU of a rented machine with this kind; None without one."""
    device = _device(kind)
    offers = [each for each in instances() if device is not None and each.device == device.short]
    if not offers:
        return None
    best = min(offers, key=lambda each: (each.price_per_h / each.devices, each.name))
    return Price(best.price_per_h / best.devices, f"{best.name}, {best.provider} {best.region}, list price {best.date}")


@cache
def default_power(kind: str) -> Power | None:
    """Return the catalog's board power while held, an upper bound, and IDLE_SHARE of it else; None without one."""
    device = _device(kind)
    if device is None or not device.tdp_w:
        return None
    says = f"{device.short}: board power {device.tdp_w:g} W while held, {IDLE_SHARE:.0%} of it assumed when idle"
    idle = IDLE_RANGE[0] / IDLE_SHARE, IDLE_RANGE[1] / IDLE_SHARE
    return Power(device.tdp_w, IDLE_SHARE * device.tdp_w, says, ((_HELD, 1.0), idle))


def bills(
    result: FleetResult,
    cluster: ClusterTree | None = None,
    only: Only = None,
) -> tuple[Bill, ...]:
    """Return hours, cost and energy by kind of GPU.

    Which kind a job used is known from its devices, or where the cluster has one kind.
    """
    at = chosen(result, only)
    kinds = [""] if cluster is None else list(cluster.types)
    gpus = np.array([result.gpus]) if cluster is None else np.bincount(cluster.gpu_type, minlength=len(kinds))
    share = result.workload.share
    used: Float64 = np.zeros(len(kinds))
    each = result.segments
    if len(kinds) == 1:
        used[0] = float((result.gpu_ns[at] * share[at]).sum())
    elif cluster is not None and each is not None and len(each.devices):
        asked = np.zeros(len(result.workload))
        asked[at] = share[at]
        length = (each.end_ns - each.start_ns) * asked[each.job]
        used[:] = np.bincount(
            cluster.gpu_type[each.devices], np.repeat(length, np.diff(each.offset)), minlength=len(kinds)
        )
    else:  # only what jobs are bound to tells the kind; the rest stands under a kind without a name
        which, names = codes(result.workload.gpu_type[at].tolist())
        hours = np.bincount(which, result.gpu_ns[at] * share[at], minlength=len(names))
        for name, value in zip(names, hours.tolist(), strict=True):
            if name not in kinds:
                kinds, gpus, used = [*kinds, name], np.append(gpus, 0), np.append(used, 0.0)
            used[kinds.index(name)] += value
    span_h = span_ns(result) / HOUR_NS
    return tuple(
        Bill.of(
            kind,
            int(gpus[i]),
            float(used[i]) / HOUR_NS,
            float(gpus[i]) * span_h,
            default_price(kind),
            default_power(kind),
        )
        for i, kind in enumerate(kinds)
    )
