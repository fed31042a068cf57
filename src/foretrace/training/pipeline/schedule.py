"""`PipelineSchedule`: what every process of a pipeline does, action by action, and the checks of such a table.

A row per process, its actions in order: `F3` forward of micro-batch 3, `B3` its backward, or `I3` and `W3`, the halves
of one (gradient of the stage's input, gradients of its weights), and `U0`, the update with batch 0. Where a process
has several stages the stage follows, as in `F3@5`. Micro-batches are counted over all batches: with m of them per
batch, micro-batch i is of batch i // m.

A stage with V versions of its weights runs batch t on W(max(t - V + 1, 0)), and `U t` makes W(t + 1): V = 1 is ordinary
training, V = 2 everywhere is PipeDream-2BW (Narayanan et al., ICML 2021), V = p - s PipeDream (SOSP 2019).

The published ones are functions, by name in `SCHEDULES`: GPipe (Huang et al., NeurIPS 2019), 1F1B with a flush
(PipeDream-Flush, Megatron-LM), 1F1B without (PipeDream), PipeDream-2BW, interleaved 1F1B (Narayanan et al., SC 2021),
ZB-H1 (Qi et al., ICLR 2024). All accumulate gradients in the order of micro-batches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, NoReturn

from foretrace.errors import ForetraceError

_ACTION = re.compile(r"(?P<kind>[FBIWU])(?P<index>\d{1,9})(@(?P<stage>\d{1,6}))?")


class ActionKind(StrEnum):
    """What a process does."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # the part of a backward pass that the stage before waits for
    WEIGHT = "W"  # the rest of it
    UPDATE = "U"


F, B, I, W, U = ActionKind  # noqa: E741  (as they are written)
_STEP = {F: 1, B: -1, I: -1}  # to the stage that reads


class Action(NamedTuple):
    """One entry of a table: the number is a micro-batch, or the batch of an update, which is of all own stages."""

    kind: ActionKind
    number: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.number}" + (f"@{self.stage}" if self.kind != U else "")


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """A table of actions: `rows[r]` is what process r does, `versions[s]` how many versions stage s keeps.

    Construction checks it: ForetraceError says which action breaks which rule.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    micro_batches: int  # per batch
    versions: tuple[int, ...]
    first: int = 0  # batch; those before were trained by another run

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or not self.versions or min(self.versions) < 1:
            self._refuse("needs one micro-batch per batch, one stage and one version of its weights, or more")
        for process in range(len(self.rows)):
            self._check_row(process)
        missing = set(range(self.stages)) - self.process_of.keys()
        if missing:
            self._refuse(f"no process runs stage {min(missing)}")
        every = set(range(self.first, self.last))
        if any({each.number for each in row if each.kind == U} != every for row in self.rows):
            self._refuse(f"every process must update once with each of the batches {self.first} to {self.last - 1}")
        self.run_order()

    @property
    def stages(self) -> int:
        """How many pieces the model is cut into."""
        return len(self.versions)

    @cached_property
    def process_of(self) -> dict[int, int]:
        return {each.stage: process for process, row in enumerate(self.rows) for each in row if each.kind == F}

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """Stages of every process, ascending."""
        return [sorted(s for s, other in self.process_of.items() if other == r) for r in range(len(self.rows))]

    @cached_property
    def last(self) -> int:
        """One behind the last batch."""
        return 1 + max((each.number for row in self.rows for each in row if each.kind == U), default=self.first - 1)

    @cached_property
    def halves(self) -> bool:
        return any(each.kind == I for row in self.rows for each in row)

    def version(self, stage: int, batch: int) -> int:
        """Return which version of its weights a stage runs a batch on."""
        return max(batch - self.versions[stage] + 1, 0)

    def reader(self, action: Action) -> Action | None:
        """Return the action of a neighbouring stage that reads what this one makes."""
        stage = action.stage + _STEP.get(action.kind, 0)
        return action._replace(stage=stage) if action.kind in _STEP and 0 <= stage < self.stages else None

    def sender(self, action: Action) -> int | None:
        """Return the process that sends what an action reads."""
        stage = action.stage - _STEP.get(action.kind, 0)
        return self.process_of[stage] if action.kind in _STEP and 0 <= stage < self.stages else None

    def needs(self, action: Action, *, clipped: bool = False, tied: Sequence[Sequence[int]] = ()) -> list[Action]:
        """Return actions, most of them of other processes, whose results this one uses.

        `clipped`: an update needs the norm of all gradients. `tied`: stages that share a weight; the first adds up its
        gradients. An update stands for each process with the stage of that process that the rule is about.
        """
        kind, i, s = action
        back = I if self.halves else B
        if kind == F:
            found = [Action(F, i, s - 1)] if s else []
            batch = i // self.micro_batches - self.versions[s]
            if batch >= self.first:
                others = range(self.stages) if clipped else [group[0] for group in tied if s in group[1:]]
                found += [Action(U, batch, other) for other in others]
        elif kind in (B, I):
            found = [Action(back, i, s + 1) if s + 1 < self.stages else Action(F, i, s)]
        elif kind == W:
            found = [Action(I, i, s)]
        else:
            mine = self.stages_of[self.process_of[s]]
            found = [Action(U, i, other) for group in tied if group[0] in mine for other in group if other not in mine]
            if clipped and i - self.versions[-1] >= self.first:  # what scales this batch's loss
                found += [Action(U, i - self.versions[-1], other) for other in range(self.stages)]
        return found

    def run_order(
        self, *, clipped: bool = False, tied: Sequence[Sequence[int]] = ()
    ) -> list[tuple[int, Action, list[tuple[int, int]]]]:
        """Return (process, action, what it needs as (process, place in the row)) in an order in which all can run.

        Raises ForetraceError where processes would wait for each other without end.
        """
        done: dict[Action, tuple[int, int]] = {}
        at = [0] * len(self.rows)
        found: list[tuple[int, Action, list[tuple[int, int]]]] = []
        moved = True
        while moved:
            moved = False
            for process, row in enumerate(self.rows):
                while at[process] < len(row):
                    action = row[at[process]]
                    key = action if action.kind != U else Action(U, action.number, self.stages_of[process][0])
                    wanted = self.needs(key, clipped=clipped, tied=tied)
                    if any(each not in done for each in wanted):
                        break
                    place = (process, at[process])
                    found.append((process, action, [done[each] for each in wanted]))
                    for stage in self.stages_of[process] if action.kind == U else [action.stage]:
                        done[Action(action.kind, action.number, stage)] = place
                    at[process] += 1
                    moved = True
        stuck = [(process, row[at[process]]) for process, row in enumerate(self.rows) if at[process] < len(row)]
        if stuck:
            waits = "; ".join(f"process {process} waits at {action}" for process, action in stuck[:4])
            self._refuse(f"processes wait for each other: {waits}; put what they need earlier")
        return found

    def in_flight(self, process: int, stage: int | None = None) -> int:
        """Return most micro-batches that a process holds at a time, forward done, backward not, of one stage or all."""
        now = most = 0
        for each in self.rows[process]:
            if stage is not None and each.stage != stage:
                continue
            now += (each.kind == F) - (each.kind in (B, W))
            most = max(most, now)
        return most

    def __str__(self) -> str:
        several = self.stages > len(self.rows)
        return "\n".join(
            " ".join(str(each) if several else str(each).split("@")[0] for each in row) for row in self.rows
        )

    def _check_row(self, process: int) -> None:
        """Check rules that one process can break alone: each pass once, in order, on weights that exist."""
        m, seen, stages = self.micro_batches, set[Action](), self.stages_of[process]
        kinds = {each.kind for each in self.rows[process]} & {B, W}
        where = f"in the row of process {process}"
        for each in self.rows[process]:
            if each in seen:
                self._refuse(f"{each} is {where} twice")
            before, batch = [], each.number // m
            if each.kind == U:
                before = [
                    Action(kind, i, s)
                    for s in stages
                    for i in range(each.number * m, (each.number + 1) * m)
                    for kind in kinds
                ]
                before += [Action(U, each.number - 1, -1)] if each.number > self.first else []
            elif not 0 <= each.stage < self.stages or self.process_of.get(each.stage) != process:
                self._refuse(f"{each} {where} is of a stage that is not there; stages are 0 to {self.stages - 1}")
            elif batch < self.first:
                self._refuse(f"{each} {where} is of batch {batch}, before the first one, {self.first}")
            elif each.kind == F and batch - self.versions[each.stage] >= self.first:
                before = [Action(U, batch - self.versions[each.stage], -1)]
            elif each.kind != F:
                before = [Action(I if each.kind == W else F, each.number, each.stage)]
                before += [Action(U, batch - 1, -1)] if batch > self.first else []
            for other in before:
                if other not in seen:
                    why = "whose weights it runs on" if each.kind == F else "which it needs"
                    self._refuse(f"{where} {each} comes before {other}, {why}; put {other} ahead of it")
            seen.add(each)
        count = Counter(each.kind for each in seen)
        if (count[I] and count[B]) or count[I] != count[W] or count[F] != count[B] + count[I]:
            self._refuse(f"{where} {count[F]} forward passes have {count[B] + min(count[I], count[W])} backward passes")
        if count[F] != (self.last - self.first) * m * len(stages):
            self._refuse(f"{where} batches are not whole: each needs {m} micro-batches and an update")

    def _refuse(self, why: str) -> NoReturn:
        raise ForetraceError(f"the schedule {self.name} cannot run: {why}.")


def parse(
    text: str, *, micro_batches: int, versions: int | Sequence[int] = 1, name: str = "table", first: int = 0
) -> PipelineSchedule:
    """Return a table from its text: a line per process, actions between blanks; the stage is the line by default.

    `versions` is one number for all stages or one for each. Raises ForetraceError naming the line and the word.
    """
    rows = []
    for number, line in enumerate(each for each in text.splitlines() if each.strip()):
        row = []
        for word in line.split():
            found = _ACTION.fullmatch(word)
            if not found:
                raise ForetraceError(
                    f"line {number + 1} of the schedule has {word!r}, which is no action; write F0, B0, I0, W0 or U0, "
                    "with a stage as in F0@1."
                )
            kind = ActionKind(found["kind"])
            row.append(Action(kind, int(found["index"]), -1 if kind == U else int(found["stage"] or number)))
        rows.append(tuple(row))
    stages = 1 + max((each.stage for row in rows for each in row), default=0)
    each_one = (versions,) * stages if isinstance(versions, int) else tuple(versions)
    return PipelineSchedule(name=name, rows=tuple(rows), micro_batches=micro_batches, versions=each_one, first=first)


def table(
    name: str, rows: Iterable[Iterable[Action]], *, micro_batches: int, versions: Sequence[int], first: int
) -> PipelineSchedule:
    """Return the schedule of these passes, with each update directly behind the last backward pass of its batch."""
    finished = []
    for row in rows:
        passes = list(row)
        kind = W if any(each.kind == W for each in passes) else B
        left = Counter(each.number // micro_batches for each in passes if each.kind == kind)
        whole: list[Action] = []
        for each in passes:
            whole.append(each)
            if each.kind == kind:
                batch = each.number // micro_batches
                left[batch] -= 1
                if not left[batch]:
                    whole.append(Action(U, batch, -1))
        finished.append(tuple(whole))
    return PipelineSchedule(
        name=name, rows=tuple(finished), micro_batches=micro_batches, versions=tuple(versions), first=first
    )


def gpipe(stages: int, micro_batches: int, batches: int, *, first: int = 0) -> PipelineSchedule:
    """Return all forward passes of a batch, then all its backward passes."""
    return _rows("gpipe", [1] * stages, micro_batches, batches, first, lambda stage: micro_batches)


def one_f_one_b_flush(
    stages: int, micro_batches: int, batches: int, *, warmup: int = 1, first: int = 0
) -> PipelineSchedule:
    """Return p - s - 1 forward passes (times `warmup`) of stage s, then one forward, one backward; then a flush."""
    return _rows("1f1b-flush", [1] * stages, micro_batches, batches, first, lambda s: warmup * (stages - s - 1))


def one_f_one_b(stages: int, micro_batches: int, batches: int, *, warmup: int = 1, first: int = 0) -> PipelineSchedule:
    """Return PipeDream: never drained; each stage keeps as many versions of its weights as are in use."""
    versions = [1 - (-warmup * (stages - s - 1) // micro_batches) for s in range(stages)]
    return _rows("1f1b", versions, micro_batches, batches, first, lambda s: warmup * (stages - s - 1), flush=False)


def two_bw(stages: int, micro_batches: int, batches: int, *, warmup: int = 1, first: int = 0) -> PipelineSchedule:
    """Return PipeDream-2BW: never drained, two versions. Raises ForetraceError with the fewest micro-batches."""
    least = max(warmup * (stages - 1), 1)
    if micro_batches < least:
        raise ForetraceError(
            f"2bw with {stages} stages and a warm-up of {warmup} needs {least} micro-batches per batch or more, got "
            f"{micro_batches}: with fewer, a third version of the weights would be needed; give "
            f"`micro_batches={least}`."
        )
    return _rows("2bw", [2] * stages, micro_batches, batches, first, lambda s: warmup * (stages - s - 1), flush=False)


def zero_bubble(stages: int, micro_batches: int, batches: int, *, first: int = 0) -> PipelineSchedule:
    """Return ZB-H1: 1F1B with a flush, whose stage s puts off s gradients of weights into what would be its bubble."""

    def passes(stage: int) -> Iterator[Action]:
        for t in range(first, first + batches):
            weight = t * micro_batches
            for each in _alternating(t * micro_batches, micro_batches, stages - stage - 1, stage):
                if each.kind == F:
                    yield each
                    continue
                yield Action(I, each.number, stage)
                if each.number - weight >= stage:
                    yield Action(W, weight, stage)
                    weight += 1
            yield from (Action(W, i, stage) for i in range(weight, (t + 1) * micro_batches))

    return table(
        "zero-bubble", map(passes, range(stages)), micro_batches=micro_batches, versions=[1] * stages, first=first
    )


def interleaved(stages: int, micro_batches: int, batches: int, *, chunks: int = 2, first: int = 0) -> PipelineSchedule:
    """Return 1F1B with a flush on stages / chunks processes; process r has the stages r, r + p, r + 2 p, ..."""
    p = stages // max(chunks, 1)
    if chunks < 1 or p < 1 or p * chunks != stages or micro_batches % p:
        near = max(-(-micro_batches // max(p, 1)) * max(p, 1), 1)
        raise ForetraceError(
            f"interleaved needs stages that `chunks=` divides and micro-batches in groups of the processes, "
            f"got {stages} stages, {chunks} chunks and {micro_batches} micro-batches; give "
            f"`micro_batches={near}` and `chunks=1` or a divisor of {stages}."
        )
    count = micro_batches * chunks

    def passes(process: int) -> Iterator[Action]:
        warm = min(2 * (p - process - 1) + (chunks - 1) * p, count)
        for t in range(first, first + batches):
            for kind, k, _ in _alternating(0, count, warm, 0):
                chunk = k // p % chunks if kind == F else chunks - 1 - k // p % chunks
                yield Action(kind, t * micro_batches + k // (p * chunks) * p + k % p, chunk * p + process)

    return table("interleaved", map(passes, range(p)), micro_batches=micro_batches, versions=[1] * stages, first=first)


SCHEDULES: dict[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b-flush": one_f_one_b_flush,
    "1f1b": one_f_one_b,
    "2bw": two_bw,
    "zero-bubble": zero_bubble,
    "interleaved": interleaved,
}


def _rows(
    name: str, versions: list[int], m: int, batches: int, first: int, warm: Callable[[int], int], *, flush: bool = True
) -> PipelineSchedule:
    """Return rows of alternating passes, which begin again with every batch where there is a flush."""
    runs = [(t * m, m) for t in range(first, first + batches)] if flush else [(first * m, batches * m)]
    rows = ((each for run in runs for each in _alternating(*run, warm(s), s)) for s in range(len(versions)))
    return table(name, rows, micro_batches=m, versions=versions, first=first)


def _alternating(begin: int, count: int, warm: int, stage: int) -> Iterator[Action]:
    """Yield `warm` forward passes, then one forward and one backward in turns, then what is left."""
    warm = min(max(warm, 0), count)
    yield from (Action(F, begin + i, stage) for i in range(warm))
    for i in range(count):
        if warm + i < count:
            yield Action(F, begin + warm + i, stage)
        yield Action(B, begin + i, stage)
