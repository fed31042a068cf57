"""What to do first: every technique tried on one run, ranked by what it saves, and the best three predicted together.

Every technique that can be applied is predicted once with its default settings. What gains more than noise can explain,
as far as that does not move the step before and after alike, gets a range: *one by one*, as
`foretrace.techniques.whatif` weighs assumptions, while a fixed amount of work lasts, else *all at once*: one prediction
with all assumptions at the ends that make the step slower, and one with all at the other ends. The second is the wider
one. What is distinguishable from no change is then combined as far as possible, most saving first, and
predicted as a chain: savings do not add up.

Work is counted in tasks that are predicted, not in seconds, so that the same run always gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import hypot, inf
from typing import Literal

import numpy as np

from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.noise import between
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.base import Larger, Technique
from foretrace.techniques.explain import why_not_more
from foretrace.techniques.whatif import company, unverified, whatif

WORK = 1_200_000  # tasks that are predicted; 1 to 1.5 us each
MOST = 3  # techniques that are combined
# Of combining them: data first, then layouts and types, then what merges operators, and launches last.
ORDER = (
    "prefetch-data", "channels-last", "mixed-precision", "reconstruct-batchnorm", "structured-dropout", "compiled",
    "fused-optimizer", "bucket-fusion", "cuda-graphs",
)  # fmt: skip
_WORTH = 1e-3  # a technique has to take this share off the step, also one that joins others
_BESIDE = 0.01  # of the step: ends that miss the prediction by more do not bound it
_EACH = 2_000  # a prediction costs as much beside its tasks
_INSERTED = 15  # inserting a task costs as much as so many that are kept
_NOISE = 1  # an interval of noise costs as much as a prediction

How = Literal["", "noise alone", "all at once", "one by one"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tried:
    """Techniques applied one after the other, and the step that they lead to.

    `interval_s` is that of the step, `saved_range_s` of what is taken off: narrower where noise moves both alike.
    `how` says how they were found; by "noise alone" they are at least as wide as that, and "" has none.
    """

    techniques: tuple[Technique, ...]
    before_s: float
    after_s: float
    how: How = ""
    interval_s: tuple[float, float] | None = None
    saved_range_s: tuple[float, float] | None = None
    why_not_more: str = ""

    @property
    def name(self) -> str:
        """The techniques as they are written."""
        return _name(self.techniques)

    @property
    def saved_s(self) -> float:
        """What is taken off the step."""
        return self.before_s - self.after_s

    @property
    def gains(self) -> bool:
        """Whether the step gets shorter over the whole range, and by as much as a replay can tell."""
        worth = self.saved_s >= _WORTH * self.before_s
        return worth and self.saved_range_s is not None and self.saved_range_s[0] > 0


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A technique that was not predicted, and why."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Failed(LeftOut):
    """A technique that ended in an error of ours."""

    error: Exception


@dataclass(frozen=True, kw_only=True, eq=False)
class Advice:
    """What to do about a run."""

    before: Timeline
    level: float
    gains: tuple[Tried, ...]  # distinguishable from no change, most first
    together: Tried | None  # the best of `gains` as a chain, where there are two that can be combined
    hidden: tuple[Tried, ...]  # cannot be distinguishable from no change
    slower: tuple[Tried, ...]  # by the first estimate, least first
    refused: tuple[LeftOut, ...]
    asks: tuple[LeftOut, ...]  # needs a choice; `why` lists the parameters
    failed: tuple[Failed, ...]  # a mistake of ours, which must not cost the advice about the others


def advise(graph: TaskGraph, *, level: float = 0.8, work: float = WORK) -> Advice:
    """Try every technique that can be applied; rank, weigh and combine those that gain.

    `work` bounds what is spent on weighing assumptions one by one: `inf` does so for all, 0 for none.
    """
    from foretrace.techniques.registry import techniques  # every technique there is: `against` needs a few only

    trial = _Trial(graph, level)
    asks = []
    for name, kind in techniques().items():
        if not kind.can_apply():
            continue  # supposes something and does not say how to reach it
        if missing := [f"{each.name}=" for each in kind.parameters() if each.required]:
            asks.append(LeftOut(name=name, why=" ".join(missing)))
        else:
            trial.estimate((kind(),))
    estimates = sorted(trial.found, key=lambda each: (-each.saved_s, each.name))
    trial.reserve([each for each in estimates if each.saved_s > 0], work)
    weighed = [trial.with_range(each) for each in estimates if each.saved_s > 0]
    gains = [each for each in weighed if each is not None and each.gains]
    together = trial.compose(gains)
    hidden = [each for each in weighed if each is not None and not each.gains]
    return Advice(
        before=trial.before, level=level, gains=tuple(gains), together=together,
        hidden=(*hidden, *(each for each in estimates if each.saved_s == 0)),
        slower=tuple(each for each in estimates if each.saved_s < 0),
        refused=tuple(trial.refused), asks=tuple(asks), failed=tuple(trial.failed),
    )  # fmt: skip


def against(graph: TaskGraph, kinds: Sequence[type[Technique]], *, level: float = 0.8) -> tuple[Tried, ...]:
    """Return which of a few techniques gain beyond doubt, most first, as `advise` says; what fails is left to it to
    say.
    """
    trial = _Trial(graph, level)
    found = [each for kind in kinds if (each := trial.estimate((kind(),))) is not None and each.saved_s > 0]
    trial.reserve(found, WORK // 10)
    weighed = [trial.with_range(each) for each in found]
    return tuple(sorted((each for each in weighed if each is not None and each.gains), key=lambda each: -each.saved_s))


class _Trial:
    """Predictions on one graph, and how much work is left for weighing assumptions one by one."""

    def __init__(self, graph: TaskGraph, level: float) -> None:
        self.level = level
        self.before = simulate(graph)
        self.found: list[Tried] = []
        self.refused: list[LeftOut] = []
        self.failed: list[Failed] = []
        self._spent = 0
        self._left = 0.0
        self._graphs = {"": graph}  # by the techniques applied
        self._timelines: dict[str, Timeline] = {}

    def estimate(self, chain: tuple[Technique, ...]) -> Tried | None:
        """Return the step after a chain of techniques, noted in `found`; None where it does not fit, or failed."""
        with self._noted(chain):
            after = self._timelines[_name(chain)] = simulate(self._predicted(chain))
            self._spent += self._cost(chain)
            self.found.append(Tried(techniques=chain, before_s=self.before.step_time_s, after_s=after.step_time_s))
            return self.found[-1]
        return None

    @contextmanager
    def _noted(self, chain: Sequence[Technique]) -> Iterator[None]:
        """Note what does not fit, and what fails: one technique must not cost the advice about the others."""
        name = _name(chain)
        try:
            yield
        except NotApplicableError as error:
            self.refused.append(LeftOut(name=name, why=str(error).removeprefix(f"{name}: ")))
        except Exception as error:  # said in the answer, and raised by the command when that is given
            self.failed.append(Failed(name=name, why=f"{type(error).__name__}: {error}", error=error))

    def reserve(self, faster: Sequence[Tried], work: float) -> None:
        """Keep of `work` what it takes to weigh these all at once, and to put the best of them together."""
        each = [(2 + _NOISE) * self._cost(found.techniques) for found in faster]
        self._left = max(work - self._spent - sum(each) - MOST * max(each, default=0), 0)

    def with_range(self, found: Tried) -> Tried | None:
        """Return `found` with its range; that of the noise alone where the noise hides it already. None where it
        failed.
        """
        with self._noted(found.techniques):
            after = self._timelines[found.name]
            noise = after.interval_s(self.level)
            less, more = between(self.before.draws, after.draws, np.subtract, self.level)
            saved = found.saved_s - less, found.saved_s + more
            alone = replace(found, how="noise alone", interval_s=(noise.low_s, noise.high_s), saved_range_s=saved)
            if not alone.gains:
                return alone
            return self._one_by_one(found) or self._all_at_once(alone, after) or self._one_by_one(found, inf)
        return None

    def _one_by_one(self, found: Tried, most: float | None = None) -> Tried | None:
        """Return `found` as `whatif` weighs it; None where that is more work than is left, or than `most`."""
        ends = sum(2 * len(technique.uncertain(graph)) for technique, graph in self._walk(found.techniques))
        cost = ends * self._cost(found.techniques)
        if cost > (self._left if most is None else most):
            return None
        self._left -= cost
        answer = whatif(self._graphs[""], found.techniques, level=self.level)
        return replace(
            found, how="one by one", interval_s=answer.interval_s, saved_range_s=answer.saved_interval_s,
            why_not_more=answer.why_not_more,
        )  # fmt: skip

    def _all_at_once(self, found: Tried, after: Timeline) -> Tried | None:
        """Return `found` by noise alone, and all assumptions at their slow or fast ends; None where those do not bound
        it.

        Ends that miss the prediction by up to `_BESIDE` of the step still bound it: the prediction is then the end, and
        what they miss by counts on either side.
        """
        slow_s, fast_s = self._step_at_ends(found.techniques, "slower"), self._step_at_ends(found.techniques, "faster")
        missed_s = max(fast_s - found.after_s, found.after_s - slow_s)
        if missed_s > _BESIDE * found.before_s:
            return None
        fast_s, slow_s = min(fast_s, found.after_s), max(slow_s, found.after_s)
        steps = [simulate(graph) for _, graph in self._walk(found.techniques)]
        others = [*company(self.before, after), *unverified(self._graphs[""], found.techniques, [*steps, after])]
        missed_s = max(missed_s, 0.0)
        faster = hypot(found.after_s - fast_s, missed_s, *(each.faster_s for each in others))
        slower = hypot(slow_s - found.after_s, missed_s, *(each.slower_s for each in others))
        assert found.interval_s is not None and found.saved_range_s is not None
        (low_s, high_s), (least_s, most_s) = found.interval_s, found.saved_range_s
        after_low_s = max(found.after_s - hypot(found.after_s - low_s, faster), 0.0)
        after_high_s = found.after_s + hypot(high_s - found.after_s, slower)
        saved_low_s = found.saved_s - hypot(found.saved_s - least_s, slower)
        saved_high_s = found.saved_s + hypot(most_s - found.saved_s, faster)
        return replace(
            found, how="all at once", interval_s=(after_low_s, after_high_s), saved_range_s=(saved_low_s, saved_high_s),
            why_not_more=why_not_more(after),
        )  # fmt: skip

    def compose(self, gains: Sequence[Tried]) -> Tried | None:
        """Return the best three that can be combined, predicted together; None where there are no two."""
        best: Tried | None = gains[0] if gains else None
        for further in gains[1:]:
            assert best is not None
            if len(best.techniques) == MOST:
                break
            found = self.estimate(tuple(sorted((*best.techniques, *further.techniques), key=_place)))
            if found is not None and found.after_s < best.after_s - _WORTH * best.before_s:
                best = found
        if best is None or len(best.techniques) < 2:
            return None
        ranged = self.with_range(best)
        return ranged if ranged is not None and ranged.gains else None

    def _walk(self, chain: Sequence[Technique]) -> Iterator[tuple[Technique, TaskGraph]]:
        """Yield every technique of a chain with the graph that it is applied to."""
        for i, technique in enumerate(chain):
            yield technique, self._predicted(chain[:i])

    def _predicted(self, chain: Sequence[Technique]) -> TaskGraph:
        """Return the graph after a chain, from the longest part of it that is known."""
        if (name := _name(chain)) not in self._graphs:
            self._graphs[name] = chain[-1].predict(self._predicted(chain[:-1]))
        return self._graphs[name]

    def _step_at_ends(self, chain: Sequence[Technique], end: Larger) -> float:
        """Return the step after a chain with all its assumptions at the ends that make it slower, or faster."""
        at_end: tuple[Technique, ...] = ()
        for technique, known in self._walk(chain):
            larger = {each.field: each.larger_is for each in technique.parameters()}
            assumed = technique.uncertain(known)
            ends = {each.flag: each.high if larger[each.flag] == end else each.low for each in assumed}
            at_end = (*at_end, replace(technique, **ends))
        return simulate(self._predicted(at_end)).step_time_s

    def _cost(self, chain: Sequence[Technique]) -> int:
        """Return work of predicting a chain."""
        tasks, kept = len(self._graphs[_name(chain)]), len(self._graphs[""])
        return len(chain) * (_EACH + tasks) + _INSERTED * max(tasks - kept, 0)


def _name(chain: Sequence[Technique]) -> str:
    return " + ".join(map(str, chain))


def _place(technique: Technique) -> int:
    return ORDER.index(technique.name) if technique.name in ORDER else len(ORDER)
