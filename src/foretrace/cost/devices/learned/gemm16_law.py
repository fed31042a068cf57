"""The time of a 16-bit product on a GPU as a law with few numbers: what a device's data sheet is put into.

The library picks the fastest of some tiles and splits of the reduction; a kernel then costs

    t = floor + min over splits q of [ (tiles_q^4 + memory^4)^(1/4) + reduction_q ]
    tiles_q = min over tiles (a, c) of waves * (k/q * seconds per k of the tile + what a wave costs in any case)
    waves   = ceil(b * ceil(m/a) * ceil(n/c) * q / SMs)
    memory  = bytes that come from DRAM / bandwidth + bytes that the L2 cache still holds / rate at which it feeds SMs

Large products draw all the power that a board may take, and its clock falls: no product is done before its energy,
so much for every FLOP, is drawn. Units that do more FLOP per cycle than registers can feed (`_REFERENCE`) draw as much
per cycle as if they did not.

Latencies are counted in clock cycles (they shorten with the clock, not with the peak), rates as shares of the peak per
SM and of the bandwidth. Products with one row or one column have kernels of their own. Nothing in it names a device and
no absolute dimension is an input: it is the wave and tile form of NeuSight (ASPLOS 2025) with the tiles minimised over
instead of looked up. All parameters are real numbers (logarithms of what they stand for), so that they can be fitted
without bounds and shifted by a few measurements of a new device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrace.errors import ForetraceError
from foretrace.hardware.devices import Device

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

TILES = (
    (16, 64), (32, 64), (32, 128), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64),
    (128, 256), (256, 128),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
_STEP = 32  # of k: a split is a whole number of these
_HAIR = np.float32(1e-4)
_CHUNK = 8192  # rows at once: what stays in a core's cache
_USUAL_CLOCK_GHZ = 1.8
_USUAL_L2_MB_PER_SM = 0.4

#: name -> where fitting starts. Logarithms, except shares, which are logits, and exponents.
START: dict[str, float] = {
    "floor": 8.4,  # cycles of any kernel
    "compute": -0.35,  # share of the peak that the best tile reaches
    "memory": -0.35,  # share of the bandwidth
    "cache_share": 1.2,  # logit: how much of what fits is found in the L2 cache
    "cache_write": 2.4,  # logit: as much again for what is written
    "cache_edge": -1.7,  # size up to which products fit, as a share of the cache
    "cache_slope": 3.1,  # how sharp that edge is
    "cache": 2.1,  # bytes per cycle and SM out of the L2 cache, with as few in flight as small products have
    "wave": 5.7,  # cycles of a wave, whatever its tile
    "epilogue": -1.6,  # cycles per element of the output tile
    "load": 1.6,  # cycles per k of any tile
    "load_edge": -4.0,  # and per k and unit of a + c
    "split": 8.45,  # cycles that splitting costs
    "reduce": 3.3,  # bytes per cycle and SM of adding the parts up
    "vector_floor": 0.25,  # one row or column: its floor relative to the others'
    "vector_rate": 3.0,  # bytes per cycle and SM
    "vector_step": -0.9,  # cycles per k
    "energy": -9.0,  # pJ per FLOP: none until one is known
    **{
        f"tile_{a}x{c}": value
        for (a, c), value in zip(
            TILES, (1.74, 1.57, 1.41, 1.39, 0.93, 0.17, 0.44, -0.12, 0.36, -0.1, -0.22, -0.29), strict=True
        )
    },
}
#: How much of the growth of the peak per SM and cycle latencies of loading, of the epilogue and the L2 cache follow.
#: Chosen by leaving GPUs out, not fitted.
FOLLOW: dict[str, float] = {"follow_load": 1.0, "follow_epilogue": 1.0, "follow_cache": 0.0}
_REFERENCE = 2048.0  # FLOP per SM and cycle at which these make no difference, and that registers can feed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What the law needs of a device, in FLOP/s, bytes/s, bytes and Hz."""

    peak: float
    bandwidth: float
    sms: int
    l2_bytes: float
    clock_hz: float
    power_w: float = np.inf  # that it may draw, as if registers fed its units; infinite where no limit is known
    guessed: tuple[str, ...] = ()  # figures that the data sheet lacks

    @classmethod
    def of(cls, device: Device) -> Chip:
        """Make it from a device of the catalog.

        Raises ForetraceError if it has no 16-bit peak, bandwidth or number of SMs.
        """
        peak = device.bf16_tflops or device.fp16_tflops
        missing = [
            name
            for name, value in (
                ("16-bit peak", peak), ("memory bandwidth", device.memory_gb_s), ("number of SMs", device.sms)
            )
            if not value > 0
        ]  # fmt: skip
        if missing:
            raise ForetraceError(
                f"device {device.name!r} has no {' and no '.join(missing)} in the catalog, which predicting 16-bit "
                "products needs; add the figure to the device table."
            )
        guessed = tuple(
            name for name, value in (("clock", device.boost_mhz), ("L2 cache", device.l2_mb)) if not value > 0
        )
        clock_hz = device.boost_mhz * 1e6 or _USUAL_CLOCK_GHZ * 1e9
        limit_w = device.tdp_w if device.vendor == "NVIDIA" and device.tdp_w > 0 else np.inf
        return cls(
            peak=peak * 1e12,
            bandwidth=device.memory_gb_s * 1e9,
            sms=device.sms,
            l2_bytes=(device.l2_mb or _USUAL_L2_MB_PER_SM * device.sms) * 2**20,
            clock_hz=clock_hz,
            power_w=limit_w * max(1.0, peak * 1e12 / device.sms / clock_hz / _REFERENCE),
            guessed=guessed,
        )

    @property
    def traits(self) -> Floats:
        """Logarithms of what chips differ in: per SM and cycle FLOP and bytes from memory, L2 per SM, SMs, clock."""
        cycles = self.sms * self.clock_hz
        return np.log([self.peak / cycles, self.bandwidth / cycles, self.l2_bytes / self.sms, self.sms, self.clock_hz])


def apart(traits: Floats, others: Floats) -> float:
    """Return how far traits lie outside of what others [chips, traits] span; 0 within."""
    return float(np.linalg.norm(np.maximum(0.0, np.maximum(others.min(axis=0) - traits, traits - others.max(axis=0)))))


def seconds(theta: Mapping[str, float], chip: Chip, m: Floats, n: Floats, k: Floats, b: Floats | None = None) -> Floats:
    """Return seconds of `b` products [m x k] by [k x n] on a chip."""
    out = np.empty(len(m), np.float64)
    plan = _Plan.of(theta, chip)
    one = np.ones(min(len(m), _CHUNK), np.float32)
    for start in range(0, len(m), _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = [np.asarray(each[rows], np.float32) for each in (m, n, k)]
        times = one[: len(part[0])] if b is None else np.asarray(b[rows], np.float32)
        out[rows] = _chunk(plan, part[0], part[1], part[2], times)
    return out * 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The law with a chip put in, in microseconds."""

    floor: float
    sms: float
    per_k: tuple[float, ...]  # per tile
    per_wave: tuple[float, ...]
    split: float
    reduce: float  # per byte
    dram: float  # per byte
    cache: float
    share: float
    write: float
    edge: float  # bytes
    slope: float
    vector_floor: float
    vector_byte: float
    vector_step: float
    energy: float  # per FLOP

    @classmethod
    def of(cls, theta: Mapping[str, float], chip: Chip) -> _Plan:
        cycle = 1e6 / chip.clock_hz
        rate = chip.peak / chip.sms / chip.clock_hz / _REFERENCE
        e = {name: float(np.exp(value)) for name, value in theta.items()}
        loading, tail, caching = (
            rate ** -theta.get(f"follow_{what}", FOLLOW[f"follow_{what}"]) for what in ("load", "epilogue", "cache")
        )
        per_k, per_wave = [], []
        for a, c in TILES:
            share = 2.0 / (1.0 + e[f"tile_{a}x{c}"]) * e["compute"]  # 1 for a tile whose parameter is 0
            work = 2 * a * c * 1e6 / (chip.peak / chip.sms * share)
            load = (e["load"] + e["load_edge"] * (a + c)) * cycle * loading
            per_k.append((work**4 + load**4) ** 0.25)
            per_wave.append((e["wave"] + e["epilogue"] * a * c * tail) * cycle)
        return cls(
            floor=e["floor"] * cycle,
            sms=float(chip.sms),
            per_k=tuple(per_k),
            per_wave=tuple(per_wave),
            split=e["split"] * cycle,
            reduce=cycle / (chip.sms * e["reduce"]),
            dram=1e6 / (chip.bandwidth * e["memory"]),
            cache=cycle * caching / (chip.sms * e["cache"]),
            share=_share(theta["cache_share"]),
            write=_share(theta["cache_write"]),
            edge=chip.l2_bytes * e["cache_edge"],
            slope=min(e["cache_slope"], 60.0),
            vector_floor=e["vector_floor"] * e["floor"] * cycle,
            vector_byte=cycle / (chip.sms * e["vector_rate"]),
            vector_step=e["vector_step"] * cycle,
            energy=e["energy"] * 1e-6 / chip.power_w,
        )


def _share(logit: float) -> float:
    return float(1.0 / (1.0 + np.exp(-logit)))


def _chunk(plan: _Plan, m: Singles, n: Singles, k: Singles, b: Singles) -> Singles:
    output = 2 * b * m * n
    read = 2 * b * k * (m + n)
    kept = plan.share / (1.0 + np.minimum((output + read) / plan.edge, 3.0) ** plan.slope)
    held = (read + plan.write * output) * kept
    memory = (output + read - held) * plan.dram + held * plan.cache
    fourth = memory**2
    fourth *= fourth
    across = {c: np.ceil(n / c) * b for c in {c for _, c in TILES}}
    along = {a: np.ceil(m / a) for a in {a for a, _ in TILES}}
    blocks = [along[a] * across[c] / plan.sms for a, c in TILES]
    best = np.full(len(m), np.inf, np.float32)
    waves, wave_s = np.empty_like(best), np.empty_like(best)
    for q in SPLITS:
        depth = np.ceil(k / (q * _STEP)) * _STEP
        tiles = np.full(len(m), np.inf, np.float32)
        for count, per_k, per_wave in zip(blocks, plan.per_k, plan.per_wave, strict=True):
            # a hair less than the count, because a whole number of waves must not round up to one more
            np.multiply(count, q, out=waves)
            np.subtract(waves, _HAIR, out=waves)
            np.ceil(waves, out=waves)
            np.multiply(depth, per_k, out=wave_s)
            np.add(wave_s, per_wave, out=wave_s)
            np.multiply(waves, wave_s, out=waves)
            np.minimum(tiles, waves, out=tiles)
        tiles *= tiles
        tiles *= tiles
        time = np.sqrt(np.sqrt(tiles + fourth))
        if q > 1:
            time += plan.split + (4.0 * q * plan.reduce) * output
        np.minimum(best, time, out=best)
    np.maximum(best, plan.energy * k * output, out=best)
    best += plan.floor
    vector = np.flatnonzero(np.minimum(m, n) <= 1)
    if len(vector):
        nbytes = (output + read)[vector] * plan.vector_byte
        best[vector] = plan.vector_floor + np.sqrt(
            np.sqrt(fourth[vector] + nbytes**4 + (k[vector] * plan.vector_step) ** 4)
        )
    return best
