"""Standard Workload Format 2.2 of the Parallel Workloads Archive: 18 numbers a line, comments after a semicolon.

1 job, 2 submit, 3 wait, 4 run time, 5 processors given, 6 CPU time, 7 memory, 8 processors asked, 9 time asked,
10 memory asked, 11 status, 12 user, 13 group, 14 program, 15 queue, 16 partition, 17 preceding job, 18 think time; −1
says that a number is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from foretrace.errors import ForetraceError
from foretrace.fleet.formats.jobs import MOST_GPUS, Aside, Bad, LogRows, Row, number
from foretrace.fleet.formats.source import Source

_NUMBERS = re.compile(r"\s*(-?[0-9.]+(e[+-]?[0-9]+)?\s+){17}-?[0-9.]+\s*", re.IGNORECASE)
_EPOCH = re.compile(r"^;\s*UnixStartTime:\s*(\d{1,10})\b", re.MULTILINE)
STATUS = {-1: "", 0: "failed", 1: "completed", 5: "cancelled"}


def matches(source: Source) -> bool:
    """Return whether the first line that is no comment has 18 numbers."""
    first = next((line for line in source.lines if line.strip() and not line.lstrip().startswith(";")), "")
    return bool(_NUMBERS.fullmatch(first))


def rows(source: Source, *, processors_per_gpu: int = 1) -> LogRows:
    """Read jobs; a processor of SWF is taken for a GPU, or so many of them for one, rounded up.

    Lines of parts of a job (status 2 to 4) and jobs that did not run are set aside. `status` is kept in details.
    """
    if processors_per_gpu < 1:
        raise ForetraceError(f"a GPU stands for one processor or more, not for {processors_per_gpu}.")

    def lines() -> Iterator[tuple[str, list[str]]]:
        for at, line in enumerate(source.lines, 1):
            if line.strip() and not line.lstrip().startswith(";"):
                yield f"line {at}", line.split()

    def job(cells: list[str]) -> Row:
        if len(cells) != 18:
            raise Bad(f"it has {len(cells)} numbers where 18 belong")
        value = [number(cell, f"field {at}") for at, cell in enumerate(cells, 1)]
        if value[10] in (2, 3, 4):
            raise Aside("parts of jobs that were stopped and resumed")
        if value[10] not in STATUS:
            raise Bad(f"status is {cells[10][:40]!r}, not from -1 to 5")
        if value[1] < 0:
            raise Bad("submit time is below zero")
        processors = value[7] if value[7] > 0 else value[4]
        if value[3] <= 0 or processors <= 0:
            raise Aside("jobs that did not run, or on no processor")
        gpus = math.ceil(processors / processors_per_gpu)
        if gpus > MOST_GPUS or processors != int(processors):
            raise Bad(f"processors are {processors:g}, not a whole number that a cluster has")
        waited = value[2] >= 0
        return {
            "job": cells[0],
            "submit": value[1],
            "start": value[1] + value[2] if waited else None,
            "end": value[1] + value[2] + value[3] if waited else None,
            "gpus": gpus,
            "work_s": value[3],
            "estimate_s": value[8] if value[8] > 0 else math.nan,
            "user": "" if value[11] < 0 else cells[11],
            "tenant": "" if value[14] < 0 else cells[14],
            "model": "" if value[13] < 0 else cells[13],
            "status": STATUS[int(value[10])],
        }

    epoch = _EPOCH.search(source.text)
    return LogRows(
        rows=lines(), parse=job, details={"status": ""}, epoch_s=float(epoch[1]) if epoch else 0.0,
        notes=lambda: [f"{processors_per_gpu} of its processors are one GPU here"],
    )  # fmt: skip
