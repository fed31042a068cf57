"""`minimise`: the cheapest point that a strategy finds within calls, steps and seconds; stopped and resumed at will.

    found = minimise(problem, strategy=MCMC(beta=50), starts=[today], calls=10_000, seconds=5, chains=4, on="ray")
    found.best, found.cost, found.proven, found.bound
    found = minimise(problem, strategy=MCMC(beta=50), starts=[today], calls=20_000, chains=4, state=found.state)

A search is its seed and the costs that it met, in order: its state is these, and to resume is to let the strategy go
the same way again with the costs known, which takes its own time and no calls. So what is interrupted and resumed, on
whatever machine, ends as if it had never been. Chains are searches of their own with other random numbers that share
the calls and the steps evenly; they are advanced side by side here, or each where the executor puts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isnan
from random import Random
from typing import Any, Generic, Literal, cast
from zlib import crc32

import msgspec

from foretrace import executor
from foretrace.deadline import Deadline
from foretrace.errors import ForetraceError
from foretrace.search.space import Constrained, Infeasible, Point, Problem, Responded
from foretrace.search.strategy import LearnedStart, SearchContext, SearchStrategy

# Of a new point, as it is kept: its cost, why it cannot be, `Constrained`, or `Responded` (whose cost may be None: inf)
KeptCost = float | str | tuple[float | None, float | tuple[float, ...]]
Ended = Literal["", "proven", "finished", "nothing new", "calls", "steps", "seconds", "stopped"]

_REPEATED = 30_000  # points in a row that were all priced before: the strategy is caught
_ROUNDS = 32  # likewise where it is fewer: so many times the points of the space
_ROUNDING = 1e-9  # that a bound may be above a cost
_ENDLESS = 1 << 62
_FADE = 0.98  # per look, of what the longest call took
_LOOK = 256  # asks between two looks at the clock
_BATCH = 0.02  # of the seconds: what is priced between two looks at the clock
_AGAIN = 3  # times that a chain is started again whose worker was killed
_PARTS = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the budget, after which chains elsewhere hand over what they have


class SearchState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a search stands; JSON holds all of it."""

    strategy: str
    seed: int
    costs: tuple[tuple[KeptCost, ...], ...]  # of the new points of every chain, in order
    best: tuple[int, ...]  # of every chain, a check sum of its best point

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return cast("dict[str, Any]", msgspec.to_builtins(self))

    @classmethod
    def of_json(cls, held: Any) -> SearchState:
        """Return the state that `to_json` gave; raises ValueError where it is none."""
        try:
            found = msgspec.convert(held, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"this is no state of a search: {error}") from None
        if len(found.best) != len(found.costs):
            raise ValueError("chains differ in number")
        return found


@dataclass(frozen=True, kw_only=True)
class Found(Generic[Point]):
    """The answer of a search."""

    best: Point | None  # None where nothing feasible was met
    cost: float
    calls: int  # points that were priced, each once
    steps: int  # generations, rounds, expansions: what the strategy counts in
    curve: tuple[tuple[int, float], ...]  # (calls, best cost) at every gain, chains taking turns
    bound: float  # no point costs less
    proven: bool  # none costs less than the best one, up to the gap that was allowed
    infeasible: dict[str, int]  # why points cannot be, and how many, most first
    ended: Ended
    state: SearchState
    learned: LearnedStart | None = None  # of a strategy that learns


@dataclass(frozen=True, kw_only=True)
class _Order(Generic[Point]):
    """A chain to be run, with its budget, as it travels between processes."""

    problem: Problem[Point]
    strategy: SearchStrategy
    starts: tuple[Point, ...]
    seed: int
    index: int
    calls: int
    steps: int
    gap: float
    kept: tuple[KeptCost, ...]
    check: int | None = None  # of the best point that an earlier part of the search met
    seconds: float = inf


class _Chain(Generic[Point]):
    """One search: its generator, the costs that it met, and the best of its points."""

    def __init__(self, order: _Order[Point], until: Deadline) -> None:
        """Go the way that an earlier part of the search went, up to where a new point is needed."""
        rng = Random(f"{order.seed} {order.index}" if order.index else order.seed)
        context = SearchContext(problem=order.problem, starts=order.starts, rng=rng, until=until)
        self.context, self.order = context, order
        self.kept = list(order.kept)  # costs of new points, those of an earlier part of the search first
        self.calls = 0  # of which were asked for by now
        self.known: dict[Hashable, float] = {}
        self.best: Point | None = None
        self.cost = inf
        self.gains: list[tuple[int, float]] = []
        self.steps = 0
        self.ended: Ended = ""
        self._repeated, self._caught = 0, min(_REPEATED, _ROUNDS * context.space.size)
        self._key = context.space.key
        self._steps = order.strategy.steps(context)
        self._asked: Sequence[Point] = ()
        self._keys: list[Hashable] = []
        self._costs: list[float | None] = []  # of what was asked, None where it is not known
        self._open: list[int] = []  # places of what is to be priced
        self._advance(None)
        while self.calls < len(self.kept) and not self.ended:
            self.wanted(0)
        if order.check is not None and self.calls == len(self.kept) and self.check != order.check:
            raise ForetraceError("this state is of a search among other points; begin a new one.")

    @property
    def proven(self) -> bool:
        """Whether no point is better than the best one by more than the gap."""
        bound = self.context.bound
        return self.best is not None and self.cost <= bound + self.order.gap * abs(bound)

    def wanted(self, most: int) -> list[Point]:
        """Return points to be priced next; none at the end of a step or search, or while known points are repeated."""
        for _ in range(_LOOK):
            if self._open and not self.ended:
                if self.calls < len(self.kept):  # of an earlier part of the search
                    for cost in self.kept[self.calls : self.calls + len(self._open)]:
                        self._learn(_met(cost))
                    continue
                if self.calls < self.order.calls:
                    most = min(most, self.order.calls - self.calls)
                    return [self._asked[i] for i in self._open[:most]]
                self.ended = "calls"
            if self.ended or not self._advance(self._answer()):
                break
        return []

    def priced(self, cost: float) -> None:
        """Note the cost of the first of the points that were wanted."""
        if isinstance(cost, Constrained):
            self.kept.append((cost.objective, cost.excess))
        elif isinstance(cost, Responded) and not isnan(cost):
            self.kept.append((float(cost) if cost < inf else None, cost.response))
        elif cost < inf:
            self.kept.append(float(cost))
        elif isnan(cost):
            raise ValueError(f"the cost of {self._asked[self._open[0]]} is not a number")
        else:
            self.kept.append(getattr(cost, "why", "infinite"))
        self._learn(cost)

    def _learn(self, cost: float) -> None:
        place = self._open.pop(0)
        self.known[self._keys[place]] = self._costs[place] = cost
        self.calls += 1
        if cost < self.cost:
            if cost < self.context.bound - _ROUNDING * abs(self.context.bound):
                raise ValueError(f"{self._asked[place]} costs {cost}, below the bound {self.context.bound}")
            self.best, self.cost = self._asked[place], float(cost)
            self.gains.append((self.calls, self.cost))
            if self.proven:
                self.ended = "proven"
        if len(self.known) >= self.context.space.size and not self.ended:
            self.context.prove(self.cost)
            self.ended = "proven" if self.proven else "finished"

    def _advance(self, costs: Sequence[float] | None) -> bool:
        """Give the strategy the costs of what it asked, and ask it again; False at the end of a step."""
        try:
            self._asked = self._steps.send(costs)  # type: ignore[arg-type]  # None begins a generator
        except StopIteration:
            self._asked = ()
            self.ended = "finished"
        self._keys = list(map(self._key, self._asked))
        self._costs = list(map(self.known.get, self._keys))
        if None in self._costs:
            self._repeated = 0
            first: dict[Hashable, int] = {}
            for i, key in enumerate(self._keys):
                if self._costs[i] is None:
                    first.setdefault(key, i)
            self._open = list(first.values())
        elif self._keys:
            self._repeated += len(self._keys)
            if self._repeated > self._caught:
                self.ended = "nothing new"
        else:
            self.steps += 1
            if self.proven:
                self.ended = "proven"
            elif self.steps >= self.order.steps and not self.ended:
                self.ended = "steps"
        return bool(self._keys)

    def _answer(self) -> Sequence[float]:
        known = self.known
        return [known[key] if cost is None else cost for key, cost in zip(self._keys, self._costs, strict=True)]

    def found(self) -> Found[Point]:
        """Return what the search came to."""
        met = map(_met, self.kept)
        reasons = Counter(cost.why for cost in met if isinstance(cost, Infeasible | Constrained) and cost == inf)
        order = self.order
        return Found(
            best=self.best, cost=self.cost, calls=len(self.kept), steps=self.steps, curve=tuple(self.gains),
            bound=self.context.bound, proven=self.proven, infeasible=dict(reasons), ended=self.ended,
            learned=self.context.learned,
            state=SearchState(
                strategy=repr(order.strategy), seed=order.seed, costs=(tuple(self.kept),), best=(self.check,)
            ),
        )  # fmt: skip

    @property
    def check(self) -> int:
        """Check sum of the best point."""
        return 0 if self.best is None else crc32(repr(self._key(self.best)).encode())


Tell = Callable[[Callable[[], Found[Any]]], None]


def minimise(
    problem: Problem[Point],
    *,
    strategy: SearchStrategy,
    starts: Sequence[Point] = (),
    calls: int | None = None,
    steps: int | None = None,
    seconds: float | Deadline | None = None,
    gap: float = 0.0,
    chains: int = 1,
    seed: int = 0,
    on: str | None = None,
    state: SearchState | None = None,
    tell: Tell | None = None,
) -> Found[Point]:
    """Return the cheapest point that is found; Ctrl-C ends the search with the best so far.

    Args:
        problem: what points cost; what is sent elsewhere (`on`) is pickled.
        strategy: which points to try.
        starts: points to begin with; the answer costs no more than any of them.
        calls: points to price at most, those of earlier parts (`state`) included.
        steps: steps of the strategy at most, likewise.
        seconds: from now on, or a deadline that is shared with other work. A call is begun only if it would still end
            in time, going by the longest so far; the first is always made.
        gap: a cost within this share of the bound counts as proven, and ends the search.
        chains: searches with random numbers of their own.
        seed: of the random numbers.
        on: None for this process, else a place of `executor.map`; the answer is the same, unless time decides it.
        state: of an earlier part of the same search.
        tell: is given a function that returns the answer so far, after every step; elsewhere only when chains hand over
            what they have, four times in all.

    Raises ForetraceError for a budget that is none, and for the state of another search.

    """
    for name, value in (("calls", calls), ("steps", steps), ("chains", chains)):
        if value is not None and value < 1:
            raise ForetraceError(f"`{name}={value}` allows no search; give 1 or more.")
    until = seconds if isinstance(seconds, Deadline) else Deadline(inf if seconds is None else seconds)
    kept: Sequence[tuple[KeptCost, ...]] = (
        [()] * chains if state is None else _kept(state, repr(strategy), seed, chains)
    )
    orders = [
        _Order(
            problem=problem, strategy=strategy, starts=tuple(starts), seed=seed, index=i, kept=kept[i],
            calls=_share(calls, chains, i), steps=_share(steps, chains, i), gap=gap,
            check=None if state is None else state.best[i],
        )
        for i in range(chains)
    ]  # fmt: skip
    parts = _here(orders, until, tell) if on is None else _elsewhere(orders, until, tell, on)
    return _joined(parts, gap)


def _met(cost: KeptCost) -> float:
    """Return a cost as the strategy met it."""
    if isinstance(cost, tuple):
        first, second = cost
        if isinstance(second, tuple):
            return Responded(inf if first is None else first, second)
        assert first is not None
        return Constrained(first, second)
    return Infeasible(cost) if isinstance(cost, str) else cost


def _share(total: int | None, chains: int, i: int) -> int:
    return _ENDLESS if total is None else total // chains + (i < total % chains)


def _kept(state: SearchState, strategy: str, seed: int, chains: int) -> Sequence[tuple[KeptCost, ...]]:
    if (state.strategy, state.seed, len(state.costs)) != (strategy, seed, chains):
        raise ForetraceError(
            f"this state is of {state.strategy} with seed {state.seed} and {len(state.costs)} chains, not of "
            f"{strategy} with seed {seed} and {chains}; resume with what it was begun with."
        )
    return state.costs


def _here(orders: Sequence[_Order[Point]], until: Deadline, tell: Tell | None) -> list[Found[Point]]:
    """Return all chains side by side in this process: what they ask for is priced together."""
    chains = [_Chain(order, until) for order in orders]
    costs, clock, timed = orders[0].problem.costs, until.clock, until.left < inf
    longest = thought = 0.0  # seconds of the longest call and ask so far, less and less as time passes
    most = 1 if timed else _ENDLESS  # points that are priced before the clock is looked at
    try:
        while left := [chain for chain in chains if not chain.ended]:
            began, steps = clock() if timed else 0.0, sum(chain.steps for chain in left)
            points: list[Point] = []
            asking: list[_Chain[Point]] = []
            for chain in left:
                asked = chain.wanted(most - len(points))
                points += asked
                asking += [chain] * len(asked)
            if tell is not None and sum(chain.steps for chain in left) > steps:
                tell(lambda: _joined([chain.found() for chain in chains], orders[0].gap))
            if timed:
                now = clock()
                thought = max(_FADE * thought, now - began)
                if until.left <= longest + thought and any(chain.calls for chain in left):
                    for chain in left:
                        chain.ended = chain.ended or "seconds"
                    break
            if not points:
                continue
            found = costs(points)
            for chain, cost in zip(asking, found, strict=True):
                chain.priced(cost)
            if timed:
                per_call = (clock() - now) / len(points)
                longest = max(_FADE * longest, per_call)
                fit = min(_BATCH * until.seconds, until.left) / max(per_call, 1e-9)
                most = max(int(min(fit, 2 * len(points))), 1)
    except KeyboardInterrupt:  # at any place: what is not kept yet never was
        chains = [
            _Chain(replace(order, kept=tuple(chain.kept), check=None), until)
            for order, chain in zip(orders, chains, strict=True)
        ]
        for chain in chains:
            chain.ended = chain.ended or "stopped"
    return [chain.found() for chain in chains]


def _run(order: _Order[Point]) -> Found[Point]:
    return _here([order], Deadline(order.seconds), None)[0]


def _elsewhere(orders: Sequence[_Order[Point]], until: Deadline, tell: Tell | None, on: str) -> list[Found[Point]]:
    """Return every chain where the executor puts it, in a few parts: what ends early leaves something behind."""
    total_s = until.left
    parts = [_Chain(replace(order, calls=0), until).found() for order in orders]
    try:
        with executor.place(on) as processes:
            for share in _PARTS:
                going = [i for i, part in enumerate(parts) if part.ended in ("", "calls", "seconds")]
                left_s = share * total_s - until.spent if total_s < inf else inf
                now = [
                    replace(orders[i], kept=state.costs[0], check=state.best[0], seconds=left_s,
                            calls=ceil(share * orders[i].calls))
                    for i in going for state in [parts[i].state]
                ]  # fmt: skip
                for i, part in zip(going, executor.map(_run, now, on=on, pool=processes, again=_AGAIN), strict=True):
                    parts[i] = part
                if tell is not None:
                    tell(lambda: _joined(parts, orders[0].gap))
    except KeyboardInterrupt:
        parts = [replace(part, ended="stopped") for part in parts]
    return parts


def _joined(parts: Sequence[Found[Point]], gap: float) -> Found[Point]:
    """Return the answer of all chains; which call came when does not depend on where they ran."""
    best = min(parts, key=lambda part: part.cost)
    curve: list[tuple[int, float]] = []
    for calls, cost in sorted(
        (sum(min(each.calls, call if j <= i else call - 1) for j, each in enumerate(parts)), cost)
        for i, part in enumerate(parts)
        for call, cost in part.curve
    ):
        if not curve or cost < curve[-1][1]:
            curve.append((calls, cost))
    reasons: Counter[str] = sum((Counter(part.infeasible) for part in parts), Counter())
    bound = max(part.bound for part in parts)
    states = [part.state for part in parts]
    return replace(
        best, calls=sum(part.calls for part in parts), steps=sum(part.steps for part in parts), curve=tuple(curve),
        bound=min(bound, best.cost), proven=best.best is not None and best.cost <= bound + gap * abs(bound),
        infeasible=dict(reasons.most_common()),
        state=msgspec.structs.replace(
            states[0], costs=tuple(each.costs[0] for each in states), best=tuple(each.best[0] for each in states)
        ),
    )  # fmt: skip
