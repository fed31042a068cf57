"""`TableNetwork`: what collectives cost between the numbers of workers that were measured, and between others.

Sizes: `cost/curves.py`. Numbers of workers: a time is taken apart into moving the bytes at the bus bandwidth of the
largest size (bytes / time x 2 (n - 1) / n for all-reduce), and what it takes beyond that: latency, and the ramp of
protocols and channels. Both change slowly with the number of workers where a switch joins all devices, and are
interpolated over its logarithm at the same size; beyond the measured numbers the bandwidth stays and the rest goes on
as it grew. Where cables join the devices, the bandwidth follows how many rings fit on them (`hardware/wiring.py`); that
wiring is used whose rings explain the measured numbers much better than none, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log
from pathlib import Path

import numpy as np

from foretrace.cost import curves
from foretrace.cost.collective_files import read
from foretrace.cost.collective_table import CollectiveTable, Series
from foretrace.cost.curves import Fitted
from foretrace.cost.network import NOTHING, CollectiveKind, Cost, Network, asked, bus_share
from foretrace.cost.networks import none_else, whole
from foretrace.errors import ForetraceError
from foretrace.hardware.wiring import KNOWN, Wiring

MODELS = ("table", "pieces")
_LEAST_OFF = 0.10  # relative error assumed at numbers of workers that were not measured, at least
_UNCHECKED = 0.25  # the same where no measured number can be left out to see
_GROWTH = 0.5  # power of the number of workers by which latency grows where one number was measured alone
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
    """Measured collectives. `per_node` workers share a machine; `model` is "table" or "pieces"."""

    table: CollectiveTable
    workers: int
    per_node: int
    name: str = ""
    in_flight: int = 1
    model: str = "table"
    wiring: Wiring | None = None
    fits: dict[int, Fitted] = field(default_factory=dict, repr=False, compare=False)
    known: dict[tuple[CollectiveKind, float, int], Cost] = field(default_factory=dict, repr=False, compare=False)

    def cost(self, kind: CollectiveKind, nbytes: float, *, workers: int | None = None) -> Cost:
        """Time of one collective. Raises ForetraceError where nothing like it was measured."""
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
        """The measured collective that answers for this one, and the factor of its time."""
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
            if exact.spread:
                spread = float(np.interp(log(nbytes), np.log(exact.nbytes), exact.spread))
                low, high = low / (1 + spread), high * (1 + spread)
            why = f"{exact.title}, {self._how(fitted)} of {self.table.name}"
            return Cost(seconds=seconds, low_s=seconds * low, high_s=seconds * high, why=why)
        seconds, why = self._between(family, kind, nbytes, workers)
        off = self._off(family, kind, nbytes, workers)
        return Cost(seconds=seconds, low_s=seconds / (1 + off), high_s=seconds * (1 + off), why=why)

    def left_out(self, series: Series) -> float | None:
        """Mean relative error at sizes left out of the fit of a series; None where it has too few."""
        fitted = self._fit(series)
        return fitted.mape if len(fitted.errors) else None

    def _family(self, kind: CollectiveKind, workers: int) -> list[Series]:
        """Series over as many machines as so many workers take, or over the next number that was measured."""
        nodes = -(-workers // self.per_node)
        series = self.table.of(kind)
        near = min({each.nodes for each in series}, key=lambda measured: (abs(log(measured / nodes)), -measured))
        return sorted((each for each in series if each.nodes == near), key=lambda each: each.workers)

    def _between(self, family: list[Series], kind: CollectiveKind, nbytes: float, workers: int) -> tuple[float, str]:
        """Time for a number of workers that was not measured."""
        below = [each for each in family if each.workers < workers]
        above = [each for each in family if each.workers >= workers]
        if below and above:
            one, other = below[-1], above[0]
            weight = log(workers / one.workers) / log(other.workers / one.workers)
            rate = exp((1 - weight) * log(self._rate(one)) + weight * log(self._rate(other)))
            beyond_s = (1 - weight) * self._beyond_s(one, nbytes) + weight * self._beyond_s(other, nbytes)
            said = f"between {one.workers} and {other.workers} workers"
        else:
            outer = [*below[::-1], *above]  # the nearest first
            rate = self._rate(outer[0])
            beyond_s = self._beyond_s(outer[0], nbytes) * self._growth(outer, nbytes, workers)
            said = f"from {outer[0].workers} workers"
        seconds = bus_share(kind, workers) * nbytes / (rate * self._rings(workers)) + beyond_s
        nodes, measured = -(-workers // self.per_node), family[0].nodes
        where = f", {measured} machines measured and {nodes} asked" if nodes != measured else ""
        wires = f", {self._rings(workers)} rings of {self.wiring.name}" if self.wiring else ""
        return seconds, f"{kind} of {workers} workers, {said} of {self.table.name}{wires}{where}"

    def _rate(self, series: Series) -> float:
        """Bus bandwidth per ring at the largest size, bytes/s."""
        largest = series.nbytes[-1]
        share = bus_share(series.kind, series.workers)
        return share * largest / _at(self._fit(series), largest) / self._rings(series.workers)

    def _beyond_s(self, series: Series, nbytes: float) -> float:
        """What a time has beyond moving the bytes at that bandwidth."""
        moving_s = bus_share(series.kind, series.workers) * nbytes / (self._rate(series) * self._rings(series.workers))
        return max(_at(self._fit(series), nbytes) - moving_s, 0.0)

    def _growth(self, outer: list[Series], nbytes: float, workers: int) -> float:
        """How the rest grows from the nearest measured number: by the power between the nearest two, 0 to 1."""
        power = _GROWTH
        if len(outer) > 1:
            one, other = (max(self._beyond_s(each, nbytes), 1e-12) for each in outer[:2])
            power = min(max(log(one / other) / log(outer[0].workers / outer[1].workers), 0.0), 1.0)
        return float((workers / outer[0].workers) ** power)

    def _rings(self, workers: int) -> int:
        if self.wiring is None:
            return 1
        return max(self.wiring.rings(min(workers, self.wiring.devices)), 1)

    def _off(self, family: list[Series], kind: CollectiveKind, nbytes: float, workers: int) -> float:
        """Relative error at numbers not measured: the largest at measured ones left out, near this size."""
        worst = _LEAST_OFF if len(family) > 2 else _UNCHECKED
        for left_out in family[1:-1]:
            rest = [each for each in family if each is not left_out]
            for size in (nbytes / 2, nbytes, nbytes * 2):
                guess, _ = self._between(rest, kind, size, left_out.workers)
                worst = max(worst, abs(guess / _at(self._fit(left_out), size) - 1))
        if workers > family[-1].workers or workers < family[0].workers:
            worst *= 2
        if self.wiring is not None and self.wiring.forwards(min(workers, self.wiring.devices)):
            worst += _FORWARDED
        return worst * (1 + abs(log(-(-workers // self.per_node) / family[0].nodes)))

    def _fit(self, series: Series) -> Fitted:
        fit = curves.cached_pieces if self.model == "pieces" else curves.cached_table
        return self.fits.setdefault(id(series), fit(series.nbytes, series.seconds))

    def _how(self, fitted: Fitted) -> str:
        if isinstance(fitted.curve, curves.Pieces):
            return f"{len(fitted.curve.lines)} alpha-beta pieces"
        return "table"


def _at(fitted: Fitted, nbytes: float) -> float:
    return float(fitted.curve.seconds(np.array([nbytes]))[0])


def table_network(path: Path, workers: int, options: dict[str, str], *, in_flight: int = 1) -> TableNetwork:
    """The network in a file of measured collectives. Raises ForetraceError.

    Options: `per-node` workers of a machine (else as many as were measured on one), `model` table or pieces, `wiring`
    a name or none (else found from the numbers), `system` one of several in the file, `kind` and `workers` that were
    measured where the file does not say.
    """
    measured = whole(options, "workers", 0)
    table = read(path, workers=measured, kind=options.pop("kind", ""))
    system, model, wiring = options.pop("system", ""), options.pop("model", "table"), options.pop("wiring", "")
    per_node = whole(options, "per-node", 0)
    none_else(options, str(path), "per-node, model, wiring, system, workers, kind")
    return of_table(table, workers, per_node=per_node, model=model, wiring=wiring, system=system, in_flight=in_flight)


def of_table(
    table: CollectiveTable,
    workers: int,
    *,
    per_node: int = 0,
    model: str = "table",
    wiring: str = "",
    system: str = "",
    in_flight: int = 1,
) -> TableNetwork:
    """The network that a table describes; arguments as the options of `table_network`. Raises ForetraceError."""
    if model not in MODELS:
        raise ForetraceError(f"model={model} is unknown; there are {' and '.join(MODELS)}.")
    if wiring not in ("", "none", *KNOWN):
        raise ForetraceError(f"wiring={wiring} is unknown; there are none, {', '.join(KNOWN)}.")
    systems = table.systems()
    if system or len(systems) > 1:
        if system not in systems:
            raise ForetraceError(f"{table.name} has several systems; add system= one of {' | '.join(systems)}.")
        chosen = tuple(each for each in table.series if each.system == system)
        table = CollectiveTable(name=f"{table.name}, {system}", series=chosen, backend=table.backend)
    most = max(each.per_node for each in table.series)
    return TableNetwork(
        table=table,
        workers=workers,
        per_node=per_node or (most if any(each.nodes > 1 for each in table.series) else max(most, workers)),
        name=table.name,
        in_flight=in_flight,
        model=model,
        wiring=KNOWN[wiring] if wiring in KNOWN else None if wiring == "none" else wiring_of(table),
    )


def wiring_of(table: CollectiveTable) -> Wiring | None:
    """The wiring whose rings explain the bus bandwidths of large transfers; None where no wiring is needed for it."""
    series = [each for each in table.of(CollectiveKind.ALL_REDUCE) if each.nodes == 1]
    return _wiring_of(tuple(series)) if len(series) > 1 else None


@lru_cache(maxsize=64)
def _wiring_of(series: tuple[Series, ...]) -> Wiring | None:
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
