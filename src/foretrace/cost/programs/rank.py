"""Schedules of one task in the order of their predicted times, the best of them timed; and calibration, in seconds."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrace.cost.operators.store import cache, make_folder
from foretrace.cost.programs.compile import Bound, CompiledProgram
from foretrace.cost.programs.drawing import draw
from foretrace.cost.programs.predictor import ROW, USUAL, Boosted, Formula, ProgramPredictor, fit, row
from foretrace.cost.programs.program import LoopKind, LoopNest, Statement, TensorProgram
from foretrace.cost.programs.schedules import LoopSchedule, apply
from foretrace.cost.programs.tasks import KINDS, SIZES, Task, task
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.hardware.processor import caches_here, instruction_sets, named
from foretrace.reading import DAMAGED, parse_npz, read_bytes
from foretrace.trace.observe.machine import machine

Floats = NDArray[np.float64]
Tell = Callable[[float], None]
ROUNDS, SAMPLE_S = 24, 0.6e-3
_MOST_LINES = 1200  # of LLVM IR; longer programs take seconds to compile
_MOST_BYTES = 1 << 28
_SLOW_S = 3.0  # a program is timed for so long at most, and twice at least
_ELSEWHERE = 2.5  # a processor that nothing was measured on: predictions for it are off by as much
_TURNS = 24  # programs that are timed in turns


class _Head(msgspec.Struct, frozen=True):
    """What a predictor's file holds beside its trees."""

    constants: tuple[float, ...]
    low: float
    high: float
    about: str
    start: float | None


@dataclass(frozen=True, kw_only=True)
class RankedSchedule:
    """A schedule of a task; `measured_s` is None where it was only predicted."""

    loops: str
    binds: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float | None = None

    @property
    def time_s(self) -> float:
        return self.predicted_s if self.measured_s is None else self.measured_s


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The fastest first: those that were timed, then the others."""

    task: Task
    flops: int
    candidates: tuple[RankedSchedule, ...]
    predictor: ProgramPredictor
    foreign: bool  # the predictor was fitted on another processor


def rank(
    given: Task, *, tries: int, measured: int, seed: int = 0, calibrate_s: float = 0.0, tell: Tell | None = None
) -> Ranking:
    """Draw so many schedules of a task, predict all, time the best.

    With `calibrate_s`, programs of all kinds are timed for so long before; what is fitted to them is kept for this
    processor. Raises ForetraceError where the task is too large to be held, or has a single way to run.
    """
    nbytes = apply(given, next(_drawn(given, 0))).nbytes
    if nbytes > _MOST_BYTES:
        raise ForetraceError(f"{given.name} holds {nbytes / 1e6:,.0f} MB; give sizes that hold at most 268 MB.")
    predictor, foreign = (calibrate(calibrate_s, seed, tell), False) if calibrate_s else load()
    schedules = dict.fromkeys(each for each, _ in zip(_drawn(given, seed), range(tries), strict=False))
    programs = [apply(given, each) for each in schedules]
    compiled, rows, caches = [], [], caches_here()
    for i, each in enumerate(programs):
        compiled.append(CompiledProgram(each))
        rows.append(row(compiled[-1], caches))
        if tell is not None:
            tell((i + 1) / (len(programs) + measured))
    table = np.array(rows)
    predicted, binds = predictor.predict(table), predictor.binds(table)
    order = np.argsort(predicted, kind="stable")
    inputs = given.inputs("float32")
    timed = times([compiled[i].bind(inputs) for i in order[:measured]])
    ratio = float(np.median(timed / predicted[order[:measured]])) if measured else 1.0
    wide = _ELSEWHERE if foreign else 1.0
    low, high = predictor.low * min(1.0, ratio) / wide, predictor.high * max(1.0, ratio) * wide
    found = [
        RankedSchedule(
            loops=described(programs[i]), binds=binds[i], predicted_s=float(predicted[i]),
            low_s=float(predicted[i] * low), high_s=float(predicted[i] * high),
            measured_s=float(timed[place]) if place < len(timed) else None,
        )
        for place, i in enumerate(order)
    ]  # fmt: skip
    best = tuple(sorted(found, key=lambda each: (each.measured_s is None, each.time_s)))
    return Ranking(task=given, flops=programs[0].flops, candidates=best, predictor=predictor, foreign=foreign)


def times(programs: Sequence[Bound], rounds: int = ROUNDS) -> Floats:
    """Return the least wall-clock seconds [programs] of short samples in turns; data is where the run before
    left it.
    """
    counts = []
    for each in programs:
        each.run()
        counts.append(max(1, round(SAMPLE_S / max(each.run(), 1e-7))))
    best, spent = np.full(len(programs), np.inf), np.zeros(len(programs))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            for i, each in enumerate(programs):
                if spent[i] < _SLOW_S or number < 2:
                    one = each.run(counts[i])
                    best[i], spent[i] = min(best[i], one), spent[i] + one * counts[i]
    finally:
        if collecting:
            gc.enable()
    return best


def _drawn(given: Task, seed: int) -> Iterator[LoopSchedule]:
    """Yield random schedules that compile in reasonable time."""
    from foretrace.cost.programs.emit import module

    rng = np.random.default_rng(seed)
    for _ in range(100_000):
        schedule = draw(given, rng)
        if module(apply(given, schedule)).text.count("\n") <= _MOST_LINES:
            yield schedule


def described(program: TensorProgram) -> str:
    """Return its loops from the outermost in, nests apart by semicolons: "i4 k128 j8v" (v: vectorised, u: unrolled)."""

    def words(node: LoopNest) -> str:
        if isinstance(node, Statement):
            return ""
        mark = {LoopKind.VECTORISED: "v", LoopKind.UNROLLED: "u"}.get(node.kind, "")
        inside = [text for each in node.body if (text := words(each))]
        rest = inside[0] if len(inside) == 1 else f"({'; '.join(inside)})" if inside else ""
        return f"{node.variable.split('.')[1]}{node.extent}{mark} {rest}".rstrip()

    return "; ".join(filter(None, map(words, program.nests))) or "no loop"


# --- calibration -----------------------------------------------------------------------------------------------------


def calibrate(seconds: float, seed: int = 0, tell: Tell | None = None) -> ProgramPredictor:
    """Return time programs of all kinds for so long at most, fit a predictor to them, and keep it for this
    processor.
    """
    end, rng, caches = time.monotonic() + 0.8 * seconds, np.random.default_rng(seed), caches_here()
    rows: list[Floats] = []
    found: list[float] = []
    tasks: list[int] = []
    number = 0
    while time.monotonic() < end or len(found) < _TURNS:
        bound = []
        for _ in range(_TURNS):
            kind = KINDS[number % len(KINDS)]
            given = task(kind, **{name: int(rng.choice(sizes)) for name, sizes in SIZES[kind].items()})
            compiled = CompiledProgram(apply(given, next(_drawn(given, int(rng.integers(1 << 30))))))
            rows.append(row(compiled, caches))
            bound.append(compiled.bind(given.inputs("float32")))
            tasks.append(number)
            number += 1
            if tell is not None:
                tell(min(1.0, 1 - (end - time.monotonic()) / seconds))
        found += times(bound).tolist()
    about = f"{len(found)} programs timed here in {seconds:g} s"
    predictor = fit(np.array(rows), np.array(found), tasks, about)
    path = _path()
    make_folder(path.parent)
    write_bytes(path, packed(predictor))
    return predictor


def load() -> tuple[ProgramPredictor, bool]:
    """Return the predictor of this processor, else the shipped one; and whether that was fitted on another
    processor.
    """
    if _path().exists():
        return unpacked(read_bytes(_path()), str(_path())), False
    shipped = unpacked(files("foretrace.cost.programs").joinpath("shipped.npz").read_bytes())
    return shipped, not shipped.about.startswith(f"{_processor()},")


def _processor() -> str:
    return f"{machine().get('cpu')} ({named(instruction_sets())})"


def _path() -> Path:
    return cache() / "programs" / f"{hashlib.sha256(_processor().encode()).hexdigest()[:16]}.npz"


def packed(predictor: ProgramPredictor) -> bytes:
    """Return the predictor as a file."""
    trees = predictor.trees
    head = {
        "constants": predictor.formula.constants, "low": predictor.low, "high": predictor.high,
        "about": predictor.about, "start": trees.start if trees else None,
    }  # fmt: skip
    arrays = {name: getattr(trees, name) for name in ("edges", "feature", "cut", "left", "step")} if trees else {}
    small = {name: each.astype("f4" if each.dtype.kind == "f" else "i2") for name, each in arrays.items()}
    file = BytesIO()
    np.savez_compressed(file, head=np.frombuffer(msgspec.json.encode(head), np.uint8), **small)
    return file.getvalue()


def unpacked(data: bytes, where: str = "the shipped predictor") -> ProgramPredictor:
    """Return what `packed` wrote. Raises ForetraceError where it is damaged."""
    try:
        held = parse_npz(data)
        head = msgspec.json.decode(held["head"].tobytes(), type=_Head)
        trees = None
        if head.start is not None:
            edges, step = (held[name].astype(np.float64) for name in ("edges", "step"))
            feature, cut, left = (held[name].astype(np.int64) for name in ("feature", "cut", "left"))
            sound = feature.shape == cut.shape == left.shape == step.shape and edges.shape[1] == len(ROW) + 1
            sound &= bool((feature < edges.shape[1]).all() and (left >= 0).all() and (left < step.shape[1] - 1).all())
            if not sound or not (np.isfinite(edges).all() and (np.abs(step) < 1).all() and abs(head.start) < 10):
                raise ValueError("its trees do not fit")
            trees = Boosted(edges=edges, feature=feature, cut=cut, left=left, step=step, start=head.start)
        if len(head.constants) != len(USUAL) or not all(1e-9 < each < 1e9 for each in (*head.constants, head.high)):
            raise ValueError("its constants do not fit")
        if not 1e-9 < head.low <= head.high:
            raise ValueError("its range is none")
    except (*DAMAGED, msgspec.MsgspecError) as error:
        raise ForetraceError(f"{where} is damaged ({error}); delete it and calibrate again.") from None
    formula = Formula(constants=head.constants)
    return ProgramPredictor(formula=formula, trees=trees, low=head.low, high=head.high, about=head.about)
