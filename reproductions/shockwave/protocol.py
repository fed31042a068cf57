"""How far fleet simulation is from real hardware: the Shockwave study's runs on 32 GPUs, and its own simulator.

    python -m reproductions shockwave [--shared-data PATH] [--results FILE] [--choose] [--sensitivity] [--json]
    python -m reproductions shockwave play 120.trace --policy max_min_fairness

Every policy with a physical run among the recorded results is predicted: the median of a dozen runs with arrivals, run
times and restarts drawn anew, and a range that covers a slow run (`Shockwave.predict`). The run time of each job alone
comes from recorded results of the *other* policies. Two rules are not the published ones, when a round is decided
and how long a restart takes: `--choose` chooses them by leaving one policy out. Makespan is last (arrival + JCT) less
first arrival, also for the recorded runs, whose own number is shown beside it.

Each run reports the GPU-hours that its jobs held. Normal runs have 2 % more than the jobs take alone; a run with over
6 % more was slow for reasons that no rule knows. Beside each error stands the one with jobs that are slower by what the
run itself reports: attribution, not prediction.

`--results` names other recorded results in the same form, of policies that were held back; run times still come from
those beside the job list. Policies that the simulator does not have are named and passed over. `--sensitivity` changes
one rule at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.formats import read
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import Workload
from reproductions import parser_of, shared_data
from reproductions.results import simple
from reproductions.shockwave.profile import rows_of
from reproductions.shockwave.simulator import RUNS, Prediction, Shockwave, compare, recorded_runs
from reproductions.simulators import play
from tables import percent, table

LOG = "120_0.2_5_100_40_25_0,0.5,0.5_0.6,0.3,0.09,0.01_multigpu_dynamic.trace"
RUN = "tacc_32gpus_comparison"
BAR = {"jct": 0.03, "makespan": 0.03, "per_job_log": 0.08}  # over normal runs: mean absolute errors; root mean square
NORMAL = 1.02  # GPU-hours that normal runs report over those of the jobs alone
SLOW = 1.06  # from which on a run was slow
GPUS = 32
RESTARTS = tuple(range(16, 31, 2))  # seconds that are tried
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "as shipped": {},
    "as published: at the boundary, restart 20 s": {"decide": "boundary", "restart_s": "20"},
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
    "rounds decided at the boundary": {"decide": "boundary"},
    "AlloX with alpha = 1": {"alpha": "1"},
}


def simulate(log: Workload, policy: str, options: Mapping[str, str]) -> FleetResult:
    """One policy on the study's cluster."""
    return Shockwave().run(log, policy=policy, cluster=Shockwave.default_cluster, seed=0, options=options)


def physical(recorded: Mapping[str, Any], log: Workload) -> tuple[dict[str, Any], list[str]]:
    """Real runs of this job list by policy, and what is passed over, with the reason."""
    runs, passed = dict[str, Any](), list[str]()
    for key, entry in sorted(recorded.items(), key=lambda item: not item[0].startswith(RUN)):
        _, policy, kind = key.split("|")
        if kind != "physical" or policy in runs:
            continue
        if policy not in Shockwave.policies:
            passed.append(f"{policy} (the simulator has no such policy)")
        elif len(entry["jct_list"]) != len(log):
            passed.append(f"{policy} ({len(entry['jct_list']):,} jobs, the list has {len(log):,})")
        else:
            runs[policy] = entry
    return runs, passed


def measured(log: Workload, entry: Mapping[str, Any]) -> dict[str, float | None]:
    """What a real run says of itself: seconds, and GPU-hours (None where it does not say)."""
    took, submit = np.asarray(entry["jct_list"], float)[rows_of(log)], log.submit_ns * 1e-9
    makespan = float((submit + took).max() - submit.min())
    used = entry.get("cluster_util")
    return {
        "jct_s": float(took.mean()), "makespan_s": makespan, "makespan_field_s": float(entry.get("makespan", makespan)),
        "gpu_h": None if used is None else float(used) * GPUS * makespan / 3600,
    }  # fmt: skip


def slowness(result: FleetResult, real: Mapping[str, float | None]) -> float | None:
    """GPU-hours that a real run reports over those that its jobs take alone; None where it does not say."""
    alone = float(((result.held_ns - result.dead_ns) * result.workload.gpus).sum()) / 3.6e12
    return None if real["gpu_h"] is None else real["gpu_h"] / alone


def against(said: Prediction, log: Workload, real: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of a prediction, and whether its ranges hold the run."""
    took = np.asarray(entry["jct_list"], float)[rows_of(log)]
    return {
        "jct_s": said.mean_jct_s.mid, "makespan_s": said.makespan_s.mid,
        "jct": said.mean_jct_s.mid / real["jct_s"] - 1, "makespan": said.makespan_s.mid / real["makespan_s"] - 1,
        "per_job": float(np.median(np.abs(said.jct_s / took - 1))),
        "per_job_log": float(np.sqrt(np.mean(np.log(said.jct_s / took) ** 2))),
        "jct_range": [said.mean_jct_s.low, said.mean_jct_s.high],
        "makespan_range": [said.makespan_s.low, said.makespan_s.high],
        "covered": [said.mean_jct_s.low <= real["jct_s"] <= said.mean_jct_s.high,
                    said.makespan_s.low <= real["makespan_s"] <= said.makespan_s.high],
    }  # fmt: skip


def run(folder: Path, results: Path | None, sensitivity: bool, choose: bool = False) -> dict[str, Any]:
    """Errors by policy for ours and for the study's simulator, and by changed rule."""
    log, recorded = read(folder / LOG), recorded_runs(results or folder)
    runs, passed = physical(recorded, log)
    if not runs:
        why = f" ({'; '.join(passed)})" if passed else ""
        raise ForetraceError(
            f"{results or folder}: no entry RUN|POLICY|physical can be compared{why}; name results of the study."
        )
    found: dict[str, Any] = {"policies": {}, "passed over": passed, "sensitivity": {}, "chosen": []}
    for policy, entry in runs.items():
        began = time.perf_counter()
        single = simulate(log, policy, {})
        spent = time.perf_counter() - began
        said = Shockwave().predict(log, policy=policy, cluster=Shockwave.default_cluster, seed=0, options={}, runs=RUNS)
        real = measured(log, entry)
        ratio = slowness(single, real)
        theirs = recorded.get(f"{RUN}|{policy}|simulation")
        own = None if ratio is None else compare(simulate(log, policy, {"slower": str(ratio / NORMAL)}), entry)
        found["policies"][policy] = {
            "recorded": real | {"gpu_h_over_alone": ratio, "slow": ratio is not None and ratio > SLOW},
            "ours": against(said, log, real, entry)
            | {"seconds": spent, "run times": single.facts["profile"], "one run": compare(single, entry)},
            "ours with its GPU-hours": own,
            "theirs": None if theirs is None else compare(_as_result(log, theirs), entry),
        }
    found["mean"] = {
        which: {
            who: {key: _mean([each[who][key] for each in kept if each[who]], key) for key in (*BAR, "per_job")}
            for who in ("ours", "ours with its GPU-hours", "theirs")
        }
        for which, kept in (
            ("normal runs", [each for each in found["policies"].values() if not each["recorded"]["slow"]]),
            ("all runs", list(found["policies"].values())),
        )
    }
    if choose:
        found["chosen"] = choices(log, runs)
    for name, options in VARIANTS.items() if sensitivity else ():
        rows = {policy: compare(simulate(log, policy, options), entry) for policy, entry in runs.items()}
        found["sensitivity"][name] = rows
    return found


def choices(log: Workload, runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """When rounds are decided and how long a restart takes, chosen without one policy and tried on it; and on none.

    Deciding by the error per job (root mean square of logarithms, at the best restart), then the restart by the mean
    completion. A slow run enters with jobs that are slower by the GPU-hours that it reports.
    """
    table: dict[tuple[str, int], dict[str, dict[str, float]]] = {}
    for decide in ("boundary", "ahead"):
        for restart in RESTARTS:
            options = {"decide": decide, "restart_s": str(restart)}
            for policy, entry in runs.items():
                single = simulate(log, policy, options)
                ratio = slowness(single, measured(log, entry))
                plain = compare(single, entry)
                if ratio is not None and ratio > SLOW:
                    single = simulate(log, policy, options | {"slower": str(ratio / NORMAL)})
                table.setdefault((decide, restart), {})[policy] = {
                    "fit": compare(single, entry)["per_job_log"], "jct": compare(single, entry)["jct"],
                    "plain": plain["jct"], "plain makespan": plain["makespan"],
                }  # fmt: skip
    found = []
    for out in (*runs, ""):
        fitted = [policy for policy in runs if policy != out]
        if not fitted:
            continue

        def mean(at: tuple[str, int], key: str, fitted: Sequence[str] = fitted) -> float:
            return float(np.mean([abs(table[at][policy][key]) for policy in fitted]))

        decide = min(("boundary", "ahead"), key=lambda d: min(mean((d, r), "fit") for r in RESTARTS))
        restart = min(RESTARTS, key=lambda r: mean((decide, r), "jct"))
        found.append({"left out": out, "decide": decide, "restart_s": restart,
                      "per_job_log": {d: min(mean((d, r), "fit") for r in RESTARTS) for d in ("boundary", "ahead")}}
                     | ({key: table[decide, restart][out][f"plain{' makespan' if key == 'makespan' else ''}"]
                         for key in ("jct", "makespan")} if out else {}))  # fmt: skip
    return found


def _mean(errors: Sequence[float], key: str) -> float | None:
    """Mean absolute error, root mean square for `per_job_log`; None of none."""
    if not errors:
        return None
    return float(np.sqrt(np.mean(np.square(errors))) if key == "per_job_log" else np.abs(errors).mean())


def _as_result(log: Workload, entry: Mapping[str, Any]) -> FleetResult:
    """Recorded completion times in the form that ours have, to be compared in the same way."""
    end = log.submit_ns + np.rint(np.asarray(entry["jct_list"]) * 1e9).astype(np.int64)
    return simple(log, policy="", cluster="", gpus=32, start_ns=log.submit_ns, end_ns=end)


def text(found: Mapping[str, Any]) -> str:
    """Tables for people."""
    own, rows = "ours with its GPU-hours", []
    for policy, each in found["policies"].items():
        real, ours = each["recorded"], each["ours"]
        rows.append([
            policy + (" (a slow run)" if real["slow"] else ""),
            "–" if real["gpu_h"] is None else f"{real['gpu_h']:.1f} ({real['gpu_h_over_alone'] - 1:+.1%})",
            *(cell for key in ("jct", "makespan") for cell in (
                f"{real[f'{key}_s']:,.0f}", f"{ours[f'{key}_s']:,.0f}",
                " … ".join(f"{edge:,.0f}" for edge in ours[f"{key}_range"]),
                *(percent(each[who][key], signed=True) if each[who] else "–" for who in ("ours", own, "theirs")))),
            *(percent(each[who]["per_job_log"]) if each[who] else "–" for who in ("ours", "theirs")),
        ])  # fmt: skip
    for which, mean in found["mean"].items():
        rows.append([
            f"{which}, mean absolute", "",
            *(cell for key in ("jct", "makespan") for cell in (
                "", "", "", *(_percent(mean[who][key]) for who in ("ours", own, "theirs")))),
            *(_percent(mean[who]["per_job_log"]) for who in ("ours", "theirs")),
        ])  # fmt: skip
    header = (
        "policy", "GPU-hours, real (over the jobs alone)",
        *(f"{key} s, {cell}" if i < 3 else f"{key} {cell}" for key in ("JCT", "makespan") for i, cell in enumerate(
            ("real", "ours", "80 % range", "error", "with its GPU-hours", "their simulator"))),
        "error per job (log, rms)", "their simulator",
    )  # fmt: skip
    inside = [each["ours"]["covered"] for each in found["policies"].values()]
    parts = [
        table(header, rows),
        f"Asked of normal runs: JCT and makespan {BAR['jct']:.0%}, per job {BAR['per_job_log']:.0%}. Inside the range: "
        f"JCT of {sum(jct for jct, _ in inside)} of {len(inside)} runs, makespan of {sum(m for _, m in inside)}. "
        "Makespan as the runs recorded it: "
        + ", ".join(f"{k} {each['recorded']['makespan_field_s']:,.0f}" for k, each in found["policies"].items())
        + ".",
    ]
    if found["passed over"]:
        parts.append(f"Passed over: {'; '.join(found['passed over'])}.")
    if found["chosen"]:
        lines = [
            [each["left out"] or "none (as shipped)", each["decide"], str(each["restart_s"]),
             *(percent(each["per_job_log"][d]) for d in ("boundary", "ahead")),
             *(percent(each[key], signed=True) if key in each else "–" for key in ("jct", "makespan"))]
            for each in found["chosen"]
        ]  # fmt: skip
        parts += [
            "Chosen without one policy, and the error on it (one run each). The slow run enters the choice with jobs "
            "that are slower by the GPU-hours that it reports.",
            table(("left out", "decided", "restart s", "per job at the boundary", "ahead", "JCT error",
                   "makespan error"), lines),
        ]  # fmt: skip
    if found["sensitivity"]:
        lines = []
        for name, each in found["sensitivity"].items():
            signed = [" / ".join(percent(x[key], signed=True) for x in each.values()) for key in ("jct", "makespan")]
            means = [_percent(_mean([x[key] for x in each.values()], key)) for key in (*BAR, "per_job")]
            lines.append([name, signed[0], means[0], signed[1], *means[1:]])
        order = " / ".join(found["policies"])
        parts += [
            f"One rule changed at a time, one run each; errors in the order {order}.",
            table(("variant", "JCT", "mean", "makespan", "mean", "per job (log, rms)", "median per job"), lines),
        ]
    return "\n\n".join(parts)


def _percent(value: float | None) -> str:
    return "–" if value is None else percent(value)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["play"]:
        return play(Shockwave(), arguments[1:])
    shared = shared_data()
    parser = parser_of("shockwave", __doc__)
    parser.add_argument("--shared-data", type=Path, default=shared)
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--choose", action="store_true", help="choose the two rules again, leaving one policy out")
    parser.add_argument("--sensitivity", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = run(given.shared_data / "fleet" / "shockwave", given.results, given.sensitivity, given.choose)
    print(json.dumps(found, indent=1) if given.json else text(found))
    return 0
