"""Pods of Alibaba's GPU cluster of 2023 (`openb_pod_list_*.csv`; Weng et al., USENIX ATC 2023).

name, cpu_milli, memory_mib, num_gpu, gpu_milli (thousandths of one GPU), gpu_spec (kinds it may use, apart by "|"),
qos, pod_phase, creation_time, deletion_time, scheduled_time (seconds of the trace's own clock).
"""

from __future__ import annotations

import math

from foretrace.fleet.formats.jobs import Aside, Bad, LogRows, Row, gpus_of, name_of, not_below_zero, table_rows, whole
from foretrace.fleet.formats.source import Source

COLUMNS = ("creation_time", "scheduled_time", "deletion_time", "name", "num_gpu", "gpu_milli", "gpu_spec")
ALSO = ("qos", "pod_phase", "cpu_milli", "memory_mib")


def matches(source: Source) -> bool:
    """Return whether the header names pods and their share of a GPU; `rows` says where the times are missing."""
    return source.has("name", "num_gpu", "gpu_milli")


def rows(source: Source, *, pending: bool = False) -> LogRows:
    """Read pods; `qos`, `phase`, `cpu_milli`, `memory_mib` are kept in details; run time is deletion minus scheduling.

    pending: keep pods that were deleted before they were scheduled, with unknown run time; else they are set aside.
    """

    def job(cells: dict[str, str]) -> Row:
        share = _share(cells["gpu_milli"])
        if whole(cells["num_gpu"], "num_gpu") == 0:
            raise Aside("pods without GPUs")
        if share == 0:
            raise Bad("it requests a GPU but gpu_milli is 0")
        gpus = gpus_of(cells["num_gpu"], "num_gpu")
        if gpus > 1 and share < 1:
            raise Bad(f"gpu_milli is {cells['gpu_milli']!r} for several GPUs, where only whole ones go together")
        created = not_below_zero(cells["creation_time"], "creation_time")
        deleted = not_below_zero(cells["deletion_time"], "deletion_time")
        row: Row = {
            "job": name_of(cells["name"], "name"),
            "submit": created,
            "start": None,
            "end": deleted,
            "gpus": gpus,
            "share": share,
            "gpu_type": cells["gpu_spec"].strip(),
            "work_s": math.nan,
        }
        for key, name in (("qos", "qos"), ("phase", "pod_phase")):
            row[key] = cells.get(name, "")
        for name in ("cpu_milli", "memory_mib"):
            row[name] = not_below_zero(cells[name], name) if name in cells else math.nan
        if not cells["scheduled_time"].strip():
            if not pending:
                raise Aside("pods deleted before they were scheduled")
            return row
        row["start"] = not_below_zero(cells["scheduled_time"], "scheduled_time")
        row["work_s"] = deleted - row["start"]
        if row["work_s"] == 0:
            raise Aside("pods deleted in the second in which they were scheduled")
        if row["work_s"] < 0:
            raise Bad("it was deleted before it was scheduled")
        return row

    details = {"qos": "", "phase": "", "cpu_milli": math.nan, "memory_mib": math.nan}
    return table_rows(source, job, COLUMNS, ALSO, details=details)


def _share(text: str) -> float:
    milli = whole(text, "gpu_milli")
    if not 0 <= milli <= 1000:
        raise Bad(f"gpu_milli is {text[:40]!r}, not from 0 to 1000")
    return milli / 1000
