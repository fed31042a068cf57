"""Two copies of a training and a changed one, run in turns and timed block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Protocol

import numpy as np

from foretrace.deadline import Clock
from foretrace.errors import ForetraceError
from foretrace.experiment.trial import in_turns
from foretrace.training.batches import Resident

if TYPE_CHECKING:
    from torch import Tensor

    from foretrace.training.training import Training

DISTURBED = 1.1  # wall over CPU time of a block that does not wait, beyond which something else used the core
SLOWED = 1.12  # CPU time of a block relative to the arm's lower quartile, beyond which others took caches or frequency
MOST_TURNS = 2  # times as many rounds as planned, where rounds are disturbed and time is left
LEAST_ROUNDS, MOST_ROUNDS = 8, 24
SHORT_STEP_S, ROUNDS_OF_SHORT_STEPS = 0.02, 16
_STEPS = 3  # of a block
_LEAST_BLOCK_S = 0.1  # shorter blocks take more steps, so that one interruption does not decide
_FETCHED_AHEAD = 2  # batches that every loader worker makes before it is asked
_LOADED_STEPS = 8  # of a block whose batches are made by workers, which come in bursts


@dataclass(frozen=True, kw_only=True)
class TurnPlan:
    """How the arms take turns."""

    discarded: int  # first steps of every block, not counted: caches are another arm's
    steps: int  # counted steps of a block
    rounds: int  # blocks of every arm
    seconds: float  # a round that would not end within is not begun, once LEAST_ROUNDS are done


def plan(step_s: Mapping[str, float], seconds: float, *, workers: int = 0, epoch: int = 0, period: int = 1) -> TurnPlan:
    """Return blocks for arms whose steps take about so long; `workers` is the most that a loader has, `epoch` its
    batches.

    Where `seconds` do not suffice for LEAST_ROUNDS of three steps, blocks become shorter, down to a single `period` of
    steps that differ; fewer rounds than that are not run, whatever they take.
    """
    longest, total = max(step_s.values()), sum(step_s.values())
    discarded = 1 + _FETCHED_AHEAD * workers
    least = _LOADED_STEPS if workers else _STEPS
    steps = max(least, ceil(_LEAST_BLOCK_S / max(longest, 1e-6)))
    if epoch:
        steps = max(min(steps, epoch - discarded), 1)
    steps = -(-steps // period) * period
    while steps > period and LEAST_ROUNDS * (discarded + steps) * total > seconds:
        steps -= period
    wanted = ROUNDS_OF_SHORT_STEPS if longest < SHORT_STEP_S else LEAST_ROUNDS
    rounds = int(seconds / ((discarded + steps) * total))
    return TurnPlan(discarded=discarded, steps=steps, rounds=min(max(rounds, wanted), MOST_ROUNDS), seconds=seconds)


class InTurns(Protocol):
    """An arm: what it runs block by block, and the mean step of each block so far."""

    @property
    def wall_s(self) -> list[float]:
        """On the wall clock."""

    @property
    def cpu_s(self) -> list[float]:
        """On the CPU clock; needed by arms of one thread."""

    def block(self, plan: TurnPlan) -> None:
        """Run one block and keep its mean step."""


@dataclass(kw_only=True)
class Running:
    """One arm: a training under way, and its blocks so far."""

    training: Training
    fresh: bool  # a new loader for every block: idle workers of another arm would keep filling their queues
    wall_s: list[float] = field(default_factory=list)  # per step
    cpu_s: list[float] = field(default_factory=list)
    _steps: Iterator[Tensor] | None = None

    def block(self, plan: TurnPlan) -> None:
        """Run one block and keep its mean step on both clocks."""
        steps = self._begun()
        for _ in range(plan.discarded):
            next_loss(steps)
        self._settle()
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(plan.steps):
            next_loss(steps)
        self._settle()
        self.wall_s.append((time.perf_counter() - began) / plan.steps)
        self.cpu_s.append((time.process_time() - began_cpu) / plan.steps)
        self._pause()

    def losses(self, count: int, seed: int) -> list[float]:
        """Return losses of `count` steps, with the random numbers that `seed` gives."""
        import torch

        torch.manual_seed(seed)
        steps = self._begun()
        losses = [float(next_loss(steps)) for _ in range(count)]
        self._pause()
        return losses

    def close(self) -> None:
        """End the loader's workers."""
        if self._steps is not None:
            self._steps.close()  # type: ignore[attr-defined]
            self._steps = None

    def _begun(self) -> Iterator[Tensor]:
        if self._steps is None:
            self._steps = self.training.steps()
        return self._steps

    def _pause(self) -> None:
        if self.fresh:
            self.close()

    def _settle(self) -> None:
        if self.training.device != "cpu":
            import torch

            torch.cuda.synchronize()


def waits(training: Training) -> bool:
    """Return whether a step can wait for something that is not this process: a device, loader workers."""
    return training.device != "cpu" or workers(training) > 0


def workers(training: Training) -> int:
    """Return processes of the loader."""
    return 0 if isinstance(training.loader, Resident) else int(getattr(training.loader, "num_workers", 0))


@dataclass(frozen=True, kw_only=True)
class CountedRounds:
    """Which rounds of `take_turns` count."""

    kept: tuple[int, ...]
    repeated: int  # run in addition, in the place of disturbed ones
    disturbed: int  # of those kept


def take_turns(
    arms: Mapping[str, InTurns],
    plan: TurnPlan,
    *,
    one_thread: bool,
    tell: Callable[[float], None] | None = None,
    clock: Clock | None = None,
) -> CountedRounds:
    """Run blocks of all arms in turns, who begins changing from round to round.

    Arms of one thread that wait for nothing tell which rounds others disturbed (`_calm`): these are run once more, as
    far as `plan.seconds` allow, and count only if too few calm rounds are left without them.
    """
    ran = in_turns(
        arms, lambda name, _: arms[name].block(plan), plan.rounds, least=LEAST_ROUNDS,
        most=MOST_TURNS * plan.rounds, seconds=plan.seconds, good=(lambda: sum(_calm(arms))) if one_thread else None,
        tell=tell, clock=clock,
    )  # fmt: skip
    done = len(next(iter(ran.values())))
    calm = _calm(arms) if one_thread else [True] * done
    kept = [i for i, quiet in enumerate(calm) if quiet]
    if len(kept) < LEAST_ROUNDS:
        kept = list(range(done))
    return CountedRounds(
        kept=tuple(kept), repeated=max(done - plan.rounds, 0), disturbed=sum(not calm[i] for i in kept)
    )


def _calm(arms: Mapping[str, InTurns]) -> list[bool]:
    """Return per round, whether nothing disturbed it: no arm waited for its core or computed much slower than it can.

    What others do on a machine only ever adds time, also to CPU time (shared caches, clock frequency), so an arm's
    lower quartile is what it takes undisturbed. The same rule holds for every arm and looks at no ratio between them.
    """
    calm = np.ones(len(next(iter(arms.values())).cpu_s), dtype=np.bool_)
    for arm in arms.values():
        wall, cpu = np.array(arm.wall_s), np.array(arm.cpu_s)
        calm &= (wall <= DISTURBED * cpu) & (cpu <= SLOWED * np.quantile(cpu, 0.25))
    return [bool(each) for each in calm]


def next_loss(steps: Iterator[Tensor]) -> Tensor:
    """Return the loss of the next step. Raises ForetraceError where the loader gives nothing."""
    loss = next(steps, None)
    if loss is None:
        raise ForetraceError("the loader of the training gives no batch; give it at least one batch of samples.")
    return loss
