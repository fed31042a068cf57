"""Times of operators on a machine that others use, too: taken in rounds, beside probes of how fast it is just then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretrace.cost.calls import Float64
from foretrace.cost.operators.bench import OperatorTimings
from foretrace.cost.operators.local import unsure_key
from foretrace.cost.operators.operator import Operator
from foretrace.deadline import Deadline
from foretrace.model.machine_state import ALIKE, alike, calm, probe

TURNS = 4  # of each of two rounds
_CHUNK = 3  # operators between two probes
_MOST_ROUNDS = 3
Progress = Callable[[float], None]
Sample = tuple[float, Float64]  # seconds of an operator, and the probes beside it (NaN where the machine changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOperators:
    """Seconds by key, why the others have none, and the probes of the calm machine."""

    measured: OperatorTimings
    usual_s: Float64  # by PROBES
    alike: float  # share of the times that met the machine calm
    unsure: Mapping[str, float] = field(default_factory=dict)  # by key: times that rounds apart in time differ
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    states: Sequence[Float64] = ()

    @property
    def known(self) -> dict[str, float]:
        """What `Processor.of` wants of it."""
        return {**self.measured.seconds, **{unsure_key(key): times for key, times in self.unsure.items()}}


def in_rounds(
    wanted: Sequence[Operator],
    *,
    budget_s: float | None = None,
    usual_s: Float64 | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> TimedOperators:
    """Return operators timed in two rounds, the second in reverse, and once more where these differ: see `agreed`."""
    until = Deadline(float("inf") if budget_s is None else budget_s)
    rounds: list[TimedOperators] = []
    left = list(wanted)
    for turn in range(_MOST_ROUNDS):
        if not left or (turn and not until.allows("round")):
            break

        def told(share: float, turn: int = turn) -> None:
            if progress is not None and turn < 2:
                progress((turn + share) / 2)

        with until.part("round"):
            rest = None if budget_s is None else max(until.budget_s, 0.0) / (1 if turn else 2)
            rounds.append(timed(left[::-1] if turn % 2 else left, budget_s=rest, progress=told, **how))
        if turn:
            found = agreed(rounds, usual_s)
            left = [each for each in wanted if {each.key, each.near_key} & set(found.unsure)]
    return agreed(rounds, usual_s)


def timed(
    wanted: Sequence[Operator],
    *,
    turns: int = TURNS,
    target_s: float = 0.004,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> TimedOperators:
    """Return operators timed in one round of several turns.

    A machine that others use is fast in some seconds and slow in others (twice as slow, where two of its processors
    are one core). So the machine is probed before and after every few operators, and of a call's times the median of
    those counts that met the machine calm (see `agreed`): as fast as it was in its fastest fifth. Of the repetitions
    of a call the middle is taken, as the middle of steps is what is predicted: many low times add up to too little.
    Turns that would not end within `budget_s` are left out, but for the first.
    """
    from foretrace.cost.operators.bench import NO_TIME, TYPICAL, measure

    chunks = [wanted[at : at + _CHUNK] for at in range(0, len(wanted), _CHUNK)]
    samples: dict[str, list[Sample]] = {}
    failed: dict[str, str] = {}
    states: list[Float64] = []
    until = Deadline(float("inf") if budget_s is None else budget_s)
    for turn in range(turns):
        if turn and not until.allows(then=until.spent / turn):
            break
        for i, chunk in enumerate(chunks):
            if not until.allows("chunk"):
                failed |= dict.fromkeys((each.key for each in chunk), NO_TIME)
                continue
            with until.part("chunk"):
                before = probe()
                found = measure(chunk, target_s=target_s, percentile=TYPICAL)
                after = probe()
            states += [before, after]
            state = (before * after) ** 0.5 if alike(before, after) else np.full(len(before), np.nan)
            for key, value in found.seconds.items():
                samples.setdefault(key, []).append((value, state))
            failed |= found.failed
            if progress is not None:
                progress((turn + (i + 1) / len(chunks)) / turns)
    timings = OperatorTimings(failed=failed)
    return agreed([TimedOperators(measured=timings, usual_s=calm(states), alike=0.0, samples=samples, states=states)])


def agreed(rounds: Sequence[TimedOperators], usual_s: Float64 | None = None) -> TimedOperators:
    """Return what rounds that are apart in time say together.

    A machine that is slow while an operator is timed, and so are its probes, cannot be told from a slow operator. So
    where rounds differ by more than ALIKE the least counts, and the next one to it says how unsure that is. An operator
    that never met the machine calm is as unsure as the machine was slow. `usual_s` are the probes of the calm machine
    as earlier calibrations saw it.
    """
    states = [each for found in rounds for each in found.states]
    best = calm(states) if usual_s is None else np.fmin(calm(states), usual_s)
    seconds: dict[str, float] = {}
    unsure: dict[str, float] = {}
    met = 0
    for key in dict.fromkeys(key for found in rounds for key in found.samples):
        levels: list[list[float]] = []
        slower = []
        calmly = False
        for found in rounds:
            if mine := found.samples.get(key, ()):
                slower += [float(np.max(state / best)) for _, state in mine if np.isfinite(state).all()]
                values = [value for value, state in mine if alike(state, best)]
                calmly = calmly or bool(values)
                levels.append(values or [min(value for value, _ in mine)])
        levels.sort(key=np.median)
        least, *others = (float(np.median(each)) for each in levels)
        apart = others[0] / least if others else 1.0
        together = [each for values in levels for each in values if np.median(values) < least * np.exp(ALIKE)]
        seconds[key] = float(np.median(together)) if calmly else least
        met += calmly
        apart *= 1.0 if calmly else max(float(np.median(slower)) if slower else 2.0, 1.0)
        if apart > np.exp(ALIKE):
            unsure[key] = apart
    failed = {key: why for found in rounds for key, why in found.measured.failed.items() if key not in seconds}
    return TimedOperators(
        measured=OperatorTimings(seconds=seconds, failed=failed), usual_s=calm(states),
        alike=met / max(len(seconds), 1), unsure=unsure, states=states,
        samples={key: [each for found in rounds for each in found.samples.get(key, ())] for key in seconds},
    )  # fmt: skip
