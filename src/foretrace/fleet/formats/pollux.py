"""Workloads of the Pollux and Sia simulators (Qiao et al., OSDI 2021; Jayaram Subramanya et al., SOSP 2023)."""

from __future__ import annotations

import math

from foretrace.fleet.formats.jobs import (
    Row,
    above_zero,
    collect,
    cut,
    gpus_of,
    name_of,
    not_below_zero,
    placed,
    table_notes,
    with_columns,
)  # fmt: skip
from foretrace.fleet.formats.source import Source, table
from foretrace.fleet.workload import Workload

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


def matches(source: Source) -> bool:
    """Its header names the columns."""
    return set(COLUMNS) <= set(source.header)


def read(source: Source, *, salvage: bool = False, ties: str = "file") -> Workload:
    """The file says how much is to be trained only by the name of the application, so `work_s` is nan."""
    taken = table(source)
    at = with_columns(source, taken, COLUMNS)
    width = len(taken.header)

    def job(cells: list[str] | None) -> Row:
        cells = cut(cells, width)
        return {
            "job": name_of(cells[at["name"]], "name"),
            "submit": not_below_zero(cells[at["time"]], "time"),
            "gpus": gpus_of(cells[at["num_replicas"]], "num_replicas"),
            "work_s": math.nan,
            "model": name_of(cells[at["application"]], "application"),
            "batch": above_zero(cells[at["batch_size"]], "batch_size"),
        }

    return collect(
        source, "pollux", placed(taken.rows), job, salvage=salvage, ties=ties,
        notes=lambda: table_notes(taken, COLUMNS),
    )  # fmt: skip
