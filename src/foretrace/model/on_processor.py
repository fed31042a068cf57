"""A training step on this machine's processor, from its operators alone: what they take, and what calls them.

    timed = calibrated(50)                                    # some ten seconds of work
    step = Processor.of(timed.measured.seconds).step(capture(training, like="cpu"))
    step.seconds, step.low_s, step.high_s

On a processor one thread does everything, so a step is the sum of its operators and of what stands between them:
Python and autograd in the forward pass, the engine in the backward pass, the loop over parameters in an update. That is
a number of nanoseconds per call and phase, taken from the small networks of `host_chains`; views cost less inside a
backward pass, which calls them from C++, than they do alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.cost.calls import Calls, Family, Float64
from foretrace.cost.model import CostModel, Prediction
from foretrace.cost.operators import store
from foretrace.cost.operators.arguments import callable_alone
from foretrace.cost.operators.grid import chosen
from foretrace.cost.operators.local import RESOURCES, TENTH, Local, unsure_key
from foretrace.cost.operators.machine import fingerprint
from foretrace.cost.operators.operator import Operator, call
from foretrace.deadline import Deadline
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.hardware.devices import Device
from foretrace.model import effects
from foretrace.model.effects import StepEffects
from foretrace.model.host_chains import PARTS, chains, kinds_of, network, time_key
from foretrace.model.machine_state import ALIKE, CALLS, OF_RESOURCE, USUAL, alike, probe, usual
from foretrace.model.memory.reuse import reuse
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.timed_operators import TURNS, Progress, TimedOperators, in_rounds

LEAST = 5  # operators: the parts of one network, and two calls
_PROBE_OF = [OF_RESOURCE[each] for each in RESOURCES]
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_ROW = {phase: i for i, phase in enumerate(PHASES)}
# What is believed of a call beforehand, in times of a view that is called alone: a value and its deviation.
_CALL = (1.5, 1.5)
_VIEW = (-0.4, 0.4)  # less than it takes alone
_OWNER = (1.0, 1.5)  # that is called: a module; backward, a weight whose gradient is kept
_CHAIN_ERROR = 0.08  # of the time of a network, most of it what its own operators are mispredicted by
_STRAY, _LEAST_STRAY = 0.5, 0.3
_LEAST_VIEW = 0.1  # of a view called alone
# Standard deviation of the logarithm of a step that no call explains, by seconds of the step: judged on development
# models, small ones and some of full size, which err more.
_LASTING, _STEP_ERROR = (0.15, 0.3), (0.06, 0.1)
_EFFECT_ERROR = 0.3  # of what a step does to its calls
# Of products that may read denormal numbers, where the batch does not say how many: one in twenty makes products take 4
# to 12 times as long (measured on products alone); how many there are, if any, nobody knows.
_DENORMAL = 3.0
ENOUGH_FOR_EFFECTS = 20  # operators: with fewer, a calibration is to be short
_OWN_TURNS = 2  # of each of two rounds of a model's own operators
SLOWED = Operator.of(f"{__name__}:slowed", [[]], ["Scalar"]).key  # of how many times slower the machine was


def operators(k: int) -> list[Operator]:
    """Return the k operators that say most about this machine: networks of small calls, then calls by design.

    Raises ForetraceError if k is below LEAST.
    """
    if k < LEAST:
        raise ForetraceError(f"{k} operators say too little of a machine; measure {LEAST} or more, 50 do well.")
    first = chains(kinds_of(k))
    return [*chosen().designed[: k - len(first)], *first]


def calibrated(
    k: int, *, budget_s: float | None = None, progress: Progress | None = None, turns: int = TURNS, **how: Any
) -> TimedOperators:
    """Time the k operators, and the constants of `effects` where they are many; see `timed`.

    Those constants are measured before and after, of which the least counts: while others fill the caches that a
    machine's cores share, code that was driven out costs twice as much.
    """
    until = Deadline(float("inf") if budget_s is None else budget_s)
    with_effects = k >= ENOUGH_FOR_EFFECTS and until.allows(then=3 * effects.MEASURING_S)
    more = effects.measured() if with_effects else {}
    left = None if budget_s is None else until.until(effects.MEASURING_S * with_effects).budget_s
    found = in_rounds(operators(k), turns=turns, budget_s=left, progress=progress, **how)
    if more:
        again = effects.measured()
        more = {key: min(value, again[key]) for key, value in more.items()}
    seconds = {**found.measured.seconds, **more}
    return replace(found, measured=replace(found.measured, seconds=seconds))


def keep(machine: Mapping[str, Any], found: TimedOperators) -> tuple[Path, str]:
    """Store what was timed on this machine; and what its state was, compared with other calibrations.

    A slowed machine makes everything slower: times of calmer moments stay, and predictions get wider until a
    calibration meets the machine calm again.
    """
    known, seconds = store.load(machine), dict(found.measured.seconds)
    before = np.array([known.get(key, each) for key, each in zip(USUAL, found.usual_s.tolist(), strict=True)])
    slower, faster = float(np.max(found.usual_s / before)), float(np.max(before / found.usual_s))
    whole = any(map(effects.is_effect, seconds))
    state = (
        f"{100 * found.alike:.0f} % of the times met the machine calm ({1e6 * found.usual_s[0]:.2f} µs a view, "
        f"{1e3 * found.usual_s[2]:.2f} ms a copy of 4 MiB)"
    )
    unsure = max(slower, 1.0 if whole else max(faster, known.get(SLOWED, 1.0)))
    if slower > np.exp(ALIKE):
        seconds = {key: value for key, value in seconds.items() if key not in known}
    else:
        seconds |= dict(zip(USUAL, np.minimum(found.usual_s, before).tolist(), strict=True))
    if unsure > np.exp(ALIKE):
        state += (
            f"; others slowed it, or it was up to {unsure:.1f} times faster in another calibration: ranges are wider"
        )
    for key in found.measured.seconds.keys() & seconds.keys():
        if key in found.unsure or unsure_key(key) in known:
            seconds[unsure_key(key)] = found.unsure.get(key, 0.0)  # of which nothing is loaded
    seconds[SLOWED] = unsure if unsure > np.exp(ALIKE) else 0.0
    return store.save(machine, seconds), state


def with_own(graph: OperatorGraph, k: int, *, budget_s: float = 60.0, progress: Progress | None = None) -> Processor:
    """Return this machine's processor after timing, and keeping, the k calls of the graph that say most of its step."""
    machine = fingerprint()
    known = store.load(machine)
    if wanted := Processor.of(known).telling(graph, k, known):
        best = usual(known)
        keep(machine, in_rounds(wanted, turns=_OWN_TURNS, usual_s=best, budget_s=budget_s, progress=progress))
    return Processor.of(store.load(machine)).now()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOverhead:
    """Seconds that a call takes in a step beyond those that it takes alone, by phase; fewer for a view."""

    call_s: tuple[float, float, float]
    view_s: tuple[float, float, float]
    owner_s: tuple[float, float, float] = (0.0, 0.0, 0.0)  # per module called, and weight whose gradient is kept
    alone_s: float  # of a view called alone
    networks: int  # that this comes from; 0: assumed
    stray: float = _STRAY  # of all that is spent per call: how far this is off for the networks that it comes from

    @classmethod
    def of(cls, seconds: Mapping[str, float], local: Local) -> HostOverhead:
        """Make it from the times of the networks, as `calibrated` gives them."""
        alone = float(np.exp(local.logarithms(_VIEW_CALL)[0][0]))
        rows: list[list[tuple[Float64, float, float]]] = [[], [], []]
        found = 0
        for kind in kinds_of(None):
            if any(time_key(kind, part) not in seconds for part in PARTS):
                continue
            found += 1
            both = [seconds[time_key(kind, part)] for part in PARTS]
            taken = (both[0], both[1] - both[0], both[2])
            for at, (amounts, own) in enumerate(_counted(kind, local)):
                rows[at].append((amounts, taken[at] - own, max(taken[at], 1e-9)))
        solved = [_solved(each, alone) for each in rows]
        times = np.array([
            (taken, max(taken - left + float(np.dot(each, amount)), 0.1 * taken))
            for each, among in zip(solved, rows, strict=True)
            for amount, left, taken in among
        ]).reshape(-1, 2)  # fmt: skip
        off = np.average(np.log(times[:, 1] / times[:, 0]) ** 2, weights=times[:, 0]) if found else _STRAY**2
        call_s, view_s, owner_s = zip(*solved, strict=True)
        return cls(
            call_s=call_s,
            view_s=view_s,
            owner_s=owner_s,
            alone_s=alone,
            networks=found,
            stray=max(float(np.sqrt(off)), _LEAST_STRAY),
        )


_VIEW_CALL = Calls.of([("aten::view", '[[[8,8],[]],["float","ScalarList"],["","[64]"]]')])


def _counted(kind: str, local: Local) -> list[tuple[Float64, float]]:
    """Return per phase of a network calls, views and owners, and what all calls take alone."""
    graph = _captured(kind)
    own = local.parts(graph.calls)[0]
    views = graph.calls.family == Family.NONE
    amounts = np.stack([~views, views, _owners(graph)])
    phases = np.array([node.phase for node in graph.nodes])
    return [(amounts[:, at].sum(axis=1), float(np.nansum(own[at]))) for at in (phases == each for each in PHASES)]


def _owners(graph: OperatorGraph) -> Float64:
    """Return of every node how many modules begin there in the forward pass, and gradients of weights behind it (n)."""
    found = np.zeros(len(graph))
    layer = ""
    for i, node in enumerate(graph.nodes):
        if node.phase == Phase.FORWARD:
            found[i] = node.layer not in ("", layer)
            layer = node.layer
    for each in graph.storages:
        if each.role == Role.GRADIENT and each.born >= 0:
            found[each.born] += graph.nodes[each.born].phase == Phase.BACKWARD
    return found


@cache
def _captured(kind: str) -> OperatorGraph:
    from foretrace.model.capture.capture import capture

    return capture(network(kind), like="cpu")


def _solved(rows: Sequence[tuple[Float64, float, float]], alone: float) -> tuple[float, float, float]:
    """Return seconds per call, view and owner that explain what is left, near to what is believed beforehand."""
    believed, stray = np.array([_CALL, _VIEW, _OWNER]).T * alone
    precision = np.diag(stray**-2.0)
    right = precision @ believed
    for amount, left, taken in rows:
        weight = (_CHAIN_ERROR * taken) ** -2.0
        precision = precision + weight * np.outer(amount, amount)
        right = right + weight * left * amount
    call, view, owner = np.linalg.solve(precision, right).tolist()
    return max(call, 0.0), view, max(owner, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step with their 80 % range, and what they are made of."""

    seconds: float
    low_s: float
    high_s: float
    operators_s: float  # what its calls take alone
    host_s: float  # what calls them
    unknown: int  # calls that nothing is known of


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorRates:
    """What a calibration says of a processor, in figures that can be compared."""

    product_gflop_s: float  # 512 x 512 x 512
    convolution_gflop_s: float  # 64 channels, 3 x 3, 32 images of 16 x 16
    near_gb_s: float  # adding 2 x 256 KiB
    far_gb_s: float  # adding 2 x 8 MiB
    call_s: tuple[float, float, float]  # of the smallest product, forward and backward; in an update, of a sum
    low: float  # 80 % range of the product's rate, as factors
    high: float

    @property
    def headline(self) -> str:
        """One sentence."""
        low, high = self.product_gflop_s * self.low, self.product_gflop_s * self.high
        return f"Products run at {self.product_gflop_s:.0f} GFLOP/s here ({low:.0f} – {high:.0f})."

    @property
    def lines(self) -> list[str]:
        """A table."""
        micro = [f"{1e6 * each:.1f}" for each in self.call_s]
        return [
            f"convolutions       {self.convolution_gflop_s:>8.0f} GFLOP/s  (64 channels, 3 × 3)",
            f"sums, in a cache   {self.near_gb_s:>8.1f} GB/s     (0.75 MiB)",
            f"sums, from memory  {self.far_gb_s:>8.1f} GB/s     (24 MiB)",
            f"the smallest call  {micro[0]:>8} µs       forward, {micro[1]} backward, {micro[2]} in an update",
        ]


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The processor of this machine, as some measured operators show it."""

    local: Local
    host: HostOverhead
    effects: StepEffects | None = None
    slowed: float = 1.0  # times that the machine was slower, or faster, when some of its operators were timed
    usual_s: Float64 | None = None  # probes of the machine when they were timed
    drift: Float64 | None = None  # times that it is slower, or faster, by now, by PROBES

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> Processor:
        """Make it from stored times. Raises ForetraceError where none of them is of an operator."""
        in_step = StepEffects.of(seconds)
        local = Local.of(seconds if in_step is None else in_step.without_faults(seconds))
        if not local.measured:
            raise ForetraceError(
                "no operator was timed on this machine yet; run foretrace calibrate device --operators 50."
            )
        return cls(
            local=local, host=HostOverhead.of(seconds, local), effects=in_step, slowed=seconds.get(SLOWED, 1.0),
            usual_s=usual(seconds),
        )  # fmt: skip

    @classmethod
    def probed(cls, state: Float64 | None = None) -> Processor:
        """Return what the probes alone say (of this machine just now, or seen so): three calls, and no calibration."""
        seen = dict(zip((each.key for each in CALLS), (probe() if state is None else state).tolist(), strict=True))
        local = Local.of(seen | {CALLS[1].near_key: seen[CALLS[1].key]})
        return cls(local=local, host=HostOverhead.of({}, local))

    def now(self, state: Float64 | None = None) -> Processor:
        """Return the processor as its probes see it just now (or saw it): ranges widen by what that differs."""
        state = probe() if state is None else state
        if self.usual_s is None or not np.isfinite(self.usual_s).all() or alike(state, self.usual_s):
            return self
        return replace(self, drift=state / self.usual_s)

    def telling(self, graph: OperatorGraph, k: int, known: Collection[str] = ()) -> list[Operator]:
        """Return the k calls whose times say most of how long a step takes, of those not `known` by their keys."""
        lies = self._lies(graph)[0]
        calls = graph.calls
        found: dict[Operator, None] = {}
        for i in self.local.telling(calls, lies):
            each = Operator(calls.op[i], calls.text[i])
            if each.key in known or each in found or not callable_alone(each):
                continue
            found[each] = None
            if len(found) == k:
                break
        return list(found)

    def rates(self) -> ProcessorRates:
        """Return predicted times of some telling calls, as rates."""
        calls = Calls.of([(each.name, each.text) for each in _telling()])
        found = self.local.predict(calls)
        away = replace(self.local, place=1.0).predict(calls).seconds
        alone = found.seconds
        return ProcessorRates(
            product_gflop_s=float(calls.flops[0] / alone[0] / 1e9),
            convolution_gflop_s=float(calls.flops[1] / alone[1] / 1e9),
            near_gb_s=float(calls.nbytes[2] / replace(self.local, place=0.0).predict(calls).seconds[2] / 1e9),
            far_gb_s=float(calls.nbytes[3] / away[3] / 1e9),
            call_s=tuple(float(alone[at]) + self.host.call_s[i] for i, at in enumerate((4, 4, 5))),  # type: ignore[arg-type]
            low=float(alone[0] / found.high_s[0]),
            high=float(alone[0] / found.low_s[0]),
        )

    def costs(self, graph: OperatorGraph) -> CostModel:
        """Return seconds of the calls of this graph in a step, in their order: for `lower(..., own_processor=True)`."""
        return _InStep(processor=self, graph=graph)

    def seconds(self, graph: OperatorGraph) -> Float64:
        """Return seconds of every node in a step; NaN where nothing is known."""
        place, more = self._lies(graph)
        alone = self.local.parts(graph.calls, place)[0]
        return np.asarray(alone + self._beyond(graph, alone) + more)

    def step(self, graph: OperatorGraph) -> StepTime:
        """Return a step of these operators, one after another."""
        calls, (place, more) = graph.calls, self._lies(graph)
        alone, stray = self.local.parts(calls, place)
        own = float(np.nansum(alone))
        beyond = float(np.nansum(self._beyond(graph, alone)))
        context = float(more.sum())
        total = own + beyond + context
        if not total > 0:
            raise ForetraceError(f"{graph.name} has no operator whose time is known; capture it in float32.")
        spent = own * self.local.shares(calls, place)
        per_call = float(spent[0]) + abs(beyond)  # dispatch, and what stands between: as much as Python does with them
        doubt = float(np.nansum(alone[np.isnan(effects.denormals(graph))]))
        unsure = (own * stray, per_call * self.host.stray, context * _EFFECT_ERROR, doubt * _DENORMAL)
        spent[0] += total - own
        drifted = 1.0 if self.drift is None else float(spent @ self.drift[_PROBE_OF] / total)
        apart = np.log(self.slowed) ** 2 + np.log(drifted) ** 2
        left = np.interp(total, _LASTING, _STEP_ERROR)
        deviation = np.sqrt(np.sum(np.square(unsure)) / total**2 + left**2 + apart)
        factor = float(np.exp(TENTH * deviation))
        return StepTime(
            seconds=total, low_s=total / factor, high_s=total * factor, operators_s=own, host_s=beyond + context,
            unknown=int(np.isnan(alone).sum()),
        )  # fmt: skip

    def _lies(self, graph: OperatorGraph) -> tuple[Float64, Float64]:
        """Return per node the share of its data that is far, and seconds for what a step does to it beside."""
        lies = reuse(graph)
        if self.effects is None:
            return lies.far_shares(), np.zeros(len(graph))
        return lies.far_shares(self.effects.far_share), self.effects.beyond(graph, lies, self.local.seconds)

    def _beyond(self, graph: OperatorGraph, alone: Float64) -> Float64:
        views = graph.calls.family == Family.NONE
        at = np.array([_ROW.get(node.phase, 0) for node in graph.nodes], dtype=np.int64)
        per_call, per_view = np.array(self.host.call_s)[at], np.array(self.host.view_s)[at]
        least = _LEAST_VIEW * self.host.alone_s - alone
        found = np.where(views, np.maximum(per_view, least), per_call)
        found += np.array(self.host.owner_s)[at] * _owners(graph)
        if self.effects is not None:
            found += self.effects.turning(graph) * np.nan_to_num(alone)
        return np.asarray(found)


@cache
def _telling() -> tuple[Operator, ...]:
    rest = ("[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    return (
        call("mm", [512, 512], [512, 512]),
        call("convolution", [32, 64, 16, 16], [64, 64, 3, 3], None, *rest),
        call("add", [256, 256], [256, 256], "1"),
        call("add", [2048, 1024], [2048, 1024], "1"),
        call("mm", [4, 8], [8, 8]),
        call("add_", [8, 8], [8, 8], "1"),
    )


@dataclass(frozen=True, kw_only=True)
class _InStep(CostModel):
    processor: Processor
    graph: OperatorGraph
    name: str = "local"

    def predict(self, calls: Calls, device: Device | None = None) -> Prediction:
        if len(calls) != len(self.graph):
            raise ForetraceError(
                f"these are {len(calls)} calls, but {self.graph.name} has {len(self.graph)}; give all of its calls."
            )
        step = self.processor.step(self.graph)  # whose range holds for all of its calls together
        low, high = (np.full(len(calls), end / step.seconds) for end in (step.low_s, step.high_s))
        return self._answer(self.processor.seconds(self.graph), low, high, self.processor.local.why)
