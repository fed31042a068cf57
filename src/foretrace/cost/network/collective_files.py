"""Tables of measured collectives from files: our own JSON, CSV of several programs, and what nccl-tests prints.

CSV is distinguished by its header:

- `size(B), ..., time(us), ..., busbw(GB/s)`: columns of nccl-tests; the first time (out of place) counts. The number of
  workers is not in such a file; it is read from the file name (`AR_GPU8...`, `..._8gpus...`) or given.
- `time_stats.KIND.median, ..., num_workers, devices_per_node, size`: Vidur's profiles, times in ms.
- `bytes, busbw_GBps, gpus[, system]`: bus bandwidths of one or several systems.
- `kind, workers, nbytes, seconds[, per_node][, system]`: plain.

All of them may be compressed (gzip).
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isclose, isfinite
from pathlib import Path

from foretrace import reading
from foretrace.cost.network.collective_table import CollectiveSeries, CollectiveTable, decode, series_of, table_of
from foretrace.cost.network.network import CollectiveKind, bus_share
from foretrace.errors import ForetraceError
from foretrace.plaintext import whole_number

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"b": 1.0, "kb": 2.0**10, "mb": 2.0**20, "gb": 2.0**30}
_HEADER = re.compile(r"\s*(?P<name>[a-z]+)\s*\((?P<unit>[^)]*)\)\s*", re.IGNORECASE)
_WORKERS = re.compile(r"(?:gpus?|ranks?|workers?|n)[_-]?(\d+)(?!\d)|(?<!\d)(\d+)[_-]?x?(?:gpus?|ranks?|workers?)", re.I)
_LOG_ROW = re.compile(r"(?<![\w.])(?P<row>\d+\s+\d+\s+[a-z]\w+\s.*\S)\s*$")  # behind whatever a launcher writes first
_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "allreduce": CollectiveKind.ALL_REDUCE,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "allgather": CollectiveKind.ALL_GATHER,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "sendrecv": CollectiveKind.SEND,
    "send_recv": CollectiveKind.SEND,
    "reduce": CollectiveKind.REDUCE,
}


def read(path: Path, *, workers: int = 0, per_node: int = 0, kind: str = "") -> CollectiveTable:
    """Return the table in a file. `workers`, `per_node` and `kind` say what such a file may not: they never overrule
    it.

    Raises ForetraceError with the place that cannot be read.
    """
    given = _kind_of(kind, str(path)) if kind else None
    data = reading.read_bytes(path, mend="give JSON, CSV or the output of nccl-tests")
    head = data.lstrip()[:1]
    if head == b"{":
        return decode(data, str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ForetraceError(f"{path} is neither text nor gzip; give JSON, CSV or the output of nccl-tests.") from None
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    if not first:
        raise ForetraceError(f"{path} is empty; give a table of collectives.")
    if first.lstrip().startswith("#") or any(_is_title(line) for line in lines):
        return table_of(str(path), _nccl_tests(path, lines, workers, per_node, given), backend="nccl")
    rows = csv.DictReader(_numbered(lines))
    names = tuple(rows.fieldnames or ())
    if any(name.startswith("time_stats.") for name in names):
        return table_of(str(path), _series(path, _vidur(path, rows)), backend="nccl")
    if "busbw_GBps" in names:
        return table_of(str(path), _series(path, _bandwidths(path, rows)), backend="nccl")
    if {"kind", "workers", "nbytes", "seconds"} <= set(names):
        return table_of(str(path), _series(path, _plain(path, rows)))
    if any(match and match["name"].lower() == "size" for match in map(_HEADER.fullmatch, names)):
        found = workers or _workers_in(path.name)
        if not found:
            raise ForetraceError(f"{path} does not say how many workers were measured; give `workers=N`.")
        series = _columns(path, rows, found, per_node or found, given or _kind_in(path.name))
        return table_of(str(path), [series], backend="nccl")
    raise ForetraceError(
        f"{path}: its columns ({', '.join(names[:6])}) are those of no table of collectives; "
        "docs/network.md lists the forms."
    )


def _is_title(line: str) -> bool:
    """Return whether the line above the figures of nccl-tests."""
    return "algbw" in line and "busbw" in line and "," not in line


def _numbered(lines: Sequence[str]) -> list[str]:
    """Return lines whose header has a name per column: a second `time(us)` becomes `time(us)#2`."""
    at = next(at for at, line in enumerate(lines) if line.strip())
    seen: dict[str, int] = {}
    names = []
    for name in (each.strip().strip('"') for each in lines[at].split(",")):
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return [",".join(names), *(line for line in lines[at + 1 :] if line.strip())]


def _number(row: Mapping[str, str | None], name: str, path: Path, line: int) -> float:
    text = row.get(name)
    try:
        return float(text or "")
    except ValueError:
        raise ForetraceError(f"{path}, row {line}: {text!r} in column {name} is no number.") from None


def _whole(row: Mapping[str, str | None], name: str, path: Path, line: int) -> int:
    value = _number(row, name, path, line)
    if not value.is_integer():
        raise ForetraceError(f"{path}, row {line}: {value:g} in column {name} is no whole number.")
    return int(value)


def _columns(
    path: Path, rows: csv.DictReader[str], workers: int, per_node: int, kind: CollectiveKind | None
) -> CollectiveSeries:
    columns: dict[str, tuple[str, str]] = {}
    for name in rows.fieldnames or ():
        if match := _HEADER.fullmatch(name):
            columns.setdefault(match["name"].lower(), (name, match["unit"].strip().lower()))
    if "time" not in columns:
        raise ForetraceError(f"{path} has sizes but no column time(us) or time(ns).")
    (size, size_unit), (time, time_unit) = columns["size"], columns["time"]
    if size_unit not in _BYTES or time_unit not in _SECONDS:
        raise ForetraceError(f"{path}: {size} and {time} name a unit that is unknown; write size(B) and time(us).")
    points = []
    for line, row in enumerate(rows, 2):
        nbytes, seconds = _number(row, size, path, line), _number(row, time, path, line)
        points.append((nbytes * _BYTES[size_unit], seconds * _SECONDS[time_unit], 0.0))
    return series_of(
        str(path), kind=kind or CollectiveKind.ALL_REDUCE, workers=workers, per_node=per_node, points=points
    )


_Point = tuple[tuple[str, CollectiveKind, int, int], tuple[float, float, float]]  # of which series, and where on it


def _vidur(path: Path, rows: csv.DictReader[str]) -> Iterator[_Point]:
    for line, row in enumerate(rows, 2):
        kind = _kind_of(row.get("collective") or "", f"{path}, row {line}")
        column = f"time_stats.{row['collective']}."
        middle = _number(row, f"{column}median", path, line)
        spread = (_number(row, f"{column}max", path, line) - _number(row, f"{column}min", path, line)) / 2
        workers = _whole(row, "num_workers", path, line)
        key = "", kind, workers, min(_whole(row, "devices_per_node", path, line), workers)
        nbytes = _number(row, "size", path, line)
        yield key, (nbytes, middle * 1e-3, spread / middle if middle > 0 else 0.0)


def _bandwidths(path: Path, rows: csv.DictReader[str]) -> Iterator[_Point]:
    """Yield points; rows without a number of workers are left out: without it a bus bandwidth is no time."""
    for line, row in enumerate(rows, 2):
        if not (row.get("gpus") or "").strip():
            continue
        workers = _whole(row, "gpus", path, line)
        nbytes, rate = _number(row, "bytes", path, line), _number(row, "busbw_GBps", path, line)
        if not rate > 0:
            raise ForetraceError(f"{path}, row {line}: a bus bandwidth of {rate:g} GB/s gives no time.")
        nodes = re.search(r"(\d+) nodes?", row.get("system") or "")
        per_node = -(-workers // int(nodes[1])) if nodes and int(nodes[1]) else workers
        key = row.get("system") or "", CollectiveKind.ALL_REDUCE, workers, per_node
        seconds = nbytes * bus_share(CollectiveKind.ALL_REDUCE, workers) / (rate * 1e9)
        yield key, (nbytes, seconds, 0.0)


def _plain(path: Path, rows: csv.DictReader[str]) -> Iterator[_Point]:
    for line, row in enumerate(rows, 2):
        kind = _kind_of(row.get("kind") or "", f"{path}, row {line}")
        workers = _whole(row, "workers", path, line)
        per_node = _whole(row, "per_node", path, line) if (row.get("per_node") or "").strip() else workers
        key = row.get("system") or "", kind, workers, per_node
        yield key, (_number(row, "nbytes", path, line), _number(row, "seconds", path, line), 0.0)


def _series(path: Path, found: Iterator[_Point]) -> list[CollectiveSeries]:
    groups = defaultdict(list)
    for key, point in found:
        groups[key].append(point)
    return [
        series_of(str(path), kind=kind, workers=workers, per_node=per_node, points=points, system=system)
        for (system, kind, workers, per_node), points in groups.items()
    ]


# --- what nccl-tests prints -----------------------------------------------------------------------------------------


def _nccl_tests(
    path: Path, lines: Sequence[str], workers: int, per_node: int, kind: CollectiveKind | None
) -> list[CollectiveSeries]:
    ranks: dict[str, str] = {}
    alone = 0
    titles: list[str] = []
    points: list[tuple[float, float, float]] = []
    ratios: list[float] = []
    words: tuple[str, str] = ("", "")
    for line in lines:
        if rank := re.search(r"\bRank\s+(\d+)\s.*\bPid\s+(\d+\s+on\s+(\S+))\s+device", line):
            alone += rank[1] == "0" and ranks.get("0") not in (None, rank[3])
            ranks[rank[1]] = rank[3]
        if "_perf" in line or "Collective test starting" in line:
            titles.append(line)
        if line.lstrip().startswith("#"):
            continue
        match = _LOG_ROW.search(line)
        row = _log_row(match["row"].split()) if match else None
        if row is None:
            continue
        nbytes, seconds, ratio, *told = row
        points.append((nbytes, seconds, 0.0))
        words = (told[0], told[1])
        if ratio:
            ratios.append(ratio)
    if len(ranks) == 1:
        several = " on every machine" if alone else ""
        raise ForetraceError(
            f"{path}: each process was rank 0 of 1{several}, so nothing was communicated and bus bandwidth is 0; build "
            "nccl-tests with MPI=1 and start it by mpirun, or give it several GPUs (-g 8)."
        )
    if not points:
        raise ForetraceError(f"{path} holds no line of sizes and times as nccl-tests prints them.")
    found = len(ranks) or workers or _workers_in(path.name)
    if not found:
        raise ForetraceError(f"{path} does not list its ranks; give `workers=N`.")
    hosts = list(ranks.values())
    most = max(map(hosts.count, hosts)) if hosts else per_node or found
    named = next((each for each in (_kind_in(title) for title in titles) if each), None)
    what = named or kind or _kind_in(path.name) or _guessed(path, words, max(ratios, default=0.0), found)
    return [series_of(str(path), kind=what, workers=found, per_node=min(most, found), points=points)]


def _log_row(words: Sequence[str]) -> tuple[float, float, float, str, str] | None:
    """Return bytes, seconds, bus bandwidth over algorithm bandwidth (0: not known), reduction, root; None for another
    line.

    Columns: size, count, type, [redop], [root], time (us), algbw, busbw, ...: the three come first after the words.
    """
    if len(words) < 6 or None in map(whole_number, words[:2]) or words[2].replace(".", "").isdecimal():
        return None
    at = 3
    redop, root = "", ""
    if not _is_number(words[at]):
        redop, at = words[at], at + 1
    rank = whole_number(words[at])  # or −1 for none
    if rank is not None and rank <= 1 << 20 and len(words) > at + 3:
        whole = [word for word in words[at : at + 4] if "." not in word]
        if words[at].startswith("-") or (len(whole) == 1 and "." in words[at + 1]):
            root, at = words[at], at + 1
    if len(words) < at + 3 or not all(_is_number(word) for word in words[at : at + 3]):
        return None
    time_us, algbw, busbw = (float(word) for word in words[at : at + 3])
    if not float(words[0]) or time_us <= 0:
        return None
    ratio = busbw / algbw if algbw > 1.0 and isfinite(busbw / algbw) else 0.0
    return float(words[0]), time_us * 1e-6, ratio, redop, root  # series_of refuses a time that is not finite


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _guessed(path: Path, words: tuple[str, str], ratio: float, workers: int) -> CollectiveKind:
    """Return which collective a log is of, from the reduction it names and the ratio of its two bandwidths.

    Raises ForetraceError where several fit, as all-reduce and send between two workers do.
    """
    redop, root = words
    reduces = redop not in ("", "none")
    summed = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE)
    rooted = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
    fits = [
        kind
        for kind in CollectiveKind
        if isclose(bus_share(kind, workers), ratio, rel_tol=0.03)
        and (reduces == (kind in summed) or kind == CollectiveKind.SEND)
        and (root == "" or (root != "-1") == (kind in rooted))
    ]
    if len(fits) == 1:
        return fits[0]
    which = f" ({' or '.join(fits)} by its figures)" if fits else ""
    raise ForetraceError(f"{path} does not say which collective it is of{which}; give `kind=`.")


def _kind_in(text: str) -> CollectiveKind | None:
    lower = text.lower().replace("-", "_")
    return next((kind for name, kind in _KINDS.items() if name in lower), None)


def _kind_of(text: str, where: str) -> CollectiveKind:
    found = _KINDS.get(text.strip().lower().replace("-", "_")) or next(
        (kind for kind in CollectiveKind if kind == text.strip()), None
    )
    if found is None:
        raise ForetraceError(f"{where}: {text!r} is no collective; choose from {', '.join(CollectiveKind)}.")
    return found


def _workers_in(name: str) -> int:
    match = _WORKERS.search(name)
    return int(match[1] or match[2]) if match else 0
