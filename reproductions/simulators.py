"""Simulators of others, re-created for their known answers and kept apart from the engine.

Each plays a trace by the rules of the published program, quirks included, so that its published figures come out.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from foretrace.cli.fleet import tell_origin
from foretrace.errors import ForetraceError
from foretrace.files import write_text
from foretrace.fleet.result import FleetResult, per_job
from foretrace.fleet.scene import cluster_of, measured, workload_of
from foretrace.fleet.workload import Workload
from foretrace.report import fleet as report
from foretrace.report.jsonout import dumps
from foretrace.report.terminal import PIPE_WIDTH, Terminal, render
from reproductions import parser_of
from tables import percent, shared_traces, table


class Simulator(Protocol):
    """One re-created simulator."""

    name: str
    policies: tuple[str, ...]
    default_cluster: str

    def run(
        self, workload: Workload, *, policy: str, cluster: str, seed: int, options: Mapping[str, str]
    ) -> FleetResult:
        """Play the workload; raises ForetraceError for a policy, cluster or option that it does not know."""
        ...


@dataclass(frozen=True, kw_only=True)
class Known:
    """A published mean completion time. Linear programs depend on the vertex that a solver returns: `near` says so."""

    trace: str  # below the folder of fleet data
    policy: str
    cluster: str
    mean_jct_s: float
    near: str = "exact"
    jobs: str = ""  # the jobs measured
    options: Mapping[str, str] = field(default_factory=dict)
    slow: bool = False  # left out by --quick
    shipped: str = ""  # completion times of every job, beside


def answers(simulator: Simulator, known: Sequence[Known], folder: Path, *, quick: bool = False) -> list[dict[str, Any]]:
    """One row per known answer: published beside ours."""
    found = []
    for each in known:
        if quick and each.slow:
            continue
        workload = workload_of(str(folder / each.trace), simulator.name)
        begin = time.process_time()
        result = simulator.run(workload, policy=each.policy, cluster=each.cluster, seed=0, options=each.options)
        seconds = time.process_time() - begin
        only = measured(each.jobs, workload)
        jct = result.jct_s if only is None else result.jct_s[only]
        row = {
            "simulator": simulator.name, "policy": each.policy, "trace": Path(each.trace).name, "jobs": len(jct),
            "published_s": each.mean_jct_s, "ours_s": float(np.mean(jct)), "near": each.near, "cpu_s": seconds,
        }  # fmt: skip
        if each.shipped:
            with (folder / each.shipped).open() as lines:
                theirs = {one["job_id"]: float(one["JCT"]) for one in csv.DictReader(lines)}
            ours = zip(workload.job, result.jct_s.tolist(), strict=True)
            row["jobs_alike"] = sum(theirs.get(str(job)) == value for job, value in ours)
        found.append(row)
    return found


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table."""
    return table(
        ("simulator", "policy", "trace", "jobs", "published mean JCT s", "ours", "off %", "asked", "jobs alike", "s"),
        [
            (
                row["simulator"], row["policy"], row["trace"], f"{row['jobs']:,}", f"{row['published_s']:.10g}",
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


def main(simulator: Simulator, known: Sequence[Known], given: Sequence[str], *, about: str) -> int:
    """`play TRACE ...` plays any log; nothing compares all known answers."""
    if given[:1] == ["play"]:
        return play(simulator, given[1:])
    parser = parser_of(simulator.name, about)
    parser.add_argument("--quick", action="store_true", help="leave out what takes long")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    traces = shared_traces()
    if traces is None:
        raise ForetraceError("the traces of the published simulator are not here; set FORETRACE_SHARED_DATA.")
    rows = answers(simulator, known, traces.parent / "fleet", quick=options.quick)
    print(json.dumps(rows, indent=1) if options.json else text(rows))
    return 0


def play(simulator: Simulator, given: Sequence[str]) -> int:
    """Play a log by the simulator's rules, and answer as `foretrace fleet run` does."""
    parser = parser_of(f"{simulator.name} play", f"Play a log of jobs by the rules of {simulator.name}'s simulator.")
    parser.add_argument("trace", help="a log of jobs (docs/fleet-formats.md)")
    parser.add_argument("--format", default=simulator.name)
    parser.add_argument("--salvage", action="store_true", help="leave out rows that cannot be read")
    parser.add_argument("--policy", required=True, help=", ".join(simulator.policies))
    parser.add_argument("--cluster", default=simulator.default_cluster)
    parser.add_argument("--jobs", type=int, default=0, help="only the first N jobs; 0: all")
    parser.add_argument("--measure", default="", metavar="A-B", help="means over these jobs only, by number")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the simulator; repeat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="write a row per job, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    workload = workload_of(options.trace, options.format, salvage=options.salvage)
    if options.jobs < 0:
        raise ForetraceError(f"--jobs {options.jobs} takes none; give a number above 0, or leave it out for all.")
    if 0 < options.jobs < len(workload):
        workload = workload.take(np.arange(options.jobs))
    result = simulator.run(
        workload, policy=options.policy, cluster=options.cluster, seed=options.seed, options=_pairs(options.option)
    )
    tell_origin(result)
    only = measured(options.measure, result.workload)
    view = report.run(result, cluster_of(str(result.gpus)), path=options.trace, only=only, next_="")
    if options.out is not None:
        write_text(options.out, per_job(result, only))
    print(dumps(view) if options.json else render(view, Terminal(width=PIPE_WIDTH)), end="\n" if options.json else "")
    return 0


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in texts:
        key, equals, value = each.partition("=")
        if not equals or not key or key in found:
            raise ForetraceError(f"--option {each}: write each key=value once, as in profiles=throughputs.json.")
        found[key] = value
    return found
