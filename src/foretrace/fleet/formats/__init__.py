"""Logs and job lists of other systems, read into a `Workload`: distinguished by content."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.fleet.formats import alibaba2020, alibaba2023, gavel, kueue, own, ray_jobs, slurm, swf, tables
from foretrace.fleet.formats.clusters import read_cluster
from foretrace.fleet.formats.jobs import LogRows, collect
from foretrace.fleet.formats.own import write_csv
from foretrace.fleet.formats.source import Source, load
from foretrace.fleet.workload import Workload
from foretrace.trace import foreign

__all__ = ["FORMATS", "Format", "read", "read_cluster", "write_csv"]


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of log. `matches` decides by content alone; `rows` takes the options that its signature names."""

    name: str
    about: str
    matches: Callable[[Source], bool]
    rows: Callable[..., LogRows]

    @property
    def options(self) -> tuple[str, ...]:
        """What may be said beside the path, by name."""
        return ("ties", *(name for name in inspect.signature(self.rows).parameters if name != "source"))


def _with(columns: Sequence[str]) -> Callable[[Source], bool]:
    """Return whether the header of a source names these columns."""
    return lambda source: source.has(*columns)


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("foretrace", "a workload as foretrace writes it (CSV)", own.matches, own.rows),
        Format("philly", "Microsoft Philly, one row per job (CSV)", _with(tables.PHILLY), tables.philly),
        Format("gavel", "Gavel job lists of 7 or 10 columns (TSV), generated jobs (CSV)", gavel.is_gavel, gavel.gavel),
        Format("shockwave", "Shockwave job lists of 12 columns (TSV)", gavel.is_shockwave, gavel.shockwave),
        Format("tiresias", "job files of the Tiresias simulator (CSV)", tables.is_tiresias, tables.tiresias),
        Format("pollux", "workloads of the Pollux and Sia simulators (CSV)", _with(tables.POLLUX), tables.pollux),
        Format("helios", "SenseTime Helios cluster_log.csv", _with(tables.HELIOS), tables.helios),
        Format("alibaba2020", "Alibaba PAI 2020, pai_task_table", alibaba2020.matches, alibaba2020.rows),
        Format("alibaba2023", "Alibaba 2023, openb_pod_list", alibaba2023.matches, alibaba2023.rows),
        Format("swf", "Standard Workload Format 2.2", swf.matches, swf.rows),
        Format("slurm", "Slurm accounting, sacct -P", slurm.matches, slurm.rows),
        Format("kueue", "Kueue workloads, kubectl get workloads -o json", kueue.matches, kueue.rows),
        Format("ray", "Ray jobs, JSON of the jobs API", ray_jobs.matches, ray_jobs.rows),
    )
}


def read(
    path: str | Path, format: str = "auto", *, salvage: bool = False, ties: str = "file", **options: Any
) -> Workload:
    """Return jobs of a log, plain or gzip.

    format: a name of FORMATS, or `auto` to decide by content. salvage: leave out rows that cannot be read; they are
    listed in `origin.refused`. ties: order of jobs submitted at once (file, reverse, name). options: what the format's
    own `rows` takes. Every row is accounted for: jobs, refused rows, and rows set aside or joined
    (counted in `origin.notes`) add up to `origin.rows`.
    Raises ForetraceError: the file cannot be read, is of no known format, or rows are refused without `salvage`.
    """
    source = load(path)
    chosen = _chosen(source, format)
    unknown = sorted(set(options) - set(chosen.options))
    if unknown:
        raise ForetraceError(
            f"{source.path}: format {chosen.name} has no option {unknown[0]!r}; it has {', '.join(chosen.options)}."
        )
    return collect(source, chosen.name, chosen.rows(source, **options), salvage=salvage, ties=ties)


def _chosen(source: Source, format: str) -> Format:
    if format != "auto":
        if format not in FORMATS:
            raise ForetraceError(f"there is no format {format!r}; there are auto, {', '.join(FORMATS)}.")
        return FORMATS[format]
    if not source.first:
        raise source.fail("is empty; name a log with jobs.")
    found = [each for each in FORMATS.values() if each.matches(source)]
    if len(found) == 1:
        return found[0]
    if found:
        raise source.fail(f"could be {' or '.join(each.name for each in found)}; say which with `format=`.")
    name = source.path.lower().removesuffix(".gz")
    if not name.endswith((".csv", ".tsv")) and (
        said := foreign.by_content(source.text[:64].encode()) or foreign.by_name(name)
    ):
        raise source.fail(f"{said.partition(';')[0]}, not a log of jobs; see docs/fleet.md for what is read.")
    raise source.fail(
        f"is of no known format (it begins {source.first[:60]!r}); say which with `format=`: {', '.join(FORMATS)}."
    )
