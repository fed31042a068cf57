"""`schedule_layer`: operators of one layer on the cores of one accelerator, in the shortest order that is found.

As PHAZE does it (Wang et al., ICML 2024): an operator runs on one core of its kind, or on all of them, and then nothing
runs beside it; forward and backward are apart. PHAZE solves an integer program with big-M rows; here CP-SAT has two
cumulative constraints, begins from the serial schedule, ends at a deterministic limit, and its bound is reported.
Heads are in groups: one operator per head and step is beyond any solver. Operators at the same time share the memory's
bandwidth without a loss, which is not modelled: what is gained beside the serial schedule is the most that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretrace.cost.accelerators import kernels as designed
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.graph.writer import StepWriter
from foretrace.hardware.accelerators import Accelerator
from foretrace.plan.codesign import kernels
from foretrace.plan.solver import SolverLimits, answer, apart
from foretrace.plan.transformers.model import DESIGNED, Parallelism, on_design, vector
from foretrace.plan.transformers.shape import TransformerSizes
from foretrace.trace.trace import LaneKind

GROUPS = 4  # of heads
LIMIT = 1.0  # of the solver's deterministic time: two to four seconds
_MOST_S = 300.0  # however slow the machine
Rows = Sequence[tuple[bool, int, int, tuple[int, ...]]]  # operators as the solver takes them


@dataclass(frozen=True, kw_only=True)
class LayerOperator:
    """An operator: ns on one core of its kind and on all of them; `needs`: rows that come before."""

    name: str
    tensor: bool  # on tensor cores; else on vector cores
    one_ns: int
    all_ns: int
    needs: tuple[int, ...] = ()

    @property
    def least_ns(self) -> int:
        """In its better mode."""
        return min(self.one_ns, self.all_ns)


@dataclass(frozen=True, kw_only=True)
class LayerSchedule:
    """When each operator begins, ns, and on which core of its kind, −1 for all; none can end before `bound_ns`."""

    operators: tuple[LayerOperator, ...]
    cores: tuple[int, int]  # tensor, vector
    begins: tuple[int, ...]
    core: tuple[int, ...]
    bound_ns: int
    phase: Phase

    @property
    def ns(self) -> int:
        """Until the last operator ends."""
        return max(begin + self.took(i) for i, begin in enumerate(self.begins))

    def took(self, row: int) -> int:
        """Return ns of an operator where it runs."""
        return self.operators[row].all_ns if self.core[row] < 0 else self.operators[row].one_ns

    def lane(self, row: int) -> str:
        """Return where an operator runs, in words."""
        kind = "tensor" if self.operators[row].tensor else "vector"
        return f"all {kind} cores" if self.core[row] < 0 else f"{kind} core {self.core[row]}"

    @property
    def serial_ns(self) -> int:
        """One operator after another, each in its better mode."""
        return sum(each.least_ns for each in self.operators)

    @property
    def gap(self) -> float:
        """By how much a better one could be shorter, at most, as a share."""
        return 1 - self.bound_ns / self.ns

    @property
    def proven(self) -> bool:
        """Whether there is none shorter."""
        return self.bound_ns >= self.ns

    def graph(self) -> TaskGraph:
        """Return it as tasks, a lane per core that is used; an operator on all cores waits for all before it."""
        order = sorted(range(len(self.operators)), key=lambda i: (self.begins[i], self.core[i]))
        writer, rows = StepWriter("layer"), dict[int, int]()
        last, since = list[int](), list[int]()  # the last task on all cores, and those since then
        for i in order:
            each, whole = self.operators[i], self.core[i] < 0
            waits = {rows[need] for need in each.needs}.union(last, since if whole else ())
            lane = writer.on(LaneKind.GPU, self.lane(i))
            rows[i] = writer.behind(waits, TaskKind.KERNEL, lane, each.name, self.took(i), phase=self.phase)
            last, since = ([rows[i]], []) if whole else (last, [*since, rows[i]])
        return writer.ended()


def layer_operators(
    model: TransformerSizes, at: Parallelism, design: Accelerator, groups: int = GROUPS, decode: int = 0
) -> tuple[list[LayerOperator], list[LayerOperator]]:
    """Return operators of a layer, forward and backward, that one device with this plan runs for a micro-batch."""
    model = replace(model, length=1) if decode else model
    heads = max((model.kv_heads if decode else model.heads) // at.tensor, 1)
    groups = next(each for each in range(min(groups, heads), 0, -1) if heads % each == 0)
    sizes = np.zeros((kernels.ROWS, 7))
    kernels.operator_rows(vector(model, DESIGNED), at.tensor, at.sequence, at.micro, decode, sizes)
    machine = np.stack([on_design(design).array()] * 2)  # all cores, one of each kind
    machine[1, designed.CORES], machine[1, designed.LANES] = 1, design.lanes
    parts = [model.heads // at.tensor * model.head, *[max(model.kv_heads / at.tensor, 1.0) * model.head] * 2]
    passes: list[list[LayerOperator]] = []
    for rows in (range(designed.FORWARD), range(designed.FORWARD, kernels.LAYER)):
        found: list[LayerOperator] = []
        where: dict[str, list[int]] = {}  # name in OPERATORS -> rows of it
        for row in rows:
            name, size = designed.OPERATORS[row], sizes[row]
            plain = name.removesuffix(" back").removesuffix(" input").removesuffix(" weight")
            split = groups if plain in ("scores", "softmax", "context") else 1
            pieces = [(name, size)]
            if split > 1:
                share = size.copy()
                share[[designed.BATCH, designed.NUMBERS]] = size[[designed.BATCH, designed.NUMBERS]] / split
                pieces = [(f"{name}, heads {i + 1} of {split}", share) for i in range(split)]
            elif name == "query key value":
                pieces = []
                for part, width in zip(("query", "key", "value"), parts, strict=True):
                    share = size.copy()
                    share[designed.N] = width
                    pieces.append((part, share))
            wanted = [where[each] for each in NEEDS[name] if each in where]
            where[name] = []
            for i, (piece, share) in enumerate(pieces):
                needs = [others[i] if len(others) == len(pieces) == groups > 1 else others for others in wanted]
                flat = [each for some in needs for each in (some if isinstance(some, list) else [some])]
                one, every = (max(round(1e9 * kernels.operator_s(share, machine[k])), 1) for k in (1, 0))
                where[name].append(len(found))
                found.append(LayerOperator(
                    name=piece, tensor=bool(size[designed.KIND]), one_ns=one, all_ns=every, needs=tuple(flat)
                ))  # fmt: skip
        passes.append(found)
    return passes[0], passes[1]


# What each operator reads that another one of its pass makes.
NEEDS = {
    "norm 1": (), "query key value": ("norm 1",), "scores": ("query key value",), "softmax": ("scores",),
    "context": ("softmax", "query key value"), "output": ("context",), "residual 1": ("output",),
    "norm 2": ("residual 1",), "up": ("norm 2",), "activation": ("up",), "down": ("activation",),
    "residual 2": ("down", "residual 1"),
    "residual 2 back": (), "down input": ("residual 2 back",), "down weight": ("residual 2 back",),
    "activation back": ("down input",), "up input": ("activation back",), "up weight": ("activation back",),
    "norm 2 back": ("up input",), "residual 1 back": ("norm 2 back", "residual 2 back"),
    "output input": ("residual 1 back",), "output weight": ("residual 1 back",), "context input": ("output input",),
    "context weight": ("output input",), "softmax back": ("context input",), "scores input": ("softmax back",),
    "scores weight": ("softmax back",),
    "query key value input": ("scores input", "scores weight", "context weight"),
    "query key value weight": ("scores input", "scores weight", "context weight"),
    "norm 1 back": ("query key value input", "residual 1 back"),
}  # fmt: skip


def layer_schedules(
    model: TransformerSizes, at: Parallelism, design: Accelerator, *, training: bool = True, decode: int = 0
) -> tuple[LayerSchedule, ...]:
    """Return a layer forward and, of a training, backward. Raises MissingExtraError without OR-Tools."""
    cores, phases = (design.tensor_cores, design.vector_cores), (Phase.FORWARD, Phase.BACKWARD)
    passes = layer_operators(model, at, design, decode=decode)[: 2 if training else 1]
    return tuple(schedule_layer(each, cores, phase) for each, phase in zip(passes, phases, strict=False))


def schedule_layer(
    operators: Sequence[LayerOperator], cores: tuple[int, int], phase: Phase = Phase.FORWARD, limit: float = LIMIT
) -> LayerSchedule:
    """Return the shortest schedule that is found within `limit`; never longer than the serial one.

    Raises MissingExtraError without OR-Tools.
    """
    given = ([(each.tensor, each.one_ns, each.all_ns, each.needs) for each in operators], cores)
    limits = SolverLimits(seconds=_MOST_S, work=limit, threads=1)
    found = apart("foretrace.plan.codesign.schedule", given, limits, "an exact schedule of a layer")
    begins, core, bound = found or (*_serial(given[0]), _longest(given[0]))
    return LayerSchedule(
        operators=tuple(operators), cores=cores, begins=tuple(begins), core=tuple(core), bound_ns=bound, phase=phase
    )


def _longest(rows: Rows) -> int:
    """Return the longest chain of operators that need each other, ns: no schedule is shorter."""
    ends = list[int]()
    for _, one, every, needs in rows:
        ends.append(min(one, every) + max((ends[need] for need in needs), default=0))
    return max(ends)


def _serial(rows: Rows) -> tuple[list[int], list[int]]:
    ends = np.cumsum([min(one, every) for _, one, every, _ in rows]).tolist()
    return [0, *ends[:-1]], [-1 if every <= one else 0 for _, one, every, _ in rows]


def _solve(rows: Rows, cores: tuple[int, int], limits: SolverLimits, began: float) -> tuple[list[int], list[int], int]:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    begins, core = _serial(rows)
    top = sum(min(one, every) for _, one, every, _ in rows)
    starts, wholes, ends = list[Any](), list[Any](), list[Any]()
    used: tuple[list[Any], list[Any]] = ([], [])  # intervals on tensor and on vector cores, and how many each takes
    takes: tuple[list[int], list[int]] = ([], [])
    for at, (tensor, one, every, needs) in enumerate(rows):
        start, whole = model.new_int_var(0, top, ""), model.new_bool_var("")
        model.add_hint(start, begins[at])
        model.add_hint(whole, core[at] < 0)
        alone = model.new_optional_fixed_size_interval_var(start, one, ~whole, "")
        with_all = model.new_optional_fixed_size_interval_var(start, every, whole, "")
        kind = 0 if tensor else 1
        used[kind].append(alone)
        takes[kind].append(1)
        for both in (0, 1):
            used[both].append(with_all)
            takes[both].append(cores[both])
        end = start + one + (every - one) * whole
        for need in needs:
            model.add(start >= ends[need])
        starts.append(start)
        wholes.append(whole)
        ends.append(end)
    last = model.new_int_var(0, top, "")
    model.add_hint(last, top)
    for end in ends:
        model.add(last >= end)
    for kind in (0, 1):
        model.add_cumulative(used[kind], takes[kind], cores[kind])
        work = [  # of all cores of this kind together: no schedule is shorter than that of a full chip
            cores[kind] * every * whole + (one * (1 - whole) if tensor == (kind == 0) else 0)
            for (tensor, one, every, _), whole in zip(rows, wholes, strict=True)
        ]
        model.add(cores[kind] * last >= sum(work))
    model.minimize(last)
    solver = cp_model.CpSolver()
    limits.set(solver.parameters, began)
    status = solver.solve(model)
    bound = max(round(np.ceil(solver.best_objective_bound - 1e-6)), _longest(rows))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or solver.value(last) >= top:
        return begins, core, bound
    chosen = [bool(solver.value(each)) for each in wholes]
    return *_settled(rows, [solver.value(each) for each in starts], chosen, cores), bound


def _settled(
    rows: Rows, starts: Sequence[int], on_all: Sequence[bool], cores: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Return begins and cores of operators in this order, each as early as what it needs and its cores allow."""
    begins, ends, chosen = [0] * len(rows), [0] * len(rows), [-1] * len(rows)
    free = {True: [0] * cores[0], False: [0] * cores[1]}
    barrier = 0  # the end of the last one on all cores
    for at in sorted(range(len(rows)), key=lambda i: (starts[i], not on_all[i])):
        tensor, one, every, needs = rows[at]
        begin = max([barrier, *(ends[need] for need in needs)])
        if on_all[at]:
            begin = max(begin, *ends)
            barrier = ends[at] = begin + every
        else:
            core = chosen[at] = min(range(len(free[tensor])), key=lambda k: (max(free[tensor][k], begin), k))
            begin = max(begin, free[tensor][core])
            free[tensor][core] = ends[at] = begin + one
        begins[at] = begin
    return begins, chosen


if __name__ == "__main__":
    answer(_solve)
