"""Two copies of a training and a changed one, run in turns and timed block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from foretrace.errors import ForetraceError
from foretrace.training.batches import Resident

if TYPE_CHECKING:
    from torch import Tensor

    from foretrace.training.training import Training

DISTURBED = 1.1  # wall over CPU time of a block that does not wait, beyond which something else used the core
LEAST_ROUNDS, MOST_ROUNDS = 8, 24
SHORT_STEP_S, ROUNDS_OF_SHORT_STEPS = 0.02, 16
_STEPS = 3  # of a block
_LEAST_BLOCK_S = 0.1  # shorter blocks take more steps, so that one interruption does not decide
_FETCHED_AHEAD = 2  # batches that every loader worker makes before it is asked
_LOADED_STEPS = 8  # of a block whose batches are made by workers, which come in bursts


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the arms take turns."""

    discarded: int  # first steps of every block, not counted: caches are another arm's
    steps: int  # counted steps of a block
    rounds: int  # blocks of every arm
    seconds: float  # when to stop, once LEAST_ROUNDS are done


def plan(step_s: Mapping[str, float], seconds: float, *, workers: int = 0, epoch: int = 0) -> Plan:
    """Blocks for arms whose steps take about so long; `workers` is the most that a loader has, `epoch` its batches.

    Where `seconds` do not suffice for LEAST_ROUNDS of three steps, blocks become shorter, down to a single step;
    fewer rounds than that are not run, whatever they take.
    """
    longest, total = max(step_s.values()), sum(step_s.values())
    discarded = 1 + _FETCHED_AHEAD * workers
    least = _LOADED_STEPS if workers else _STEPS
    steps = max(least, ceil(_LEAST_BLOCK_S / max(longest, 1e-6)))
    if epoch:
        steps = max(min(steps, epoch - discarded), 1)
    while steps > 1 and LEAST_ROUNDS * (discarded + steps) * total > seconds:
        steps -= 1
    wanted = ROUNDS_OF_SHORT_STEPS if longest < SHORT_STEP_S else LEAST_ROUNDS
    rounds = int(seconds / ((discarded + steps) * total))
    return Plan(discarded=discarded, steps=steps, rounds=min(max(rounds, wanted), MOST_ROUNDS), seconds=seconds)


@dataclass(kw_only=True)
class Running:
    """One arm: a training under way, and its blocks so far."""

    training: Training
    fresh: bool  # a new loader for every block: idle workers of another arm would go on filling their queues
    wall_s: list[float] = field(default_factory=list)  # per step
    cpu_s: list[float] = field(default_factory=list)
    _steps: Iterator[Tensor] | None = None

    def block(self, plan: Plan) -> None:
        """Run one block and keep its mean step on both clocks."""
        steps = self._begun()
        for _ in range(plan.discarded):
            _next(steps)
        self._settle()
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(plan.steps):
            _next(steps)
        self._settle()
        self.wall_s.append((time.perf_counter() - began) / plan.steps)
        self.cpu_s.append((time.process_time() - began_cpu) / plan.steps)
        self._pause()

    def losses(self, count: int, seed: int) -> list[float]:
        """Losses of `count` steps, with the random numbers that `seed` gives."""
        import torch

        torch.manual_seed(seed)
        steps = self._begun()
        losses = [float(_next(steps)) for _ in range(count)]
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
    """Whether a step can wait for something that is not this process: a device, loader workers."""
    return training.device != "cpu" or workers(training) > 0


def workers(training: Training) -> int:
    """Processes of the loader."""
    return 0 if isinstance(training.loader, Resident) else int(getattr(training.loader, "num_workers", 0))


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Which rounds of `take_turns` count."""

    kept: tuple[int, ...]
    repeated: int  # run in addition, in the place of disturbed ones
    disturbed: int  # of those kept


def take_turns(
    arms: Mapping[str, Running], plan: Plan, *, one_thread: bool, tell: Callable[[float], None] | None = None
) -> Rounds:
    """Run blocks of all arms in turns, who begins changing from round to round.

    Rounds in which something else used the core (only steps of one thread that wait for nothing can tell) are run
    once more, up to half as many as planned; they count only if too few calm rounds are left without them.
    """
    order, began = list(arms), time.monotonic()
    calm: list[bool] = []
    rounds, repeated = plan.rounds, 0
    while len(calm) < rounds:
        for name in order:
            arms[name].block(plan)
        order = order[1:] + order[:1]
        calm.append(not one_thread or all(arm.wall_s[-1] <= DISTURBED * arm.cpu_s[-1] for arm in arms.values()))
        spent = time.monotonic() - began
        if len(calm) == rounds and not repeated and spent < plan.seconds:
            repeated = min(calm.count(False), plan.rounds // 2)
            rounds += repeated
        if tell is not None:
            tell(min(len(calm) / rounds, 1.0))
        if spent > 1.5 * plan.seconds and len(calm) >= LEAST_ROUNDS:
            break
    repeated = max(len(calm) - plan.rounds, 0)
    kept = [i for i, quiet in enumerate(calm) if quiet]
    if len(kept) < LEAST_ROUNDS:
        kept = list(range(len(calm)))
    return Rounds(kept=tuple(kept), repeated=repeated, disturbed=sum(not calm[i] for i in kept))


def _next(steps: Iterator[Tensor]) -> Tensor:
    loss = next(steps, None)
    if loss is None:
        raise ForetraceError("the loader of the training gives no batch; give it at least one batch of samples.")
    return loss
