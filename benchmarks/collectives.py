"""How far models of collectives are off, on tables that were measured on GPUs; sizes and numbers of workers held out.

    python benchmarks/collectives.py --data DIR [--json]             # the tables of a folder like data/network
    python benchmarks/collectives.py --tables FILE... [--fit 2,4,8] [--device V100-SXM2] [--json]

Any file that `foretrace network check` reads can be scored: files of one folder belong together, and their numbers of
workers are what is held out. Settings (windows, wiring) are chosen inside the rows fitted on; the
rows reported on are never seen by a fit. Sizes: fit on every second size, report on the others; and, harder, fit on
16 or 64 sizes at even logarithmic distances. Numbers of workers: fit on 4 and 8, on 2, 4, 8, on 2 to 6, and on all but
one, report on the others. Tables of the same number of the same device are held against each other: by as much as they
differ, none of them can be known better.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from foretrace.cost.network import curves
from foretrace.cost.network.collective_files import read
from foretrace.cost.network.collective_table import CollectiveSeries, CollectiveTable, table_of
from foretrace.cost.network.curves import Fitted, Floats
from foretrace.cost.network.network import Network
from foretrace.cost.network.parse import network
from foretrace.cost.network.tables import of_table
from foretrace.errors import ForetraceError

FEW = (16, 64)
MOST_POINTS = 256  # of a number of workers held out
COUNTS = ((4, 8), (2, 4, 8), (2, 3, 4, 5, 6))
SMALL = 16 * 2**20  # bytes, below which times are mostly latency
# The devices of public tables, by a word in the path: for NCCL's model, which takes nothing from the table.
DEVICES = {"v100": "V100-SXM2", "a100": "A100-SXM4-80GB", "H200": "H200-SXM-141GB", "B200": "B200-SXM"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Mean absolute relative errors of one series or number of workers, fractions; None: not to be had."""

    table: str
    workers: int
    per_node: int
    kind: str
    split: str
    points: int  # reported on
    alpha_beta: float | None
    table_error: float | None
    nccl: float | None
    covered: float | None  # share of the points inside the table's 80 % range
    small: float | None = None  # the table's error below 16 MiB


def size_rows(name: str, series: CollectiveSeries, device: str) -> Iterator[Row]:
    """Sizes held out."""
    sizes, times = np.array(series.nbytes), np.array(series.seconds)
    for split, fitted in splits(sizes):
        held = ~fitted
        plain, found = curves.line(sizes[fitted], times[fitted]), curves.fit_table(sizes[fitted], times[fitted])
        yield Row(
            table=f"{name}{f', {series.system}' if series.system else ''}",
            workers=series.workers,
            per_node=series.per_node,
            kind=str(series.kind),
            split=split,
            points=int(held.sum()),
            alpha_beta=mape(plain.at(sizes[held]), times[held]),
            table_error=mape(found.curve.seconds(sizes[held]), times[held]),
            nccl=nccl_error(series, sizes[held], times[held], device),
            covered=covered(found, sizes[held], times[held]),
        )


def splits(sizes: Floats) -> Iterator[tuple[str, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """Every second size; 16 and 64 at even logarithmic distances where there are many more."""
    yield "every 2nd size", np.arange(len(sizes)) % 2 == 0
    for count in FEW:
        if len(sizes) >= 4 * count:
            near = np.searchsorted(sizes, np.geomspace(sizes[0], sizes[-1], count)).clip(0, len(sizes) - 1)
            few = np.zeros(len(sizes), dtype=bool)
            few[near] = True
            yield f"all but {count}", few


def count_rows(name: str, table: CollectiveTable, counts: Sequence[int], device: str) -> Iterator[Row]:
    """Numbers of workers held out, all on one machine."""
    series = [each for each in table.series if each.nodes == 1]
    fitted = [each for each in series if each.workers in counts]
    if len(fitted) < 2 or len(fitted) == len(series):
        return
    yield from held_rows(name, fitted, [each for each in series if each.workers not in counts], device)


def single_rows(name: str, table: CollectiveTable, device: str) -> Iterator[Row]:
    """Each number of workers held out from all the others, over as many machines."""
    for nodes in sorted({each.nodes for each in table.series}):
        series = [each for each in table.series if each.nodes == nodes]
        for out in series if len(series) > 2 else ():
            yield from held_rows(name, [each for each in series if each is not out], [out], device)


def held_rows(
    name: str, fitted: Sequence[CollectiveSeries], held: Sequence[CollectiveSeries], device: str
) -> Iterator[Row]:
    """Series predicted from those fitted on."""
    most = max(each.workers for each in (*fitted, *held))
    for whole in held:
        per_node = whole.per_node if whole.nodes > 1 else 0
        measured = of_table(table_of(name, fitted), most, per_node=per_node)
        each = thinned(whole)
        sizes, times = np.array(each.nbytes), np.array(each.seconds)
        seconds, low, high = costs(measured, each)
        small = sizes < SMALL
        counts = ", ".join(str(one.workers) for one in fitted)
        yield Row(
            table=name,
            workers=each.workers,
            per_node=each.per_node,
            kind=str(each.kind),
            split=f"fit on {counts}",
            points=len(sizes),
            alpha_beta=None,
            table_error=mape(seconds, times),
            nccl=nccl_error(each, sizes, times, device),
            covered=float(np.mean((low <= times) & (times <= high))),
            small=mape(seconds[small], times[small]) if small.any() else None,
        )


def twins(files: Sequence[Path]) -> Iterator[tuple[str, str, CollectiveSeries, float, float]]:
    """Pairs of tables of the same device, collective and number of workers on one machine.

    Gives both names, the series, the mean relative difference over the sizes that both have, and how many of the
    second's times are inside the 80 % range of the first.
    """
    series = [
        (device_of(str(file), ""), table_name(file), each)
        for file in files
        for each in read(file).series
        if each.nodes == 1
    ]
    for at, (device, name, one) in enumerate(series):
        for other_device, other_name, other in series[at + 1 :]:
            if device and (device, one.kind, one.workers) == (other_device, other.kind, other.workers):
                low, high = max(one.nbytes[0], other.nbytes[0]), min(one.nbytes[-1], other.nbytes[-1])
                sizes = np.array([size for size in thinned(other).nbytes if low <= size <= high])
                if len(sizes):
                    times = np.interp(sizes, other.nbytes, other.seconds)
                    first = of_table(table_of(name, [one]), one.workers)
                    found = [first.cost(one.kind, size) for size in sizes]
                    inside = np.mean([x.low_s <= t <= x.high_s for x, t in zip(found, times, strict=True)])
                    yield name, other_name, one, mape(np.array([x.seconds for x in found]), times), float(inside)


def table_name(file: Path) -> str:
    """The folder for tables with one number of workers per file."""
    return file.parent.name if file.name.startswith("AR_GPU") else file.name.split(".")[0]


def thinned(series: CollectiveSeries) -> CollectiveSeries:
    """At most so many of its sizes, evenly chosen."""
    step = -(-len(series.nbytes) // MOST_POINTS)
    return replace(series, nbytes=series.nbytes[::step], seconds=series.seconds[::step], spread=())


def costs(of: Network, series: CollectiveSeries) -> tuple[Floats, Floats, Floats]:
    """Time, low and high of every size."""
    found = [of.cost(series.kind, size, workers=series.workers) for size in series.nbytes]
    return (
        np.array([each.seconds for each in found]),
        np.array([each.low_s for each in found]),
        np.array([each.high_s for each in found]),
    )


def mape(predicted: Floats, measured: Floats) -> float:
    return float(np.mean(np.abs(predicted / measured - 1)))


def covered(fitted: Fitted, sizes: Floats, times: Floats) -> float:
    predicted = fitted.curve.seconds(sizes)
    factors = np.array([fitted.factors(size) for size in sizes])
    return float(np.mean((predicted * factors[:, 0] <= times) & (times <= predicted * factors[:, 1])))


def nccl_error(series: CollectiveSeries, sizes: Floats, times: Floats, device: str) -> float | None:
    """Error of NCCL's own model on one machine; it knows nothing of the network between machines."""
    if not device or series.nodes > 1 or series.kind == "send":
        return None
    try:
        model = network(f"nccl:{device},per-node={series.workers}", series.workers)
    except ForetraceError:
        return None  # a device whose constants NCCL does not have
    return mape(np.array([model.cost(series.kind, size).seconds for size in sizes]), times)


def device_of(path: str, given: str) -> str:
    return given or next((device for word, device in DEVICES.items() if word in path), "")


def score(files: Sequence[Path], counts: Sequence[Sequence[int]], device: str) -> list[Row]:
    """Rows of all files; those of one folder are one table if each holds a single series."""
    folders: dict[Path, list[tuple[Path, CollectiveTable]]] = {}
    for file in files:
        folders.setdefault(file.parent, []).append((file, read(file)))
    rows: list[Row] = []
    for folder, found in folders.items():
        single = len(found) > 1 and all(len(table.series) == 1 for _, table in found)
        groups = (
            [(folder.name, table_of(folder.name, [table.series[0] for _, table in found]))]
            if single
            else [(file.name.split(".")[0], table) for file, table in found]
        )
        for name, table in groups:
            for series in table.series:
                which = device_of(series.system or name, device)
                rows += size_rows(name, series, which)
            if len(table.systems()) == 1:
                for each in counts:
                    rows += count_rows(name, table, each, device_of(name, device))
                rows += single_rows(name, table, device_of(name, device))
    return list(dict.fromkeys(rows))  # a number may be left out in two ways


def tables_in(data: Path) -> list[Path]:
    """Tables of collectives in a folder; a file without sizes is none."""
    found = [path for path in sorted(data.glob("*/*")) if path.name.endswith((".csv", ".csv.gz"))]
    return [path for path in found if path.name != "nvls_ramp.csv"]  # one size only


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def section(data: Path) -> str:
    """The page docs/accuracy/collectives.md."""
    rows = score(tables_in(data), COUNTS, "")
    sizes: dict[tuple[str, int, int, str], dict[str, Row]] = {}
    for row in rows:
        if not row.split.startswith("fit on"):
            sizes.setdefault((row.table, row.workers, row.per_node, row.kind), {})[row.split] = row
    names = list(dict.fromkeys(row.split for row in rows if not row.split.startswith("fit on")))
    lines = []
    for (table, workers, per_node, kind), found in sizes.items():
        line = [table, kind, f"{workers}/{per_node}"]
        for name in names:
            each = found.get(name)
            line.append(_both(each) if each else "–")
        first = found[names[0]]
        lines.append([*line, percent(first.nccl), percent(first.covered)])
    held = [
        [row.table, row.split, f"{row.workers}/{row.per_node}", percent(row.table_error),
         percent(row.small), percent(row.nccl), percent(row.covered)]
        for row in rows if row.split.startswith("fit on")
    ]  # fmt: skip
    from tables import table as markdown

    return (
        "Mean absolute errors in %, on tables that others measured with NCCL. *Sizes*: a curve is fitted on some sizes "
        "and held against the others; the two figures are one alpha-beta line / table. "
        "Width of the median and kind of interpolation are chosen inside the sizes fitted on. Up to eight "
        "alpha-beta pieces were built, too, and are gone: as good as the table at best. With 16 sizes nobody can "
        "see where a library changes its algorithm (4/2 and 16/8 jump by a factor of two within a few per cent of "
        "size). *NCCL* is its own tuning model, which takes nothing from the table. *In range*: share of the held-out "
        "points inside the 80 % interval of the table fitted on every second size. `python benchmarks/collectives.py "
        "--tables FILE...` scores other files.\n\n"
        + markdown(("table", "kind", "workers / per machine", *names, "NCCL", "in range"), lines)
        + "\n\n## Numbers of workers that were not fitted\n\n"
        "Every size of the number held out (at most 256 of them) is predicted from the numbers named, over as many "
        "machines. *Small*: the table's error below 16 MiB. On the V100 the wiring is not given: the bus bandwidths"
        " of the fitted numbers are explained by the rings of a hybrid cube mesh, which then give those of the "
        "others. Five of its devices form a ring only through a peer, which costs more than the model has; they are"
        " no source for others either. How strongly the power of latency is pooled, and that forwarded rings are no"
        " source, was chosen "
        "by leaving one number out of these tables; the form was published with them in view.\n\n"
        + markdown(("table", "fitted", "workers / per machine", "table", "small", "NCCL", "in the 80 % range"), held)
        + "\n\n## Tables of the same number on the same device\n\n"
        "The first table taken for the second: what machines and versions differ by, which nobody can predict from one "
        "of them. Rows of one file that give a size twice widen the range by what they differ.\n\n"
        + as_twins(tables_in(data))
    )


def as_twins(files: Sequence[Path]) -> str:
    """Markdown of `twins`."""
    from tables import table as markdown

    lines = [[one, other, f"{each.kind}, {each.workers}", percent(off), percent(inside)]
             for one, other, each, off, inside in twins(files)]  # fmt: skip
    return markdown(("one", "other", "collective, workers", "differ by", "in the range of the first"), lines)


def _both(row: Row) -> str:
    return f"{percent(row.alpha_beta)} / {percent(row.table_error)}"


HEADER = (
    "table", "workers / per machine", "kind", "held out", "points", "alpha-beta", "table", "below 16 MiB",
    "NCCL's model", "in the 80 % range",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    return [
        row.table, f"{row.workers}/{row.per_node}", row.kind, row.split, str(row.points), percent(row.alpha_beta),
        percent(row.table_error), percent(row.small), percent(row.nccl), percent(row.covered),
    ]  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of tables")
    parser.add_argument("--tables", type=Path, nargs="+", default=[], metavar="FILE", help="these tables instead")
    parser.add_argument("--fit", default="", metavar="N,N,...", help="numbers of workers to fit on")
    parser.add_argument("--device", default="", help="for NCCL's model; else by the name of the file")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        files = given.tables or (tables_in(given.data) if given.data else [])
        if not files:
            raise ForetraceError("there is no table; give --data DIR or --tables FILE.")
        counts = [tuple(int(each) for each in given.fit.split(","))] if given.fit else COUNTS
        rows = score(files, counts, given.device)
    except (ForetraceError, ValueError) as error:
        print(f"collectives: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
        return 0
    from tables import table

    print(table(HEADER, [cells(row) for row in rows]))
    if any(twins(files)):
        print("\nTables of the same number on the same device:\n\n" + as_twins(files))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
