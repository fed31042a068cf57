"""What collectives take on the rig's link, measured on that link before anything is predicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from foretrace import executor
from foretrace.cost.network.collective_table import CollectiveTable, decode
from foretrace.cost.network.network import CollectiveKind
from foretrace.errors import ForetraceError
from foretrace.experiment.collectives import time_collectives
from foretrace.experiment.links import netns
from foretrace.experiment.links.hosts import TimeHosts, of_all, time_hosts
from foretrace.experiment.messages import Collectives
from foretrace.experiment.processes import Workers
from foretrace.hardware.cluster import Link, parse_link

REPETITIONS = 15
WANTED_SPREAD = 0.02  # quartile distance over time of a size, beyond which it is measured again, three times in all
MOST_SPREAD = 0.10  # beyond which a calibration is refused
LEAST_S = 0.01  # on the link; shorter messages take what the scheduler decides; how they vary is no reason to refuse
# Dense where the token bucket (32 to 256 KiB) runs empty and times bend: between few points nothing is certain there.
SIZES = (
    *(kilobytes << 10 for kilobytes in (1, 4, 16, 24, 32, 48, 64, 96)),
    *(1 << power for power in range(17, 25)),  # 128 KiB to 16 MiB
)
_LONGEST_S = 0.36  # of one collective; larger sizes follow from the smaller ones
_SLOWEST = 0.5  # of the stated rate that a link is expected to reach at least, for how long to wait


@dataclass(frozen=True, kw_only=True)
class LinkCalibration:
    """A measured link."""

    table: CollectiveTable
    file: Path
    spread: float  # the largest of sizes that take the link LEAST_S
    stated_mbit_s: float
    mbit_s: float  # bus bandwidth of the largest all-reduce: what the link carries of payload, each way


def calibrate(
    workers: Workers,
    link: Link,
    file: Path,
    *,
    name: str,
    kinds: Sequence[CollectiveKind] = (CollectiveKind.ALL_REDUCE,),
    hosts: bool = True,
) -> LinkCalibration:
    """Measure collectives on a rig that is up, and what its `hosts` take beside them; write the table to `file`.

    Raises ForetraceError where a size keeps varying by more than MOST_SPREAD.
    """
    sizes = tuple(size for size in SIZES if size / link.bytes_per_s <= _LONGEST_S) or SIZES[:3]
    longest = 4 * REPETITIONS * len(kinds) * sum(2 * size / (_SLOWEST * link.bytes_per_s) for size in sizes)
    request = Collectives(
        kinds=tuple(kinds),
        sizes=sizes,
        repetitions=REPETITIONS,
        wanted_spread=WANTED_SPREAD,
        name=name,
        table=str(file),
    )
    workers.ask(time_collectives, request, "calibrating the link", seconds=longest)
    table = decode(file.read_bytes(), str(file))
    if hosts:
        found = workers.ask(time_hosts, TimeHosts(bytes_per_s=link.bytes_per_s), "timing the hosts beside the link")
        table = msgspec.structs.replace(table, hosts=of_all(found))
        table.save(file)
    worst, what = _worst(table, LEAST_S * link.bytes_per_s)
    if worst > MOST_SPREAD:
        raise ForetraceError(
            f"the link varies too much to predict anything for it: {what} spread by {100 * worst:.0f} % over "
            f"{REPETITIONS} repetitions, three times over (limit {100 * MOST_SPREAD:.0f} %); stop what else is running."
        )
    carried = _bus_mbit_s(table, len(workers))
    return LinkCalibration(table=table, file=file, spread=worst, stated_mbit_s=1e3 * link.gbit_s, mbit_s=carried)


def alone(workers: int, link: str, file: Path | None = None) -> LinkCalibration:
    """Make a rig only to measure its link (written as in "300mbit"), and remove it again; the table stays in `file`.

    Raises ForetraceError where the machine cannot have one, or the link varies too much.
    """
    parsed = parse_link(link)
    with (
        TemporaryDirectory(prefix="foretrace-rig-") as folder,
        netns.made(workers, parsed) as net,
        netns.running(net) as started,
    ):
        return calibrate(
            started, parsed, file or Path(folder) / "network.json", name=title(workers, link),
            hosts=workers <= executor.cores(),
        )  # fmt: skip


def title(workers: int, link: str) -> str:
    """Return what a measured link is called."""
    return f"gloo, {workers} workers, {link}"


def _worst(table: CollectiveTable, least_bytes: float) -> tuple[float, str]:
    """Return the largest spread of a size that matters, and which one it is."""
    found = [
        (spread, f"{each.kind} of {nbytes / 2**20:g} MiB")
        for each in table.series
        for nbytes, spread in zip(each.nbytes, each.spread, strict=False)
        if nbytes >= least_bytes or nbytes == each.nbytes[-1]
    ]
    return max(found, default=(0.0, ""))


def _bus_mbit_s(table: CollectiveTable, workers: int) -> float:
    """Return payload that crosses the slowest link per second in the largest all-reduce; 0 where none was measured."""
    for each in table.of(CollectiveKind.ALL_REDUCE):
        return 8e-6 * each.nbytes[-1] * 2 * (workers - 1) / workers / each.seconds[-1]
    return 0.0
