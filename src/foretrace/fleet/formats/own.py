"""foretrace's own CSV of a workload: the interchange form, read and written without loss.

First line, when foretrace wrote it: `# foretrace workload 1 epoch_s=...`. Then a header and one row per job. Needed are
`submit_s`, `gpus` and `work_s`; `job`, `model`, `tenant`, `user`, `gpu_type`, `min_gpus`, `max_gpus`, `estimate_s`,
`priority`, `share`, `iterations`, `batch`, `logged_start_s`, `logged_end_s` may be there; a blank cell says unknown.
Details stand in columns named `number:NAME`, `whole:NAME`, `flag:NAME` or `text:NAME`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.fleet.formats.jobs import Bad, LogRows, Row, cut, gpus_of, number, placed, whole
from foretrace.fleet.formats.source import Source, whole_table
from foretrace.fleet.workload import NUMBERS, SECOND, TEXTS, Workload

MARK = "# foretrace workload 1"
NEEDED = ("submit_s", "gpus", "work_s")
COLUMNS = (
    "job", "submit_s", "gpus", "work_s", *TEXTS, "min_gpus", "max_gpus", *NUMBERS, "logged_start_s", "logged_end_s",
)  # fmt: skip
_EPOCH = re.compile(rf"{re.escape(MARK)} epoch_s=(\S+)")
_BARE = re.compile(r'[",\r\n]')
_KINDS = {"number": np.float64, "whole": np.int64, "flag": np.bool_, "text": np.object_}


def matches(source: Source) -> bool:
    """Return whether it begins with the mark, or its header names the columns that are needed."""
    return source.first.startswith(MARK) or source.has(*NEEDED)


def rows(source: Source) -> LogRows:
    """Return jobs as written. Rows without a name are called by their number, from 0."""
    lines = whole_table(source)
    epoch = 0.0
    header: list[str] = []
    for line, cells in lines:
        if cells is None:
            raise source.fail(f"line {line} has broken quotes; correct it.")
        if cells[0].startswith("#"):
            found = _EPOCH.match(",".join(cells))
            epoch = _epoch(source, found[1]) if found else epoch
            continue
        header = [cell.strip() for cell in cells]
        break
    details = {name: name.split(":", 1) for name in header if name.split(":", 1)[0] in _KINDS and ":" in name}
    unknown = [name for name in header if name not in COLUMNS and name not in details]
    for name in NEEDED:
        if name not in header:
            raise source.fail(f"has no column {name!r}; a workload needs {', '.join(NEEDED)}.")
    if unknown or len(set(header)) < len(header):
        raise source.fail(
            f"has a column {(unknown or header)[0]!r} that is unknown or stands twice; columns of its own are called "
            "number:NAME, whole:NAME, flag:NAME or text:NAME."
        )
    at = {name: position for position, name in enumerate(header)}

    def job(cells: list[str] | None) -> Row:
        cells = cut(cells, len(header))
        made: Row = {
            "submit": _time(cells[at["submit_s"]], "submit_s"),
            "gpus": gpus_of(cells[at["gpus"]], "gpus"),
            "work_s": _work(cells[at["work_s"]]),
        }
        for name in ("job", *TEXTS):
            if name in at:
                made[name] = cells[at[name]]
        for name, default in NUMBERS.items():
            if name in at:
                made[name] = _float(cells[at[name]], name, default)
        if not 0 < made.get("share", 1.0) <= 1:
            raise Bad(f"share is {made['share']:g}, not in (0, 1]")
        for key, name in (("start", "logged_start_s"), ("end", "logged_end_s")):
            if name in at and cells[at[name]].strip():
                made[key] = _time(cells[at[name]], name)
        least, most = (
            gpus_of(cells[at[name]], name) if name in at and cells[at[name]].strip() else made["gpus"]
            for name in ("min_gpus", "max_gpus")
        )
        if least > most:
            raise Bad(f"min_gpus {least} is above max_gpus {most}")
        made |= {"min_gpus": least, "max_gpus": most}
        for name, (kind, _) in details.items():
            made[name] = _detail(cells[at[name]], kind, name)
        return made

    def named(made: Workload) -> Workload:
        kept = {
            named: np.array(made.details[name].tolist(), object)
            if kind == "text"
            else made.details[name].astype(_KINDS[kind])
            for name, (kind, named) in details.items()
        }
        return replace(made, details=kept)

    return LogRows(
        rows=placed(lines), parse=job, exact=True, loose=True, epoch_s=epoch, settle=named,
        details={name: "" if kind == "text" else math.nan for name, (kind, _) in details.items()},
    )  # fmt: skip


def write_csv(workload: Workload, path: str | Path) -> Path:
    """Write the workload so that `rows` returns the same jobs, to the nanosecond; a path ending in .gz is packed.

    Names, origin and numbers of decisions do not travel. Raises ForetraceError where a detail has more than one value
    per job or the file cannot be written.
    """
    path = Path(path)
    columns = {"job": list(map(str, workload.job))}
    columns["submit_s"] = list(map(_seconds, workload.submit_ns.tolist()))
    for name in COLUMNS[2:-2]:
        write: Callable[[Any], str] = _written if name == "work_s" or name in NUMBERS else str
        columns[name] = list(map(write, getattr(workload, name).tolist()))
    for name in COLUMNS[-2:]:
        stamps = getattr(workload, f"{name[:-2]}_ns").tolist()
        columns[name] = ["" if each == -1 else _seconds(each) for each in stamps]
    for name, values in workload.details.items():
        kind = {"f": "number", "i": "whole", "u": "whole", "b": "flag"}.get(values.dtype.kind, "text")
        if values.shape != (len(workload),):
            raise ForetraceError(f"the detail {name!r} has not one value per job; take it out before writing {path}.")
        columns[f"{kind}:{name}"] = [_written(each) if kind == "number" else str(each) for each in values.tolist()]
    lines = [f"{MARK} epoch_s={float(workload.epoch_s)!r}", ",".join(map(_cell, columns))]
    lines += [",".join(map(_cell, cells)) for cells in zip(*columns.values(), strict=True)]
    text = "\n".join([*lines, ""])
    write_bytes(path, text.encode("utf-8", errors="replace"), compress=path.suffix == ".gz")
    return path


def _cell(text: str) -> str:
    """Return quoted where CSV needs it; the csv module of Python 3.11 leaves a lone carriage return bare."""
    if _BARE.search(text):
        return '"' + text.replace('"', '""') + '"'
    return text


def _seconds(ns: int) -> str:
    """Return nanoseconds as decimal seconds, exactly."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // SECOND}" + (f".{ns % SECOND:09d}".rstrip("0") if ns % SECOND else "")


def _written(value: float) -> str:
    return "" if math.isnan(value) else repr(value)


def _time(text: str, what: str) -> int:
    try:
        value = Decimal(text.strip())
        if not value.is_finite() or abs(value) >= Decimal("9e9") or (what == "submit_s" and value < 0):
            raise InvalidOperation
        return int((value * SECOND).to_integral_value())
    except InvalidOperation:
        raise Bad(f"{what} is {text[:40]!r}, not a time in seconds") from None


def _float(text: str, what: str, default: float) -> float:
    """Return the number as written; infinite numbers are allowed, since policies may know what they mean."""
    if not text.strip():
        return default
    try:
        return float(text)
    except ValueError:
        return number(text, what)


def _work(text: str) -> float:
    value = _float(text, "work_s", math.nan)
    if value <= 0 or math.isinf(value):
        raise Bad(f"work_s is {text[:40]!r}, not above zero")
    return value


def _detail(text: str, kind: str, name: str) -> Any:
    if kind == "text":
        return text
    if kind == "number":
        return _float(text, name, math.nan)
    if kind == "flag":
        if text not in ("True", "False"):
            raise Bad(f"{name} is {text[:40]!r}, not True or False")
        return text == "True"
    return whole(text, name)


def _epoch(source: Source, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise source.fail(f"its first line says epoch_s={text[:40]}, which is no number; correct it.")
    return value
