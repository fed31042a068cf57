"""`foretrace network`: what collectives should cost on a machine, and whether they do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli.answers import answers
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.cost.network.collective_table import CollectiveSeries, CollectiveTable
    from foretrace.report.views import Result

network = typer.Typer(
    name="network",
    help="Expected times of collectives, compared with yours.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@network.command("check")
@answers
def check(
    measured: Annotated[
        Path, typer.Argument(metavar="MEASURED", help="Output of nccl-tests, a table (.csv), or one of ours (.json).")
    ],
    on: Annotated[
        str,
        typer.Option(
            "--on", metavar="NETWORK", help="CLUSTER.yaml, nccl:DEVICE, another table, or a link (25gbit/10us)."
        ),
    ],
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=0, help="Where the file has several, or does not say.")
    ] = 0,
    per_node: Annotated[
        int, typer.Option("--per-node", metavar="N", min=0, help="Workers of one machine, in the same cases.")
    ] = 0,
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help="all-reduce, ..., in the same cases.")] = "",
    system: Annotated[str, typer.Option("--system", metavar="NAME", help="One of several systems in a file.")] = "",
) -> Result:
    """Is my bus bandwidth right? Measured collectives against what the machine should give, size by size.

    Exit code 1 where they are slower. Example: foretrace network check all_reduce.log --on nccl:H100-SXM5-80GB
    """
    from foretrace.cost.network.collective_files import read
    from foretrace.cost.network.parse import network as parse
    from foretrace.report import network as report

    table = read(measured, workers=workers, per_node=per_node, kind=kind)
    series = _chosen(table, workers, per_node, kind, system)
    expected = parse(on, series.workers)
    return report.check(series, expected, on=on, source=str(measured))


def _chosen(table: CollectiveTable, workers: int, per_node: int, kind: str, system: str) -> CollectiveSeries:
    """The one series that is meant. Raises ForetraceError that lists what there is."""
    found = [
        each
        for each in table.series
        if workers in (0, each.workers)
        and per_node in (0, each.per_node)
        and kind.replace("_", "-") in ("", each.kind)
        and system in ("", each.system)
    ]
    if len(found) == 1:
        return found[0]
    titles = [f"{each.title}{f' on {each.system}' if each.system else ''}" for each in found or table.series]
    which = "holds several series" if found else "holds nothing of that"
    raise ForetraceError(
        f"{table.name} {which}; choose by --workers, --per-node, --kind or --system from: {'; '.join(titles)}."
    )
