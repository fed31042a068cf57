"""`LatencyProfile`: what single instances of a model take, by threads and batch; and measuring them, and whole splits.

A profile is a CSV file with a row per point: `model, threads, batch, latency_ms`, and where it was measured here also
`samples_ms` (every measured latency, separated by spaces) and `origin` (machine, versions and content of the model).

Every instance is a process of its own on cores of its own. Times are those of whoever waits for the batch. What others
do on a machine only adds time, so a point whose latencies spread by more than QUIET_SPREAD (interquartile range over
median) is measured again, up to ATTEMPTS times, and the calmest attempt is kept; one that still spreads by more than
MOST_SPREAD is refused: the search does not use it. Points are kept in a file as they come, so that an interrupted
profile continues where it ended.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.deadline import Deadline
from foretrace.errors import ForetraceError
from foretrace.experiment.arms import LEAST_ROUNDS, plan
from foretrace.experiment.cores import ahead
from foretrace.experiment.statistics import MOST_SPREAD, QUIET_SPREAD
from foretrace.experiment.trial import in_turns
from foretrace.files import write_text
from foretrace.hardware import processor
from foretrace.reading import read_text
from foretrace.serving.server.models import ModelFacts, ModelSource
from foretrace.serving.server.split import CoreSplit, ModelInstance
from foretrace.serving.server.worker import ModelWorker
from foretrace.trace.observe.machine import machine

ATTEMPTS = 3
SAMPLES, LEAST_SAMPLES, POINT_S = 20, 7, 3.0  # latencies of a point; fewer where they would take longer than this
# Short ones are repeated for as long, so that not all of them fall into one slice of time that another process had.
MOST_SAMPLES, LEAST_S = 1000, 0.3
DISCARDED = 2  # first batches of every size: libraries choose and prepare their kernels

Tell = Callable[[str, float], None]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class _Row(msgspec.Struct):
    model: str
    threads: _Count
    batch: _Count
    latency_ms: float
    samples_ms: str = ""
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """Latencies of instances of one model that run alone. Points that were measured have several, recorded ones one."""

    model: str
    samples_s: Mapping[ModelInstance, Float64] = field(default_factory=dict)  # sorted
    origin: str = ""  # where it was measured, and of what; "": recorded elsewhere
    refused: tuple[ModelInstance, ...] = ()  # points that others disturbed too much; a search leaves them out

    def latency_s(self, quantile: float = 0.5) -> dict[ModelInstance, float]:
        """Return a quantile of the latency at every point. Raises ForetraceError where samples are too few for it."""
        fewest = min(map(len, self.samples_s.values()), default=1)
        if quantile > 0.5 and fewest < (needed := samples_for(quantile)):
            raise ForetraceError(
                f"`tail={quantile:g}` needs {needed} latencies of every point, and the profile of {self.model} has "
                f"{fewest} of one; measure it with this tail, or leave it out."
            )
        return {point: float(np.quantile(samples, quantile)) for point, samples in self.samples_s.items()}

    def alone_s(self, split: CoreSplit, quantile: float = 0.5) -> float:
        """Return that quantile of the latency of a batch if instances do not disturb each other.

        It is within x with this probability if each of n instances is with the n-th root of it: exact for equal
        instances, and an upper bound for others. Raises KeyError for an instance that was not measured.
        """
        level = quantile ** (1 / len(split))
        return max(float(np.quantile(self.samples_s[each], level)) for each in set(split.instances))

    def save(self, path: Path) -> None:
        """Write the profile, whole or not at all; those of other models in the file stay."""
        others = [each for each in read(path) if each.model != self.model] if path.exists() else []
        out = io.StringIO()
        table = csv.writer(out, lineterminator="\n")
        table.writerow(_Row.__struct_fields__)
        for profile in (*others, self):
            for point, samples in sorted(profile.samples_s.items()):
                listed = " ".join(f"{1e3 * each:.6g}" for each in samples.tolist()) if len(samples) > 1 else ""
                median_ms = 1e3 * float(np.median(samples))
                table.writerow((profile.model, *point, f"{median_ms:.17g}", listed, profile.origin))
        write_text(path, out.getvalue())


def samples_for(quantile: float) -> int:
    """Return latencies of which one at least is expected beyond the quantile."""
    return ceil(round(1 / (1 - quantile), 6))


def read(path: Path) -> tuple[LatencyProfile, ...]:
    """Return the profiles in a file, one per model. Raises ForetraceError with the line that is no point of one."""
    mend = f"give a CSV file with the columns {', '.join(_Row.__struct_fields__[:4])}"
    rows = csv.DictReader(io.StringIO(read_text(path, mend=mend)), restval="", restkey="more", skipinitialspace=True)
    found, origins = dict[str, dict[ModelInstance, Float64]](), dict[str, str]()
    try:
        for given in rows:
            row = msgspec.convert(given, _Row, strict=False)
            point = ModelInstance(row.threads, row.batch)
            samples_ms = [float(each) for each in row.samples_ms.split()] or [row.latency_ms]
            samples = np.sort(np.array(samples_ms)) / 1e3
            if not 0 < samples[0] <= samples[-1] < np.inf:
                raise ValueError("latencies must be finite and above 0")
            if point in found.setdefault(row.model, {}) or origins.setdefault(row.model, row.origin) != row.origin:
                raise ValueError("a point comes twice, or points of one model from two places")
            found[row.model][point] = samples
    except (csv.Error, msgspec.ValidationError, ValueError) as error:
        raise ForetraceError(f"{path}, line {rows.line_num} is no point of a profile ({error}); {mend}.") from None
    if not found:
        raise ForetraceError(f"{path} is no latency profile: it holds no point; {mend}.")
    return tuple(LatencyProfile(model=name, samples_s=points, origin=origins[name]) for name, points in found.items())


# --- measuring ------------------------------------------------------------------------------------------------------


def points(threads: int, batch: int, fixed: int | None = None) -> tuple[ModelInstance, ...]:
    """Return what to profile: batches that are powers of two, and the equal shares of the batch where they are none.

    `fixed` is the only batch that the model takes.
    """
    found = {ModelInstance(t, 2**k) for t in range(1, threads + 1) for k in range(batch.bit_length())}
    for count in {*(2**k for k in range(threads.bit_length())), threads}:
        shares = {batch // count, -(-batch // count)} - {0}
        found |= {ModelInstance(t, size) for size in shares for t in range(1, threads // count + 1)}
    return tuple(sorted(each for each in found if fixed in (None, each.batch)))


def facts_of(source: ModelSource, cores: Sequence[int]) -> ModelFacts:
    """Return what there is to know of a model. Raises ForetraceError where it cannot be loaded."""
    with running(source, [ModelInstance(1, 1)], cores) as (worker,):
        return worker.facts


def measure_profile(
    source: ModelSource, facts: ModelFacts, *, cores: Sequence[int], batch: int, path: Path, samples: int = SAMPLES,
    ours: bool = False, tell: Tell = lambda what, share: None,
) -> LatencyProfile:  # fmt: skip
    """Measure what the profile in `path` lacks, and keep it there.

    `samples` is how many latencies a point needs. A profile of another model or machine is refused, or replaced where
    the file is `ours`. Raises ForetraceError also where the model cannot be run.
    """
    origin = _origin(source, facts)
    kept = {each.model: each for each in (read(path) if path.exists() else ())}.get(source.name)
    if kept and kept.origin != origin and not ours:
        raise ForetraceError(
            f"{path} holds a profile of {source.name} from elsewhere ({kept.origin or 'no origin is stated'}); name "
            "another file to measure here."
        )
    found = dict(kept.samples_s) if kept and kept.origin == origin else {}
    wanted, least = points(len(cores), batch, facts.fixed_batch), _least(samples)

    def spread(point: ModelInstance) -> float:
        return _spread(found[point]) if point in found and len(found[point]) >= least else np.inf

    todo = [each for each in wanted if spread(each) > MOST_SPREAD]
    for attempt in range(ATTEMPTS):
        done, again = 0, f", attempt {attempt + 1}" if attempt else ""
        for threads, group in groupby(todo, key=lambda point: point.threads):
            sizes = [point.batch for point in group]
            with running(source, [ModelInstance(threads, max(sizes))], cores) as (worker,):
                for size in sizes:
                    point, latencies = ModelInstance(threads, size), _latencies(worker, size, samples)
                    if _spread(latencies) < spread(point):
                        found[point] = latencies
                    LatencyProfile(model=source.name, samples_s=found, origin=origin).save(path)
                    done += 1
                    tell(f"{threads} threads, batch {size}{again}", done / len(todo))
        todo = [each for each in todo if spread(each) > QUIET_SPREAD]
    return LatencyProfile(
        model=source.name, samples_s={point: found[point] for point in wanted}, origin=origin,
        refused=tuple(each for each in todo if spread(each) > MOST_SPREAD),
    )  # fmt: skip


def run_in_turns(
    source: ModelSource, splits: Mapping[str, CoreSplit], *, cores: Sequence[int], seconds: float, batches: int = 1,
    own: str = "", tell: Callable[[float], None] | None = None,
) -> dict[str, list[list[float]]]:  # fmt: skip
    """Run splits in turns, each with all of its instances at once, for about so many seconds; so many batches each.

    Return the latencies of batches, seconds until the slowest instance has ended, by split and round. Processes of the
    split named `own` have the library's own settings, see `ModelWorker`.
    """
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(running(source, split.instances, cores, own=name == own))
            for name, split in splits.items()
        }
        stack.enter_context(ahead())

        def run(name: str, count: int) -> list[float]:
            sizes = [each.batch for each in splits[name].instances]
            return [run_batch(workers[name], sizes) for _ in range(count)]

        turns = plan({name: min(run(name, DISCARDED)) for name in splits}, seconds)
        steps = max(turns.steps, ceil(batches / LEAST_ROUNDS))
        return in_turns(
            splits, lambda name, _: run(name, turns.discarded + steps)[turns.discarded :], turns.rounds,
            least=LEAST_ROUNDS, seconds=seconds, tell=tell,
        )  # fmt: skip


@contextmanager
def running(
    source: ModelSource, instances: Sequence[ModelInstance], cores: Sequence[int], *, own: bool = False
) -> Iterator[tuple[ModelWorker, ...]]:
    """Start a process for each instance, on consecutive cores, ready; ended with the block."""
    workers, free = list[ModelWorker](), list(cores)
    try:
        for each in instances:
            taken, free = free[: each.threads], free[each.threads :]
            workers.append(ModelWorker(source, each, taken, first=True, own=own))
        for worker in workers:
            worker.ready()
        yield tuple(workers)
    finally:
        for worker in workers:
            worker.end()


def run_batch(workers: Sequence[ModelWorker], sizes: Sequence[int]) -> float:
    """Run so many samples on each worker at once; seconds until all have ended.

    Raises ForetraceError where the model raises or a process dies.
    """
    began = perf_counter()
    runs = []
    try:
        for worker, size in zip(workers, sizes, strict=True):
            worker.submit(size)
        for worker in workers:
            runs.append(worker.receive())
    except EOFError:
        raise ForetraceError(
            f"an instance {worker.ended()} in a batch of {max(sizes)} samples; if nobody did that, it had too little "
            "memory: use a smaller `batch=`."
        ) from None
    took = perf_counter() - began
    if said := next((run.error for run in runs if run.error), ""):
        raise ForetraceError(f"the model raised {said} in a batch of {max(sizes)} samples; see that it takes so many.")
    return took


def _latencies(worker: ModelWorker, size: int, samples: int) -> Float64:
    """Return latencies of batches of one size, sorted."""
    with ahead():
        for _ in range(DISCARDED):
            run_batch([worker], [size])
        until, found = Deadline(POINT_S), list[float]()
        while (
            len(found) < _least(samples)
            or (len(found) < samples and until.spent < POINT_S)
            or (len(found) < MOST_SAMPLES and until.spent < LEAST_S)
        ):
            found.append(run_batch([worker], [size]))
    return np.sort(np.array(found))


def _least(samples: int) -> int:
    """Return latencies that a point must have, however long they take; a tail needs all of them."""
    return LEAST_SAMPLES if samples <= SAMPLES else samples


def _spread(samples: Float64) -> float:
    """Return interquartile range over median."""
    low, median, high = np.quantile(samples, [0.25, 0.5, 0.75])
    return float((high - low) / median)


def _origin(source: ModelSource, facts: ModelFacts) -> str:
    """Return what a profile holds for: content of the model, processor and what may be used of it, libraries."""
    library, here = "onnxruntime" if facts.kind == "onnx" else "torch", machine()
    return (
        f"{source.size + ' ' if facts.kind == 'zoo' else ''}{facts.kind} {facts.fingerprint:08x}; {here['cpu']} "
        f"({processor.named(processor.instruction_sets())}), {here['cores']} cores, {library} {version(library)}"
    )
