"""What is asked of a search for the shortest step, and what it answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import isfinite

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.names import resolve
from foretrace.plan.advise import LeftOut
from foretrace.plan.buckets import BucketPlan
from foretrace.plan.problem import CoarseStep, Plan
from foretrace.plan.recorded import Planned
from foretrace.techniques.base import Technique
from foretrace.techniques.whatif import WhatIf

_SIZE = re.compile(r"(?P<value>(\d+(\.\d*)?|\.\d+)(e\d+)?)\s*(?P<unit>([kmgt]i?)?b?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, kw_only=True)
class OptimiseRequest:
    """What is asked for."""

    workers: int = 1
    network: str = ""
    backend: str = ""
    gradient_mb: float = 0.0  # of all gradients, where the recording does not show them
    memory_limit: int | None = None  # bytes
    only_buckets: bool = False  # leave precision, compiling and the optimizer as they are
    ahead: bool = True  # also look for plans whose messages overtake each other
    rounds: int | None = None  # of that search, at most
    seed: int = 0

    def checked(self) -> OptimiseRequest:
        """Return the wish with the back end's own name; raises ForetraceError where it cannot be met by anyone."""
        backend = resolve(self.backend, ("gloo", "nccl")) or self.backend
        if backend not in ("", "gloo", "nccl"):
            raise ForetraceError(f"`backend={backend}` does not exist; choose gloo or nccl.")
        if self.workers < 1:
            raise ForetraceError(f"`workers={self.workers}` is not possible; give 1 or more.")
        if self.workers > 1 and not self.network:
            raise ForetraceError(
                f"`workers={self.workers}` need a network between them; add e.g. `network=10gbit/20us`, or a file."
            )
        if self.workers == 1 and self.network:
            raise ForetraceError("`network=` joins several workers; add `workers=N` with 2 or more.")
        if not 0 <= self.gradient_mb < 1e9:
            raise ForetraceError(f"`gradient_mb={self.gradient_mb}` is no size; give MB above 0.")
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise ForetraceError(f"`memory_limit={self.memory_limit}` is not possible; give bytes above 0, e.g. 16GB.")
        return replace(self, backend=backend)


def size(text: str, parameter: str = "memory_limit") -> int | None:
    """Return bytes of "16GB", "900MiB" or "1e9"; None for no text. Raises ForetraceError that names the parameter."""
    if not text.strip():
        return None
    found = _SIZE.fullmatch(text.strip())
    value = float(found["value"]) * _UNITS[found["unit"].lower().removesuffix("b")] if found else 0.0
    if not (isfinite(value) and value >= 1):
        raise ForetraceError(f"`{parameter}={text}` is no size above 0; write 16GB or 900MiB.")
    return round(value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A set of techniques with its best buckets."""

    techniques: tuple[Technique, ...]
    step_s: float  # by the coarsened view; by the whole graph on one worker
    memory: int | None  # bytes at the peak, if known
    found: BucketPlan | None  # None on one worker
    parallel: Planned | None

    @property
    def chain(self) -> tuple[Technique, ...]:
        """All techniques in their order, the exchange last."""
        return self.techniques + ((self.parallel,) if self.parallel is not None else ())


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One technique of the answer, behind those before it."""

    name: str
    what: str
    before_s: float
    after_s: float
    saved_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Overtaking:
    """What messages that overtake each other would reach beyond DistributedDataParallel."""

    plan: Plan
    step_s: float  # by the coarsened view
    checked_s: float | None  # by the whole graph, None where it is too short to tell
    bound_s: float
    proven: bool
    rounds: int
    evaluations: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """The best configuration found."""

    graph: TaskGraph
    wanted: OptimiseRequest
    recorded_s: float  # one worker as recorded
    default_s: float  # as it would be without this search: data-parallel as it is by default, or as recorded
    best: Candidate
    whatif: WhatIf  # of the best chain, on the whole graph
    gains: tuple[Gain, ...]
    left_out: tuple[LeftOut, ...]
    problem: CoarseStep | None
    overtaking: Overtaking | None
    bound_s: float  # no buckets are better with these techniques
    seconds: float  # that the search took, weighing of assumptions apart
    states: int
    sets: int  # of techniques that were predicted
    finished: bool  # False where time ran out
    memory_recorded: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Predicted step of the answer, by the whole graph."""
        return self.whatif.after_s

    @property
    def difference(self) -> float:
        """How far the coarsened view was off the whole graph, relative."""
        return self.best.step_s / self.step_s - 1 if self.step_s else 0.0
