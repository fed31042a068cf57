"""`foretrace network`: what collectives should cost on a machine, and whether they do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.cli.answers import answers, group
from foretrace.cli.options import argument, option

if TYPE_CHECKING:
    from foretrace.report.views import Result

network = group("network", "Expected times of collectives, compared with yours.")


@network.command("check")
@answers
def check(
    measured: Path = argument(..., "MEASURED", "Output of nccl-tests, a table (.csv), or one of ours (.json)."),
    on: str = option(..., "NETWORK", "CLUSTER.yaml, nccl:DEVICE, another table, or a link (25gbit/10us)."),
    workers: int = option(0, "N", "Where the file has several, or does not say.", least=0),
    per_node: int = option(0, "N", "Workers of one machine, in the same cases.", least=0),
    kind: str = option("", "KIND", "all-reduce, ..., in the same cases."),
    system: str = option("", "NAME", "One of several systems in a file."),
) -> Result:
    """Check the bus bandwidth of measured collectives.

    Against what the machine should give, size by size.

    Exit code 1 where they are slower. Example: foretrace network check all_reduce.log --on nccl:H100-SXM5-80GB
    """
    from foretrace.cost.network.collective_files import read
    from foretrace.cost.network.parse import network as parse
    from foretrace.report import network as report

    table = read(measured, workers=workers, per_node=per_node, kind=kind)
    series = table.one(workers=workers, per_node=per_node, kind=kind, system=system)
    return report.check(series, parse(on, series.workers), on=on)
