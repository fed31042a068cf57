"""What utilisation is good for inside a space of networks with measured latencies.

The second half of Kosaian and Phanishayee, A Study on the GPU Utilisation of CNN Inference: how utilisation goes along
with latency, FLOPs and cost, and whether a search may be guided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.plaintext import whole_number

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

STRATEGIES = ("random", "FLOPs", "utilisation")
_BUDGETS = tuple(np.arange(0.1, 0.91, 0.1).round(1).tolist())  # quantiles of the latency
_LIKE = 0.02  # networks of "equal" FLOPs lie so far apart, in logarithms


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a device can do at most. `source` says where that is from."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on FLOPs bound a kernel (compute-to-memory ratio)."""
        return self.flops_per_s / self.bytes_per_s


# Devices of the published latencies; most are in no catalog of accelerators. Correlations do not depend on the figures.
_MEASURED_ON = {
    "1080ti": Ceilings(name="GTX 1080 Ti", flops_per_s=11.34e12, bytes_per_s=484e9, source="vendor, boost clock"),
    "2080ti": Ceilings(name="RTX 2080 Ti", flops_per_s=13.45e12, bytes_per_s=616e9, source="vendor, boost clock"),
    "titan_rtx": Ceilings(name="Titan RTX", flops_per_s=16.31e12, bytes_per_s=672e9, source="vendor, boost clock"),
    "raspi4": Ceilings(
        name="Raspberry Pi 4", flops_per_s=48e9, bytes_per_s=12.8e9, source="4 cores x 1.5 GHz x 8; LPDDR4-3200"
    ),
}  # fmt: skip


def column(name: str) -> tuple[Ceilings, int]:
    """Device and batch of a column of latencies, e.g. "2080ti_256"; a device without suffix ran one image.

    Raises ForetraceError for devices that are not known here.
    """
    device, _, batch = name.rpartition("_")
    size = whole_number(batch)
    if size is None or not device:
        device, size = name, 1
    if device not in _MEASURED_ON:
        raise ForetraceError(
            f"column {name!r} names no known device; columns are {', '.join(_MEASURED_ON)} and _batch."
        )
    return _MEASURED_ON[device], size


@dataclass(frozen=True, kw_only=True, eq=False)
class Networks:
    """Networks of a space and what they compute for one image (n rows)."""

    flops: Float64
    nbytes: Mapping[int, Float64]  # batch -> bytes of products
    kernels: Float64  # operators of a forward pass
    latencies_s: Mapping[str, Float64]  # column -> seconds of a batch

    def __len__(self) -> int:
        return len(self.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A strategy: FLOPs lost against the best network within the same latency, on average over budgets and draws."""

    strategy: str
    regret: float  # mean share of the best network's FLOPs that is lost
    worst: float  # over budgets, mean over draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One device and batch."""

    name: str
    peaks: Ceilings
    batch: int
    utilisation: tuple[float, float, float]  # 10th, 50th, 90th percentile over networks
    highest: float
    left_out: int  # networks above the peak, which were mis-measured
    spread: float  # of utilisation at equal FLOPs: 90th over 10th percentile, median over groups
    with_latency: float  # rank correlation of utilisation
    with_flops: float
    with_intensity: float
    flops_with_latency: float
    below_ridge: float  # share of networks whose aggregate intensity is below the ridge
    searches: tuple[Search, ...]


@dataclass(frozen=True, kw_only=True)
class Study:
    """The study's second half on one space."""

    networks: int
    columns: tuple[Column, ...]
    between: Mapping[str, Mapping[str, float]]  # rank correlation of latency between columns
    measured: int  # networks that a search measures
    inferred: tuple[str, ...]


def ranks(values: Float64) -> Float64:
    """Ranks from 0, ties shared (n rows)."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    before = np.cumsum(count) - count
    return np.asarray((before + (count - 1) / 2)[place], dtype=np.float64)


def rank_correlation(a: Float64, b: Float64) -> float:
    """Spearman's; NaN where one of them is constant."""
    return _correlation(ranks(a), ranks(b))


def _correlation(x: Float64, y: Float64) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / size) if size else float("nan")


def study(
    networks: Networks,
    *,
    measured: int = 100,
    draws: int = 20,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Study:
    """All figures. A search may measure `measured` networks; it is repeated `draws` times with other first ones.

    Raises ForetraceError where there are fewer networks than a search needs.
    """
    if len(networks) < 4 * measured or measured < 20:
        raise ForetraceError(
            f"{len(networks)} networks and {measured} measurements are no search; measure 20 or more, and at most a "
            "quarter of the space."
        )
    columns = []
    for name in networks.latencies_s:
        columns.append(_column(networks, name, measured, draws, seed))
        if progress is not None:
            progress(len(columns) / len(networks.latencies_s))
    ranked = {name: ranks(latency) for name, latency in networks.latencies_s.items()}
    return Study(
        networks=len(networks),
        columns=tuple(columns),
        between={a: {b: _correlation(x, y) for b, y in ranked.items()} for a, x in ranked.items()},
        measured=measured,
        inferred=tuple(_inferred(columns)),
    )


def _column(networks: Networks, name: str, measured: int, draws: int, seed: int) -> Column:
    peaks, batch = column(name)
    possible = networks.flops * batch <= networks.latencies_s[name] * peaks.flops_per_s
    left_out = int((~possible).sum())
    networks = subset(networks, np.flatnonzero(possible))
    if len(networks) < 4 * measured:
        raise ForetraceError(
            f"column {name!r}: {left_out} networks would be above the peak of {peaks.name}; check that it is in ms per "
            "batch."
        )
    latency = networks.latencies_s[name]
    work = networks.flops * batch
    share = work / latency / peaks.flops_per_s
    intensity = work / networks.nbytes[batch]
    groups = _alike(networks.flops)
    inside = [np.quantile(share[rows], (0.1, 0.9)) for rows in groups]
    low, middle, high = np.quantile(share, (0.1, 0.5, 0.9)).tolist()
    return Column(
        name=name,
        peaks=peaks,
        batch=batch,
        utilisation=(low, middle, high),
        highest=float(share.max()),
        left_out=left_out,
        spread=float(np.median([b / a for a, b in inside])) if inside else float("nan"),
        with_latency=rank_correlation(share, latency),
        with_flops=rank_correlation(share, networks.flops),
        with_intensity=rank_correlation(share, intensity),
        flops_with_latency=rank_correlation(networks.flops, latency),
        below_ridge=float((intensity < peaks.ridge).mean()),
        searches=_searches(networks, latency, batch, peaks, measured, draws, seed),
    )


def _alike(flops: Float64) -> list[Int64]:
    """Rows of networks of nearly equal FLOPs, groups of 20 and more."""
    bins = np.floor(np.log(flops) / _LIKE).astype(np.int64)
    order = np.argsort(bins, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(bins[order])) + 1)
    return [part for part in parts if len(part) >= 20]


def _searches(
    networks: Networks, latency: Float64, batch: int, peaks: Ceilings, measured: int, draws: int, seed: int
) -> tuple[Search, ...]:
    """FLOPs lost by each way to choose the `measured` networks.

    For every latency budget, the network with most FLOPs within it is wanted; FLOPs stand for capacity, as the data has
    no accuracies. Half of the measurements are spent on random networks, from which the strategy learns; the other half
    on those networks with most FLOPs that it believes to keep the budget. The answer is the best of what was measured.
    """
    half = measured // 2
    work = networks.flops * batch
    features = {
        "FLOPs": np.stack([np.ones(len(work)), np.log(work)], axis=1),
        # What bounds a network beside its FLOPs: bytes, and how many kernels its work is cut into.
        "utilisation": np.stack(
            [np.ones(len(work)), np.log(work), np.log(networks.nbytes[batch]), np.log(networks.kernels)], axis=1
        ),
    }
    budgets = np.quantile(latency, _BUDGETS)
    largest_first = np.argsort(-networks.flops, kind="stable")
    best = np.array([networks.flops[latency <= budget].max() for budget in budgets])
    lost: dict[str, list[Float64]] = {name: [] for name in STRATEGIES}
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        first = rng.choice(len(work), measured, replace=False)
        for name in STRATEGIES:
            row = np.zeros(len(budgets))
            believed = None
            if name != "random":
                x, seen = features[name], first[:half]
                share = work[seen] / latency[seen] / peaks.flops_per_s
                # Latency by way of utilisation: FLOPs over (utilisation x peak); with FLOPs alone as its only cause,
                # utilisation is what the size of a network predicts.
                weights = np.linalg.lstsq(x[seen], np.log(share), rcond=None)[0]
                believed = work / (np.exp(x @ weights) * peaks.flops_per_s)
            for i, budget in enumerate(budgets):
                tried = first
                if believed is not None:
                    fit = largest_first[believed[largest_first] <= budget][:half]
                    tried = np.concatenate([first[:half], fit])
                good = tried[latency[tried] <= budget]
                row[i] = 1 - (networks.flops[good].max() if len(good) else 0.0) / best[i]
            lost[name].append(row)
    means = {name: np.mean(rows, axis=0) for name, rows in lost.items()}
    return tuple(Search(strategy=n, regret=float(m.mean()), worst=float(m.max())) for n, m in means.items())


def _inferred(columns: Sequence[Column]) -> list[str]:
    """What the files do not say and the figures suggest."""
    found = []
    large = [each for each in columns if each.batch > 1]
    if large:
        top = max(large, key=lambda each: each.highest)
        found.append(
            "a latency at batch 32 or 256 is taken for the time of the whole batch, which the file does not say: read "
            f"so, the best network is at {top.highest:.0%} of the peak ({top.name}) and FLOPs go along with latency; "
            f"read as the time of one image, it would be at {top.highest / top.batch:.2%}."
        )
    found += [
        f"{each.name}: {each.left_out} networks are faster than the device's peak allows and were left out."
        for each in columns
        if each.left_out
    ]
    found.append("utilisation is in 32-bit arithmetic: the files do not say in which precision the networks ran.")
    return found


def subset(networks: Networks, rows: Int64) -> Networks:
    """These networks alone."""
    return replace(
        networks,
        flops=networks.flops[rows],
        nbytes={batch: column[rows] for batch, column in networks.nbytes.items()},
        kernels=networks.kernels[rows],
        latencies_s={name: column[rows] for name, column in networks.latencies_s.items()},
    )
