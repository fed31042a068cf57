"""What coding gradients takes: the hook as timed, at its own size or between others; on a GPU, its memory traffic.

The hooks (PyTorch's for 16 bit and PowerSGD, `training/compression/hooks.py` for the others) are passes over a bucket
of n float32 gradients, one kernel each. `work` counts them as the code makes them; a test counts the operators of the
real hooks. What a pass takes is the share of the device's bandwidth that measured kernels reach (Williams et al.,
Roofline, CACM 2009), what launching takes is `HostCosts`, and the slower of the two decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, log2, prod

import msgspec
import numpy as np

from foretrace.cost.calls import Family, Precision
from foretrace.cost.devices.roofline import Roofline, share_of
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.hardware.device import Device
from foretrace.model.lower import HostCosts
from foretrace.techniques.base import Prior
from foretrace.techniques.distributed.compressors import rates
from foretrace.training.compression.settings import CompressionSettings, kept
from foretrace.training.compression.timing import ALL, ENCODE, hook_operator

Shapes = Sequence[tuple[int, ...]]

TIMED, SIZES, TRAFFIC, PRIOR = "timed", "timed at other sizes", "memory traffic", "prior"  # how coding is known
_HOST = HostCosts()
_SECTOR = 32  # bytes that a GPU moves for one element at an arbitrary place
_BEYOND = 1.25  # of quoted times, which are of one model on one machine
_PER_COLUMN = 6  # kernels that make one column of a matrix orthogonal to the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """Seconds of encoding and of decoding every bucket, who says so, and how far all of them may be off."""

    how: str
    seconds: list[tuple[float, float]]
    off: Prior

    @property
    def flag(self) -> str:
        """The parameter of the technique that the factor stands for."""
        return "traffic" if self.how == TRAFFIC else "measured"


# --- timed

_ALONE = Prior(1.0, 0.8, 1.5, why="the hook was timed alone; in a step it meets other caches and a busier memory")
# Wider than alone by a guess: nobody held interpolated times against timed ones yet.
_BETWEEN = Prior(
    1.0, 0.6, 1.8, why="the hook was timed on buckets of other sizes, alone; in between it was interpolated"
)


def timed(
    calibration: Calibration, settings: CompressionSettings, buckets: Sequence[Shapes], workers: int, device: str
) -> Coding | None:
    """Return the coding as hooks were timed on this machine: on these very buckets, else on others; None where neither
    was timed.
    """
    found, how = [], TIMED
    for shapes in buckets:
        operators = [hook_operator(settings, list(shapes), workers, part, device) for part in (ENCODE, ALL)]
        times = [calibration.time_s(each) for each in operators]
        if None in times:
            how, times = SIZES, [_between(calibration, each) for each in operators]
        encode, whole = times
        if encode is None or whole is None:
            return None
        found.append((min(encode, whole), max(whole - encode, 0.0)))
    return Coding(how=how, seconds=found, off=_ALONE if how == TIMED else _BETWEEN)


def _between(calibration: Calibration, operator: Operator) -> float | None:
    """Return seconds of a hook from those of the same hook on buckets of other sizes: a power law between two of them.

    Beyond the largest in proportion to the size; below the smallest as long as that.
    """
    same = msgspec.json.encode(operator.concrete[1]).decode()  # as it stands in a key
    points: dict[int, float] = {}
    for key, seconds in calibration.seconds.items():
        if same in key and key.startswith(operator.name):
            size = _elements(Operator(operator.name, key.partition(" ")[2]))
            points[size] = min(seconds, points.get(size, seconds))
    if not points:
        return None
    wanted, sizes = _elements(operator), sorted(points)
    law = np.interp(log(wanted), np.log(sizes), np.log([points[each] for each in sizes]))
    return exp(float(law)) * max(wanted / sizes[-1], 1.0)


def _elements(operator: Operator) -> int:
    return max(sum(int(prod(shape)) for shape in operator.dims[0]), 1)


# --- by memory traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingWork:
    """One side of a hook on one bucket: operators called from Python, kernels, bytes of passes in order and others."""

    operators: float
    kernels: float
    streamed: float
    irregular: float = 0.0  # selecting, sorting, reducing


def work(settings: CompressionSettings, shapes: Shapes, workers: int) -> tuple[CodingWork, CodingWork]:
    """Return encoding and decoding one bucket of float32 gradients of these shapes, for so many workers."""
    n = sum(prod(shape) for shape in shapes)
    k = kept(n, settings.share)
    match settings.method:
        case "fp16" | "bf16":  # cast, divide; copy back
            return CodingWork(operators=2, kernels=2, streamed=10 * n), CodingWork(
                operators=1, kernels=1, streamed=6 * n
            )
        case "powersgd":
            return _low_rank(settings, shapes, n)
        case (
            "sign"
        ):  # |g|, mean; compare, weigh and sum eight bits; a byte of eight signs per worker, unpacked and added
            encode = CodingWork(operators=8, kernels=8, streamed=16.5 * n, irregular=4 * n)
            return encode, CodingWork(
                operators=6 * workers + 8, kernels=6 * workers + 8, streamed=(14 * workers + 19.5) * n
            )
        case "randomk":  # keys, sorted with their places by about 2 log2 n bits, 8 bits a pass
            passes = -(-2 * log2(max(n, 2)) // 8)
            encode = CodingWork(
                operators=4, kernels=6 + 3 * passes, streamed=28 * n, irregular=40 * passes * n + 3 * _SECTOR * k
            )
            return encode, CodingWork(operators=3, kernels=3, streamed=4 * n + 8 * k, irregular=3 * _SECTOR * k)
    # topk, dgc: sum up, |g|, four passes of a radix selection and two that collect, the chosen ones out and zeroed
    more = 2 if settings.method == "dgc" else 0
    encode = CodingWork(
        operators=6 + more,
        kernels=14 + more,
        streamed=(20 + 10 * more) * n,
        irregular=24 * n + (3 + more) * _SECTOR * k,
    )
    decode = CodingWork(operators=5, kernels=5, streamed=4 * n + 32 * workers * k, irregular=3 * _SECTOR * workers * k)
    return encode, decode


def _low_rank(settings: CompressionSettings, shapes: Shapes, n: int) -> tuple[CodingWork, CodingWork]:
    """Return PyTorch's PowerSGD hook: error added and kept, per matrix Q and P orthogonal and three products.

    Up to two columns are made orthogonal by operators (Gram-Schmidt), more by a library, whose kernels are guessed.
    """
    by_hand = settings.rank <= 2
    matrices = orthogonal = plain = vectors = small = 0
    for shape in shapes:
        rows = shape[0] if shape else 1
        others = prod(shape) // rows if rows else 0
        rank = min(rows, others, settings.rank)
        if (rows + others) * rank * settings.min_rate < rows * others:
            matrices, small = matrices + 1, small + 4 * (rows + others) * rank * (1 + rank)
            orthogonal += _PER_COLUMN * rank - 4 * by_hand  # the last column has none behind it
        else:
            plain, vectors = plain + prod(shape), vectors + 1
    called = orthogonal if by_hand else matrices
    large = n - plain
    encode = CodingWork(
        operators=4 + matrices + called, kernels=4 + matrices + orthogonal, streamed=20 * n + 8 * plain,
        irregular=4 * large + small,
    )  # fmt: skip
    decode = CodingWork(
        operators=4 + vectors + 2 * matrices + called, kernels=4 + vectors + 2 * matrices + orthogonal,
        streamed=12 * n + 12 * plain, irregular=8 * large + small,
    )  # fmt: skip
    return encode, decode


def traffic_s(done: CodingWork, device: Device) -> tuple[float, float, float]:
    """Return seconds of `done` on a GPU: central, low (the host is ahead of it) and high (it waits for every
    launch).
    """
    regular, other = share_of(Family.MOVE, Precision.FP32), share_of(Family.OTHER, Precision.FP32)
    start, rate = Roofline().start_s, 1e9 * device.memory_gb_s
    host = 1e-9 * (_HOST.backward_ns * done.operators + _HOST.call_ns * done.kernels)

    def memory(at: str) -> float:
        shares = (min(float(getattr(each, at)), 1.0) for each in (regular, other))
        return sum(nbytes / share for nbytes, share in zip((done.streamed, done.irregular), shares, strict=True)) / rate

    central = max(host, done.kernels * start + memory("middle"))
    low = done.kernels * start / 2 + memory("high")
    return central, min(low, central), _HOST.high * host + 2 * done.kernels * start + memory("low")


def by_traffic(settings: CompressionSettings, buckets: Sequence[Shapes], workers: int, device: Device) -> Coding:
    """Return what the hooks' passes over memory take on a GPU that nobody timed them on.

    Published kernels were up to 70 times slower (top-k on V100), so the slow end is a quarter beyond what was quoted of
    them, whichever GPU it is.
    """
    found = [[traffic_s(side, device) for side in work(settings, shapes, workers)] for shapes in buckets]
    central, low, high = (sum(side[i] for pair in found for side in pair) for i in range(3))
    nbytes = 4.0 * sum(prod(shape) for shapes in buckets for shape in shapes)
    quoted = _BEYOND * nbytes * sum(1e-9 / rate.value for rate in rates(settings, workers, cpu=False))
    why = (
        f"passes of the hook over memory at {device.short}'s bandwidth and its launches; low with the host ahead, high "
        "as slow as published kernels on V100"
    )
    return Coding(
        how=TRAFFIC,
        seconds=[(encode[0], decode[0]) for encode, decode in found],
        off=Prior(1.0, low / central if central else 1.0, max(high, quoted) / central if central else 1.0, why=why),
    )
