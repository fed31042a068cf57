"""Known answers of published scheduler simulators, beside ours.

    python benchmarks/fleet_known.py [--quick] [--json]

Each row plays a shipped trace by the rules of the published program (`--semantics`) and compares one figure. Rows with
linear programs depend on the vertex that a solver returns. `--quick` leaves out the rows that take long.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reproductions.simulators import semantics

from foretrace.fleet.scene import measured, workload_of
from tables import percent, shared_traces, table

TRACE_96 = "gavel/physical_cluster/max_min_fairness.trace"
# (trace, semantics, policy, cluster, jobs measured, options, published mean JCT, how near it has to come)
ROWS: tuple[tuple[str, str, str, str, str, dict[str, str], float, str], ...] = (
    ("repro/philly_ee9e8c_500.csv", "tiresias", "fifo", "1x32x4", "", {}, 169792.966, "exact"),
    ("repro/philly_ee9e8c_500.csv", "tiresias", "fjf", "1x32x4", "", {}, 149081.112, "exact"),
    ("repro/philly_ee9e8c_500.csv", "tiresias", "shortest", "1x32x4", "", {}, 129145.68, "exact"),
    ("repro/philly_ee9e8c_500.csv", "tiresias", "dlas", "1x32x4", "", {}, 140965.656, "exact"),
    ("pollux/workloads/workload-6.csv", "pollux", "tiresias", "16x4", "", {}, 3469.69375, "exact"),
    ("pollux/workloads/workload-6.csv", "pollux", "optimus", "16x4", "", {}, 5301.875, "exact"),
    ("pollux/workloads/workload-6.csv", "pollux", "pollux", "16x4", "", {"generations": "30", "population": "50"},
     2446.13125, "random search, 5 %"),
    ("gavel/generated_seed42_lam9000.csv.gz", "gavel", "allox", "36:36:36", "4000-4999", {}, 59492.106756, "exact"),
    (TRACE_96, "gavel", "fifo", "4:4:4", "", {}, 99257.864, "exact"),
    (TRACE_96, "gavel", "gandiva", "4:4:4", "", {}, 63617.345, "exact"),
    (TRACE_96, "gavel", "max_min_fairness", "4:4:4", "", {}, 66558.675, "LP, 1 %"),
    (TRACE_96, "gavel", "max_min_fairness_perf", "4:4:4", "", {}, 66166.292,
     "LP, 1 %"),
    (TRACE_96, "gavel", "finish_time_fairness_perf", "4:4:4", "", {}, 75286.208,
     "LP, 1 %"),
    (TRACE_96, "gavel", "min_total_duration_perf", "4:4:4", "", {}, 145188.631,
     "LP, 1 %"),
)  # fmt: skip
SLOW = {("pollux", "pollux"), ("gavel", "allox")}


def measure(folder: Path, *, quick: bool = False) -> list[dict[str, Any]]:
    """One row per known answer."""
    found = []
    for trace, name, policy, cluster, jobs, options, published, near in ROWS:
        if quick and (name, policy) in SLOW:
            continue
        path = folder / trace
        workload = workload_of(str(path), name)
        begin = time.process_time()
        result = semantics(name).run(workload, policy=policy, cluster=cluster, seed=0, options=options)
        seconds = time.process_time() - begin
        only = measured(jobs, workload)
        jct = result.jct_s if only is None else result.jct_s[only]
        row = {
            "semantics": name, "policy": policy, "trace": Path(trace).name, "jobs": len(jct), "published_s": published,
            "ours_s": float(np.mean(jct)), "near": near, "cpu_s": seconds,
        }  # fmt: skip
        shipped = folder / "repro" / f"tiresias_n32g4_philly500_{policy}.job.csv"
        if name == "tiresias" and shipped.exists():
            with shipped.open() as lines:
                theirs = {each["job_id"]: float(each["JCT"]) for each in csv.DictReader(lines)}
            row["jobs_alike"] = sum(
                theirs.get(str(job)) == value for job, value in zip(workload.job, result.jct_s, strict=True)
            )
        found.append(row)
    return found


def text(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    return table(
        ("semantics", "policy", "trace", "jobs", "published mean JCT s", "ours", "off %", "asked", "jobs alike", "s"),
        [
            (
                row["semantics"], row["policy"], row["trace"], f"{row['jobs']:,}", f"{row['published_s']:.10g}",
                f"{row['ours_s']:.10g}",
                # published figures have so many digits
                "0" if f"{row['ours_s']:.3f}" == f"{row['published_s']:.3f}"
                else percent(row["ours_s"] / row["published_s"] - 1, signed=True),
                row["near"], f"{row['jobs_alike']} of {row['jobs']}" if "jobs_alike" in row else "–",
                f"{row['cpu_s']:.2f}",
            )
            for row in rows
        ],
    )  # fmt: skip


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    traces = shared_traces()
    if traces is None:
        print("the traces of the published simulators are not here (FORETRACE_SHARED_DATA)", file=sys.stderr)
        return 2
    rows = measure(traces.parent / "fleet", quick=options.quick)
    print(json.dumps(rows, indent=1) if options.json else text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
