"""Utilisation over NAS-Bench-201, whose latencies were measured by others.

    python -m reproductions nas_bench_201 --archs nasbench201_arch.csv.gz --latencies nasbench201_latency.csv.gz

Without files those of the shared data are taken, where they are. `--measure` is how many networks a search may measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from foretrace.cli.options import progress
from foretrace.report.units import digits, share
from reproductions import parser_of
from reproductions.nas_bench_201.study import Study, study
from reproductions.nas_bench_201.tables import SPACE, read_networks
from tables import shared_traces


def main(given: Sequence[str]) -> int:
    parser = parser_of("nas_bench_201", __doc__)
    parser.add_argument("--archs", type=Path, help="the networks, CSV")
    parser.add_argument("--latencies", type=Path, help="their latencies by device and batch, CSV, ms")
    parser.add_argument("--measure", type=int, default=100, help="networks that a search may measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    traces = shared_traces()
    if traces is not None and options.archs is None and options.latencies is None:
        folder = traces.parent / "nas-latency"
        options.archs, options.latencies = folder / "nasbench201_arch.csv.gz", folder / "nasbench201_latency.csv.gz"
    networks = read_networks(options.archs, options.latencies)
    with progress("searching") as tell:
        found = study(networks, measured=options.measure, progress=tell)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print("\n".join(lines(found, space=SPACE)))
    return 0


def lines(found: Study, *, space: str) -> Iterator[str]:
    """Text for people."""
    large = max(found.columns, key=lambda each: each.batch)
    first = next((each for each in found.columns if each.batch == 1), large)
    lost = {each.strategy: each.regret for each in large.searches}
    shown = [large] if first is large else [large, first]
    used = " and ".join(
        f"{share(each.utilisation[0])} – {share(each.utilisation[2])} on {each.peaks.name} at batch {each.batch}"
        for each in shown
    )
    yield (
        f"Over {found.networks:,} networks of {space}, utilisation is {used}; with {found.measured} measurements, a "
        f"search guided by it loses {share(lost['utilisation'])} of the best network's FLOPs within the same latency, "
        f"one guided by FLOPs {share(lost['FLOPs'])}, a random one {share(lost['random'])}."
    )
    yield ""
    yield from _columns(found)
    for note in found.inferred:
        yield f"  note: {note}"


def _columns(found: Study) -> Iterator[str]:
    header = (
        *("", "utilisation %", "same FLOPs", "rank correlation of utilisation", "", "", "of FLOPs"),
        *("lost by a search, %", "", ""),
    )
    below = (
        "",
        "p10 – median – p90",
        "p90 / p10",
        "latency",
        "FLOPs",
        "FLOPs/B",
        "latency",
        "random",
        "FLOPs",
        "utilisation",
    )
    rows: list[tuple[str, ...]] = [header, below]
    for each in found.columns:
        lost = {search.strategy: f"{100 * search.regret:.1f}" for search in each.searches}
        figures = (each.with_latency, each.with_flops, each.with_intensity, each.flops_with_latency)
        rows.append((
            each.name,
            " – ".join(digits(100 * value) for value in each.utilisation),
            f"{each.spread:.2f}",
            *(f"{value:.2f}" for value in figures),
            lost["random"], lost["FLOPs"], lost["utilisation"],
        ))  # fmt: skip
    yield from _table(rows)
    yield ""
    yield "  rank correlation of latency between columns"
    names = list(found.between)
    yield from _table([("", *names), *((a, *(f"{found.between[a][b]:.2f}" for b in names)) for a in names)])


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with columns aligned; a header wider than its column runs over the empty ones behind it."""
    body = [row for row in rows if all(row[1:])] or list(rows)
    widths = [max(len(row[i]) for row in body) for i in range(len(rows[0]))]
    for row in rows:
        text = "  " + row[0].ljust(widths[0])
        for i, cell in enumerate(row[1:], start=1):
            start = 2 + widths[0] + sum(width + 2 for width in widths[1:i])
            if cell:
                text = text.ljust(start) + "  " + (cell.rjust(widths[i]) if all(row[1:]) and i > 0 else cell)
        yield text.rstrip()
    yield ""
