"""Whether measured collectives are what a machine should give: size by size, regime by regime, and what a miss is like.

Below some size latency decides what a collective takes, above another one the link; each miss looks like some mistakes
and not like others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from foretrace.cost.network.collective_table import CollectiveSeries
from foretrace.cost.network.link_network import LinkNetwork, ring_shape
from foretrace.cost.network.nccl import NcclNetwork
from foretrace.cost.network.network import Cost, Network, bus_share
from foretrace.hardware.cluster import Cluster
from foretrace.hardware.devices import Device, named

_ALMOST_FLAT = 1.5  # times the expected time of the smallest size: up to there latency decides
_NEAR_PEAK = 0.8  # of the largest expected bus bandwidth: from there on the link decides
_DIP = 0.9  # of the bus bandwidth at a smaller size: a change of protocol or algorithm
_ALIKE = 0.12  # two rates are the same within this


@dataclass(frozen=True, kw_only=True)
class CheckedSize:
    """One size. Bus bandwidths are GB/s (10^9 bytes)."""

    bytes: float
    regime: str  # latency, ramp, link
    measured_s: float
    expected_s: float
    expected_low_s: float
    expected_high_s: float
    measured_gb_s: float
    expected_gb_s: float
    verdict: str  # as expected, slower, faster
    protocol_switch: bool  # bus bandwidth falls here though the size grows


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Sizes that the same thing decides."""

    regime: str
    sizes: tuple[CheckedSize, ...]

    @property
    def from_bytes(self) -> float:
        """The smallest of them."""
        return self.sizes[0].bytes

    @property
    def to_bytes(self) -> float:
        """The largest of them."""
        return self.sizes[-1].bytes

    @property
    def ratio(self) -> float:
        """Median of measured over expected time."""
        return median(each.measured_s / each.expected_s for each in self.sizes)

    @property
    def verdict(self) -> str:
        """That of most of its sizes."""
        verdicts = [each.verdict for each in self.sizes]
        return max(("as expected", "slower", "faster"), key=verdicts.count)

    @property
    def best(self) -> CheckedSize:
        """The size with the largest bus bandwidth."""
        return max(self.sizes, key=lambda each: each.measured_gb_s)


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """What a miss looks like: `of` what there is, only `used` would give the rate."""

    cause: str  # "pcie", "cards", "other network", "oversubscription", "rings", "half", "faster", "late"
    used: int = 0
    of: int = 0


@dataclass(frozen=True, kw_only=True)
class NetworkCheck:
    """Measured times of one collective held against a network."""

    series: CollectiveSeries
    expected: Network

    @cached_property
    def sizes(self) -> tuple[CheckedSize, ...]:
        """Every size that was measured, smallest first."""
        series, expected = self.series, self.expected
        costs = [expected.cost(series.kind, size, workers=series.workers) for size in series.nbytes]
        factor = bus_share(series.kind, series.workers) / 1e9
        rates = [factor * size / cost.seconds for size, cost in zip(series.nbytes, costs, strict=True)]
        flat, peak = _ALMOST_FLAT * costs[0].seconds, _NEAR_PEAK * max(rates)
        found, best = [], 0.0
        for size, time_s, cost, expected_rate in zip(series.nbytes, series.seconds, costs, rates, strict=True):
            rate = factor * size / time_s
            found.append(
                CheckedSize(
                    bytes=size,
                    # With rates near the peak everywhere (large sizes only), all of them are bound by the link.
                    regime="link" if expected_rate >= peak else "latency" if cost.seconds <= flat else "ramp",
                    measured_s=time_s,
                    expected_s=cost.seconds,
                    expected_low_s=cost.low_s,
                    expected_high_s=cost.high_s,
                    measured_gb_s=rate,
                    expected_gb_s=expected_rate,
                    verdict=_verdict(time_s, cost),
                    protocol_switch=rate < _DIP * best,
                )
            )
            best = max(best, rate)
        return tuple(found)

    @cached_property
    def regimes(self) -> tuple[Regime, ...]:
        """Those that there are sizes of, in the order of sizes."""
        parts = {
            name: tuple(each for each in self.sizes if each.regime == name) for name in ("latency", "ramp", "link")
        }
        return tuple(Regime(regime=name, sizes=sizes) for name, sizes in parts.items() if sizes)

    @property
    def slower(self) -> tuple[Regime, ...]:
        """Regimes that are slower than expected."""
        return tuple(each for each in self.regimes if each.verdict == "slower")

    @property
    def steps(self) -> int:
        """Messages one after the other in the collective, at least one."""
        return max(ring_shape(self.series.kind, self.series.workers)[0], 1)

    @property
    def why(self) -> str:
        """Where the expected times come from."""
        return self.expected.cost(self.series.kind, self.series.nbytes[-1], workers=self.series.workers).why

    @cached_property
    def suspicions(self) -> tuple[Suspicion, ...]:
        """What the shape of a miss looks like; nothing where the link is as expected."""
        verdicts = {each.regime: each.verdict for each in self.regimes}
        found = list(self._slow_link()) if verdicts.get("link") == "slower" else []
        found += [Suspicion(cause="faster")] if verdicts.get("link") == "faster" else []
        return (*found, *([Suspicion(cause="late")] if verdicts.get("latency") == "slower" else []))

    @property
    def best(self) -> CheckedSize:
        """Of the sizes that the link decides, or else of the largest ones, that with the largest bus bandwidth."""
        return self.regimes[-1].best

    @property
    def cluster(self) -> Cluster | None:
        """What the expected times were given by, if it was a cluster."""
        return self.expected.cluster if isinstance(self.expected, LinkNetwork) else None

    @cached_property
    def device(self) -> Device | None:
        """The device that the network names, if it does."""
        name = self.expected.name.removeprefix("nccl:") if isinstance(self.expected, NcclNetwork) else ""
        name = self.cluster.device if self.cluster is not None else name
        return named(name) if name else None

    def _slow_link(self) -> Iterator[Suspicion]:
        measured, expected = self.best.measured_gb_s, self.best.expected_gb_s
        reached, explained = measured / expected, False
        device, cluster, nodes = self.device, self.cluster, self.series.nodes
        nvlink = cluster is not None and "NVLink" in cluster.inside.name
        nics = cluster.nics if cluster is not None else 1
        if isinstance(self.expected, NcclNetwork):
            nvlink, nics = self.expected.comm.link == "nvlink", self.expected.nics
        if nodes == 1 and nvlink and device is not None and measured <= device.pcie_gb_s < expected / 2:
            explained = True
            yield Suspicion(cause="pcie")
        if nodes > 1:
            if cards := _fewer(reached, nics):
                explained = True
                yield Suspicion(cause="cards", used=cards, of=nics)
            if reached < 0.3 and not explained:
                explained = True
                yield Suspicion(cause="other network")
            if cluster is not None and cluster.oversubscription == 1.0 and 0.3 <= reached < 0.7:
                yield Suspicion(cause="oversubscription")
        elif not explained and cluster is not None and cluster.wiring is not None:
            of = cluster.wiring.rings(self.series.workers)
            if rings := _fewer(reached, of):
                explained = True
                yield Suspicion(cause="rings", used=rings, of=of)
        if not explained and abs(reached - 0.5) < 0.5 * _ALIKE:
            yield Suspicion(cause="half")


def _verdict(time_s: float, cost: Cost) -> str:
    return "slower" if time_s > cost.high_s else "faster" if time_s < cost.low_s else "as expected"


def _fewer(reached: float, of: int) -> int:
    """Return how many of `of` would give the rate that was reached; 0 where no number below does."""
    return next((used for used in range(1, of) if abs(reached * of / used - 1) < _ALIKE), 0)
