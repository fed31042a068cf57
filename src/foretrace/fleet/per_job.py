"""A row per job of a result, as CSV."""

from __future__ import annotations

import csv
import io

import numpy as np

from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import Float64, Int64


def per_job(result: FleetResult, only: Int64 | None = None) -> str:
    """Return CSV text with a row per job: times in seconds after the log's zero, empty where there is none."""
    load, done = result.workload, result.end_ns >= 0

    def seconds(times_ns: Int64) -> list[str]:
        return [repr(each / 1e9) if each >= 0 else "" for each in times_ns.tolist()]

    def of_done(values: Float64) -> list[str]:
        return [repr(each) if known else "" for each, known in zip(values.tolist(), done.tolist(), strict=True)]

    columns = {
        "job": load.job.tolist(),
        "gpus": load.gpus.tolist(),
        "submit_s": seconds(load.submit_ns),
        "start_s": seconds(result.start_ns),
        "end_s": seconds(result.end_ns),
        "jct_s": of_done(result.jct_s),
        "queue_s": of_done(result.queue_s),
        "held_s": seconds(result.held_ns),
        "dead_s": seconds(result.dead_ns),
        "starts": result.starts.tolist(),
        "preempted": result.preempted.tolist(),
        "failed": result.failed.tolist(),
        "status": np.select(
            [result.never, done, result.start_ns >= 0], ["never", "done", "running"], "waiting"
        ).tolist(),
    }
    rows = list(zip(*columns.values(), strict=True))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows if only is None else [rows[at] for at in only.tolist()])
    return out.getvalue()
