"""Measured latencies of the networks of a search space, from files that users bring.

The tables of NAS-Bench-201 that the HELP repository publishes (HayeonLee/HELP, data/nasbench201) are no part of
foretrace. Two CSV files, plain or gzip, with the same networks: `arch_idx,arch`, and `arch_idx` with one column of
milliseconds per device and batch, such as `2080ti_256`.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from foretrace import reading
from foretrace.errors import ForetraceError
from reproductions.nas_bench_201.cells import space
from reproductions.nas_bench_201.study import Networks, column

SPACE = "nas-bench-201"
WHERE = "the latencies of NAS-Bench-201 are in the repository HayeonLee/HELP on GitHub, folder data/nasbench201"


def read_networks(archs: str | Path | None, latencies: str | Path | None) -> Networks:
    """Networks with their work and latencies. Raises ForetraceError with the file, the line and the mend."""
    if archs is None or latencies is None:
        raise ForetraceError(f"{SPACE} needs --archs FILE and --latencies FILE; {WHERE}.")
    _, arch_rows = _rows(Path(archs), "arch")
    header, latency_rows = _rows(Path(latencies), "")
    texts = {row["arch_idx"]: row["arch"] for row in arch_rows}
    missing = next((row["arch_idx"] for row in latency_rows if row["arch_idx"] not in texts), None)
    if missing is not None:
        raise ForetraceError(
            f"{archs} lacks network {missing}, which {latencies} has; give files of the same networks."
        )
    names = [name for name in header if name not in ("arch_idx", "")]
    if not names:
        raise ForetraceError(f"{latencies} has no latencies; it needs columns such as 2080ti_1 beside arch_idx.")
    batches = {column(name)[1] for name in names}
    found = space([texts[row["arch_idx"]] for row in latency_rows])
    return Networks(
        flops=found.flops,
        nbytes={batch: found.nbytes(batch) for batch in sorted(batches)},
        kernels=found.kernels(),
        latencies_s={name: _seconds(latency_rows, name, Path(latencies)) for name in names},
    )


def _rows(path: Path, needed: str) -> tuple[list[str], list[dict[str, str]]]:
    text = reading.read_text(path, mend=WHERE)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        header = list(reader.fieldnames or ())
        rows = list(reader)
    except csv.Error as error:
        raise ForetraceError(f"{path} cannot be read as a table ({error}); copy it again.") from None
    for name in filter(None, ("arch_idx", needed)):
        if name not in header:
            raise ForetraceError(f"{path} has no column {name}; its first line names {', '.join(header) or 'nothing'}.")
    for row in rows:
        if any(row.get(name) is None for name in header):
            line = 2 + next(i for i, each in enumerate(rows) if each is row)
            raise ForetraceError(f"{path} line {line} has fewer columns than the first line; copy it again.")
    if not rows:
        raise ForetraceError(f"{path} has no networks below its first line.")
    return header, rows


def _seconds(rows: list[dict[str, str]], name: str, path: Path) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    try:
        found = np.array([float(row[name]) for row in rows]) / 1e3
    except (TypeError, ValueError):
        raise ForetraceError(f"{path}: column {name} holds something that is no number of milliseconds.") from None
    if not (found > 0).all() or not np.isfinite(found).all():
        at = int(np.flatnonzero(~(found > 0) | ~np.isfinite(found))[0])
        raise ForetraceError(f"{path} line {at + 2}: {name} is {rows[at][name]} ms; a latency is above 0.")
    return found
