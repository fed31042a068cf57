"""The whole search: which techniques, which buckets, and what every one of them gives (dPRO, MLSys 2022, section 5).

Compute first: sets of techniques are predicted on the recorded graph, the smallest sets first, and each graph is
coarsened to a problem whose best buckets are found with proof. A set is left out where even an exchange without any
compute before it would last longer than the best step known (no technique off the critical path can help). What is
found is simulated again on the whole graph, and the difference is reported.

The time that is given includes what comes after the search: what each part gains, and the range of the answer. A set is
looked at only where both it and that would end in time, going by what predictions took so far (`Deadline`); the step as
it is, its default buckets and their range are always worked out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import msgspec

from foretrace.deadline import Clock, Deadline
from foretrace.errors import ForetraceError, NotApplicableError, spelled
from foretrace.files import write_text
from foretrace.graph.taskgraph import TaskGraph
from foretrace.plan.advise import LeftOut
from foretrace.plan.buckets import BucketPlan, best_buckets, by_caps, default
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.predictions import Peak, Predictions
from foretrace.plan.problem import CoarseStep, Plan, TransferCosts
from foretrace.plan.recorded import Planned, alone
from foretrace.plan.result import Answer, Candidate, Gain, OptimiseRequest, Overtaking
from foretrace.plan.search import overtaking
from foretrace.search.minimise import Found, SearchState
from foretrace.simulate.timeline import simulate
from foretrace.techniques.base import Technique
from foretrace.techniques.compute.compiled import Compiled
from foretrace.techniques.compute.fused_optimizer import FusedOptimizer
from foretrace.techniques.compute.mixed_precision import MixedPrecision
from foretrace.techniques.memory.activation_recomputation import ActivationRecomputation
from foretrace.techniques.memory.gradient_accumulation import GradientAccumulation
from foretrace.techniques.whatif import whatif

FASTER: tuple[Technique, ...] = (MixedPrecision(), Compiled(), FusedOptimizer())
FUSION = "tensor fusion"
EXCHANGED = "The recording exchanged messages itself; they were taken out, also those that are no gradients."
PARTS = (2, 4, 8)  # micro-batches that are tried
_SET, _PREDICTION = "a set", "a prediction"  # parts of the search whose time is watched
_NO_TIME = "no time was left for it; give `seconds=` more"
_WORTH = 1e-3  # a technique that gains less of the step is left out
_ROUNDS = 3  # a problem is read again with the plan found in it, as messages slow compute down

Tell = Callable[[str, float, float], None]  # what is done, share of the work, best step so far in s


class _Looked(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of techniques came to, as the state of a search keeps it."""

    refused: str = ""  # why it cannot be
    step_s: float = 0.0
    found: BucketPlan | None = None  # None on one worker
    buckets_mb: str = ""
    exchange_s: float = 0.0


@dataclass(kw_only=True)
class Optimiser:
    """A search that can be stopped at any moment and resumed."""

    recorded: TaskGraph
    wanted: OptimiseRequest
    peak: Peak | None = None
    state: Path | None = None
    tell: Tell | None = None
    clock: Clock | None = None  # seconds; by default those in which nothing is compiled
    done: dict[str, _Looked] = field(default_factory=dict)  # sets of techniques by name
    overtaking: SearchState | None = None
    overtakes: str = ""  # the set of techniques that this state belongs to
    left_out: dict[str, str] = field(default_factory=dict)
    states: int = 0
    stopped: bool = False  # by the user: the best so far is the answer
    exchange_s: float = 0.0  # least time of all messages of a step
    _print: str = ""
    _deadline: Deadline = field(init=False)
    _predictions: Predictions = field(init=False)

    def run(self, seconds: float = float("inf")) -> Answer:
        """Search until all is looked at or so many seconds have passed. Raises ForetraceError."""
        self._deadline = Deadline(seconds, self.clock)
        self.wanted.checked()
        graph = alone(self.recorded) if self.wanted.workers > 1 else self.recorded
        self._predictions = Predictions(graph, self._deadline)
        self._load(graph)
        if self.wanted.memory_limit is not None and self.peak is None:
            raise ForetraceError(
                "`memory_limit=` needs a recording that shows memory; record with `foretrace record` or profile_memory."
            )
        recorded_s = simulate(graph).step_time_s
        try:
            default_s = self._default_s(graph)
        except NotApplicableError as error:
            said = re.sub(r"gradient_mb=\S*\w", r"`\g<0>`", str(error))
            raise ForetraceError(said) from None
        best, finished = self._sets(graph, default_s)
        gains = self._gains(graph, best, default_s)
        kept = {gain.name for gain in gains}
        best = self._without(graph, best, [t for t in best.techniques if str(t) not in kept and not _saves(t)])
        overtaking, problem = None, None
        if best.parallel is not None:
            changed = self._predictions.of(best.techniques)
            best, problem = self._checked(changed, best)
            if self.wanted.ahead and not self.stopped:
                overtaking, whole = self._overtake(changed, problem, best)
                finished = finished and whole
        found = whatif(graph, best.chain)
        return Answer(
            graph=graph,
            wanted=self.wanted,
            recorded_s=recorded_s,
            default_s=default_s,
            best=best,
            whatif=found,
            gains=gains,
            notes=(EXCHANGED,) if graph is not self.recorded else (),
            left_out=tuple(LeftOut(name=name, why=why) for name, why in self.left_out.items()),
            problem=problem,
            overtaking=overtaking,
            bound_s=best.found.bound_ns / 1e9 if best.found else found.after_s,
            seconds=self._deadline.spent,
            states=self.states,
            sets=len(self.done),
            finished=finished,
            memory_recorded=None if self.peak is None else self.peak.recorded,
        )

    # --- sets of techniques --------------------------------------------------------------------------------------

    def _sets(self, graph: TaskGraph, default_s: float) -> tuple[Candidate, bool]:
        """Return the best set of techniques within the memory limit; whether all were looked at."""
        options, whole = self._options(graph)
        best: Candidate | None = None
        smallest: Candidate | None = None
        for i, chosen in enumerate(options):
            name = _name(chosen)
            if best is not None and self._cannot_help(best, chosen):
                continue
            if not self._deadline.allows(_SET, then=self._closing(chosen)) and i:
                if best is None:
                    raise ForetraceError(
                        f"no step that fits was found within {self._deadline.seconds:g} s; give `seconds=` more."
                    )
                whole = False
                for each in chosen if len(chosen) == 1 else ():
                    self.left_out.setdefault(str(each), spelled(_NO_TIME))
                continue
            try:
                with self._deadline.part(_SET):
                    found = self._candidate(graph, chosen)
            except KeyboardInterrupt:
                if best is None:
                    raise
                self.stopped = True
                return best, False
            if found is None:
                continue
            self._say(f"trying {name or 'buckets alone'}", i / len(options), best.step_s if best else default_s)
            if found.memory is not None and (smallest is None or found.memory < (smallest.memory or 0)):
                smallest = found
            limit = self.wanted.memory_limit
            if limit is not None and (found.memory or 0) > limit:
                continue
            if best is None or found.step_s < best.step_s * (1 - _WORTH):
                best = found
        if best is None:
            least = "" if smallest is None or smallest.memory is None else (
                f"; the least that was found is {smallest.memory / 1e9:.3g} GB with "
                f"{_name(smallest.techniques) or 'no technique'}"
            )  # fmt: skip
            raise ForetraceError(
                f"no step fits into {(self.wanted.memory_limit or 0) / 1e9:.3g} GB{least}. Raise `memory_limit=` or "
                "take a smaller model or batch."
            )
        return best, whole

    def _closing(self, chosen: Sequence[Technique]) -> float:
        """Return seconds that the answer takes if these techniques are it: what each gains, and its range.

        Every part is predicted behind those before it, with buckets of its own where messages are exchanged.
        """
        exchange = [] if self.wanted.workers == 1 else [self._parallel()]
        once = self._predictions.seconds(exchange)
        return self._predictions.range_seconds([*chosen, *exchange]) + (len(chosen) + 6) * once

    def _options(self, graph: TaskGraph) -> tuple[list[tuple[Technique, ...]], bool]:
        """Return sets to look at, small ones first, and whether these are all; less memory only under a limit."""
        fits, whole = list[Technique](), True
        for each in () if self.wanted.only_buckets else FASTER:
            if not self._deadline.allows(_PREDICTION, then=self._closing(())):
                self.left_out[str(each)] = spelled(_NO_TIME)
                whole = False
                continue
            with self._deadline.part(_PREDICTION):
                fit = self._fits(each)
            if fit:
                fits.append(each)
        faster = [chosen for size in range(len(fits) + 1) for chosen in combinations(fits, size)]
        if self.wanted.memory_limit is None:
            return faster, whole
        saving: list[tuple[Technique, ...]] = [()]
        recompute = ActivationRecomputation()
        parts = [GradientAccumulation(steps=count) for count in PARTS]
        saving += [(each,) for each in (recompute, *parts) if self._fits(each)]
        saving += [(recompute, each) for each in parts if (recompute,) in saving and (each,) in saving]
        return [(*less, *chosen) for less in saving for chosen in faster], whole

    def _fits(self, technique: Technique) -> bool:
        try:
            self._predictions.of([technique])
        except NotApplicableError as error:
            self.left_out[str(technique)] = str(error).split(": ", 1)[-1]
            return False
        return True

    def _cannot_help(self, best: Candidate, chosen: Sequence[Technique]) -> bool:
        """Return whether the exchange alone, with no compute before it, lasts as long as the best step known."""
        if best.found is None or any(_saves(each) for each in chosen) or self.wanted.memory_limit is not None:
            return False
        return best.step_s <= self.exchange_s * (1 + _WORTH)

    def _candidate(self, graph: TaskGraph, chosen: tuple[Technique, ...]) -> Candidate | None:
        name = _name(chosen)
        held = self.done.get(name)
        if held is not None and held.refused:
            self.left_out.setdefault(name, held.refused)
            return None
        try:
            changed = self._predictions.of(chosen)
            memory = None if self.peak is None else self.peak.after(changed, since=len(graph.changes))
            if held is None and self.wanted.workers == 1:
                held = _Looked(step_s=simulate(changed).step_time_s)
            elif held is None:
                parallel, found = self._best(changed, self._parallel())
                held = _Looked(step_s=found.step_ns / 1e9, found=found, buckets_mb=parallel.buckets_mb,
                               exchange_s=self.exchange_s)  # fmt: skip
        except NotApplicableError as error:
            if not chosen:
                raise
            self.done[name] = _Looked(refused=str(error).split(": ", 1)[-1])
            self.left_out.setdefault(name, self.done[name].refused)
            self._save()
            return None
        if name not in self.done:
            self.done[name] = held
            self._save()
        self.exchange_s = held.exchange_s
        planned = replace(self._parallel(), buckets_mb=held.buckets_mb) if held.found else None
        return Candidate(techniques=chosen, step_s=held.step_s, memory=memory, found=held.found, parallel=planned)

    def _best(self, graph: TaskGraph, parallel: Planned) -> tuple[Planned, BucketPlan]:
        """Return the best buckets, read again with themselves until they stay: messages slow compute down."""
        from foretrace.plan import engine

        best: tuple[Planned, BucketPlan] | None = None
        for _ in range(_ROUNDS):
            problem = parallel.problem(graph)
            evaluator = Evaluator(
                problem=problem, costs=TransferCosts.of(problem, chunks=(1,))
            )  # DDP sends buckets whole
            found = best_buckets(evaluator)
            self.states += found.states
            costs = evaluator.costs
            self.exchange_s = int(engine.least_work(costs.table, costs.chunks, costs.latency_ns)[0]) / 1e9
            former = parallel.buckets_mb
            parallel = parallel.with_plan(problem, found.plan)
            if best is None or found.step_ns != best[1].step_ns:
                best = parallel, found
            if parallel.buckets_mb == former:
                break
        assert best is not None
        return best

    def _checked(self, changed: TaskGraph, best: Candidate) -> tuple[Candidate, CoarseStep]:
        """Return the candidate with the best of a few plans by the whole graph, and its problem."""
        assert best.parallel is not None and best.found is not None
        problem = best.parallel.problem(changed)
        evaluator = Evaluator(problem=problem, costs=TransferCosts.of(problem, chunks=(1,)))
        plans = dict.fromkeys((best.found.plan, by_caps(evaluator)[0], default(problem)))
        options = {plan: best.parallel.with_plan(problem, plan) for plan in plans}
        times = {plan: simulate(each.predict(changed)).step_time_s for plan, each in options.items()}
        plan = min(times, key=lambda each: times[each])
        if plan == best.found.plan or times[plan] > times[best.found.plan] * (1 - _WORTH):
            return best, problem
        step_ns = evaluator.step_ns(plan)
        found = replace(best.found, plan=plan, step_ns=step_ns, bound_ns=min(best.found.bound_ns, step_ns))
        return replace(best, found=found, parallel=options[plan], step_s=step_ns / 1e9), problem

    def _parallel(self) -> Planned:
        """Return `data-parallel` with gradients as views of the buckets: no copies, no second place for them."""
        wanted = self.wanted
        return Planned(
            workers=wanted.workers,
            network=wanted.network,
            backend=wanted.backend,
            gradient_mb=wanted.gradient_mb,
            views=True,
        )

    def _default_s(self, graph: TaskGraph) -> float:
        if self.wanted.workers == 1:
            return simulate(graph).step_time_s
        return simulate(self._predictions.of([replace(self._parallel(), views=False)])).step_time_s

    def _gains(self, graph: TaskGraph, best: Candidate, default_s: float) -> tuple[Gain, ...]:
        """Return what each part of the answer takes off the step, one after the other, by the whole graph."""
        gains, now = list[Gain](), default_s

        def gained(name: str, what: str) -> Gain:
            return Gain(name=name, what=what, before_s=now, after_s=after, saved_s=now - after)

        if best.parallel is not None:
            plain = replace(self._parallel(), bucket_mb=None)
            after = simulate(self._predictions.of([plain])).step_time_s
            if now - after > _WORTH * now:
                gains.append(gained("gradients as views", "no copies back"))
            now = after
            first = self._candidate(graph, ())
            if first is not None and first.parallel is not None and first.found is not None:
                after = simulate(self._predictions.of([first.parallel])).step_time_s
                what = f"{len(first.found.plan.ends)} buckets instead of {self._default_buckets(graph)}"
                if now - after > _WORTH * now:
                    gains.append(gained(FUSION, what))
                    now = after
                elif not best.techniques:
                    self.left_out.setdefault(FUSION, "the default buckets are as good as any")
        for i, technique in enumerate(best.techniques):
            chosen = best.techniques[: i + 1]
            found = self._candidate(graph, chosen)
            if found is None:
                continue
            after = simulate(self._predictions.of(found.chain)).step_time_s
            what = technique.summary
            if now - after > _WORTH * now or _saves(technique):
                gains.append(gained(str(technique), what))
                now = after
        return tuple(gains)

    def _default_buckets(self, graph: TaskGraph) -> int:
        return len(default(self._parallel().problem(graph)).ends)

    def _without(self, graph: TaskGraph, best: Candidate, useless: Sequence[Technique]) -> Candidate:
        """Return the candidate without techniques that turned out not to gain anything on the whole graph."""
        if not useless:
            return best
        for each in useless:
            self.left_out.setdefault(str(each), "it gains less than 0.1 % of the step beside the others")
        kept = tuple(each for each in best.techniques if each not in useless)
        return self._candidate(graph, kept) or best

    # --- messages that overtake ----------------------------------------------------------------------------------

    def _overtake(self, changed: TaskGraph, problem: CoarseStep, best: Candidate) -> tuple[Overtaking, bool]:
        keep = self._predictions.range_seconds(best.chain) + self._predictions.seconds(best.chain)
        until = self._deadline.until(keep=keep)
        name = _name(best.techniques)
        state = self.overtaking if self.overtakes == name else None
        self.overtakes = name

        def heard(so_far: Callable[[], Found[Plan]]) -> None:
            self.overtaking = so_far().state
            self._save()
            self._say("messages that overtake", 1.0, min(best.step_s, so_far().cost / 1e9))

        found = overtaking(
            Evaluator.of(problem),
            seed=self.wanted.seed,
            steps=self.wanted.rounds,
            seconds=until,
            state=state,
            tell=heard,
        )
        self.stopped = self.stopped or found.ended == "stopped"
        self.overtaking = found.state
        self._save()
        assert best.parallel is not None and found.best is not None
        checked = None
        try:
            ahead = best.parallel.with_plan(problem, found.best)
            checked = simulate(ahead.predict(changed)).step_time_s
        except NotApplicableError:
            pass  # fewer than three recorded steps: what one step sends cannot be followed into the next
        answer = Overtaking(
            plan=found.best,
            step_s=found.cost / 1e9,
            checked_s=checked,
            bound_s=found.bound / 1e9,
            proven=found.proven,
            rounds=found.steps,
            evaluations=found.calls,
        )
        return answer, found.ended not in ("seconds", "stopped")

    # --- the file that keeps where a search stands ------------------------------------------------------------------

    def _load(self, graph: TaskGraph) -> None:
        self._print = _fingerprint(graph, self.wanted)
        if self.state is None or not self.state.exists():
            return
        try:
            held = json.loads(self.state.read_text())
            same = held["of"] == self._print
            sets, overtaking, self.overtakes = held["looked_at"], held["overtaking"], str(held["overtakes"])
            self.done = msgspec.convert(sets, dict[str, _Looked]) if same else {}
            self.overtaking = None if overtaking is None else SearchState.of_json(overtaking)
        except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
            raise ForetraceError(
                f"{self.state} is no state of a search; give the file that `foretrace optimise --resume` wrote, "
                " or a name that does not exist yet."
            ) from None
        if not same:
            raise ForetraceError(
                f"{self.state} belongs to another recording or other options; repeat those, or name another file."
            )

    def _save(self) -> None:
        if self.state is None:
            return
        overtaking = None if self.overtaking is None else self.overtaking.to_json()
        held = {"of": self._print, "looked_at": msgspec.to_builtins(self.done), "overtakes": self.overtakes}
        write_text(self.state, json.dumps({**held, "overtaking": overtaking}))

    def _say(self, what: str, share: float, best_s: float) -> None:
        if self.tell is not None:
            self.tell(what, share, best_s)


def _saves(technique: Technique) -> bool:
    """Return whether a technique is there for memory and not for time."""
    return isinstance(technique, (ActivationRecomputation, GradientAccumulation))


def _name(techniques: Sequence[Technique]) -> str:
    return " + ".join(map(str, techniques))


def _fingerprint(graph: TaskGraph, wanted: OptimiseRequest) -> str:
    """Return the fingerprint of everything that a search depends on."""
    found = hashlib.sha256(repr(replace(wanted, rounds=None)).encode())
    for column in (graph.dur, graph.delay, graph.lag, graph.src, graph.in_ptr, graph.kind, graph.name):
        found.update(column.tobytes())
    found.update(repr(sorted(graph.info.calibration.get("seconds", {}).items())).encode())
    return found.hexdigest()
