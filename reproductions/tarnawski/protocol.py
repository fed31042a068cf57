"""The published workloads of Tarnawski et al. (NeurIPS 2020): optima, seconds and bounds, written to README.md.

    python -m reproductions tarnawski [--shared-data PATH] [--work S] [--print] [throughput] [any-sets] [latency]

Every throughput workload is placed exactly, and once more without contiguity; every latency workload as well as
`--work` allows, which is the solver's own measure: other work on the machine changes no answer. Seconds are CPU time of
all processes, compilation of the loops left out.
"""

from __future__ import annotations

import csv
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from foretrace.errors import ForetraceError
from foretrace.plan.placement.place import Placement, place
from foretrace.plan.placement.problem import PlacementProblem, load
from reproductions import parser_of, shared_data
from tables import load as load_averages
from tables import machine, percent, table, today, update

PAGE = Path(__file__).with_name("README.md")
TITLES = {
    "throughput": "Throughput, contiguous", "any-sets": "Throughput, any sets of operators", "latency": "Latency",
}  # fmt: skip


def workloads(folder: Path, kind: str) -> Iterator[tuple[str, PlacementProblem]]:
    """Names and problems of one kind, throughput or latency."""
    for path in sorted((folder / f"{kind}-inputs").glob("*/*.json*")):
        yield f"{path.parent.name}/{path.name.partition('.')[0]}", load(path)


def rows_of(path: Path, column: str) -> dict[str, float]:
    """One column of a table of known answers, by workload."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["workload"]: float(row[column]) for row in csv.DictReader(file)}


def _cpu(problem: PlacementProblem, **how: object) -> tuple[Placement, float]:
    begun = _spent_s()
    found = place(problem, **how)  # type: ignore[arg-type]
    return found, _spent_s() - begun


def _spent_s() -> float:
    """CPU time of this process and of those that it waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


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


def any_sets(folder: Path, work: float) -> str:
    """The table of placements that need not be contiguous."""
    rows = []
    for name, problem in workloads(folder, "throughput"):
        if len(problem) > 450:
            continue
        before = place(problem).objective_value
        found, seconds = _cpu(problem, contiguous=False, work=work)
        rows.append((name, f"{before:.6g}", f"{found.objective_value:.6g}", "yes" if found.proven else "no",
                     f"{percent(found.gap)} %", f"{seconds:.0f}"))  # fmt: skip
    return table(("workload", "contiguous", "any sets", "proven", "gap", "CPU s"), rows)


def latency(folder: Path, work: float) -> str:
    """The table of latencies beside the published greedy placement."""
    greedy = rows_of(folder / "known_latency.csv", "greedy_total_latency")
    rows = []
    for name, problem in workloads(folder, "latency"):
        found, seconds = _cpu(problem, objective="latency", work=work)
        rows.append((name, f"{greedy[name]:.6g}", f"{found.objective_value:.6g}",
                     f"{percent(found.objective_value / greedy[name] - 1, signed=True)} %",
                     f"{found.bound:.6g}", f"{percent(found.gap)} %", f"{seconds:.0f}"))  # fmt: skip
    return table(("workload", "greedy", "found", "against greedy", "bound", "gap", "CPU s"), rows)


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("tarnawski", __doc__)
    default = shared_data()
    parser.add_argument("--shared-data", type=Path, default=default)
    parser.add_argument("--work", type=float, default=20.0, help="of every integer program, in the solver's seconds")
    parser.add_argument("--print", action="store_true", help="print instead of writing README.md")
    parser.add_argument("sections", nargs="*", help=f"{', '.join(TITLES)}; by default all")
    given = parser.parse_args(arguments)
    if unknown := set(given.sections) - TITLES.keys():
        parser.error(f"there is no section {' or '.join(sorted(unknown))}; choose {', '.join(TITLES)}")
    folder = given.shared_data / "placement" / "dnn-partitioning"
    if not folder.is_dir():
        raise ForetraceError(f"{folder} must hold the published workloads; name their folder with --shared-data.")
    place(next(workloads(folder, "throughput"))[1])  # compiles the loops
    tables = {
        "throughput": lambda: throughput(folder),
        "any-sets": lambda: (
            f"CP-SAT from the contiguous placement, {given.work:g} s each as it counts its own work.\n\n"
            f"{any_sets(folder, given.work)}"
        ),
        "latency": lambda: (
            f"The better of dynamic programming and CP-SAT, {given.work:g} s each as it counts its own work; the "
            f"better bound of both.\n\n{latency(folder, given.work)}"
        ),
    }
    sections = {}
    for name in given.sections or TITLES:
        when = f"*{today()}, {machine()}; load averages {load_averages()}.*"
        sections[TITLES[name]] = f"{when}\n\n{tables[name]()}"
        if given.print:
            print(f"## {TITLES[name]}\n\n{sections[TITLES[name]]}\n")
        else:
            head = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
            update(PAGE, head, {TITLES[name]: sections[TITLES[name]]}, list(TITLES.values()))
    return 0
