"""`Scaled`: the recorded time of a kernel on one device, carried over to another device.

`rescale` applies to the recorded time the ratio of what such a call typically takes on both devices (`typical_s`:
start, roofline at the share of the peaks that kernels reach, waves, alignment); of what a product took beyond its
typical time, only a part carries over, because it is the kernel library's and not the call's. Habitat's rule, which it
is compared with, is `benchmarks/habitat.py`.

The numbers come from public tables of kernel times and from recordings of single devices; `python
benchmarks/scaling.py` prints them and the errors between every two devices. No number was chosen on pairs of
recordings of one model on two devices: those are the test (`benchmarks/device_pairs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import ELEMENT_BYTES, Calls, Family, Float64, Precision
from foretrace.cost.devices import reached
from foretrace.cost.devices.measured import device_of, recorded_calls
from foretrace.cost.devices.reached import REACHED, LoadKind, Reached
from foretrace.cost.devices.roofline import MATRIX, peak_flops
from foretrace.cost.model import CostModel, Prediction
from foretrace.graph.taskgraph import TaskGraph
from foretrace.hardware.accelerators import AcceleratorDevice
from foretrace.hardware.devices import Device

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Clock cycles that a product takes in a training step, however small: its matrices come from memory and its launch from
# Python (products of 5 rows, 6.6 us on an H100 and 6.4 us + 0.7 ns k on an MI300X). Tables, which repeat one product
# with its matrices in the cache, do not have it.
PRODUCT_CYCLES = 13_200.0
PRODUCT_STEP_CYCLES = {"NVIDIA": 0.0, "AMD": 1.5}  # per step along k
# Clock cycles that a kernel takes, however small: the fastest bf16 products take 4,000 to 5,500 on A100, L40S and RTX
# PRO, kernels that move a few kB 4,200 on A100 and B200, and 7,000 on an MI300X (recordings of single devices).
START_CYCLES = {"NVIDIA": 4500.0, "AMD": 7000.0}
STEP_SHARE = 8 / 4500  # of that, for every step along k of a product, up to `STEPS`
STEPS = 512  # longer reductions are split over blocks
TILE = 128  # rows and columns of a product that one block computes, typically
WAVE_POWER = 0.5  # how much of the loss by a last, partly filled wave shows in the time
CARRY = 0.3  # share, in logarithms, of a product's excess over its typical time that carries over to another device
PLAUSIBLE = 2.5  # nine of ten products are within this factor of their typical time; then `CARRY` holds
DOUBTED = 10.0  # so far off, the sizes of a call are not believed, and its time follows the ratio alone
ALIGNED_BYTES = 16  # tensor cores of NVIDIA load rows in pieces of so many bytes
# A product with other rows takes so many times longer there: 29 against 66 TFLOP/s, products of one A100 recording.
UNALIGNED = 2.25
# Its kernels are those of older generations, and reach so much of Hopper's peak at most (Luo et al., arXiv 2402.13499).
MMA_ON_HOPPER = 0.63

# Share of the peak FLOP/s that large products reach: (vendor, 32-bit arithmetic), and of devices that differ.
_COMPUTE_SHARE = {
    ("NVIDIA", True): 0.70,
    ("NVIDIA", False): 0.80,
    ("AMD", True): 0.52,
    ("AMD", False): 0.45,
}
# The 72 W of an L4 keep no clock: 8.8 of 30.3 TFLOP/s, median of 513 large products of the table of kernels.
_COMPUTE_SHARE_OF = {("L4", True): 0.29, ("K80-half", True): 0.43}
# Share of the bandwidth that large kernels reach by family: NVIDIA, AMD.
_MEMORY_SHARE = {Family.SOFTMAX: (0.62, 0.34), Family.NORM: (0.53, 0.48)}
_MEMORY_SHARE_OTHERWISE = (0.80, 0.76)
# The same of chips that the table of kernels has (`benchmarks/scaling.py`), between two of which they count: softmax,
# normalisation, all others. No table has a GPU of Kepler: on one die of a K80 Inception-v3, ResNet-152, VGG-16 and
# AlexNet take 4.0 to 4.5 times as long as on a P100-SXM2 (TensorFlow's page of benchmarks, May 2017, K80 of two clouds;
# mean 4.24), where the peaks say 2.6 (compute) and 3.0 (memory): it reaches what Pascal does times these over 4.24.
_OF_CHIPS = {
    "Pascal GP100": (0.39, 0.44, 0.70), "Pascal GP104": (0.63, 0.50, 0.75), "Volta": (0.61, 0.55, 0.86),
    "Turing": (0.61, 0.51, 0.74), "Ampere GA100": (0.58, 0.57, 0.80), "Ada AD104": (0.78, 0.77, 0.78),
    "Kepler": (0.28, 0.32, 0.50),
}  # fmt: skip

# 80 % range of a call's measured over its scaled time, and of the median over all calls of one kind from one device to
# another, by which a whole step may be off: every two devices of the tables, of one vendor and of two. The last four
# hold between vendors. They are wider than what recordings of a model on both showed, because those are few: attention
# of two models was off by 12 %, and later kernels of either vendor are twice as fast; strided copies of two by 67 %;
# what no other kind has (fills, changes of layout: the libraries differ in what they launch) of three by a factor of
# 2.6; convolutions of one, whose library chose another way to compute them, by 7.4.
RANGES = {"products": (0.70, 1.75), "memory": (0.75, 1.35)}
STEP_RANGES = {
    "products": (0.72, 1.50), "kernels": (0.80, 1.30), "attention": (0.50, 2.00), "strided": (0.50, 2.00),
    "rest": (0.33, 3.00), "convolutions": (0.12, 8.00),
}  # fmt: skip
ON_DESIGN = (0.5, 18.0)  # vector operators of half the work; products of PHAZE's mapper over ours, 9 of 10 below


def step_range(field: str, source: Device, target: Device) -> tuple[float, float]:
    """Return by how much a field of `STEP_RANGES` of a step may be off; that of "kernels" is wider between vendors.

    There the starts of short kernels are not known well: on one of six recordings they were off by 29 %. Nothing was
    measured on a design, and no table has a GPU of Kepler, whose shares are from whole networks; ResNet-18 took up to
    twice as long on a K80 as they say (Gavel's physical cluster, 12.7 times a V100).
    """
    if isinstance(target, AcceleratorDevice):
        return ON_DESIGN
    if field == "kernels" and source.vendor != target.vendor:
        return RANGES["memory"]
    low, high = STEP_RANGES[field]
    old = [2.0 if each.arch.startswith("Kepler") else 1.0 for each in (source, target)]
    return low / old[0], high * old[1]


def start_s(device: Device) -> float:
    """Return seconds that a kernel takes, however small."""
    return START_CYCLES.get(device.vendor, START_CYCLES["NVIDIA"]) / ((device.boost_mhz or 1500.0) * 1e6)


def share_of_bandwidth(device: Device, family: Family = Family.ELEMENTWISE) -> float:
    """Return what large kernels of a family reach of the device's bandwidth."""
    return _MEMORY_SHARE.get(family, _MEMORY_SHARE_OTHERWISE)[device.vendor == "AMD"]


def share_of_peak(device: Device, precision: Precision) -> float:
    """Return what large products reach of the device's peak in this precision."""
    wide = precision in (Precision.FP32, Precision.FP64, Precision.OTHER)
    return _COMPUTE_SHARE_OF.get((device.short, wide), _COMPUTE_SHARE.get((device.vendor, wide), 0.6))


def filled(calls: Calls, device: Device) -> Float64:
    """Return share of the multiprocessors' time that products keep them busy, waves and padded tiles considered (n
    rows).
    """
    rows, columns = np.ceil(calls.m / TILE), np.ceil(calls.n / TILE)
    waves = np.maximum(calls.b * rows * columns / max(device.sms, 1), 1e-12)
    padded = (calls.m / TILE / rows) * (calls.n / TILE / columns)
    return np.asarray(waves / np.ceil(waves) * padded, dtype=np.float64)


def _element_bytes(calls: Calls) -> Float64:
    return np.array([ELEMENT_BYTES[each] for each in Precision], dtype=np.float64)[calls.precision]


def _rates(device: Device) -> Float64:
    """Return FLOP/s that large products reach, by precision."""
    return np.array([peak_flops(device, each) * share_of_peak(device, each) for each in Precision])


def unaligned(calls: Calls) -> npt.NDArray[np.bool_]:
    """Return products in 16 bit or less, or TF32, whose rows are no multiple of 16 bytes (n rows)."""
    size = _element_bytes(calls)
    short = np.isin(calls.precision, (Precision.TF32, Precision.FP16, Precision.BF16, Precision.FP8, Precision.INT8))
    odd = (calls.k * size % ALIGNED_BYTES != 0) | (calls.n * size % ALIGNED_BYTES != 0)
    told = calls.flops > 0  # sizes that nobody recorded are all 1, which says nothing
    return np.asarray(short & odd & told & (calls.family == Family.GEMM), dtype=np.bool_)


def typical_s(
    calls: Calls, device: Device, *, odd_rate: float | None = None, in_training: bool = False
) -> Float64:  # fmt: skip
    """Return what such calls typically take on a device, all in one kernel (n rows).

    `odd_rate` is what products of odd rows are known to move, in bytes per second; `in_training` gives products the
    start that they have there. NaN where neither FLOPs nor bytes are known, infinite where the device has no such
    units.
    """
    matrix = np.isin(calls.family, MATRIX)
    rates = _rates(device)[calls.precision]
    with np.errstate(divide="ignore", invalid="ignore"):
        compute = np.where(matrix & (calls.flops > 0), calls.flops / rates, 0.0)
    tiled = np.isin(calls.family, (Family.GEMM, Family.CONV)) & (calls.m * calls.n * calls.k > 1)
    if tiled.any():
        compute[tiled] /= filled(calls.take(tiled), device) ** WAVE_POWER
    odd = unaligned(calls)
    if device.vendor == "NVIDIA":
        slower = UNALIGNED / (MMA_ON_HOPPER if device.arch.startswith("Hopper") else 1.0)
        compute[odd] *= slower
    share = np.array([share_of_bandwidth(device, Family(f)) for f in range(len(Family))])[calls.family]
    memory = calls.nbytes / (device.memory_gb_s * 1e9 * share)
    if odd_rate is not None:
        memory[odd] = calls.nbytes[odd] / odd_rate
    body = np.maximum(compute, memory)
    start = start_s(device) * np.where(matrix, 1 + STEP_SHARE * np.minimum(calls.k, STEPS), 1.0)
    whole = start + body
    if in_training:
        short = np.isin(calls.precision, (Precision.FP16, Precision.BF16)) & (calls.family == Family.GEMM)
        cycles = PRODUCT_CYCLES + PRODUCT_STEP_CYCLES.get(device.vendor, 0.0) * calls.k
        # Loading overlaps with computing where there is much of it.
        whole = np.where(short & ~odd, np.hypot(cycles / ((device.boost_mhz or 1500.0) * 1e6), body), whole)
    return np.where(body > 0, whole, np.nan)


def rescale(
    seconds: Float64,
    calls: Calls,
    source: Device,
    target: Device,
    *,
    wide: Mask | None = None,
    table: Sequence[Reached] = REACHED,
) -> Float64:
    """Return seconds on `target` of kernels that took `seconds` on `source` (n rows).

    Products: typical time on the target, times a part (`carried`) of what the recorded one was off its typical time.
    Everything else: the time to start is the target's, the rest follows the ratio of the reached bandwidths, whatever
    its bytes are, as access patterns belong to the call. So does fused attention between vendors, with the ratio of
    what the multiprocessors that it keeps busy reach: each vendor has one kernel, not a library of them.
    `wide`: kernels that load 16 bytes at once (n rows); `table`: what kinds of kernels reach. Not finite where a device
    has no rates for a kernel.
    """
    if source == target:
        return seconds.copy()
    across = source.vendor != target.vendor
    odd_rates = _both(LoadKind.ODD_PRODUCT, source, target, table)
    here, there = (
        typical_s(calls, device, odd_rate=each, in_training=across)
        for device, each in zip((source, target), odd_rates or (None, None), strict=True)
    )
    starts = start_s(source), start_s(target)
    body = np.maximum(seconds - starts[0], 0.0)
    start = np.minimum(seconds / starts[0], 1.0) * starts[1]
    moved = start + body * _memory_ratios(calls, source, target, wide, table)
    matrix = np.isin(calls.family, MATRIX)
    known = matrix & (calls.flops > 0)
    # How much slower an unaligned product is than expected says nothing of a vendor that has no such rule.
    odd = unaligned(calls) & across
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.log(seconds / here)
        product = there * np.exp(np.where(odd, carried(excess, 0.0, PLAUSIBLE * UNALIGNED), carried(excess)))
        blind = start + body * _compute_ratios(calls, source, target)
    found = np.where(known, product, np.where(matrix, blind, moved))
    fused = known & (calls.family == Family.ATTENTION) & across
    if fused.any():
        part = calls.take(fused)
        found[fused] = start[fused] + body[fused] * _compute_ratios(part, source, target) * (
            _occupied(part, source) / _occupied(part, target)
        )
    return np.where(seconds > 0, found, seconds)


def _occupied(calls: Calls, device: Device) -> Float64:
    """Return share of the multiprocessors' time that fused attention keeps them busy (n rows).

    A block keeps `TILE` queries of a head and goes through all keys alone: fewer blocks than multiprocessors leave the
    others idle, and the time is that of one block, whatever the device has beside it.
    """
    waves = calls.b * np.ceil(calls.m / TILE) / max(device.sms, 1)
    return np.asarray(np.where(waves <= 1, waves, (waves / np.ceil(waves)) ** WAVE_POWER), dtype=np.float64)


def odd_rows(calls: Calls) -> Mask:
    """Return softmax of rows that one warp cannot keep and that are no multiple of 16 bytes (n rows)."""
    uneven = calls.n * _element_bytes(calls) % reached.ROW_BYTES != 0
    return np.asarray((calls.family == Family.SOFTMAX) & (calls.n > reached.LONG_ROW) & uneven, dtype=np.bool_)


def _both(kind: LoadKind, source: Device, target: Device, table: Sequence[Reached]) -> tuple[float, float] | None:
    """Return what kernels of a kind reach on both devices; None where it is not known of both."""
    one, other = (reached.rate(kind, device, table) for device in (source, target))
    return None if one is None or other is None else (one, other)


def _memory_ratios(
    calls: Calls, source: Device, target: Device, wide: Mask | None, table: Sequence[Reached]
) -> Float64:  # fmt: skip
    """Return the time on the target over that on the source beyond the start, of kernels that move data (n rows)."""
    families = [Family(f) for f in range(len(Family))]
    ratio = np.array([_bandwidth_ratio(source, target, family) for family in families])[calls.family]
    rows = odd_rows(calls)
    if rows.any():
        known = _both(LoadKind.ODD_ROWS, source, target, table)
        ratio[rows] = known[0] / known[1] if known else source.memory_gb_s / target.memory_gb_s
    loads = _both(LoadKind.WIDE, source, target, table)
    if wide is not None and loads:
        ratio[wide & (calls.family == Family.ELEMENTWISE)] = loads[0] / loads[1]
    rows = calls.family == Family.NORM
    if rows.any():
        numbers, nbytes = (calls.m * calls.n)[rows], calls.nbytes[rows]
        times = []
        for device, share in zip((source, target), _shares(source, target, Family.NORM), strict=True):
            slowest = nbytes / (device.memory_gb_s * 1e9 * share)
            each = reached.rate(LoadKind.ROWS, device, table)
            times.append(slowest if each is None else np.maximum(slowest, numbers / each))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio[rows] = np.where(times[0] > 0, times[1] / times[0], ratio[rows])
    return np.asarray(ratio, dtype=np.float64)


def carried(excess: Float64, share: float = CARRY, plausible: float = PLAUSIBLE) -> Float64:
    """Return what carries over of the logarithm of recorded over typical time (n rows); grows with it.

    A `share` of it where the typical time is `plausible`, all of it where the factor is beyond `DOUBTED`.
    """
    near, far = np.log(plausible), np.log(DOUBTED)
    inside = np.interp(excess, [-far, -near, near, far], [-far, -share * near, share * near, far])
    return np.asarray(np.where(np.abs(excess) < far, inside, excess), dtype=np.float64)


def _shares(source: Device, target: Device, family: Family) -> tuple[float, float]:
    """Return the shares of their bandwidths that large kernels of a family reach: of the chips, if both are known."""
    one, other = (
        next((row for chip, row in _OF_CHIPS.items() if each.arch.startswith(chip)), None) for each in (source, target)
    )
    if one is None or other is None:
        return share_of_bandwidth(source, family), share_of_bandwidth(target, family)
    at = {Family.SOFTMAX: 0, Family.NORM: 1}.get(family, 2)
    return one[at], other[at]


def _bandwidth_ratio(source: Device, target: Device, family: Family) -> float:
    here, there = _shares(source, target, family)
    reached = there * target.memory_gb_s
    return here * source.memory_gb_s / reached if reached else np.nan


def _compute_ratios(calls: Calls, source: Device, target: Device) -> Float64:
    """Return the ratios of products whose sizes are unknown: by the rates alone."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((_rates(source) / _rates(target))[calls.precision], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Scaled(CostModel):
    """Calls that were recorded on `source`, on another device. Answers for no others."""

    name: str = "scaled"
    source: Device
    recorded_s: Mapping[tuple[str, str], float]  # (operator, inputs as JSON text) -> seconds of its kernels

    @classmethod
    def from_graph(cls, graph: TaskGraph) -> Scaled:
        """Return the calls of a recording. Raises ForetraceError where it names no device of the catalog."""
        times = {call: float(np.mean(seconds)) for call, seconds in recorded_calls(graph).items()}
        return cls(source=device_of(graph), recorded_s=times)

    def predict(self, calls: Calls, device: Device) -> Prediction:
        key = zip(calls.op, calls.text, strict=True)
        seconds = np.array([self.recorded_s.get(each, np.nan) for each in key], dtype=np.float64)
        found = rescale(seconds, calls, self.source, device)
        matrix = np.isin(calls.family, MATRIX)
        low, high = (np.where(matrix, RANGES["products"][i], RANGES["memory"][i]) for i in (0, 1))
        if device.vendor != self.source.vendor:
            for family, field in ((Family.ATTENTION, "attention"), (Family.CONV, "convolutions")):
                low[calls.family == family], high[calls.family == family] = STEP_RANGES[field]
        if device == self.source:
            low, high = np.full(len(calls), 0.95), np.full(len(calls), 1.05)
        why = f"recorded on {self.source.short}, scaled by the typical times of such calls on both devices"
        return self._answer(found, low, high, why)
