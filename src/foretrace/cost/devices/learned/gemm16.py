"""16-bit products (fp16, bf16) on GPUs: measured ones by a net on top of a law, others by the law and their data sheet.

    model = Gemm16.load()
    model.seconds(named("h100-sxm5-80gb"), m=[4096], n=[4096], k=[4096])
    m, n, k = model.choose(device, 50)           # the products to measure there
    model.few_shot(device, m, n, k, seconds)     # a model that knows what they took

For a GPU that was measured in full (`model.known`) the law is fitted to it and two small nets correct what it leaves.
For any other the median of several laws counts: the one that all measured GPUs share and each family's own, with the
data sheet of the new GPU put in; a few measurements move it by a Gaussian process (`gemm16_shift`). Ranges come from
leaving families of GPUs out (unknown GPUs) or shapes out (known ones), never from the spread of several nets.
`benchmarks/train_gemm16.py` makes the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretrace.cost.calls import Calls, Family, Precision
from foretrace.cost.devices.learned import gemm16_shift
from foretrace.cost.devices.learned.gemm16_law import Chip, Floats, Singles, apart, seconds
from foretrace.cost.devices.learned.gemm16_shift import Belief, LawShift, Places
from foretrace.cost.devices.roofline import peak_flops
from foretrace.cost.model import CostModel, Prediction
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import Device

EDGES_S = (10e-6, 100e-6)  # of predicted time, between which a range holds
_TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
_MEASURED = ((1, 32768), (32, 65536), (32, 65536))  # m, n, k of the measurements; corrections end there
_BLOCK = 2048
_BATCHED = 1.5  # batched products were not measured: their range is this much wider, in logarithms
_FOREIGN = 2.0  # and so are all products of other vendors' devices
_LEAST_TIMES = 2
_ROOM = 0.5  # of a GPU's memory that the matrices of a product to be measured may take


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredGpu:
    """A GPU that was measured in full: the law fitted to it, and the nets that correct the law; their mean counts."""

    theta: Mapping[str, float]
    weights: tuple[tuple[Singles, Singles], ...]  # [nets, inputs, outputs], [nets, outputs]; see _folded
    low: Floats  # factors of the 80 % range per part between EDGES_S
    high: Floats

    def seconds(self, chip: Chip, m: Floats, n: Floats, k: Floats, b: Floats | None) -> Floats:
        """Return the law times its correction; outside of what was measured, the correction of the nearest edge."""
        found = seconds(self.theta, chip, m, n, k, b)
        at = [np.clip(x, *edges) for x, edges in zip((m, n, k), _MEASURED, strict=True)]
        same = b is None and all(np.array_equal(x, y) for x, y in zip(at, (m, n, k), strict=True))
        law = found if same else seconds(self.theta, chip, *at)
        factor = np.empty(len(m), np.float32)
        for start in range(0, len(m), _BLOCK):
            rows = slice(start, start + _BLOCK)
            factor[rows] = self._correction(features(law[rows], chip, *(x[rows] for x in at)))
        return np.asarray(found * np.exp(factor))

    def _correction(self, inputs: Singles) -> Singles:
        """Return the logarithm of the factor on the law, for features [inputs x rows]."""
        total = np.zeros(inputs.shape[1], np.float32)
        for net in range(len(self.weights[0][0])):
            x = inputs
            for weight, least in self.weights[:-1]:
                x = weight[net].T @ x
                np.maximum(x, least[net, :, None], out=x)
            weight, bias = self.weights[-1]
            total += weight[net, :, 0] @ x + bias[net, 0]
        return np.asarray(np.clip(total / len(self.weights[0][0]), -1.5, 1.5))


@dataclass(frozen=True, kw_only=True, eq=False)
class Gemm16(CostModel):
    """Seconds of 16-bit products on any GPU whose data sheet is known."""

    name: str = "learned"
    theta: Mapping[str, float]  # the law that all measured GPUs share
    laws: tuple[Mapping[str, float], ...]  # and that of each of their families
    belief: Belief  # what a measured product says of others
    pool: NDArray[np.int64]  # [products, 3]: m, n, k of those that may be chosen to be measured
    low: Floats  # [numbers of measurements x parts]: factors of the 80 % range on a GPU that was not measured in full
    high: Floats
    counts: tuple[int, ...]  # the numbers of measurements of these rows, first 0
    trained_on: tuple[str, ...]
    traits: Floats  # [GPUs of these, traits], see `gemm16_law.Chip`
    reach: float  # how far GPUs were from those that predicted them where the ranges were found
    known: Mapping[str, MeasuredGpu]  # by the catalog's short name
    adapted: Mapping[str, LawShift] = field(default_factory=dict)  # by the same name

    @classmethod
    def load(cls, path: Path | None = None) -> Gemm16:
        """Return the shipped weights, or those of a file that `benchmarks/train_gemm16.py` wrote."""
        return _shipped() if path is None else _read(path)

    def seconds(self, device: Device, m: ArrayLike, n: ArrayLike, k: ArrayLike, b: ArrayLike | None = None) -> Floats:
        """Return seconds of products [m x k] by [k x n] (`b` of them each, if given) on a device.

        Raises ForetraceError if the device's data sheet lacks a 16-bit peak, bandwidth or number of SMs, or a dimension
        is not a finite number of at least 1.
        """
        rows, columns, height, times = _dimensions(m, n, k, b)
        chip = Chip.of(device)
        if device.short in self.adapted:
            shift = self.adapted[device.short]
            middle, places, shared = self._places(chip, rows, columns, height, times)
            by_law = np.log(seconds(shift.law, chip, rows, columns, height, times)) - shared
            return np.asarray(np.exp(middle + shift.of(self.belief, places, by_law)))
        if device.short in self.known:
            return self.known[device.short].seconds(chip, rows, columns, height, times)
        return np.exp(gemm16_shift.expected((self.theta, *self.laws), chip, rows, columns, height, times)[0])

    def predict(self, calls: Calls, device: Device) -> Prediction:
        """Return products of 16-bit numbers; NaN for other calls, where the device has no units for them, and for all
        where the data sheet does not suffice.
        """
        least = peak_flops(device, Precision.FP32)
        half = [each for each in (Precision.FP16, Precision.BF16) if peak_flops(device, each) > least]
        mine = (calls.family == Family.GEMM) & np.isin(calls.precision, half)
        mine &= np.minimum(np.minimum(calls.b, calls.m), np.minimum(calls.n, calls.k)) >= 1
        found = np.full(len(calls), np.nan)
        low, high = np.ones(len(calls)), np.ones(len(calls))
        at = np.flatnonzero(mine)
        try:
            found[at] = self.seconds(device, calls.m[at], calls.n[at], calls.k[at], calls.b[at])
        except ForetraceError as error:
            return self._answer(found, low, high, str(error))
        low[at], high[at] = self.factors(device, found[at], calls.b[at])
        return self._answer(found, low, high, self.why(device))

    def factors(
        self, device: Device, predicted_s: Floats, b: Floats | None = None, *, count: int | None = None
    ) -> tuple[Floats, Floats]:
        """Return factors of the 80 % range on predicted times; `count` in place of how many products were measured."""
        part = np.digitize(predicted_s, EDGES_S)
        if device.short in self.known and device.short not in self.adapted:
            low, high = np.log(self.known[device.short].low), np.log(self.known[device.short].high)
        else:
            if count is None:
                count = self.adapted[device.short].count if device.short in self.adapted else 0
            at = min(count, self.counts[-1])
            low, high = (
                np.array([np.interp(at, self.counts, np.log(column)) for column in table.T])
                for table in (self.low, self.high)
            )
        wide = np.full(len(part), 1.0 if device.vendor == "NVIDIA" else _FOREIGN)
        wide *= max(1.0, apart(Chip.of(device).traits, self.traits) / self.reach)
        if b is not None:
            wide = np.where(b > 1, wide * _BATCHED, wide)
        return np.exp(low[part] * wide), np.exp(high[part] * wide)

    def few_shot(self, device: Device, m: ArrayLike, n: ArrayLike, k: ArrayLike, measured_s: ArrayLike) -> Gemm16:
        """Return a model that knows a few products measured on `device`; `choose` says which ones are worth it.

        Raises ForetraceError if fewer than two were measured, or a time is not above 0.
        """
        rows, columns, height, _ = _dimensions(m, n, k, None)
        times = np.atleast_1d(np.asarray(measured_s, np.float64))
        if times.shape != rows.shape or not (np.isfinite(times) & (times > 0)).all():
            raise ForetraceError(
                f"{len(rows)} products were measured but the times are not as many finite numbers above 0; give one "
                "time in seconds per product."
            )
        if len(times) < _LEAST_TIMES:
            raise ForetraceError(f"{len(times)} measured product is too few to adapt to; measure at least two.")
        chip = Chip.of(device)
        middle, places, _ = self._places(chip, rows, columns, height, None)
        residual = np.log(times) - middle
        shift = gemm16_shift.learn(self.belief, self.theta, chip, rows, columns, height, places, residual)
        return replace(self, adapted={**self.adapted, device.short: shift})

    def choose(self, device: Device, count: int, among: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the `count` products to measure on a device that was not measured, [products, 3]: m, n, k.

        They come in the order in which they are worth it, so the first few are the choice of fewer. `among`: other
        candidates, [n, 3], than those that fit the device's memory. Raises ForetraceError if its data sheet does not
        suffice or a size is below 1.
        """
        pool = np.asarray(self.pool if among is None else among, np.float64).reshape(-1, 3)
        if among is None and device.memory_gb:
            m, n, k = pool.T
            pool = pool[2 * (m * n + n * k + m * k) < _ROOM * device.memory_gb * 1e9]
        rows, columns, height, _ = _dimensions(pool[:, 0], pool[:, 1], pool[:, 2], None)
        chip = Chip.of(device)
        _, places, _ = self._places(chip, rows, columns, height, None)
        steep = gemm16_shift.slopes(self.theta, self.belief.names, chip, rows, columns, height)
        return pool[gemm16_shift.choose(self.belief, places, steep, count)].astype(np.int64)

    def _places(
        self, chip: Chip, m: Floats, n: Floats, k: Floats, b: Floats | None
    ) -> tuple[Floats, Places, Floats]:  # fmt: skip
        """Return the logarithm of the expected time, where products stand, and logarithm of what the shared
        law says.
        """
        middle, beside = gemm16_shift.expected((self.theta, *self.laws), chip, m, n, k, b)
        seen = features(np.exp(middle), chip, m, n, k)
        places = gemm16_shift.places_of(self.belief, chip, m, n, k, b, middle, beside, seen)
        return middle, places, middle + beside[:, 0]

    def why(self, device: Device) -> str:
        """Return one sentence on where the numbers come from."""
        if device.short in self.adapted:
            return (
                f"16-bit products: laws of tiles and waves from {', '.join(self.trained_on)}, shifted to "
                f"{self.adapted[device.short].count} products measured on {device.name}."
            )
        if device.short in self.known:
            return f"16-bit products: fitted to products measured on {device.name}."
        guessed = Chip.of(device).guessed
        return (
            f"16-bit products: laws of tiles and waves from {', '.join(self.trained_on)} and the data sheet of "
            f"{device.name}, where nothing was measured"
            + (f"; its {' and '.join(guessed)} {'are' if len(guessed) > 1 else 'is'} not known and was taken as usual."
               if guessed else ".")
        )  # fmt: skip


def features(law_s: Floats, chip: Chip, m: Floats, n: Floats, k: Floats) -> Singles:
    """Return what the nets of a known GPU see of products, [inputs x rows]: sizes, waves for six tiles, the law's
    answer.
    """
    law = np.log2(law_s * 1e6).astype(np.float32)
    return _columns(law, chip, *(np.asarray(x, np.float32) for x in (m, n, k)))


def _columns(law: Singles, chip: Chip, m: Singles, n: Singles, k: Singles) -> Singles:
    read = np.log2(m * n + n * k + m * k)
    log_m, log_n, log_k = np.log2(m), np.log2(n), np.log2(k)
    single = m == 1
    columns: list[NDArray[Any]] = [
        log_m, log_n, log_k, log_m + log_n + log_k - read, read, law, law - log_m - log_n - log_k, law - read,
        np.minimum(m, 32) / 16, m - 2 * np.floor(m / 2), single, m <= 16, m <= 32, m <= 64, n <= 64,
    ]  # fmt: skip
    rows, across = {a: np.ceil(m / a) for a in (32, 64, 128, 256)}, {c: np.ceil(n / c) for c in (64, 128, 256)}
    log_rows, log_across = ({side: np.log2(count) for side, count in each.items()} for each in (rows, across))
    for a, c in _TILES:
        log_waves = log_rows[a] + log_across[c] - np.float32(np.log2(chip.sms))
        whole = np.ceil(rows[a] * across[c] * np.float32(1 / chip.sms) - np.float32(1e-4))
        columns += [log_waves, np.minimum(np.log2(whole) - log_waves, 6), np.minimum(whole, 4) / 4]
    columns += [each + np.float32(np.log2(a)) - log_m for a, each in log_rows.items()]
    columns += [each + np.float32(np.log2(c)) - log_n for c, each in log_across.items()]
    out = np.empty((len(columns), len(m)), np.float32)
    for i, column in enumerate(columns):
        out[i] = column
    return out


def _dimensions(
    m: ArrayLike, n: ArrayLike, k: ArrayLike, b: ArrayLike | None
) -> tuple[Floats, Floats, Floats, Floats | None]:
    given = [np.atleast_1d(np.asarray(x, np.float64)) for x in (m, n, k, *(() if b is None else (b,)))]
    for name, column in zip("mnkb", given, strict=False):
        if column.ndim != 1 or column.shape != given[0].shape:
            raise ForetraceError(
                f"{name} has the shape {column.shape}, m {given[0].shape}; give columns of one length."
            )
        bad = np.flatnonzero(~(np.isfinite(column) & (column >= 1)))
        if len(bad):
            raise ForetraceError(
                f"{name} of product {bad[0]} is {column[bad[0]]:g}; dimensions are finite numbers of at least 1."
            )
    return given[0], given[1], given[2], None if b is None or bool((given[3] == 1).all()) else given[3]


@cache
def _shipped() -> Gemm16:
    return _read(files("foretrace.cost.devices.learned").joinpath("gemm16.npz"))


def _read(path: Any) -> Gemm16:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        stored = {name: arrays[name] for name in arrays.files}
    try:
        names = [str(name) for name in stored["names"]]
        known = {}
        for short in (str(name) for name in stored["known"]):
            layers = range(int(stored[f"{short}.layers"]))
            known[short] = MeasuredGpu(
                theta=_named(names, stored[f"{short}.theta"]),
                weights=_folded([(stored[f"{short}.w{i}"], stored[f"{short}.b{i}"]) for i in layers]),
                low=stored[f"{short}.low"],
                high=stored[f"{short}.high"],
            )
        return Gemm16(
            theta=_named(names, stored["theta"]),
            laws=tuple(_named(names, each) for each in stored["laws"]),
            belief=Belief(
                names=tuple(names[i] for i in np.flatnonzero(stored["spread"] > 0)),
                spread=stored["spread"][stored["spread"] > 0],
                hyper=stored["hyper"],
                leaf=float(stored["leaf"]),
                edges=stored["edges"],
                cuts=stored["cuts"],
            ),
            pool=stored["pool"],
            low=stored["low"],
            high=stored["high"],
            counts=tuple(int(x) for x in stored["counts"]),
            trained_on=tuple(str(x) for x in stored["trained_on"]),
            traits=stored["traits"],
            reach=float(stored["reach"]),
            known=known,
        )
    except KeyError as error:
        raise ForetraceError(
            f"{path} lacks {error}; write it again with benchmarks/train_gemm16.py, or install foretrace again."
        ) from None


def _folded(layers: list[tuple[Singles, Singles]]) -> tuple[tuple[Singles, Singles], ...]:
    """Return layers that need one pass less: max(x + bias, 0) = max(x, -bias) + bias, and the bias moves to the next
    layer.

    So all layers but the last carry the least value of their outputs instead of a bias.
    """
    folded = []
    before = np.zeros((len(layers[0][0]), layers[0][0].shape[1]))
    for weight, bias in layers:
        whole = bias + np.einsum("ni,nio->no", before, weight.astype(np.float64))
        folded.append((weight, (-whole).astype(np.float32)))
        before = whole
    return (*folded[:-1], (layers[-1][0], before.astype(np.float32)))


def _named(names: list[str], values: NDArray[Any]) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))
