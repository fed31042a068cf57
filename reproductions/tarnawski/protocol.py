"""The published workloads of Tarnawski et al. (NeurIPS 2020): optima, seconds and bounds, written to README.md.

    python -m reproductions tarnawski [--shared-data PATH] [--seconds S] [--print]

Every throughput workload is placed exactly, and once more without contiguity; every latency workload as well as
`--seconds` allow. Seconds are CPU time of this process, compilation of the loops left out.
"""

from __future__ import annotations

import csv
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from foretrace.errors import ForetraceError
from foretrace.plan.placement.place import Placement, place
from foretrace.plan.placement.problem import PlacementProblem, load
from reproductions import parser_of, shared_data
from reproductions.systems import put
from tables import load as load_averages
from tables import machine, percent, table, today

HERE = Path(__file__).parent
HEAD = """# Placement: published workloads

Tarnawski et al. place the operators of a model on accelerators and CPUs so that the largest load (throughput)
or the time of one sample (latency) is least. `foretrace plan place` solves the same problem after the same
preprocessing; their 16 throughput and 8 latency workloads follow, with what is known of them.
Written by `make reproduce NAME=tarnawski`.
"""


def workloads(folder: Path, kind: str) -> Iterator[tuple[str, PlacementProblem]]:
    """Names and problems of one kind, throughput or latency."""
    for path in sorted((folder / f"{kind}-inputs").glob("*/*.json*")):
        yield f"{path.parent.name}/{path.name.partition('.')[0]}", load(path)


def rows_of(path: Path, column: str) -> dict[str, float]:
    """One column of a table of known answers, by workload."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["workload"]: float(row[column]) for row in csv.DictReader(file)}


def _cpu(problem: PlacementProblem, **how: object) -> tuple[Placement, float]:
    begun = time.process_time()
    found = place(problem, **how)  # type: ignore[arg-type]
    return found, time.process_time() - begun


def throughput(folder: Path) -> str:
    """The table of exact placements."""
    known = rows_of(folder / "known_optima.csv", "optimal_max_load")
    rows = []
    for name, problem in workloads(folder, "throughput"):
        found, seconds = _cpu(problem)
        there = f"{found.objective_value / known[name] - 1:+.0e}" if name in known else "not published"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        ideals = found.method.rpartition("over ")[2].removesuffix(" ideals")
        proven = "yes" if found.proven else "no"
        rows.append((name, f"{len(problem):,}", ideals, f"{found.objective_value:.10g}", proven, there,
                     f"{seconds:.2f}", f"{memory:.0f}"))  # fmt: skip
    header = (
        "workload",
        "operators",
        "ideals",
        "largest load",
        "proven",
        "off the known one",
        "CPU s",
        "peak MB so far",
    )
    return table(header, rows)


def any_sets(folder: Path, seconds: float) -> str:
    """The table of placements that need not be contiguous."""
    rows = []
    for name, problem in workloads(folder, "throughput"):
        if len(problem) > 450:
            continue
        before = place(problem).objective_value
        found = place(problem, contiguous=False, seconds=seconds)
        rows.append((name, f"{before:.6g}", f"{found.objective_value:.6g}", "yes" if found.proven else "no",
                     f"{percent(found.gap)} %", f"{found.seconds:.1f}"))  # fmt: skip
    return table(("workload", "contiguous", "any sets", "proven", "gap", "wall s"), rows)


def latency(folder: Path, seconds: float) -> str:
    """The table of latencies beside the published greedy placement."""
    greedy = rows_of(folder / "known_latency.csv", "greedy_total_latency")
    rows = []
    for name, problem in workloads(folder, "latency"):
        found = place(problem, objective="latency", seconds=seconds)
        rows.append((name, f"{greedy[name]:.6g}", f"{found.objective_value:.6g}",
                     f"{percent(found.objective_value / greedy[name] - 1, signed=True)} %",
                     f"{found.bound:.6g}", f"{percent(found.gap)} %", f"{found.seconds:.1f}"))  # fmt: skip
    return table(("workload", "greedy", "found", "against greedy", "bound", "gap", "wall s"), rows)


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("tarnawski", __doc__)
    default = shared_data()
    parser.add_argument("--shared-data", type=Path, default=default)
    parser.add_argument("--seconds", type=float, default=60.0, help="of every integer program")
    parser.add_argument("--print", action="store_true", help="print instead of writing README.md")
    given = parser.parse_args(arguments)
    folder = given.shared_data / "placement" / "dnn-partitioning"
    if not folder.is_dir():
        raise ForetraceError(f"{folder} must hold the published workloads; name their folder with --shared-data.")
    place(next(workloads(folder, "throughput"))[1])  # compiles the loops
    page = "\n".join([
        HEAD, f"*{today()}, {machine()}; load averages {load_averages()}.*\n",
        "## Throughput, contiguous\n", throughput(folder), "",
        f"## Throughput, any sets of operators\n\nCP-SAT from the contiguous placement, {given.seconds:g} s each.\n",
        any_sets(folder, given.seconds), "",
        f"## Latency\n\nThe better of dynamic programming and CP-SAT, {given.seconds:g} s each; the bound of "
        "dynamic programming or of CP-SAT.\n",
        latency(folder, given.seconds), "",
    ])  # fmt: skip
    if given.print:
        print(page)
    else:
        put(HERE / "README.md", page)
    return 0
