"""Job lists of Gavel (Narayanan et al., OSDI 2020) and Shockwave (Zheng et al., NSDI 2023): tab-separated, or CSV.

Gavel, 10 columns: job type, command, directory, steps flag, needs data, total steps, scale factor, priority weight,
SLO, arrival in seconds. 7 columns: job type, command, steps flag, needs data, total steps, arrival, scale factor.
CSV of generated jobs: job_id, arrival_s, job_type, total_steps, scale_factor, and allox_jct_s where it is known.
Shockwave, 12 columns: Gavel's 10 with the mode (static, accordion, gns) before the priority weight and the duration in
seconds before the arrival.
"""

from __future__ import annotations

import math

from foretrace.fleet.formats import jobs
from foretrace.fleet.formats.source import Source, table

CSV_COLUMNS = ("job_id", "arrival_s", "job_type", "total_steps", "scale_factor")
COLUMNS = {  # where each stands, by how many there are
    7: {"steps": 4, "arrival": 5, "scale": 6},
    10: {"steps": 5, "scale": 6, "priority": 7, "slo": 8, "arrival": 9},
    12: {"steps": 5, "scale": 6, "mode": 7, "priority": 8, "slo": 9, "duration": 10, "arrival": 11},
}
MODES = ("static", "accordion", "gns")


def is_gavel(source: Source) -> bool:
    """Return whether there are seven or ten columns apart by tabs, or the header of generated jobs."""
    return _width(source) in (7, 10) or source.has(*CSV_COLUMNS)


def is_shockwave(source: Source) -> bool:
    """Return whether there are twelve columns apart by tabs."""
    return _width(source) == 12


def gavel(source: Source) -> jobs.LogRows:
    """Read jobs; those without a name are called by the number of their row, from 0.

    How long a step takes stands in Gavel's throughput tables, so `work_s` is nan and `iterations` says how much is to
    be done.
    """
    if source.has(*CSV_COLUMNS):
        return _generated(source)
    if _width(source) not in (7, 10):
        raise source.fail(f"has {_width(source)} columns apart by tabs where Gavel has 7 or 10; name another format.")
    return _lines(source, _width(source))


def shockwave(source: Source) -> jobs.LogRows:
    """Read jobs, called by the number of their row, from 0; `work_s` is the duration as the file states it."""
    return _lines(source, 12)


def _width(source: Source) -> int:
    return source.first.count("\t") + 1


def _lines(source: Source, width: int) -> jobs.LogRows:
    taken = table(source, "\t", header=False)

    def job(cells: list[str] | None) -> jobs.Row:
        cells = jobs.cut(cells, width)
        said = {name: cells[at] for name, at in COLUMNS[width].items()}
        if "mode" in said and said["mode"] not in MODES:
            raise jobs.Bad(f"mode is {said['mode'][:40]!r}, not one of {', '.join(MODES)}")
        made = _common(cells[0], said["steps"], said["scale"], said["arrival"])
        made["mode"] = said.get("mode", made["mode"])
        if "priority" in said:
            made |= {"priority": jobs.number(said["priority"], "priority weight"), "slo": _slo(said["slo"])}
        if "duration" in said:
            made["work_s"] = jobs.above_zero(said["duration"], "duration")
        return made

    details = {"slo": math.nan, "mode": "static"}
    return jobs.LogRows(rows=jobs.placed(taken.rows), parse=job, details=details, notes=lambda: jobs.table_notes(taken))


def _common(job_type: str, steps: str, scale: str, arrival: str) -> jobs.Row:
    """Return columns that all forms have; raises Bad."""
    return {
        "model": jobs.name_of(job_type, "job type"),
        "batch": jobs.batch_in(job_type),
        "iterations": jobs.above_zero(steps, "total steps"),
        "gpus": jobs.gpus_of(scale, "scale factor"),
        "submit": jobs.not_below_zero(arrival, "arrival"),
        "work_s": math.nan,
        "mode": "static",
    }


def _slo(text: str) -> float:
    """Return a service level objective, nan where −1 says that there is none."""
    value = jobs.number(text, "SLO")
    if value < 0:
        if value != -1:
            raise jobs.Bad(f"SLO is {text[:40]!r}, below zero (−1 says none)")
        return math.nan
    return value


def _generated(source: Source) -> jobs.LogRows:
    def job(cells: dict[str, str]) -> jobs.Row:
        made = _common(*(cells[key] for key in ("job_type", "total_steps", "scale_factor", "arrival_s")))
        known = jobs.optional(cells["allox_jct_s"], "allox_jct_s") if "allox_jct_s" in cells else math.nan
        return made | {"job": jobs.name_of(cells["job_id"], "job_id"), "allox_jct_s": known, "slo": math.nan}

    known = {"allox_jct_s": math.nan} if "allox_jct_s" in source.header else {}
    details = {"slo": math.nan, "mode": "static"} | known
    return jobs.table_rows(source, job, CSV_COLUMNS, ("allox_jct_s",), details=details)
