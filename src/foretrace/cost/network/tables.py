"""`TableNetwork`: what collectives cost between the numbers of workers that were measured, and between others.

Sizes: `cost/network/curves.py`. The time of a number p of workers that was not measured, from those that were:

    t(p, s) = share(p) s (a + b / (p - 1)) / rings(p) + L(s) p ** g(s)

`share` is that of nccl-tests (2 (p - 1) / p for all-reduce). a and b, seconds per byte, are fitted to the largest
sizes: where a switch joins the devices, few of them reach less of the bandwidth than many (b / a is 0.2 on A100, so
that two lose 14 % against eight); where cables do, `rings` of them (`hardware/wiring.py`) give the bandwidth and b is
0. That wiring is used whose rings explain the measured numbers much better than none, and the answer says so; numbers
whose ring is forwarded through a peer say nothing about others then. Numbers near the one asked count more, by 1 /
|log(q / p)|. L is what a time has beyond moving the bytes, latency and the ramp of protocols; its power g, 0 to 1, is
pooled over sizes near the one asked: single sizes jump where a library changes protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log
from pathlib import Path

import numpy as np

from foretrace.cost.network.collective_files import read
from foretrace.cost.network.collective_table import CollectiveSeries, CollectiveTable, table_of
from foretrace.cost.network.curves import Fitted, Floats, fit_table
from foretrace.cost.network.network import NOTHING, CollectiveKind, Cost, Network, asked, bus_share, none_else, whole
from foretrace.errors import ForetraceError
from foretrace.hardware.wiring import KNOWN, Wiring

_LEAST_OFF = 0.10  # relative error assumed at numbers of workers that were not measured, at least
_CARDS = 1.25  # the same over several machines, whose workers use other network cards: a published table has 1.15
_UNCHECKED = 0.25  # the same where no measured number can be left out to see
_FORWARDED = 0.20  # more, where a ring must be forwarded through a peer
_OTHER_KIND = 0.30  # for a collective derived from another one
_EXPLAINS = 3.0  # times less scatter of the bandwidth per ring than without wiring
_LEAST_SCATTER = 0.05

# A collective that was not measured, from one that moves the same parts in the same way on a ring: (source, factor).
_DERIVED: Mapping[CollectiveKind, tuple[tuple[CollectiveKind, float], ...]] = {
    CollectiveKind.ALL_REDUCE: ((CollectiveKind.REDUCE_SCATTER, 2.0), (CollectiveKind.ALL_GATHER, 2.0)),
    CollectiveKind.REDUCE_SCATTER: ((CollectiveKind.ALL_GATHER, 1.0), (CollectiveKind.ALL_REDUCE, 0.5)),
    CollectiveKind.ALL_GATHER: ((CollectiveKind.REDUCE_SCATTER, 1.0), (CollectiveKind.ALL_REDUCE, 0.5)),
    CollectiveKind.BROADCAST: ((CollectiveKind.REDUCE, 1.0),),
    CollectiveKind.REDUCE: ((CollectiveKind.BROADCAST, 1.0),),
}


@dataclass(frozen=True, kw_only=True)
class TableNetwork(Network):
    """Measured collectives. `per_node` workers share a machine."""

    table: CollectiveTable
    workers: int
    per_node: int
    name: str = ""
    in_flight: int = 1
    wiring: Wiring | None = None
    known: dict[tuple[CollectiveKind, float, int], Cost] = field(default_factory=dict, repr=False, compare=False)

    @property
    def hosts(self) -> Mapping[str, tuple[float, float, float]]:
        return self.table.hosts

    def cost(self, kind: CollectiveKind, nbytes: float, *, workers: int | None = None) -> Cost:
        """Return the time of one collective. Raises ForetraceError where nothing like it was measured."""
        p = asked(self, nbytes, workers)
        if p < 2 or not nbytes:
            return NOTHING
        members = 2 if kind == CollectiveKind.SEND else p
        key = kind, nbytes, members
        if key not in self.known:
            self.known[key] = self._cost(kind, nbytes, members)
        return self.known[key]

    def _cost(self, kind: CollectiveKind, nbytes: float, members: int) -> Cost:
        source, factor = self._source(kind)
        found = self._among(source, nbytes, members)
        if source == kind:
            return found
        seconds = factor * found.seconds
        return Cost(
            seconds=seconds,
            low_s=factor * found.low_s / (1 + _OTHER_KIND),
            high_s=factor * found.high_s * (1 + _OTHER_KIND),
            why=f"{kind} was not measured: {factor:g} × {found.why}",
        )

    def _source(self, kind: CollectiveKind) -> tuple[CollectiveKind, float]:
        """Return the measured collective that answers for this one, and the factor of its time."""
        for source, factor in ((kind, 1.0), *_DERIVED.get(kind, ())):
            if self.table.of(source):
                return source, factor
        measured = ", ".join(dict.fromkeys(str(each.kind) for each in self.table.series))
        raise ForetraceError(f"{self.table.name} says nothing about {kind}, only about {measured}; measure it, too.")

    def _among(self, kind: CollectiveKind, nbytes: float, workers: int) -> Cost:
        family = self._family(kind, workers)
        exact = next((each for each in family if each.workers == workers), None)
        if exact is not None and exact.nodes == -(-workers // self.per_node):
            fitted = self._fit(exact)
            seconds = _at(fitted, nbytes)
            low, high = fitted.factors(nbytes)
            spread = _spread(exact, nbytes)
            low, high = low / (1 + spread), high * (1 + spread)
            why = f"{exact.title}, table of {self.table.name}"
            return Cost(seconds=seconds, low_s=seconds * low, high_s=seconds * high, why=why)
        seconds, why = self._between(family, kind, nbytes, workers)
        off = self._off(family, kind, nbytes, workers)
        return Cost(seconds=seconds, low_s=seconds / (1 + off), high_s=seconds * (1 + off), why=why)

    def left_out(self, series: CollectiveSeries) -> float | None:
        """Return mean relative error at sizes left out of the fit of a series; None where it has too few."""
        fitted = self._fit(series)
        return fitted.mape if len(fitted.errors) else None

    def _family(self, kind: CollectiveKind, workers: int) -> list[CollectiveSeries]:
        """Return series over as many machines as so many workers take, or over the next number that was measured."""
        nodes = -(-workers // self.per_node)
        series = self.table.of(kind)
        near = min({each.nodes for each in series}, key=lambda measured: (abs(log(measured / nodes)), -measured))
        return sorted((each for each in series if each.nodes == near), key=lambda each: each.workers)

    def _between(
        self, family: list[CollectiveSeries], kind: CollectiveKind, nbytes: float, workers: int
    ) -> tuple[float, str]:
        """Return the time for a number of workers that was not measured."""
        measured = [self._measured(each) for each in self._sources(family, workers)]
        seconds = _seconds(
            measured, workers, nbytes, share=bus_share(kind, workers), rings=self._rings(workers),
            cables=self.wiring is not None or family[0].nodes > 1,
        )  # fmt: skip
        counts = sorted(each.workers for each in measured)
        below, above = [q for q in counts if q < workers], [q for q in counts if q > workers]
        said = (
            f"between {below[-1]} and {above[0]} workers"
            if below and above
            else f"from {(below[-1:] or above[:1] or counts)[0]} workers"
        )
        nodes, asked_of = -(-workers // self.per_node), family[0].nodes
        where = f", {asked_of} machines measured and {nodes} asked" if nodes != asked_of else ""
        wires = f", {self._rings(workers)} rings of {self.wiring.name}" if self.wiring else ""
        if self._forwarded(workers):
            wires += (
                f" that lead through a peer, which costs something unknown: the range is {100 * _FORWARDED:.0f} % wider"
            )
        return seconds, f"{kind} of {workers} workers, {said} of {self.table.name}{wires}{where}"

    def _sources(self, family: list[CollectiveSeries], workers: int) -> list[CollectiveSeries]:
        """Return numbers from which another follows: all but those whose ring is forwarded, if any are left.

        Over several machines only the next smaller and larger one: how many share a network card differs in steps.
        """
        if family[0].nodes > 1:
            return [each for each in family if each.workers < workers][-1:] + [
                each for each in family if each.workers >= workers
            ][:1]
        return [each for each in family if not self._forwarded(each.workers)] or family

    def _measured(self, series: CollectiveSeries) -> MeasuredCount:
        return MeasuredCount(
            workers=series.workers,
            curve=self._fit(series),
            largest=series.nbytes[-1],
            smallest=series.nbytes[0],
            share=bus_share(series.kind, series.workers),
            rings=self._rings(series.workers),
        )

    def _rings(self, workers: int) -> int:
        if self.wiring is None:
            return 1
        return max(self.wiring.rings(min(workers, self.wiring.devices)), 1)

    def _forwarded(self, workers: int) -> bool:
        """Return whether the rings of so many lead through a peer somewhere."""
        return self.wiring is not None and self.wiring.forwards(min(workers, self.wiring.devices))

    def _off(self, family: list[CollectiveSeries], kind: CollectiveKind, nbytes: float, workers: int) -> float:
        """Return relative error at numbers not measured: the largest at measured ones left out, near this size.

        Outside the measured numbers the outermost ones are left out, too. What repetitions of the nearest number
        differ by at this size comes on top.
        """
        outside = workers > family[-1].workers or workers < family[0].workers
        tried = family if outside else family[1:-1]
        worst = _LEAST_OFF if len(family) > 2 else _UNCHECKED
        if family[0].nodes > 1:
            worst = _CARDS
        for left_out in tried if len(family) > 2 else ():
            rest = [each for each in family if each is not left_out]
            for size in (nbytes / 2, nbytes, nbytes * 2):
                guess, _ = self._between(rest, kind, size, left_out.workers)
                worst = max(worst, abs(guess / _at(self._fit(left_out), size) - 1))
        if outside and (workers > family[-1].workers or len(family) <= 2):
            worst *= 2
        if self._forwarded(workers):
            worst += _FORWARDED
        nearest = min(family, key=lambda each: abs(log(each.workers / workers)))
        worst = (1 + worst) * (1 + _spread(nearest, nbytes)) - 1
        return worst * (1 + abs(log(-(-workers // self.per_node) / family[0].nodes)))

    def _fit(self, series: CollectiveSeries) -> Fitted:
        return _fitted(series.nbytes, series.seconds)


@lru_cache(maxsize=512)
def _fitted(nbytes: tuple[float, ...], seconds: tuple[float, ...]) -> Fitted:
    return fit_table(nbytes, seconds)


def _spread(series: CollectiveSeries, nbytes: float) -> float:
    """Return what repetitions of a size, and rows that give it twice, differ by, relative to the time."""
    return float(np.interp(log(nbytes), np.log(series.nbytes), series.spread)) if series.spread else 0.0


def _at(fitted: Fitted, nbytes: float) -> float:
    return float(fitted.curve.seconds(np.array([nbytes]))[0])


def table_network(path: Path, workers: int, options: dict[str, str], *, in_flight: int = 1) -> TableNetwork:
    """Return the network in a file of measured collectives. Raises ForetraceError.

    Options: `per-node` workers of a machine (else as many as were measured on one), `wiring`
    a name or none (else found from the numbers), `system` one of several in the file, `kind` and `workers` that were
    measured where the file does not say.
    """
    measured = whole(options, "workers", 0)
    table = read(path, workers=measured, kind=options.pop("kind", ""))
    system, wiring = options.pop("system", ""), options.pop("wiring", "")
    per_node = whole(options, "per-node", 0)
    none_else(options, str(path), "per-node, wiring, system, workers, kind")
    return of_table(table, workers, per_node=per_node, wiring=wiring, system=system, in_flight=in_flight)


def of_table(
    table: CollectiveTable,
    workers: int,
    *,
    per_node: int = 0,
    wiring: str = "",
    system: str = "",
    in_flight: int = 1,
) -> TableNetwork:
    """Return the network that a table describes; arguments as the options of `table_network`. Raises ForetraceError."""
    if wiring not in ("", "none", *KNOWN):
        raise ForetraceError(f"wiring={wiring} is unknown; there are none, {', '.join(KNOWN)}.")
    systems = table.systems()
    if system or len(systems) > 1:
        if system not in systems:
            raise ForetraceError(f"{table.name} has several systems; add system= one of {' | '.join(systems)}.")
        chosen = tuple(each for each in table.series if each.system == system)
        table = table_of(f"{table.name}, {system}", chosen, backend=table.backend)
    most = max(each.per_node for each in table.series)
    return TableNetwork(
        table=table,
        workers=workers,
        per_node=per_node or (most if any(each.nodes > 1 for each in table.series) else max(most, workers)),
        name=table.name,
        in_flight=in_flight,
        wiring=KNOWN[wiring] if wiring in KNOWN else None if wiring == "none" else wiring_of(table),
    )


def wiring_of(table: CollectiveTable) -> Wiring | None:
    """Return the wiring whose rings explain the bus bandwidths of large transfers; None where no wiring is needed for
    it.
    """
    series = [each for each in table.of(CollectiveKind.ALL_REDUCE) if each.nodes == 1]
    return _wiring_of(tuple(series)) if len(series) > 1 else None


@lru_cache(maxsize=64)
def _wiring_of(series: tuple[CollectiveSeries, ...]) -> Wiring | None:
    largest = min(each.nbytes[-1] for each in series)
    rates = {
        each.workers: bus_share(each.kind, each.workers)
        * largest
        / float(np.interp(largest, each.nbytes, each.seconds))
        for each in series
    }
    plain = _scatter([log(rate) for rate in rates.values()])
    found: dict[str, float] = {}
    for wiring in KNOWN.values():
        rings = {workers: wiring.rings(workers) for workers in rates}
        if all(rings.values()):
            found[wiring.name] = _scatter([log(rates[workers] / rings[workers]) for workers in rates])
    best = min(found, key=lambda name: found[name], default="")
    if not best or plain < _EXPLAINS * max(found[best], _LEAST_SCATTER / _EXPLAINS):
        return None
    return KNOWN[best]


def _scatter(logs: list[float]) -> float:
    return float(np.std(logs))


_SIZES = np.geomspace(1 / 4, 4, 9)  # around the one asked, over which the power is pooled
_POWER = 0.5  # of the number of workers, expected before any is seen
_CERTAIN = 0.2  # of that, as a sum of squared logarithms of numbers of workers
_LEAST_S = 1e-7  # of the rest, so that it has a logarithm
_MOST_LOST = 1.0  # b over a: two workers reach half of what many do, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCount:
    """One number of workers: its curve, its largest size, its share of bytes on the bus, and the rings that it has."""

    workers: int
    curve: Fitted
    largest: float
    smallest: float
    share: float
    rings: int = 1

    @property
    def inverse(self) -> float:
        """Seconds per byte on the bus of one ring at the largest size."""
        return float(self.at(np.array([self.largest]))[0]) / (self.share * self.largest) * self.rings

    def at(self, sizes: Floats) -> Floats:
        """Return seconds of sizes; those that were not measured are moved to the nearest that was."""
        return self.curve.curve.seconds(np.clip(sizes, self.smallest, self.largest))

    def rest(self, sizes: Floats) -> Floats:
        """Return seconds beyond moving the bytes."""
        inside = np.clip(sizes, self.smallest, self.largest)
        moving: Floats = self.share * inside * self.inverse / self.rings
        found: Floats = np.maximum(self.at(sizes) - moving, _LEAST_S)
        return found


def _seconds(
    measured: Sequence[MeasuredCount],
    workers: int,
    nbytes: float,
    *,
    share: float,
    rings: int = 1,
    cables: bool = False,
) -> float:
    """Return seconds of `nbytes` among `workers`, of whose collective `share` is the part on the bus.

    measured: one number at least, none of them `workers`; rings: of `workers`; cables: b is 0.
    """
    counts = np.array([each.workers for each in measured], dtype=np.float64)
    weights = 1 / np.maximum(np.abs(np.log(counts / workers)), 1e-6)
    a, b = _inverse(counts, np.array([each.inverse for each in measured]), weights, cables=cables)
    moving = share * nbytes * (a + b / (workers - 1)) / rings
    power = _power(counts, np.stack([each.rest(nbytes * _SIZES) for each in measured]))
    single = np.array([each.rest(np.array([nbytes]))[0] for each in measured])
    rest = float(np.sum(weights * single / counts**power) / np.sum(weights)) * workers**power
    return float(moving + rest)


def _inverse(counts: Floats, inverse: Floats, weights: Floats, *, cables: bool) -> tuple[float, float]:
    """Return a and b by least squares of relative errors, b within 0 and `_MOST_LOST` a."""
    flat = float(np.sum(weights * inverse) / np.sum(weights))
    if cables or len(counts) < 2:
        return flat, 0.0
    columns = np.stack([np.ones_like(counts), 1 / (counts - 1)], axis=1)
    scale = np.sqrt(weights) / inverse
    (a, b), *_ = np.linalg.lstsq(columns * scale[:, None], inverse * scale, rcond=None)
    if b <= 0 or a <= 0:
        lost = 0.0 if b <= 0 else _MOST_LOST
    elif b <= _MOST_LOST * a:
        return float(a), float(b)
    else:
        lost = _MOST_LOST
    if not lost:
        return flat, 0.0
    shape = 1 + lost / (counts - 1)
    a = float(np.sum(weights * inverse / shape) / np.sum(weights))
    return a, lost * a


def _power(counts: Floats, rests: Floats) -> float:
    """Return the power g from rests (counts, sizes), with a slope common to the sizes."""
    x = np.log(counts) - np.log(counts).mean()
    y = np.log(rests) - np.log(rests).mean(axis=0)
    found = (float(np.sum(x * y.mean(axis=1))) + _CERTAIN * _POWER) / (float(np.sum(x * x)) + _CERTAIN)
    return min(max(found, 0.0), 1.0)
