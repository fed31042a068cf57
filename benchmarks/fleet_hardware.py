"""How far fleet simulation is from real hardware: the Shockwave study's runs on 32 GPUs, and its own simulator.

    python benchmarks/fleet_hardware.py [--shared-data PATH] [--results FILE] [--sensitivity] [--json]

Every policy with a physical run among the recorded results is simulated. Nothing is fitted: constants are the published
ones, and the run time that each job takes alone comes from recorded results of the *other* policies. Makespan is last
(arrival + JCT) less first arrival, also for the recorded runs, whose own number is shown beside it.
`--results` names other recorded results, of policies that were held back, in the same form; run times still
come from those beside the job list. `--sensitivity` changes one rule at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.formats import read
from foretrace.fleet.result import FleetResult
from foretrace.fleet.semantics.shockwave import Shockwave, compare, recorded_runs
from foretrace.fleet.workload import Workload
from tables import ROOT, percent, table

LOG = "120_0.2_5_100_40_25_0,0.5,0.5_0.6,0.3,0.09,0.01_multigpu_dynamic.trace"
RUN = "tacc_32gpus_comparison"
BAR = {"jct": 0.03, "makespan": 0.04}  # mean absolute error over policies
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "as published": {},
    "run times from all recorded results": {"leave_out": "none"},
    "run times from steps and speeds of the job list": {"profile": "steps"},
    "run times from the duration column": {"profile": "duration"},
    "restart 0 s": {"restart_s": "0"},
    "restart 10 s": {"restart_s": "10"},
    "restart 30 s": {"restart_s": "30"},
    "no wait at a change of batch size": {"wait": "none"},
    "accounts reset at every change": {"reset_s": "0"},
    "rounds of 60 s": {"round_s": "60"},
    "rounds of 240 s": {"round_s": "240"},
    "open shares raised by one factor": {"leftover": "raise"},
    "rounds decided half a round before": {"decide": "ahead"},
    "AlloX with alpha = 1": {"alpha": "1"},
}


def simulate(log: Workload, policy: str, options: Mapping[str, str]) -> FleetResult:
    """One policy on the study's cluster."""
    return Shockwave().run(log, policy=policy, cluster=Shockwave.default_cluster, seed=0, options=options)


def run(folder: Path, results: Path | None, sensitivity: bool) -> dict[str, Any]:
    """Errors by policy for ours and for the study's simulator, and by changed rule."""
    log, recorded = read(folder / LOG), recorded_runs(results or folder)
    runs = {
        key.split("|")[1]: entry for key, entry in recorded.items() if key.startswith(RUN) and key.endswith("physical")
    }
    if not runs:
        raise ForetraceError(f"{results or folder}: no entries {RUN}|policy|physical; name results of the study.")
    found: dict[str, Any] = {"policies": {}, "sensitivity": {}}
    for policy, entry in runs.items():
        began = time.perf_counter()
        result = simulate(log, policy, {})
        spent = time.perf_counter() - began
        theirs = recorded.get(f"{RUN}|{policy}|simulation")
        took, submit = np.asarray(entry["jct_list"]), log.submit_ns * 1e-9
        found["policies"][policy] = {
            "recorded": {"jct_s": float(took.mean()), "makespan_s": float((submit + took).max() - submit.min()),
                         "makespan_field_s": float(entry["makespan"])},
            "ours": {"jct_s": float(result.jct_s.mean()), "makespan_s": result.makespan_s, "seconds": spent,
                     "run times": result.facts["profile"]} | compare(result, entry),
            "theirs": None if theirs is None else compare(_as_result(log, theirs), entry),
        }  # fmt: skip
    found["mean"] = {
        who: {
            key: _mean([each[who][key] for each in found["policies"].values() if each[who]])
            for key in (*BAR, "per_job")
        }
        for who in ("ours", "theirs")
    }
    for name, options in VARIANTS.items() if sensitivity else ():
        rows = {policy: compare(simulate(log, policy, options), entry) for policy, entry in runs.items()}
        found["sensitivity"][name] = rows
    return found


def _mean(errors: Sequence[float]) -> float:
    return float(np.abs(errors).mean()) if len(errors) else float("nan")


def _as_result(log: Workload, entry: Mapping[str, Any]) -> FleetResult:
    """Recorded completion times in the form that ours have, to be compared in the same way."""
    end = log.submit_ns + np.rint(np.asarray(entry["jct_list"]) * 1e9).astype(np.int64)
    return FleetResult.simple(log, policy="", cluster="", gpus=32, start_ns=log.submit_ns, end_ns=end)


def text(found: Mapping[str, Any]) -> str:
    """Tables for people."""
    rows = []
    for policy, each in found["policies"].items():
        real, ours, theirs = each["recorded"], each["ours"], each["theirs"] or {}
        errors = [percent(x[key], signed=True) if x else "–" for key in BAR for x in (ours, theirs)]
        rows.append([
            policy, f"{real['jct_s']:,.0f}", f"{ours['jct_s']:,.0f}", *errors[:2],
            f"{real['makespan_s']:,.0f} ({real['makespan_field_s']:,.0f})", f"{ours['makespan_s']:,.0f}", *errors[2:],
            percent(ours["per_job"]), f"{ours['seconds']:.1f}",
        ])  # fmt: skip
    mean = found["mean"]
    rows.append([
        "mean absolute", "", "", percent(mean["ours"]["jct"]), percent(mean["theirs"]["jct"]), "", "",
        percent(mean["ours"]["makespan"]), percent(mean["theirs"]["makespan"]), percent(mean["ours"]["per_job"]), "",
    ])  # fmt: skip
    header = (
        "policy", "mean JCT s, real", "ours", "error", "their simulator", "makespan s, real (as recorded)", "ours",
        "error", "their simulator", "median error per job", "CPU s",
    )  # fmt: skip
    parts = [
        table(header, rows),
        f"Asked: mean absolute error of JCT {BAR['jct']:.0%}, of makespan {BAR['makespan']:.0%}.",
    ]
    if found["sensitivity"]:
        lines = []
        for name, each in found["sensitivity"].items():
            signed = [" / ".join(percent(x[key], signed=True) for x in each.values()) for key in BAR]
            means = [percent(_mean([x[key] for x in each.values()])) for key in (*BAR, "per_job")]
            lines.append([name, signed[0], means[0], signed[1], means[1], means[2]])
        order = " / ".join(found["policies"])
        parts += [
            f"One rule changed at a time; errors in the order {order}.",
            table(("variant", "JCT", "mean", "makespan", "mean", "median per job"), lines),
        ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    shared = Path(os.environ.get("FORETRACE_SHARED_DATA", ROOT.parent / "shared" / "data"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared-data", type=Path, default=shared)
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--sensitivity", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        found = run(given.shared_data / "fleet" / "shockwave", given.results, given.sensitivity)
    except ForetraceError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if given.json else text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
