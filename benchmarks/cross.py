"""Every technique on every recording: how many predictions are sound, refused, and wrong.

    python benchmarks/cross.py [--pairs] [--json] [--only PATTERN] [--technique PATTERN] [--processes N]

Recordings are found, not listed: those of tests/data, whatever `foretrace` can read under the shared data
(FORETRACE_SHARED_DATA), the ranks of one run joined, execution traces, an ONNX model, and steps estimated from models
of the zoo; those of a device with a full launch queue as well, and the project's own in every way that a recording can
tell less. Techniques are those of the registry, two settings each (`tests.techniques.cross`). With --pairs, every
ordered pair of techniques on the three recordings on which most are sound. Every cell is judged by two processes, whose
answers must be the same to the byte. One cell more per recording is `foretrace advise`, which must not say that a
technique failed. Wrong cells are printed and make the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache, partial
from itertools import permutations
from multiprocessing import get_context
from pathlib import Path

os.environ["FORETRACE_POISON"] = "1"  # what a pass leaves unwritten shows; inherited by the workers
os.environ.setdefault("OMP_NUM_THREADS", "1")

from foretrace import flow
from foretrace.errors import ForetraceError
from foretrace.executor import cores
from foretrace.graph.store import load, save
from foretrace.graph.taskgraph import TaskGraph
from foretrace.model.operator_graph import OperatorGraph
from foretrace.plan.advise import advise
from foretrace.techniques.arguments import parse
from foretrace.techniques.registry import techniques
from tables import ROOT, machine, shared_traces, table, today
from tests.techniques.cross import Cell, judge, maimed, settings

MODELS = ("resnet50", "bert", "gpt2", "dlrm", "lstm-lm")  # of the zoo, those that there are
PAIR_RECORDINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A graph to be asked for, and how it is made."""

    name: str
    make: Callable[[], TaskGraph]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cell with its place in the cross."""

    recording: str
    techniques: tuple[str, ...]
    cell: Cell
    seconds: float


def sources() -> Iterator[Source]:
    """Everything that can become a task graph."""
    for path in sorted((ROOT / "tests" / "data").glob("*.json.gz")):
        name = path.name.split(".")[0]
        yield Source(name=name, make=partial(_recorded, path))
        for way in maimed:
            yield Source(name=f"{name}, {way}", make=partial(_maimed, path, way))
    traces = shared_traces()
    if traces is not None:
        yield from _shared(traces)
    yield from _estimated()


def _shared(traces: Path) -> Iterator[Source]:
    """Recordings and execution traces, by content; files whose names differ in numbers alone are ranks of one run."""
    from foretrace.model.readers.sources import reader_of
    from foretrace.trace.readers import KINETO

    ranks: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(each for each in traces.rglob("*") if each.is_file()):
        name = str(path.relative_to(traces))
        try:
            reader = reader_of(path)
        except ForetraceError:
            continue
        if reader == KINETO:
            ranks.setdefault((path.parent, re.sub(r"\d+", "#", path.name)), []).append(path)
            yield Source(name=name, make=partial(_recorded, path))
            yield Source(name=f"{name}, full queue", make=partial(_maimed, path, "full queue"))
        else:
            yield Source(name=name, make=partial(_scenario, path))
    for (folder, _), paths in ranks.items():
        if len(paths) > 1:
            name = f"{folder.relative_to(traces)} ({len(paths)} ranks)"
            yield Source(name=name, make=partial(_joined, paths))


def _estimated() -> Iterator[Source]:
    """Steps of models that were never run, on a device and on several precisions; and one from an ONNX file."""
    from foretrace.zoo.registry import entries

    for model in [*(each for each in MODELS if each in entries()), *sorted(set(entries()) - set(MODELS))][:6]:
        yield Source(name=f"estimate {model}", make=partial(_zoo, model))
    yield Source(name="estimate onnx", make=_onnx)


def _recorded(path: Path) -> TaskGraph:
    return flow.read(path).graph().graph


def _maimed(path: Path, way: str) -> TaskGraph:
    whole = _recorded(path)
    graph = maimed[way](whole)
    if graph is whole:
        raise ForetraceError("the recording has no device.")
    return graph


def _joined(paths: list[Path]) -> TaskGraph:
    return flow.read(paths).global_graph().graph


def _scenario(path: Path) -> TaskGraph:
    from foretrace.model.readers.sources import load_operators

    return _lowered(load_operators(path))


def _zoo(model: str) -> TaskGraph:
    from foretrace.zoo.operators import operators_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _lowered(operators_of(model, size="small"))


def _onnx() -> TaskGraph:
    """A small network as another tool writes it."""
    try:
        import onnx
    except ImportError:
        raise ForetraceError("the onnx extra is not installed.") from None
    from foretrace.model.readers.onnx import from_onnx

    make, numbers = onnx.helper.make_node, onnx.helper.make_tensor
    nodes = [make("Conv", ["x", "w"], ["c"]), make("Relu", ["c"], ["r"]), make("Flatten", ["r"], ["f"])]
    nodes.append(make("Gemm", ["f", "v"], ["y"]))
    weights = [numbers(name, 1, dims, bytes(4 * size), raw=True) for name, dims, size in (
        ("w", (16, 3, 3, 3), 432), ("v", (14400, 10), 144000),
    )]  # fmt: skip
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(nodes, "net", [value("x", 1, [8, 3, 32, 32])], [value("y", 1, [8, 10])], weights)
    return _lowered(from_onnx(onnx.helper.make_model(graph).SerializeToString(), "net"))


def _lowered(operators: OperatorGraph) -> TaskGraph:
    from foretrace.model.estimate import estimate_step
    from foretrace.model.target import target

    on = target("h100")
    return estimate_step(operators, device=on.device, costs=on.costs(operators)).lowered.graph


# -- the run ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def _graph(path: str) -> TaskGraph:
    return load(path)


def _build(name: str, path: str) -> str:
    """Make one graph in a worker and keep it as a file; "" or why it cannot be had."""
    source = next(each for each in sources() if each.name == name)
    try:
        save(source.make(), path)
    except ForetraceError as error:
        return str(error)
    return ""


def _cell(work: tuple[str, str, tuple[str, ...]]) -> Row:
    path, name, texts = work
    begin = time.perf_counter()
    try:
        chosen = [parse(text) for text in texts]
    except ForetraceError as error:
        cell = Cell(outcome="wrong", says=f"the setting cannot be parsed: {error}")
    else:
        cell = judge(_graph(path), chosen)
    return Row(recording=name, techniques=texts, cell=cell, seconds=time.perf_counter() - begin)


def _advised(work: tuple[str, str, tuple[str, ...]]) -> Row:
    """The advice about one recording: wrong where a technique failed."""
    path, name, texts = work
    begin = time.perf_counter()
    try:
        found = advise(_graph(path))
        says = "; ".join(f"{each.name}: {each.why}" for each in found.failed)
        shown = [(each.name, each.interval_s) for each in (*found.gains, *found.hidden, found.together) if each]
        before_s = found.before.step_time_s
        after_s = min((each.after_s for each in (*found.gains, found.together) if each), default=before_s)
        cell = Cell(
            outcome="wrong" if says else "sound", says=says, before_s=before_s, after_s=after_s, digest=repr(shown)
        )
    except ForetraceError as error:
        cell = Cell(outcome="refused", says=str(error))
    return Row(recording=name, techniques=texts, cell=cell, seconds=time.perf_counter() - begin)


def cross(
    *, pairs: bool, only: str, technique: str, processes: int, tell: Callable[[str], None]
) -> tuple[list[Row], dict[str, str]]:
    """All cells, and the sources that could not be made with the reason."""
    known = {name: settings(kind) for name, kind in techniques().items() if fnmatch(name, technique)}
    names = [each.name for each in sources() if fnmatch(each.name, only)]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as first,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as second,
    ):
        files = {name: str(Path(folder) / f"{i}.graph") for i, name in enumerate(names)}
        tell(f"making {len(names)} graphs")
        said = dict(zip(names, first.map(_build, names, files.values()), strict=True))

        def judged(cells: Sequence[tuple[str, tuple[str, ...]]], judging: Callable[..., Row] = _cell) -> list[Row]:
            work = [(files[name], name, texts) for name, texts in cells]
            tell(f"{len(work)} cells, each in two processes")
            chunk = max(1, min(29, len(work) // (8 * processes)))
            again = second.map(judging, work, chunksize=chunk)
            rows = []
            for one, other in zip(first.map(judging, work, chunksize=chunk), again, strict=True):
                rows.append(_agreed(one, other))
                if rows[-1].cell.outcome == "wrong":
                    tell(f"wrong: {_place(rows[-1])}: {rows[-1].cell.says}")
                if len(rows) % 500 == 0:
                    tell(f"{len(rows)} of {len(work)}")
            return rows

        rows = judged([(name, (text,)) for name in names if not said[name] for both in known.values() for text in both])
        if technique == "*":
            rows += judged([(name, ("advise",)) for name in names if not said[name]], _advised)
        if pairs:
            sound = Counter(row.recording for row in rows if row.cell.outcome == "sound" and "," not in row.recording)
            chosen = [name for name, _ in sound.most_common(PAIR_RECORDINGS)]
            couples = list(permutations([both[0] for both in known.values()], 2))
            rows += judged([(name, couple) for name in chosen for couple in couples])
    return rows, {name: why for name, why in said.items() if why}


def _agreed(one: Row, other: Row) -> Row:
    """The cell of two processes: wrong where they differ."""
    if one.cell == other.cell:
        return one
    says = f"two processes differ: {one.cell} and {other.cell}"
    return replace(one, cell=Cell(outcome="wrong", says=says))


def _place(row: Row) -> str:
    return f"{row.recording} with {' + '.join(row.techniques)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="*", help="recordings, a glob")
    parser.add_argument("--technique", default="*", help="techniques, a glob")
    parser.add_argument("--processes", type=int, default=max(1, cores() // 2), help="of each of the two runs")
    asked = parser.parse_args()

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    begin = time.perf_counter()
    rows, missing = cross(
        pairs=asked.pairs, only=asked.only, technique=asked.technique, processes=asked.processes, tell=tell
    )
    count = Counter(row.cell.outcome for row in rows)
    wrong = [row for row in rows if row.cell.outcome == "wrong"]
    if asked.json:
        print(json.dumps({"machine": machine(), "date": today(), "cells": [asdict(row) for row in rows],
                          "missing": missing, "count": count}, indent=1))  # fmt: skip
    else:
        report(rows, missing, time.perf_counter() - begin)
    sys.exit(1 if wrong else 0)


def report(rows: list[Row], missing: dict[str, str], seconds: float) -> None:
    """Counts by technique, refusals by reason, and every wrong cell."""
    by: dict[str, Counter[str]] = {}
    for row in rows:
        names = " + ".join(text.split()[0] for text in row.techniques) if len(row.techniques) == 1 else "pairs"
        by.setdefault(names, Counter())[row.cell.outcome] += 1
    ends = ("sound", "refused", "wrong")
    print(table(["technique", *ends], [[name, *(str(counts[end]) for end in ends)] for name, counts in by.items()]))
    reasons = Counter(_reason(row.cell.says) for row in rows if row.cell.outcome == "refused")
    print("\nrefused because:")
    for reason, times in reasons.most_common(40):
        print(f"  {times:5}  {reason[:150]}")
    for name, why in missing.items():
        print(f"\nno graph of {name}: {why}")
    for row in rows:
        if row.cell.odd:
            print(f"\nodd: {_place(row)}: {row.cell.before_s:.4g} s -> {row.cell.after_s:.4g} s")
    for row in rows:
        if row.cell.outcome == "wrong":
            print(f"\nwrong: {_place(row)}: {row.cell.says}")
    slow = max(rows, key=lambda row: row.seconds)
    count = Counter(row.cell.outcome for row in rows)
    print(f"\nthe slowest cell took {slow.seconds:.1f} s: {_place(slow)}")
    print(f"{len({row.recording for row in rows})} recordings, {len(rows)} cells, each in two processes: "
          f"{count['sound']} sound, {count['refused']} refused, {count['wrong']} wrong ({seconds:.0f} s)")  # fmt: skip
    print(f"{machine()}, {today()}")


def _reason(says: str) -> str:
    """The reason without its numbers and quoted names."""
    return re.sub(r"[\d.,]+", "#", re.sub(r"'[^']*'|\"[^\"]*\"", "…", says.split(": ", 1)[-1]))


if __name__ == "__main__":
    main()
