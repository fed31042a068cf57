"""`Hybrid`: a start that is learned from priced points, and a strategy that refines it (Yeung et al., 2024).

A network learns what points answer (`Responded`; without it, their cost), and is inverted: from the nearest lessons,
its gradient leads to the point that answers the target, or, where there is none, costs least (the neural adjoint, Ren
et al., NeurIPS 2020). Outside of what it learned from, such a start may be worse than none, so half of what is priced
later is of the same strategy from random starts. What it learns from is asked for as all points are: it counts as
calls, and is resumed with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.search.reinforcement import Adam, DenseNet
from foretrace.search.space import Point, Problem, Responded
from foretrace.search.strategy import LearnedStart, SearchContext, SearchStrategy, Steps

_BATCH, _RATE = 128, 5e-3  # lessons of a round of training; of Adam
_BEGINS, _DESCENT, _FREE_RATE = 16, 100, 0.1  # lessons that are descended from, and how
_LEAST = 1e-12
_REPEATED = 0.05  # of a new point, that any point counts as: who finds nothing new does not keep the turn


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """A learned start, then in turns one strategy from there and one from random starts."""

    refiner: SearchStrategy  # from random starts
    near: SearchStrategy | None = None  # from the learned one; None: the same
    lessons: int = 200  # points to learn from, of `Problem.lesson`
    rounds: int = 2000  # of training the network
    width: int = 64
    answers: int = 4  # of the inverted network that are priced; 0: the nearest lesson is the start
    blind: float = 0.5  # share of the calls after that which is of random starts

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        """Yield the starts, the lessons, the learned start beside the nearest lesson, then the refiners."""
        space, problem = context.space, context.problem
        if context.starts:
            yield context.starts
        asked = [problem.lesson(context.rng) for _ in range(self.lessons)]
        learned = self._learned(problem, asked, (yield asked))
        yield ()
        begins = list(context.starts)
        if learned is not None:
            begins += learned
            nearest, *answers = yield learned
            many = len(set(map(space.key, asked)))
            context.learned = LearnedStart(lessons=many, cost=min(answers, default=nearest), nearest=nearest)
        yield from self._in_turns(context, tuple(begins))

    def _in_turns(self, context: SearchContext[Point], begins: tuple[Point, ...]) -> Steps[Point]:
        """Take turns of both refiners: the one continues that has asked for less than its share of new points."""
        key, seen, spent = context.space.key, set[Hashable](), [0.0, 0.0]
        inner = [
            SearchContext(
                problem=context.problem, starts=starts, rng=Random(context.rng.random()), until=context.until
            )
            for starts in (begins, ())
        ]  # fmt: skip
        share = {0: 1 - self.blind, 1: self.blind}
        by = (self.near or self.refiner, self.refiner)
        going = {i: by[i].steps(inner[i]) for i in share if share[i] > 0}
        answers: dict[int, Sequence[float] | None] = {0: None, 1: None}
        while going:
            i = min(going, key=lambda each: spent[each] / share[each])
            try:
                asked = going[i].send(answers[i])  # type: ignore[arg-type]  # None begins a generator
            except StopIteration:
                del going[i]
                continue
            finally:
                context.prove(inner[i].bound)
            new = set(map(key, asked)) - seen
            seen |= new
            spent[i] += len(new) + _REPEATED * len(asked)
            answers[i] = yield asked

    def _learned(
        self, problem: Problem[Point], points: Sequence[Point], costs: Sequence[float]
    ) -> list[Point] | None:  # fmt: skip
        """Return the lesson that is nearest to the target, and what inversion answers; None if nothing is known."""
        target = problem.target_response
        met = [(at, cost) for at, cost in zip(points, costs, strict=True) if not target or isinstance(cost, Responded)]
        # Without a target, the first number of a response is what it costs.
        answers = [
            cost.response[: None if target else 1] if isinstance(cost, Responded) else (cost,) for _, cost in met
        ]
        y = np.array(answers, dtype=np.float64).reshape(len(met), -1) if met else np.zeros((0, 1))
        known = np.isfinite(y).all(axis=-1)
        if not known.any():  # nothing can be, or nothing responds
            return None
        if target and len(target) != y.shape[1]:
            raise ForetraceError(
                f"`target=` must have {y.shape[1]} numbers, as what is simulated has, got {len(target)}; give those."
            )
        if not target:  # ranks: what is far from the best need not be known well
            y[~known] = y[known].max() + 1
            rank = np.searchsorted(np.sort(y[:, 0]), y) + 0.5
            y = np.log(rank / (len(y) + 1 - rank))
        x = np.array([problem.space.encode(at) for at, _ in met])
        given = np.array([problem.given(at) for at, _ in met]).reshape(len(met), -1)
        own = np.array(problem.given(None))
        wanted = np.array(target)
        apart = ((y - wanted) ** 2).mean(axis=1) if target else y[:, 0].copy()
        if given.shape[1]:  # of the problem that is most alike
            far = (((given - own) / (given.std(axis=0) + _LEAST)) ** 2).sum(axis=1)
            apart += np.where(far == far.min(), 0.0, np.ptp(apart) + 1)
        order = np.argsort(apart, kind="stable")
        nearest, answered = problem.space.decode(x[order[0]].tolist()), dict[Hashable, Point]()
        if self.answers:
            lessons = tuple((each.shape, each.tobytes()) for each in (x, given, y))
            codes = _network(lessons, self.width, self.rounds).inverted(x[order[:_BEGINS]], own, wanted)
            answered = {problem.space.key(at): at for at in map(problem.space.decode, codes.tolist())}
        return [nearest, *list(answered.values())[: self.answers]]


class _Network:
    """What points answer, learned; and its inverse."""

    def __init__(self, x: Float64, given: Float64, y: Float64, width: int, rounds: int) -> None:
        """Train it on random batches of codes of points (n x d), what was given (n x g), what they answered (n x r)."""
        rng = np.random.default_rng(0)
        self._center, self._scale = y.mean(axis=0), y.std(axis=0).mean() + _LEAST
        self._given_center, self._given_scale = given.mean(axis=0), given.std(axis=0) + _LEAST
        into = np.hstack((x, (given - self._given_center) / self._given_scale))
        y = (y - self._center) / self._scale
        self._net = DenseNet((into.shape[1], width, width, y.shape[1]), rng)
        adam = Adam(self._net.parameters)
        for i in range(rounds):
            at = rng.integers(len(x), size=_BATCH)
            values = self._net.forward(into[at])
            off = (values[-1] - y[at]) / values[-1].size
            adam.step(self._net.backward(values, off)[0], _RATE * (1 - i / rounds))

    def inverted(self, begins: Float64, given: Float64, wanted: Float64) -> Float64:
        """Return codes after descents, best first: the answer nearest to what is wanted, or the least."""
        inside = np.clip(begins, 0.02, 0.98)
        free = np.log(inside / (1 - inside))
        rest = np.broadcast_to((given - self._given_center) / self._given_scale, (len(begins), len(given)))
        adam = Adam([free])
        for i in range(_DESCENT + 1):
            code = 1 / (1 + np.exp(-free))
            values = self._net.forward(np.hstack((code, rest)))
            off = values[-1] - (wanted - self._center) / self._scale if len(wanted) else np.ones_like(values[-1])
            if i < _DESCENT:
                by_code = self._net.backward(values, off)[1][:, : code.shape[1]]
                adam.step([by_code * code * (1 - code)], _FREE_RATE * (1 - i / _DESCENT))
        error = (off**2).mean(axis=1) if len(wanted) else values[-1][:, 0]
        return np.asarray(code[np.argsort(error, kind="stable")])


@lru_cache(maxsize=16)
def _network(lessons: tuple[tuple[tuple[int, ...], bytes], ...], width: int, rounds: int) -> _Network:
    """Return trained once for the same lessons (shapes and numbers): chains, targets and what is resumed share it."""
    x, given, y = (np.frombuffer(numbers).reshape(shape) for shape, numbers in lessons)
    return _Network(x, given, y, width, rounds)
