"""Workloads of the Pollux and Sia simulators (Qiao et al., OSDI 2021; Jayaram Subramanya et al., SOSP 2023)."""

from __future__ import annotations

import math

from foretrace.fleet.formats.jobs import Row, above_zero, collect_table, gpus_of, name_of, not_below_zero
from foretrace.fleet.formats.source import Source
from foretrace.fleet.workload import Workload

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


def matches(source: Source) -> bool:
    """Return whether its header names the columns."""
    return set(COLUMNS) <= set(source.header)


def read(source: Source, *, salvage: bool = False, ties: str = "file") -> Workload:
    """Return the file says how much is to be trained only by the name of the application, so `work_s` is nan."""

    def job(cells: dict[str, str]) -> Row:
        return {
            "job": name_of(cells["name"], "name"),
            "submit": not_below_zero(cells["time"], "time"),
            "gpus": gpus_of(cells["num_replicas"], "num_replicas"),
            "work_s": math.nan,
            "model": name_of(cells["application"], "application"),
            "batch": above_zero(cells["batch_size"], "batch_size"),
        }

    return collect_table(source, "pollux", job, COLUMNS, salvage=salvage, ties=ties)
