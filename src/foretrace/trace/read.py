"""`read`: recordings of one or many ranks become one `Trace`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Array, Int64, Mask
from foretrace.errors import TraceError
from foretrace.trace import checks, facts
from foretrace.trace.columns import RankColumns
from foretrace.trace.decimals import MAX_NS
from foretrace.trace.kineto import NotARecordingError, Recording
from foretrace.trace.readers import opened
from foretrace.trace.stream import RecordingSource, sources
from foretrace.trace.tables import LaneTable, Tables
from foretrace.trace.trace import Category, Dropped, RankInfo, Trace, TraceLane

_Columns = dict[str, Array]
Steps = Collection[int] | slice

DEFAULT_CATEGORIES = frozenset(Category) - {Category.PYTHON}
_METADATA = ("baseTimeNanoseconds", "distributedInfo", "deviceProperties", "foretrace")
_RANK_IN_NAME = (
    re.compile(r"(?i)(?<![a-z])rank[-_.]?([0-9]{1,9})"),
    re.compile(r"(?i)(?<![a-z])worker[-_.]?([0-9]{1,9})"),
)
_STEP = re.compile(r"ProfilerStep#([0-9]{1,18})")


def read(
    path: str | Path | Sequence[str | Path],
    *,
    categories: Collection[Category] | None = None,
    ranks: Collection[int] | None = None,
    steps: Steps | None = None,
    salvage: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Read the PyTorch profiler's recordings (Kineto JSON) of one rank or many.

    Args:
        path: a `.json`, `.json.gz`, `.zip` or `.tar.gz` file, a folder of rank files, or a list of those.
        categories: what to keep; by default everything but `Category.PYTHON`, whose events flood a recording.
        ranks: the ranks to keep, by default all. The rank is what the recording says about itself, else what its
            file name says ("rank3", "worker_3"), else its place in the list.
        steps: numbers of ProfilerStep marks, or a slice of those that were recorded (`slice(-2, None)`: the
            last two). Keeps events that overlap these steps of their rank, and device work launched in them.
        salvage: leave out what is broken or impossible and list it in `Trace.dropped`, instead of raising.
        progress: called with the share of the stored bytes that were read, 0 to 1.

    Time 0 is the start of the earliest event kept; `RankInfo.base_ns` tells when that was. Rows are ordered
    by (start, longest first), else as in the file. Flow arrows and the profiler's own marks (its span, the start
    and end of its window) make no rows.

    Raises:
        TraceError: one sentence that names the file, the place and what to do.

    """
    ask = _Ask(
        categories=DEFAULT_CATEGORIES if categories is None else frozenset(categories),
        ranks=None if ranks is None else frozenset(ranks),
        steps=steps,
        salvage=salvage,
    )
    try:
        return _read(path, ask, progress)
    except MemoryError:
        raise TraceError(f"{shown(path)} does not fit into memory: keep fewer ranks, steps or categories.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """One recording of a run, read without the others; times count from its own earliest event."""

    name: str
    told: int | None  # rank that the recording or its file name tells; None: only its place among the others can
    trace: Trace | None  # of rank `told`, else 0; None where that rank was not asked for


def read_apart(
    file: Path,
    *,
    alone: bool,
    ranks: Collection[int] | None = None,
    steps: Steps | None = None,
    salvage: bool = False,
) -> tuple[list[Apart], list[TraceError]]:
    """Return what `read` reads of one stored file of a run (an archive may hold several ranks), and files refused.

    `alone` says that the file was asked for by name: what is no recording is then an error. `rank_numbers` numbers
    the parts of all files. Raises TraceError as `read` does.
    """
    kept = None if ranks is None else frozenset(ranks)
    ask = _Ask(categories=DEFAULT_CATEGORIES, ranks=kept, steps=steps, salvage=salvage)
    parts: list[Apart] = []
    refused: list[TraceError] = []
    try:
        for source in sources(file):
            tables = Tables()
            found, broken = _read_sources([replace(source, alone=source.alone and alone)], tables, ask)
            refused += broken
            for r in found:
                told = r.rank
                r.rank = 0 if told is None else told
                wanted = ask.ranks is None or told is None or told in ask.ranks
                parts.append(Apart(name=r.name, told=told, trace=_merge([r], tables, []) if wanted else None))
    except MemoryError:
        raise TraceError(f"{file} does not fit into memory: keep fewer ranks, steps or categories.") from None
    return parts, refused


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """What `read` was asked for."""

    categories: frozenset[Category]
    ranks: frozenset[int] | None
    steps: Steps | None
    salvage: bool


@dataclass(slots=True, kw_only=True)
class _Rank:
    """What one file holds; without columns if its rank was not asked for."""

    name: str
    rank: int | None
    metadata: dict[str, Any] = field(default_factory=dict)
    columns: _Columns = field(default_factory=dict)
    lanes: LaneTable = field(default_factory=LaneTable)
    platform: str = "cpu"
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The rank, once every file has one."""
        assert self.rank is not None
        return self.rank

    @property
    def base_ns(self) -> int:
        """Epoch of the file's time 0."""
        base = self.metadata.get("baseTimeNanoseconds")
        return base if isinstance(base, int) and 0 <= base <= MAX_NS else 0


def _read(path: str | Path | Sequence[str | Path], ask: _Ask, progress: Callable[[float], None] | None) -> Trace:
    tables = Tables()
    found, refused = _read_sources(sources(path, progress), tables, ask)
    if not found:
        raise refused[0]
    _number(found)
    kept = [r for r in found if ask.ranks is None or r.rank in ask.ranks]
    if ask.ranks is not None and (missing := sorted(ask.ranks - {r.number for r in kept})):
        known = listed(sorted(r.number for r in found))
        raise TraceError(f"{shown(path)} has no rank {listed(missing)}: choose from {known}.")
    if not kept:
        raise TraceError(f"{shown(path)}: no rank was asked for: name at least one.")
    notes = [Dropped(reason=f"file left out: {e}", count=0, where=shown(path)) for e in refused]
    return _merge(kept, tables, notes)


def _read_sources(given: Iterable[RecordingSource], tables: Tables, ask: _Ask) -> tuple[list[_Rank], list[TraceError]]:
    """Return what each source holds, and why some could not be read."""
    found: list[_Rank] = []
    refused: list[TraceError] = []
    for source in given:
        try:
            found.append(_read_file(source, tables, ask))
        except TraceError as error:
            # A folder may hold other files, and what can be salvaged of a set are its good files.
            foreign = isinstance(error, NotARecordingError) and not source.alone
            if not foreign and not ask.salvage:
                raise
            refused.append(error)
    return found, refused


def _read_file(source: RecordingSource, tables: Tables, ask: _Ask) -> _Rank:
    recording = opened(source, salvage=ask.salvage)
    rank = _rank_of(recording)
    if ask.ranks is not None and rank is not None and rank not in ask.ranks:
        return _Rank(name=source.name, rank=rank)
    marks = frozenset() if ask.steps is None else frozenset({Category.ANNOTATION, Category.RUNTIME})
    builder = RankColumns(source.name, tables, ask.categories | marks, salvage=ask.salvage)
    for events in recording.events():
        builder.add(events)
    lost = recording.lost | builder.dropped
    columns = builder.finish()
    columns = _pick(columns, time_order(columns["start"], columns["dur"]))
    columns = _possible(source.name, columns, builder.span, lost, ask)
    if not len(columns["start"]):
        raise TraceError(_nothing(source.name, lost))
    if ask.steps is not None:
        columns = _pick(columns, _in_steps(source.name, columns, list(tables.names), ask.steps))
        columns = _pick(columns, np.isin(columns["category"], [int(c) for c in ask.categories]))
        if not len(columns["start"]):
            raise TraceError(f"{source.name} has no event of the categories asked for in these steps.")
    return _Rank(
        name=source.name,
        rank=_rank_of(recording),
        metadata={key: recording.value(key) for key in _METADATA},
        columns=columns,
        lanes=builder.lanes,
        platform=_platform(recording, builder, tables),
        dropped=lost,
    )


def _nothing(name: str, lost: Mapping[str, int]) -> str:
    """Return why a recording has no rows."""
    if lost:
        reasons = "; ".join(f"{reason} ({count:,})" for reason, count in list(lost.items())[:4])
        return f"{name} holds no event that can be kept: {reasons}."
    return f"{name} holds no events, only metadata: let the profiler record at least one active step."


def time_order(start: Int64, dur: Int64) -> npt.NDArray[np.intp]:
    """Return rows by (start, longest first), stable."""
    order = np.argsort(start, kind="stable")
    same = np.diff(start[order]) == 0
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    if len(tied):
        rows = order[tied]
        order[tied] = rows[np.lexsort((-dur[rows], start[rows]))]
    return order


def _pick(columns: _Columns, rows: Array) -> _Columns:
    """Return rows of the columns; each old column is let go before the next is made."""
    return {name: columns.pop(name)[rows] for name in list(columns)}


def _possible(name: str, columns: _Columns, span: checks.Span, lost: dict[str, int], ask: _Ask) -> _Columns:
    """Refuse what cannot be true; with `salvage` leave it out."""
    for check in checks.DROPPING:
        found = check(columns, span)
        if found is not None:
            _refuse(name, found, lost, ask)
            columns = _pick(columns, ~found.rows)
    found = checks.shared_launches(columns)
    if found is not None:
        _refuse(name, found, lost, ask)
        columns["correlation"][found.rows] = -1
    return columns


def _refuse(name: str, found: checks.Impossible, lost: dict[str, int], ask: _Ask) -> None:
    if not ask.salvage:
        raise TraceError(f"{name} {found.what}: record again, or read the rest with `salvage=`.")
    lost[found.reason] = int(np.count_nonzero(found.rows))


def _in_steps(name: str, columns: _Columns, names: Sequence[str], steps: Steps) -> Mask:
    """Return rows that overlap the steps, and the device work launched in them."""
    number_of = {i: int(m[1]) for i, n in enumerate(names) if (m := _STEP.match(n))}
    marks = np.flatnonzero((columns["category"] == Category.ANNOTATION) & np.isin(columns["name"], list(number_of)))
    numbers = np.array([number_of[n] for n in columns["name"][marks].tolist()], dtype=np.int64)
    known = np.unique(numbers)
    if not len(known):
        raise TraceError(f"{name} has no ProfilerStep marks to select steps by: read it without `steps=`.")
    chosen = known[steps] if isinstance(steps, slice) else np.array(sorted(set(steps)), dtype=np.int64)
    if missing := np.setdiff1d(chosen, known).tolist():
        raise TraceError(f"{name} has no step {listed(missing)}: choose from {listed(known.tolist())}.")
    if not len(chosen):
        raise TraceError(f"{name}: no step was selected: choose from {listed(known.tolist())}.")
    marks = marks[np.isin(numbers, chosen)]
    begin = columns["start"][marks]
    end = np.maximum.accumulate(begin + columns["dur"][marks])
    start, dur = columns["start"], columns["dur"]
    inside = _overlaps(start, start + np.maximum(dur, 1), begin, end)
    calls = (columns["category"] == Category.RUNTIME) & _overlaps(start, start + 1, begin, end)
    launched = np.isin(columns["correlation"], columns["correlation"][calls & (columns["correlation"] >= 0)])
    return inside | launched


def _overlaps(start: Int64, end: Int64, begins: Int64, ends: Int64) -> Mask:
    """Return which intervals overlap one of the windows; windows by start, their ends never decreasing."""
    last = np.searchsorted(begins, end, side="left") - 1
    return (last >= 0) & (ends[last] > start)


def _rank_of(recording: Recording) -> int | None:
    """Return rank that the recording, or else its file name, tells."""
    info = recording.value("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if isinstance(rank, int) and 0 <= rank < 2**31:
        return rank
    name = Path(recording.name).name
    for pattern in _RANK_IN_NAME:
        if match := pattern.search(name):
            return int(match[1])
    return None


def _number(found: list[_Rank]) -> None:
    """Give every file a rank of its own."""
    for r, number in zip(found, rank_numbers([(r.name, r.rank) for r in found]), strict=True):
        if r.rank is None:
            r.rank = number
            if len(found) > 1:
                r.dropped[f"file tells no rank: taken as rank {number} by its place"] = 0


def rank_numbers(files: Sequence[tuple[str, int | None]]) -> list[int]:
    """Return the rank of every (file, rank that it tells): that one, else the lowest free in the files' order.

    Raises TraceError where two files tell the same rank: they are not one run.
    """
    claimed: dict[int, str] = {}
    for name, rank in files:
        if rank is None:
            continue
        if rank in claimed:
            raise TraceError(
                f"{claimed[rank]} and {name} are both rank {rank}: name the files of one recording, one per rank."
            )
        claimed[rank] = name
    free = (rank for rank in range(2 * len(files)) if rank not in claimed)
    return [next(free) if rank is None else rank for _, rank in files]


def _platform(recording: Recording, builder: RankColumns, tables: Tables) -> str:
    names = list(tables.names)
    calls = [names[i] for i in builder.runtime_names]
    keys = recording.metadata
    if any(key.startswith(("roctracer", "rocprof", "hip_")) for key in keys) or any(
        name.startswith("hip") for name in calls
    ):
        return "rocm"
    return "cuda" if builder.device_work or any(name.startswith("cu") for name in calls) else "cpu"


def _merge(kept: list[_Rank], tables: Tables, notes: list[Dropped]) -> Trace:
    """Return one trace of all ranks on one clock."""
    zero = min(r.base_ns + int(r.columns["start"][0]) for r in kept)
    lanes: list[TraceLane] = []
    for r in kept:
        r.columns["start"] += r.base_ns - zero
        r.columns["lane"] += len(lanes)
        lanes += r.lanes.lanes(r.number)
    columns = kept[0].columns
    if len(kept) > 1:
        columns = {name: np.concatenate([r.columns.pop(name) for r in kept]) for name in list(columns)}
        columns = _pick(columns, time_order(columns["start"], columns["dur"]))
    ranks = tuple(_info(r, zero, len(kept)) for r in sorted(kept, key=lambda r: r.number))
    dropped = [Dropped(reason=k, count=n, where=r.name) for r in kept for k, n in r.dropped.items()]
    return Trace(
        **columns,
        names=tuple(tables.names),
        lanes=tuple(lanes),
        shapes=tuple(tables.shapes.texts),
        collectives=tuple(tables.collectives.found),
        ranks=ranks,
        dropped=(*dropped, *notes),
    )


def _info(r: _Rank, zero: int, ranks: int) -> RankInfo:
    distributed = r.metadata.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    world = distributed.get("world_size")
    devices = r.metadata.get("deviceProperties")
    devices = devices if isinstance(devices, list) else []
    recorded = r.metadata.get("foretrace")
    told, wrong = facts.sound(recorded if isinstance(recorded, dict) else {})
    for key in wrong:
        r.dropped[f"recorder's fact {key!r} left out: it is not as a recorder writes it"] = 0
    return RankInfo(
        rank=r.number,
        world_size=world if isinstance(world, int) and world > 0 else ranks,
        source=r.name,
        backend=str(distributed.get("backend") or ""),
        platform=r.platform,
        devices=tuple(str(d.get("name", "")) for d in devices if isinstance(d, dict)),
        base_ns=zero,
        recording=told,
    )


def listed(numbers: Sequence[int]) -> str:
    """Return numbers for a sentence: at most eight of them."""
    shown = ", ".join(str(n) for n in numbers[:8])
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > 8 else shown


def shown(path: str | Path | Sequence[str | Path]) -> str:
    return str(path) if isinstance(path, str | Path) else ", ".join(str(p) for p in path)
