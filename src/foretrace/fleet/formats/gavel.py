"""Job lists of Gavel (Narayanan et al., OSDI 2020): two widths of tab-separated lines, and generated jobs as CSV.

10 columns: job type, command, directory, steps flag, needs data, total steps, scale factor, priority weight, SLO,
arrival in seconds. 7 columns: job type, command, steps flag, needs data, total steps, arrival, scale factor.
CSV: job_id, arrival_s, job_type, total_steps, scale_factor, and allox_jct_s where it is known.
"""

from __future__ import annotations

import math

from foretrace.fleet.formats.jobs import (
    Bad,
    Row,
    above_zero,
    batch_in,
    collect,
    collect_table,
    cut,
    gpus_of,
    name_of,
    not_below_zero,
    number,
    optional,
    placed,
    table_notes,
)  # fmt: skip
from foretrace.fleet.formats.source import Source, table
from foretrace.fleet.workload import Workload

CSV_COLUMNS = ("job_id", "arrival_s", "job_type", "total_steps", "scale_factor")
WIDE = {"steps": 5, "scale": 6, "priority": 7, "slo": 8, "arrival": 9}
NARROW = {"steps": 4, "arrival": 5, "scale": 6}


def matches(source: Source) -> bool:
    """Return whether seven or ten columns apart by tabs, or the header of generated jobs."""
    return source.first.count("\t") in (6, 9) or set(CSV_COLUMNS) <= set(source.header)


def read(source: Source, *, salvage: bool = False, ties: str = "file") -> Workload:
    """Return jobs without a name are called by the number of their row, from 0. How long a step takes stands in Gavel's
    throughput tables, so `work_s` is nan and `iterations` says how much is to be done.
    """
    if set(CSV_COLUMNS) <= set(source.header):
        return _generated(source, salvage=salvage, ties=ties)
    taken = table(source, "\t", header=False)
    width = source.first.count("\t") + 1
    if width not in (7, 10):
        raise source.fail(f"has {width} columns apart by tabs where Gavel has 7 or 10; name another format.")
    at = WIDE if width == 10 else NARROW

    def job(cells: list[str] | None) -> Row:
        cells = cut(cells, width)
        made = common(cells[0], cells[at["steps"]], cells[at["scale"]], cells[at["arrival"]])
        if width == 10:
            made["priority"] = number(cells[at["priority"]], "priority weight")
            made["slo"] = slo_of(cells[at["slo"]])
        return made

    return collect(
        source, "gavel", placed(taken.rows), job, salvage=salvage, ties=ties,
        details={"slo": math.nan, "mode": "static"}, notes=lambda: table_notes(taken),
    )  # fmt: skip


def common(job_type: str, steps: str, scale: str, arrival: str) -> Row:
    """Return columns that all forms have; raises Bad."""
    return {
        "model": name_of(job_type, "job type"),
        "batch": batch_in(job_type),
        "iterations": above_zero(steps, "total steps"),
        "gpus": gpus_of(scale, "scale factor"),
        "submit": not_below_zero(arrival, "arrival"),
        "work_s": math.nan,
        "mode": "static",
    }


def slo_of(text: str) -> float:
    """Return a service level objective, nan where −1 says that there is none."""
    value = number(text, "SLO")
    if value < 0:
        if value != -1:
            raise Bad(f"SLO is {text[:40]!r}, below zero (−1 says none)")
        return math.nan
    return value


def _generated(source: Source, *, salvage: bool, ties: str) -> Workload:
    def job(cells: dict[str, str]) -> Row:
        made = common(*(cells[key] for key in ("job_type", "total_steps", "scale_factor", "arrival_s")))
        known = optional(cells["allox_jct_s"], "allox_jct_s") if "allox_jct_s" in cells else math.nan
        return made | {"job": name_of(cells["job_id"], "job_id"), "allox_jct_s": known, "slo": math.nan}

    known = {"allox_jct_s": math.nan} if "allox_jct_s" in source.header else {}
    return collect_table(
        source, "gavel", job, CSV_COLUMNS, ("allox_jct_s",), salvage=salvage, ties=ties,
        details={"slo": math.nan, "mode": "static"} | known,
    )  # fmt: skip
