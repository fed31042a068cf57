"""`Local`: what calls take on this machine's processor, from a few calls that were measured on it.

A call is so many dispatches, products, elements and bytes (`work_terms`), and each has a price. Prices of every
operator come with the package: they were fitted to one machine's times of a random pool. Another machine is taken to
have other prices in a few ways: everything slower or faster (its clock), one resource (dispatches, products, elements,
bytes near and far), one resource of one family, one resource of one operator, and what remains of one operator nearby
in size. Each way has a spread that is believed beforehand, in logarithms; a handful of measured calls then says how
much of each there is, and how sure that is. This is Gaussian process regression on the logarithm of the time
(Rasmussen and Williams 2006, chapter 2), made linear again around every estimate (Gauss-Newton).

    local = Local.of(store.load(fingerprint()))
    found = local.predict(graph.calls, device)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources

import msgspec
import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Calls, Family, Float64
from foretrace.cost.model import CostModel, Prediction
from foretrace.cost.operators.work_terms import NAMES, TERMS, Amounts, amounts
from foretrace.hardware.devices import Device
from foretrace.hardware.processor import instruction_sets, named
from foretrace.trace.tables import Interner

RESOURCES = tuple(dict.fromkeys(TERMS.values()))
_OF = np.array([[TERMS[name] == each for each in RESOURCES] for name in NAMES], dtype=float)  # [terms x resources]
# What another machine may differ in, beforehand: standard deviations of logarithms.
_CLOCK = 0.7  # all resources but bytes from afar
_RESOURCE = np.array([0.4, 0.7, 0.5, 0.5, 0.8])  # of RESOURCES
_FAMILY, _OPERATOR = 0.2, 0.15
NOISE = 0.06  # of one measurement
_REACH = 2.5  # in factors of two of a size: how far what remains of one call tells of another of its operator
_SMOOTH = 0.3  # share of what remains that such a call tells of; the rest is each call's own
_SAME = 1e-6
_BELIEVED = 1.5  # standard deviations from what the other measured calls say: beyond, a call is taken for disturbed
_ODD = 0.7  # logarithm: a time that is off by more from what the others say is doubted
# Deviation per root of the factors of two that a call is larger than those that the prices were fitted to: prices that
# were fitted to the smaller half of the pool hold for 94 of 100 calls of the larger half with it, at any distance.
_BEYOND = 0.5
_BEYOND_TOGETHER = 0.24  # of these, that all calls of a step have in common: it holds for 80 of 100
_ENOUGH = 8  # operators, to say anything by leaving some out
_ROUNDS = 8
_SMALL_BYTES = 32 << 10  # calls below this were only measured with data near
MIDWAY = 0.5  # share of a call's bytes that are not in a core's caches, where nothing better is known
MOST = 400  # measured operators that are looked at: time and memory grow with their square
_TOGETHER = 600  # different calls whose errors are added up together
TENTH = 1.2816  # standard deviations between the middle and either end of an 80 % range


def unsure_key(key: str) -> str:
    """Return what a calibration stores how many times a measured time may be off under."""
    return f"unsure {key}"


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per amount, by family, operator ("" for others of the family) and term; and how far calls stray."""

    of: dict[str, dict[str, dict[str, float]]]
    spread: dict[str, float]  # per family: deviation of log times that its prices leave unexplained
    most: dict[str, tuple[float, float]] = {}  # per family: FLOPs and bytes of the largest calls they were fitted to
    machine: str = ""  # where they were fitted
    calls: int = 0

    def row(self, family: Family, op: str) -> Float64:
        """Return price of every term for an operator."""
        mine = self.of.get(family.name) or self.of["ELEMENTWISE"]
        found = mine.get(op) or mine.get(op.partition(" ")[0].partition(".")[0]) or mine.get(op.rstrip("_"))
        return np.array([(found or mine[""]).get(name, 0.0) for name in NAMES])

    def table(self, of: Amounts) -> Float64:
        """Return price of every term for every call [n x terms]."""
        known: dict[tuple[int, str], Float64] = {}
        for key in zip(of.family.tolist(), of.op, strict=True):
            if key not in known:
                known[key] = self.row(Family(key[0]), key[1])
        return np.array([known[key] for key in zip(of.family.tolist(), of.op, strict=True)]).reshape(-1, len(NAMES))


@cache
def shipped() -> Prices:
    """Return the prices that come with the package."""
    data = resources.files("foretrace.cost.operators").joinpath("prices.json").read_bytes()
    return msgspec.json.decode(data, type=Prices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegressionRows:
    """Calls as the regression sees them (n rows): what is spent on each resource at the prices of the package."""

    cost: Float64  # [n x resources] seconds
    family: npt.NDArray[np.int64]
    op: npt.NDArray[np.int64]  # number of its name
    size: Float64  # [n x sizes] logarithms to base 2
    spread: Float64
    beyond: Float64  # variance within the spread's for sizes beyond those of the prices

    def __len__(self) -> int:
        return len(self.family)

    def with_more(self, other: RegressionRows) -> RegressionRows:
        """Return these and others."""
        names = [each.name for each in fields(self)]
        return RegressionRows(**{n: np.concatenate([getattr(self, n), getattr(other, n)]) for n in names})

    def take(self, rows: npt.NDArray[np.int64]) -> RegressionRows:
        """Return these rows."""
        return RegressionRows(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})


def rows_of(calls: Calls, prices: Prices, place: Float64 | float) -> tuple[RegressionRows, npt.NDArray[np.bool_]]:
    """Return calls whose share `place` of their bytes comes from afar, and which of them can be spoken of."""
    found = amounts(calls)
    terms = found.terms.copy()
    terms[:, NAMES.index("far")] *= place
    cost = terms * prices.table(found) @ _OF
    sizes = np.stack([calls.flops, calls.nbytes, calls.b, calls.m, calls.n, calls.k], axis=1)
    families = [Family(each).name for each in calls.family.tolist()]
    spread = np.array([prices.spread.get(each, 0.5) for each in families])
    most = np.array([prices.most.get(each, (np.inf, np.inf)) for each in families]).reshape(-1, 2)
    larger = np.stack([calls.flops, calls.nbytes], axis=1) / np.maximum(most, 1.0)
    beyond = np.log2(np.maximum(larger, 1.0)).max(axis=1)
    rows = RegressionRows(
        cost=cost, family=calls.family.astype(np.int64), op=np.array([_numbers[each] for each in found.op], np.int64),
        size=np.log2(np.maximum(sizes, 1.0)), spread=np.hypot(spread, _BEYOND * np.sqrt(beyond)),
        beyond=_BEYOND**2 * beyond,
    )  # fmt: skip
    return rows, found.known & (cost.sum(axis=1) > 0)


_numbers = Interner()


def shared(a: RegressionRows, b: RegressionRows) -> Float64:
    """Return prior covariance [a x b x resources] of what multiplies each resource, as logarithms, the clock apart."""
    family = a.family[:, None] == b.family[None, :]
    op = family & (a.op[:, None] == b.op[None, :])
    found: Float64 = (_RESOURCE**2)[None, None, :] + (family * _FAMILY**2 + op * _OPERATOR**2)[:, :, None]
    return found


CLOCKED = np.array([each != "far" for each in RESOURCES], dtype=float)


def remaining(a: RegressionRows, b: RegressionRows) -> Float64:
    """Return prior covariance [a x b] of what is left of one operator nearby in size."""
    apart = ((a.size[:, None, :] - b.size[None, :, :]) ** 2).mean(axis=2)
    op = (a.family[:, None] == b.family[None, :]) & (a.op[:, None] == b.op[None, :])
    family = a.family[:, None] == b.family[None, :]
    near = _SMOOTH * np.exp(-apart / (2 * _REACH**2)) * (0.7 * op + 0.3 * family)
    found: Float64 = a.spread[:, None] * b.spread[None, :] * (near + (1 - _SMOOTH) * op * (apart < _SAME))
    return found


def covariance(a: RegressionRows, b: RegressionRows, share_a: Float64, share_b: Float64) -> Float64:
    """Return prior covariance [a x b] of log times around estimates that spend such shares on each resource."""
    found = np.einsum("ar,br,abr->ab", share_a, share_b, shared(a, b))
    found += _CLOCK**2 * np.outer(share_a @ CLOCKED, share_b @ CLOCKED)
    return np.asarray(found + remaining(a, b))


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalFit:
    """What measured calls say of a machine."""

    rows: RegressionRows
    weights: Float64  # of each measured call in a prediction
    share: Float64
    inverse: Float64  # of the covariance of the measured calls

    @classmethod
    def to(cls, rows: RegressionRows, log_s: Float64, unsure: Float64 | float = 0.0) -> LocalFit:
        """Return the most probable machine for these log times, of which some are unsure beyond NOISE."""
        n = len(rows)
        change = np.zeros((n, len(RESOURCES)))
        among, rest = shared(rows, rows), remaining(rows, rows)
        noise = np.full(n, NOISE**2) + np.square(unsure)
        for turn in range(_ROUNDS):
            cost = rows.cost * np.exp(change)
            total = cost.sum(axis=1)
            share = cost / total[:, None]
            clock = share @ CLOCKED
            kernel = np.einsum("ar,br,abr->ab", share, share, among) + _CLOCK**2 * np.outer(clock, clock) + rest
            target = log_s - np.log(total) + (share * change).sum(axis=1)
            inverse = np.linalg.inv(kernel + np.diag(noise))
            weights = inverse @ target
            change = np.clip(_change(rows, rows, share, weights), -6.0, 6.0)
            if turn >= _ROUNDS // 2 and turn < _ROUNDS - 2 and n >= _ENOUGH:  # what no other call believes counts less
                variance = 1 / np.diag(inverse)
                beyond = np.maximum(np.abs(weights) * variance - _BELIEVED * np.sqrt(variance), 0.0)
                noise = np.maximum(noise, beyond**2)
        return cls(rows=rows, weights=weights, share=share, inverse=inverse)

    def predict(self, rows: RegressionRows) -> tuple[Float64, Float64]:
        """Return log seconds and their variance (n each)."""
        total, share = self.spent(rows)
        if not len(self.rows):
            return np.log(total), _variance(rows, share)
        cross = covariance(rows, self.rows, share, self.share)
        mean = np.log(total) + remaining(rows, self.rows) @ self.weights
        explained = np.einsum("ij,jk,ik->i", cross, self.inverse, cross)
        return mean, np.maximum(_variance(rows, share) - explained, 1e-6)

    def among(self, rows: RegressionRows) -> tuple[Float64, Float64]:
        """Return log seconds (n) and their covariance [n x n]: errors of similar calls go together."""
        mean, variance = self.predict(rows)
        _, share = self.spent(rows)
        found = covariance(rows, rows, share, share)
        if len(self.rows):
            cross = covariance(rows, self.rows, share, self.share)
            found = found - cross @ self.inverse @ cross.T
            np.fill_diagonal(found, variance)
        return mean, found

    def spent(self, rows: RegressionRows) -> tuple[Float64, Float64]:
        """Return seconds at this machine's prices (n), and the share of each resource in them [n x resources]."""
        cost = rows.cost
        if len(self.rows):
            cost = cost * np.exp(np.clip(_change(rows, self.rows, self.share, self.weights), -6.0, 6.0))
        total = cost.sum(axis=1)
        return total, cost / total[:, None]

    def left_out(self) -> tuple[Float64, Float64]:
        """Return the error of every measured call, predicted from those of other operators only, and its standard
        deviation.
        """
        error, deviation = np.zeros(len(self.rows)), np.ones(len(self.rows))
        for each in np.unique(self.rows.op):
            out = np.flatnonzero(self.rows.op == each)
            block = np.linalg.inv(self.inverse[np.ix_(out, out)])
            error[out] = block @ self.weights[out]
            deviation[out] = np.sqrt(np.maximum(np.diag(block), 1e-9))
        return error, deviation


def _change(rows: RegressionRows, measured: RegressionRows, share: Float64, weights: Float64) -> Float64:
    """Return what multiplies each resource of `rows` [n x resources], as logarithms."""
    own = np.einsum("abr,br,b->ar", shared(rows, measured), share, weights)
    clock = _CLOCK**2 * float((share @ CLOCKED) @ weights)
    return np.asarray(own + clock * CLOCKED[None, :])


def _variance(rows: RegressionRows, share: Float64) -> Float64:
    own = _RESOURCE**2 + _FAMILY**2 + _OPERATOR**2
    return np.asarray(share**2 @ own + (_CLOCK * (share @ CLOCKED)) ** 2 + rows.spread**2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Local(CostModel):
    """Seconds of calls on the processor that some calls were measured on. `device` is not looked at."""

    fit: LocalFit
    prices: Prices
    measured: int  # operators
    place: float = MIDWAY
    widened: float = 1.0  # of the deviations, from leaving operators out
    seconds: Mapping[str, float] = field(default_factory=dict)  # as measured
    name: str = "local"

    @classmethod
    def of(cls, seconds: Mapping[str, float], prices: Prices | None = None) -> Local:
        """Make it from times as a calibration stores them (by `Operator.key`, and by `near_key` with data near).

        Only ATen calls count; of more than MOST operators as many, evenly through all.
        """
        known = prices or shipped()
        rows, log_s, unsure, operators = _measured(seconds, known)
        fit = LocalFit.to(rows, log_s, unsure)
        widened = 1.0
        if operators >= _ENOUGH:
            error, deviation = fit.left_out()
            widened = float(np.clip(np.quantile(np.abs(error) / deviation, 0.8) / TENTH, 0.5, 2.0))
        return cls(fit=fit, prices=known, measured=operators, widened=widened, seconds=seconds)

    def predict(self, calls: Calls, device: Device | None = None) -> Prediction:
        """Return seconds of every call (n rows) with its 80 % range; NaN for products that are not in float32."""
        mean, deviation = self.logarithms(calls)
        seconds, stray = np.exp(mean), np.exp(TENTH * deviation)
        return self._answer(seconds, 1 / stray, stray, self.why)

    def logarithms(self, calls: Calls, place: Float64 | None = None) -> tuple[Float64, Float64]:
        """Return log seconds of every call and their standard deviation; NaN where it cannot say.

        `place` is the share of its bytes that a call does not find in a core's caches, where that is known (n).
        """
        distinct, which, apart = _distinct(calls, place)
        rows, known = self._rows(distinct, apart)
        mean, variance = np.full(len(distinct), np.nan), np.full(len(distinct), np.nan)
        at = np.flatnonzero(known)
        if len(at):
            mean[at], variance[at] = self.fit.predict(rows.take(at))
            variance *= self.widened**2
        here, own = self._here(distinct, apart, mean)
        here &= known
        mean, variance = np.where(here, own[0], mean), np.where(here, own[1], variance)
        return mean[which], np.sqrt(variance[which])

    def total(self, calls: Calls, place: Float64 | None = None) -> tuple[float, float]:
        """Return seconds of all calls that can be spoken of, and the standard deviation of its logarithm."""
        each, deviation = self.parts(calls, place)
        return float(np.nansum(each)), deviation

    def parts(self, calls: Calls, place: Float64 | None = None) -> tuple[Float64, float]:
        """Return seconds of every call as a part of the sum of all (n; NaN where it cannot say), and the standard
        deviation of the sum's logarithm.

        Of a call that was not measured the mean counts, not the middle: it errs by itself, and where many err by
        factors, those that take longer add more than the others lack. What all err by together moves no middle, and
        _BEYOND, which holds most calls instead of the usual one, neither.
        """
        distinct, which, apart = _distinct(calls, place)
        rows, known = self._rows(distinct, apart)
        times = np.bincount(which, minlength=len(distinct)).astype(np.float64)
        found, at = np.full(len(distinct), np.nan), np.flatnonzero(known)
        if not len(at):
            return found[which], 0.0
        distinct, apart = distinct.take(at), None if apart is None else apart[at]
        rows, times, (mean, variance) = rows.take(at), times[at], self.fit.predict(rows.take(at))
        here, own = self._here(distinct, apart, mean)
        wide, beyond = self.widened**2, np.where(here, 0.0, np.minimum(rows.beyond, variance))
        found[at] = np.exp(np.where(here, own[0], mean + wide * (variance - beyond) / 2))
        each = found[at] * times
        most = np.argsort(-each)[:_TOGETHER]  # the largest decide how sure the sum is
        among = wide * self.fit.among(rows.take(most))[1]
        among[here[most]] = among[:, here[most]] = 0.0  # what was measured errs by itself
        share = each[most] / each[most].sum()
        together = float(share @ among @ share - wide * share**2 @ beyond[most])
        among[np.diag_indices(len(most))] += np.where(here, own[1], 0.0)[most]
        found[at] *= np.where(here, 1.0, np.exp(-together / 2))
        common = _BEYOND_TOGETHER / _BEYOND * float(share @ np.sqrt(beyond[most]))
        return found[which], float(np.sqrt(max(share @ among @ share, 0.0) + common**2))

    def shares(self, calls: Calls, place: Float64 | None = None) -> Float64:
        """Return the share of each of RESOURCES in the seconds of all calls that can be spoken of."""
        rows, known = self._rows(calls, place)
        at = np.flatnonzero(known)
        if not len(at):
            return np.zeros(len(RESOURCES))
        total, share = self.fit.spent(rows.take(at))
        return np.asarray(total @ share / total.sum())

    def telling(self, calls: Calls, place: Float64 | None = None) -> Iterator[int]:
        """Yield the calls by what their times would say of the sum of all: greedily, what lowers its variance most."""
        distinct, which, apart = _distinct(calls, place)
        rows, known = self._rows(distinct, apart)
        at = np.flatnonzero(known)
        if not len(at):
            return
        often = np.bincount(which, minlength=len(distinct))[at]
        spent = np.exp(self.fit.predict(rows.take(at))[0]) * often
        most = np.argsort(-spent)[:_TOGETHER]
        among, spent = self.fit.among(rows.take(at[most]))[1], spent[most]
        first = np.unique(which, return_index=True)[1][at[most]]
        for _ in range(len(most)):
            best = int(np.argmax((among @ spent) ** 2 / (np.diag(among) + NOISE**2)))
            yield int(first[best])
            among = among - np.outer(among[:, best], among[best]) / (among[best, best] + NOISE**2)

    def _here(self, calls: Calls, place: Float64 | None, others: Float64) -> tuple[npt.NDArray[np.bool_], Float64]:
        """Return which of these calls were measured themselves, and log seconds and variance of those [2 x n].

        A time of which the other measured calls say, in logarithms, that it should be some quite other one, is as
        unsure as that differs.
        """
        found = np.full((2, len(calls)), np.nan)
        given = np.full(len(calls), self.place) if place is None else place
        for i, key in enumerate(map(" ".join, zip(calls.op, calls.text, strict=True))):
            if (far := self.seconds.get(key, 0.0)) > 0.0:
                near = self.seconds.get(f"near {key}", far)
                apart = max(self.seconds.get(unsure_key(each), 1.0) for each in (key, f"near {key}"))
                found[:, i] = np.log(near + given[i] * (far - near)), NOISE**2 + np.log(apart) ** 2
        off = np.abs(others - found[0])
        found[1] += np.where(off > _ODD, off / TENTH, 0.0) ** 2
        return np.isfinite(found[0]), found

    def _rows(self, calls: Calls, place: Float64 | None) -> tuple[RegressionRows, npt.NDArray[np.bool_]]:
        given = np.full(len(calls), self.place) if place is None else place
        return rows_of(calls, self.prices, np.where(calls.nbytes < _SMALL_BYTES, 0.0, given))

    @property
    def why(self) -> str:
        """Where its numbers come from."""
        if not self.measured:
            there, here = self.prices.machine, named(instruction_sets())
            return f"prices of operators on another processor ({there}); none was measured on this one ({here})."
        more = "; foretrace calibrate device --operators 50 tells more" if self.measured < _ENOUGH else ""
        return f"fitted to {self.measured} operators measured on this processor{more}."


def _distinct(calls: Calls, place: Float64 | None) -> tuple[Calls, npt.NDArray[np.int64], Float64 | None]:
    """Return every call once, which of them each one is, and their places to the nearest quarter."""
    first = Interner()
    places = np.zeros(len(calls)) if place is None else np.round(place * 4) / 4
    keys = zip(calls.op, calls.text, calls.flops.tolist(), calls.nbytes.tolist(), places.tolist(), strict=True)
    which = np.array([first[key] for key in keys], dtype=np.int64)
    at = np.unique(which, return_index=True)[1]  # numbers are given in order, so each is where it came first
    return calls.take(at), which, None if place is None else places[at]


def _measured(seconds: Mapping[str, float], prices: Prices) -> tuple[RegressionRows, Float64, Float64, int]:
    names = [key for key in seconds if key.startswith("aten::") and " " in key and "channels_last" not in key]
    calls = Calls.of([(name, text) for name, _, text in (key.partition(" ") for key in names)])
    keep = np.flatnonzero(rows_of(calls, prices, 0.0)[1])
    keep = keep[np.linspace(0, len(keep) - 1, min(len(keep), MOST)).round().astype(np.int64)]
    names = [names[i] for i in keep]
    calls = calls.take(keep)
    near = np.array([f"near {key}" in seconds for key in names], dtype=bool)
    far_rows, _ = rows_of(calls, prices, near.astype(np.float64))
    near_rows = rows_of(calls, prices, 0.0)[0].take(np.flatnonzero(near))
    keys = [*names, *(f"near {key}" for key, has in zip(names, near, strict=True) if has)]
    taken = np.array([[seconds[key], seconds.get(unsure_key(key), 1.0)] for key in keys], dtype=np.float64)
    log_s, unsure = np.log(taken.reshape(-1, 2)).T
    return far_rows.with_more(near_rows), log_s, unsure, len(names)
