"""float32 products and vector operators on GPUs that were never measured: physics outside, small nets inside.

What a device is enters through physics alone (peak, bandwidth, SMs, memory, power), what a shape is through nets that
never see the device, so that nothing is extrapolated over devices. With F the FLOPs and V the bytes of a product

    tc = F / (peak * issue * s(o1)),   tm = V / (bandwidth * dram * s(o2)),   t = max(tc, tm, energy / power budget)

where (o1, o2) come from blocks per SM, the last wave, the padding of tiles and the dimensions. A vector operator takes
V / (bandwidth * dram * s(o)), with o from its size, its width and its kind. The form is that of NeuSight (ASPLOS 2025,
section 4: utilisation under a roofline, with tiles and waves), without its device inputs.

Times are of the device alone: what a stream of queued kernels pays. Measured one by one, a kernel takes longer, because
the clock runs while the host launches it (`benchmarks/isolated.py`).

80 % ranges are what the model missed by on devices that it had not seen in training: every training device is left out
once and predicted by nets that never saw it. The residuals log(true / said) are kept by group of operators and by
predicted time, every device with the same weight, and their 10 % and 90 % quantiles are the range. The spread of nets
with different seeds says nothing here: they agree on the same wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.hardware.devices import Device

WEIGHTS = "fp32.npz"
FACTS = "fp32.json"
TILE = 128  # output rows and columns of the tile that waves are counted with
ENERGY_TILE = 64  # rows and columns up to which a padded tile is computed, and paid for in energy
SHARPNESS = 24.0  # of the smooth maximum of compute, memory and power
COMPUTE_BIAS, MEMORY_BIAS = 1.4, 1.0  # a net that says nothing stands for 80 % and 73 % of the peaks
VECTOR_OPS = ("add", "addu", "mul", "mulu", "div", "divu", "pow", "powu", "relu", "gelu", "tanh", "softmax", "ln")
ROW_OPS = ("softmax", "ln")  # their time depends on the width of a row, not on the size alone
DRAM = ("HBM", "GDDR", "HBM of Pascal")
GROUPS = ("bmm", "linear", "elementwise", "rows")
REGIMES_S = (1e-4, 1e-3)  # predicted seconds: below the first the host matters, above the last power

# Joules per FLOP that a product takes at the limit of its board. Pascal and Volta/Turing from sustained products of the
# training GPUs; newer ones scaled by what the foundries say of their nodes, unconfirmed.
_PJ_PER_FLOP = {"Pascal": 20.0, "Volta": 18.0, "Turing": 18.0, "Ampere GA100": 9.9, "Ampere": 12.0, "Ada": 6.6,
                "Hopper": 6.6, "Blackwell": 6.6}  # fmt: skip
# Whose kernels run: products of Pascal are "maxwell_sgemm", of Volta and Turing "volta_sgemm", then "ampere_sgemm".
GENERATIONS = (("Pascal",), ("Volta", "Turing"), ("Ampere", "Ada", "Hopper", "Blackwell"))
_GDDR = ("Pascal GP104", "Turing", "Ampere GA102", "Ada", "Blackwell GB202")
# 128 float32 lanes per SM under four schedulers of one instruction per cycle: what is no multiply-add (loads from
# shared memory and addresses, about 6 per 64) takes its slot. 64 lanes, or dual issue, leave slots free.
_SINGLE_ISSUE = ("Ampere GA102", "Ada", "Hopper", "Blackwell")
_ISSUE = 64 / 70


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardFeatures:
    """What the model needs to know of a device."""

    name: str
    peak_flops: float
    bytes_per_s: float
    sms: int
    dram: int  # index into DRAM
    issue: float  # share of issue slots left to multiply-adds
    joule_per_flop: float
    tdp_w: float
    generation: int  # index into GENERATIONS

    @property
    def budget_w(self) -> float:
        """Power left to computing: 97 % of the board's limit, less what it draws when idle."""
        return max(0.97 * self.tdp_w - (10.0 if self.tdp_w < 100 else 30.0), 1.0)

    @property
    def streaming_w(self) -> float:
        """Power above idle while memory is the limit: boards then draw about 70 % of their limit (assumed)."""
        return self.budget_w - 0.27 * self.tdp_w


def board(device: Device) -> BoardFeatures | None:
    """Return the board of a device; None where it is of a kind that the model says nothing about."""
    if device.vendor != "NVIDIA" or not (device.fp32_tflops and device.memory_gb_s and device.sms and device.tdp_w):
        return None
    energy = next((pj for arch, pj in _PJ_PER_FLOP.items() if device.arch.startswith(arch)), None)
    if energy is None:
        return None
    gddr = device.arch.startswith(_GDDR)
    return BoardFeatures(
        name=device.short,
        peak_flops=device.fp32_tflops * 1e12,
        bytes_per_s=device.memory_gb_s * 1e9,
        sms=device.sms,
        dram=1 if gddr else 2 if device.arch.startswith("Pascal") else 0,
        issue=_ISSUE if device.arch.startswith(_SINGLE_ISSUE) else 1.0,
        joule_per_flop=energy * 1e-12,
        tdp_w=device.tdp_w,
        generation=next(i for i, names in enumerate(GENERATIONS) if device.arch.startswith(names)),
    )


def product_features(b: Float64, m: Float64, k: Float64, n: Float64, linear: Float64, sms: Float64 | float) -> Float32:
    """Return [rows, 7] for b products of [m x k] by [k x n] (k summed over) on `sms` multiprocessors."""
    rows, columns = np.ceil(m / TILE), np.ceil(n / TILE)
    waves = b * rows * columns / sms
    log_waves = np.log2(waves)
    last = np.clip(np.log2(np.ceil(waves)) - log_waves, 0.0, 6.0)
    log_m, log_n = np.log2(m), np.log2(n)
    padding = np.log2(rows * columns * TILE**2) - log_m - log_n
    found = np.empty((len(m), 7), dtype=np.float32)
    for i, column in enumerate((log_waves, last, np.log2(k), padding, linear, log_m, log_n)):
        found[:, i] = column
    return found


def vector_features(op: npt.NDArray[np.integer], rows: Float64, width: Float64) -> Float32:
    """Return [rows, 2 + operators]: size; width where the operator works on rows; which operator (index into
    VECTOR_OPS).
    """
    of_rows = op >= len(VECTOR_OPS) - len(ROW_OPS)
    found = np.zeros((len(op), 2 + len(VECTOR_OPS)), dtype=np.float32)
    found[:, 0] = np.log2(np.maximum(rows * width, 1.0))
    found[:, 1] = np.where(of_rows, np.log2(np.maximum(width, 1.0)), 0.0)
    found[np.arange(len(op)), 2 + op] = 1.0
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp32:
    """The trained model. Times in seconds, energies in joules above idle, one per row."""

    product: Ensemble
    vector: Ensemble
    product_offset: Float64  # [generations, 2]: efficiency of each kernel library against the newest
    product_dram: Float64  # log of the share of the bandwidth that each kind of memory gives (DRAM)
    vector_dram: Float64
    facts: Mapping[str, Any]  # what `train_predictor.py` wrote beside the weights

    def product_s(
        self, b: Float64, m: Float64, k: Float64, n: Float64, linear: Float64, on: BoardFeatures
    ) -> tuple[Float64, Float64]:
        """Return (seconds with all power one wants, joules) of products."""
        out = self.product(product_features(b, m, k, n, linear, on.sms)).astype(np.float64)
        out += self.product_offset[on.generation]
        flops = 2.0 * b * m * k * n
        compute = np.log(flops / (on.peak_flops * on.issue)) - log_sigmoid(out[:, 0] + COMPUTE_BIAS)
        nbytes = 4.0 * b * (m * n + k * (m + n))
        share = self.product_dram[on.dram]
        memory = np.log(nbytes / on.bytes_per_s) - log_sigmoid(out[:, 1] + MEMORY_BIAS) - share
        padded = 2.0 * b * k * ENERGY_TILE**2 * np.ceil(m / ENERGY_TILE) * np.ceil(n / ENERGY_TILE)
        return np.exp(smooth_maximum(compute, memory, SHARPNESS)), padded * on.joule_per_flop

    def vector_s(
        self, op: npt.NDArray[np.integer], rows: Float64, width: Float64, nbytes: Float64, on: BoardFeatures
    ) -> tuple[Float64, Float64]:
        """Return (seconds, joules) of vector operators that move `nbytes`."""
        out = self.vector(vector_features(op, rows, width))[:, 0].astype(np.float64)
        share = log_sigmoid(out) + np.log(2.0) + self.vector_dram[on.dram]
        seconds = nbytes / on.bytes_per_s * np.exp(-share)
        return seconds, seconds * on.streaming_w

    def sustained_s(self, seconds: Float64, joules: Float64, on: BoardFeatures) -> Float64:
        """Return seconds of a kernel that runs for long: not faster than its energy over the power budget."""
        return np.exp(smooth_maximum(np.log(seconds), np.log(joules / on.budget_w), SHARPNESS))


def regimes(seconds: Float64) -> npt.NDArray[np.int64]:
    """Return which regime each prediction falls into (n)."""
    return np.searchsorted(np.array(REGIMES_S), seconds, side="right").astype(np.int64)


def factors(
    of: Sequence[Sequence[Sequence[float]]], group: npt.NDArray[np.int64], seconds: Float64
) -> tuple[Float64, Float64]:
    """Return (low, high) factors on predictions of these groups and seconds (n each)."""
    values = np.asarray(of, dtype=np.float64)[group, regimes(seconds)]
    return values[:, 0], values[:, 1]


def smooth_maximum(x: Float64, y: Float64, sharpness: float) -> Float64:
    """Return (e^(px) + e^(py))^(1/p) as a logarithm: the maximum, rounded where both are close."""
    return np.asarray(np.logaddexp(sharpness * x, sharpness * y) / sharpness)


def of_arrays(arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> Fp32:
    """Return the model from what `train_predictor.py` stores; raises KeyError where an array is missing."""
    wide = {key: np.asarray(value, dtype=np.float64) for key, value in arrays.items()}
    return Fp32(
        product=Ensemble.of(wide, "product"),
        vector=Ensemble.of(wide, "vector"),
        product_offset=wide["product.offset"],
        product_dram=wide["product.dram"],
        vector_dram=wide["vector.dram"],
        facts=facts,
    )


def stored() -> tuple[dict[str, npt.NDArray[Any]], Mapping[str, Any]]:
    """Return (arrays, facts) that come with the package."""
    folder = files("foretrace.cost.devices.learned")
    facts = json.loads(folder.joinpath(FACTS).read_text(encoding="utf-8"))
    with np.load(BytesIO(folder.joinpath(WEIGHTS).read_bytes())) as arrays:
        return dict(arrays), facts


@cache
def shipped() -> Fp32:
    """Return the model whose weights come with the package."""
    return of_arrays(*stored())


Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_BLOCK = 1024  # rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ensemble:
    """Nets of one shape with two hidden layers, whose outputs are averaged.

    The hidden function is SiLU, x / (1 + exp(-x)), computed as u (1 + tanh u) with u = x / 2: weights and biases of
    hidden layers are stored halved, so that a layer gives u.
    """

    first: Float32  # [inputs, nets * width]
    first_bias: Float32  # [nets * width]
    hidden: Float32  # [nets, width, width]
    hidden_bias: Float32  # [nets * width]
    last: Float32  # [nets * width, outputs], divided by the number of nets
    last_bias: Float32  # [outputs], the mean of all nets

    @property
    def nets(self) -> int:
        """How many nets are averaged."""
        return len(self.hidden)

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[np.floating]], prefix: str) -> Ensemble:
        """Make it from arrays as `train_predictor.py` stores them: w0 [nets, in, width], b0, w1, b1, w2, b2, mean, std.

        Raises KeyError where one is missing.
        """
        w0, b0, w1, b1, w2, b2, mean, std = (
            np.asarray(arrays[f"{prefix}.{name}"], dtype=np.float64)
            for name in ("w0", "b0", "w1", "b1", "w2", "b2", "mean", "std")
        )
        nets, inputs, width = w0.shape
        scaled = w0 / std[None, :, None]
        shift = b0 - np.einsum("i,niw->nw", mean, scaled)
        return cls(
            first=np.ascontiguousarray(scaled.transpose(1, 0, 2).reshape(inputs, nets * width) / 2, dtype=np.float32),
            first_bias=(shift.reshape(-1) / 2).astype(np.float32),
            hidden=(w1 / 2).astype(np.float32),
            hidden_bias=(b1.reshape(-1) / 2).astype(np.float32),
            last=(w2.reshape(nets * width, -1) / nets).astype(np.float32),
            last_bias=b2.mean(axis=0).astype(np.float32),
        )

    def __call__(self, features: Float32) -> Float32:
        """Return mean outputs [rows, outputs] for features [rows, inputs]."""
        out = np.empty((len(features), self.last.shape[1]), dtype=np.float32)
        nets, width = self.nets, self.hidden.shape[1]
        space = np.empty((3, min(_BLOCK, len(features)), nets * width), dtype=np.float32)
        for begin in range(0, len(features), _BLOCK):
            rows = features[begin : begin + _BLOCK]
            x, y, gate = space[:, : len(rows)]
            np.matmul(rows, self.first, out=x)
            x += self.first_bias
            _silu(x, gate)
            for net in range(nets):
                at = slice(net * width, (net + 1) * width)
                np.matmul(x[:, at], self.hidden[net], out=y[:, at])
            y += self.hidden_bias
            _silu(y, gate)
            np.matmul(y, self.last, out=out[begin : begin + _BLOCK])
        out += self.last_bias
        return out


def _silu(half: Float32, gate: Float32) -> None:
    """Compute SiLU of twice `half`, in place; `gate` is scratch of the same shape."""
    np.tanh(half, out=gate)
    gate += 1.0
    half *= gate


def log_sigmoid(x: Float64) -> Float64:
    """Return the logarithm of 1 / (1 + exp(-x)), without overflow."""
    return np.asarray(-np.logaddexp(0.0, -x))
