"""Run every benchmark and write docs/performance.md.

    python benchmarks/run.py [--hta-python PATH] [read] [build] [engines] [ranks] [estimate] [predictors] [fleet] ...

Without names every section is made anew; a named one leaves the others as they are. Peers are measured in the same
run on the same machine, so the ratios mean more than the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import before
import build
import engine
import estimate
import fleet
import predictors
import ranks
import read
import soundness
import startup
from foretrace.files import write_text
from tables import ROOT, load, machine, shared_traces, table, today, update

PAGE = ROOT / "docs" / "performance.md"
HEAD = """
# How fast it is

Written by `python benchmarks/run.py` (`make bench`). CPU time of one process unless a row says otherwise, best of
several runs; peers run beside it in the same run, so look at the ratios first.
"""


def made() -> str:
    return f"*{today()}, {machine()}; load averages {load()}.*\n\n"


def mark(met: bool | None) -> str:
    return {True: "met", False: "**missed**", None: ""}[met]


def read_section(hta_python: str) -> str:
    """Reading, against HolisticTraceAnalysis and a plain loop."""
    traces = shared_traces()
    own = ROOT / "tests" / "data" / "recommender.json.gz"
    recording = traces / "hta" / "df_index_resolver.json.gz" if traces else own
    rows = read.measure([recording], hta_python)
    figures = read.verdict(rows)
    out = made() + f"`{recording.name}`, {rows[0].events:,} events in the file.\n\n"
    out += table(
        ("reader", "rows kept", "CPU s", "events / CPU-s", "peak memory MB"),
        [
            (row.reader, f"{row.rows:,}", f"{row.seconds:.3f}", f"{row.rate:,.0f}", f"{row.peak_bytes / 1e6:,.0f}")
            for row in rows
        ],
    )
    if "times HolisticTraceAnalysis" not in figures:
        out += "\n\nHolisticTraceAnalysis was not installed beside this run."
    verdicts = []
    for what, value in figures.items():
        goal = read.TARGETS.get(what)
        below = what.startswith("peak")
        met = None if goal is None or traces is None else (value <= goal if below else value >= goal)
        wanted = "" if goal is None else f"{'<' if below else '≥'} {goal:,}"
        verdicts.append((what, f"{value:,.0f}" if value >= 1000 else f"{value:.2f}", wanted, mark(met)))
    return out + "\n\n" + table(("figure", "reached", "target", ""), verdicts)


def build_section(_: str) -> str:
    """From recordings in memory to task graphs."""
    rows = build.measure(build.recordings())
    largest = max(rows, key=lambda row: row.tasks)
    return made() + table(
        ("recording", "events kept", "tasks", "edges", "CPU ms", "tasks / CPU-s", "target", ""),
        [
            (
                row.recording[:44], f"{row.events:,}", f"{row.tasks:,}", f"{row.edges:,}",
                f"{1e3 * row.seconds:.0f}", f"{row.rate:,.0f}",
                f"≥ {build.TARGET:,}" if row is largest and shared_traces() else "",
                mark(row.rate >= build.TARGET if row is largest and shared_traces() else None),
            )
            for row in rows
        ],
    )  # fmt: skip


def engines_section(_: str) -> str:
    """Replay, variants, schedule, sensitivity, each beside its plain-Python twin and networkx."""
    return made() + table(
        ("what", "CPU ms", "rate", "target", ""),
        [
            (
                row.what, f"{1e3 * row.seconds:.3g}" if row.unit != "times" else "",
                f"{row.rate:,.3g} {row.unit}" if row.rate is not None and row.rate < 1e4
                else f"{row.rate:,.0f} {row.unit}" if row.rate is not None else "",
                "" if row.target is None else f"< {row.target:g} s" if row.rate is None else f"≥ {row.target:,.0f}",
                mark(row.met),
            )
            for row in engine.measure()
        ],
    )  # fmt: skip


def soundness_section(_: str) -> str:
    """What verifying every graph takes of a what-if."""
    intro = "Every graph is verified before it is replayed; its share of a what-if with interval and assumptions.\n\n"
    rows = soundness.measure(build.recordings())
    worst = max(rows, key=lambda row: row.share)
    return made() + intro + table(
        ("recording, technique", "tasks", "CPU ms", "checks", "CPU ms in them", "share", "target", ""),
        [
            (
                f"{row.recording[:30]}, {row.technique}", f"{row.tasks:,}", f"{1e3 * row.seconds:.0f}",
                str(row.checks), f"{1e3 * row.checking:.2f}", f"{row.share:.1%}",
                f"≤ {soundness.TARGET:.0%}" if row is worst else "",
                mark(row.share <= soundness.TARGET if row is worst else None),
            )
            for row in rows
        ],
    )  # fmt: skip


def ranks_section(_: str) -> str:
    """Global graphs, sets of ranks, and many ranks out of a few."""
    found = ranks.measure(ranks.eight_ranks())
    out = made() + (
        "Tasks per CPU-second. *Plain replayer*: the published algorithm (Kahn with a clock and a sorted queue per "
        "device; dPRO, MLSys 2022) in plain Python, run beside ours on the same graphs, to the same nanosecond; on the "
        "last column's graphs links decide their order as they run, as in the schedule engine. dPRO's own replayer was "
        "measured at 26,000 to 72,000 nodes per CPU-second on graphs of 3,200 to 102,400 nodes, on another machine.\n\n"
    )
    out += table(
        ("graph", "tasks", "edges", "replay", "schedule", "plain replayer", "replay / plain", "plain, deciding"),
        [
            (
                row.graph, f"{row.tasks:,}", f"{row.edges:,}", f"{row.replay:,.0f}", f"{row.schedule:,.0f}",
                f"{row.plain:,.0f}", f"{row.times:,.0f}", f"{row.plain_decides:,.0f}",
            )
            for row in found.replay
        ],
    )  # fmt: skip
    if found.prediction is None:
        return out + "\n\nThe shared recordings were not there: nothing was read or predicted."
    tasks, events = found.prediction.tasks, found.reading[0].events
    out += (
        f"\n\nEight recorded ranks whose step is repeated until each has {tasks:,} tasks ({events:,} events), read "
        "and built into graphs; wall time.\n\n"
    )
    out += table(
        ("where", "s", "events / s"),
        [(row.where, f"{row.seconds:.2f}", f"{row.events / row.seconds:,.0f}") for row in found.reading],
    )
    one = found.prediction
    out += (
        f"\n\n{one.ranks:,} ranks predicted from these {one.recorded_ranks}, from files to the times of every rank, in "
        "a process of its own. What else runs there (see the load above) lengthens wall time, hardly CPU time.\n\n"
    )
    rows = [(f"{what}, wall", f"{seconds:.1f} s", "", "") for what, seconds in one.stages.items()]
    rows += [
        ("all, from start to answer, wall", f"{one.seconds:.1f} s", f"< {ranks.TARGET_S:g} s",
         mark(one.seconds < ranks.TARGET_S)),
        ("CPU time of all processes", f"{one.cpu_s:.1f} s", "", ""),
        ("peak memory", f"{one.peak_bytes / 1e9:.2f} GB", f"< {ranks.TARGET_BYTES / 1e9:g} GB",
         mark(one.peak_bytes < ranks.TARGET_BYTES)),
    ]  # fmt: skip
    return out + table(("stage", "reached", "target", ""), rows)


def startup_section(_: str) -> str:
    """What a user waits for."""
    return made() + (
        "*First*: no compiled loop in numba's cache yet, as after an installation. *After*: the median of five "
        "runs. Wall "
        "time as the user waits; targets are held against CPU time.\n\n"
    ) + table(
        ("command", "first s", "first, CPU s", "target", "after s", "after, CPU s", "target", ""),
        [
            (
                row.what, f"{row.first_wall_s:.2f}", f"{row.first_cpu_s:.2f}",
                "" if row.first_target is None else f"< {row.first_target:g}",
                f"{row.wall_s:.3f}", f"{row.cpu_s:.3f}", "" if row.target is None else f"< {row.target:g}",
                mark(row.met if row.target is not None else None),
            )
            for row in startup.measure()
        ],
    )  # fmt: skip


FIRST = (
    "\nThe first time, with nothing kept, models of `transformers` take more than the 3.5 CPU-s asked for "
    "(2026-11-29, AVX-512 Xeon, quiet): bert 4.7 (5.5 before), gpt2 5.3 (6.4), llama 6.7 (7.6); a second was "
    "Python's search for garbage when it ends. Of bert's, loading PyTorch takes 1.1, loading transformers 2.1 (of "
    "it PyTorch's compiler about 0.7, reading every model's files for their names 0.3 to 0.4, scipy 0.25), "
    "loading this package, numba and the command line 0.4, capture 0.5 and the rest 0.4. A stand-in that keeps "
    "the compiler unloaded saves 0.3 for bert and nothing for gpt2 and llama.\n"
)


def estimate_section(_: str) -> str:
    """A model alone: the whole command, from the shell."""
    return made() + (
        "`foretrace estimate`, from the shell to the answer, caches warm: the median of five runs, each a process of "
        f"its own. The largest is held against {estimate.TARGET_S:g} s and {estimate.TARGET_BYTES / 1e9:g} GB.\n\n"
    ) + table(
        ("command", "operators", "parameters", "wall s", "CPU s", "peak GB", ""),
        [
            (
                row.command, f"{row.operators:,}", f"{row.parameters / 1e6:,.0f} M", f"{row.wall_s:.2f}",
                f"{row.cpu_s:.2f}", f"{row.peak_bytes / 1e9:.2f}", mark(row.met),
            )
            for row in estimate.measure()
        ],
    ) + FIRST  # fmt: skip


def predictors_section(_: str) -> str:
    """Learned cost models, one core."""
    found = predictors.measure(1_000_000)
    names = {
        "products": "float32 products: features, nets and laws", "vector": "float32 row operators: the same",
        "products_nets_only": "nets of products alone", "products_nets_torch": "the same nets in PyTorch",
    }  # fmt: skip
    return (
        f"*{today()}, {found['machine']}.*\n\n"
        + (
            "Predictions per second of the thread's CPU time, batches of a million, numpy alone but for the last row; "
            f"target 1,000,000. The nets are {found['nets_against_torch']} times as fast as in PyTorch, in turns. "
            "16-bit products are in [accuracy/gemm.md](accuracy/gemm.md).\n\n"
        )
        + table(("what", "predictions / s"), [(text, f"{found[key]:,}") for key, text in names.items()])
    )


def fleet_section(_: str) -> str:
    """The fleet engine: jobs per second, and growth."""
    found = fleet.measure()
    parts = {
        "simple": f"every placement alike, {found['gpus']:,} GPUs",
        "by_placement": f"by placement, {found['gpus']:,} GPUs",
        "busy": f"every placement alike, {found['busy_gpus']:,} GPUs",
        "busy_by_placement": f"by placement, {found['busy_gpus']:,} GPUs",
    }
    targets = {"simple": 20_000, "by_placement": 1_000}
    rows = [
        (
            words, row["policy"], f"{row['jobs_per_s']:,.0f}", f"{row['events']:,}", f"{row['mean_jct_h']:.3g}",
            f"{row['utilisation']:.1%}", mark(row["jobs_per_s"] >= targets[part]) if part in targets else "",
        )
        for part, words in parts.items() for row in found[part]
    ]  # fmt: skip
    growth = [
        (
            row["policy"], f"{row['jobs']:,}", f"{row['gpus']:,}", f"{row['cpu_s']:.2f}", f"{row['jobs_per_s']:,.0f}",
            mark(row["cpu_s"] < 300) if row["jobs"] == 1_000_000 else "",
        )
        for row in found["growth"]
    ]  # fmt: skip
    write_text(PAGE.with_name("fleet-growth.svg"), fleet.growth_svg(found["growth"]))
    return (
        f"*{today()}, {found['machine']}.*\n\n{found['log']}; CPU seconds of setting up, playing and summing up, "
        "compiling apart. Targets on the first two parts: 20,000 and 1,000 jobs/s; a million jobs on 100,000 GPUs in "
        f"300 s and 4 GB (peak of this whole run: {found['peak_gb']:.2f} GB). A plain loop with a heap that plays FIFO "
        f"and counts GPUs, nowhere in particular: {found['plain_fifo_jobs_per_s']:,.0f} jobs/s. Published simulators: "
        "6 to 540 jobs/s (their own logs and machines).\n\n"
        + table(("speeds and cluster", "policy", "jobs/s", "events", "mean JCT h", "in use", ""), rows)
        + "\n\nGenerated jobs on a tenth as many GPUs, nine tenths of them asked for; `dally-manual` with speeds by "
        "placement:\n\n"
        + table(("policy", "jobs", "GPUs", "CPU s", "jobs/s", ""), growth)
        + "\n\n![CPU time against the number of jobs](fleet-growth.svg)\n"
    )


def before_section(_: str) -> str:
    """Engines against those of an earlier commit."""
    intro = (
        f"The same cases with the package of commit {before.BEFORE} and with this one, in turns, each turn a process "
        "of its own; least CPU time. `python benchmarks/before.py`.\n\n"
    )
    return made() + intro + table(("case", "before", "now", "times", "answers"), before.measure(list(before.PARTS)))


SECTIONS: dict[str, tuple[str, Callable[[str], str]]] = {
    "read": ("Reading", read_section),
    "build": ("Building the graph", build_section),
    "engines": ("Engines", engines_section),
    "soundness": ("Verifying graphs", soundness_section),
    "ranks": ("Many ranks", ranks_section),
    "estimate": ("A model alone", estimate_section),
    "predictors": ("Predictors", predictors_section),
    "fleet": ("Fleet", fleet_section),
    "startup": ("Command line", startup_section),
    "before": ("Against the engines before", before_section),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--hta-python", default=sys.executable, help="a Python that has HolisticTraceAnalysis")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sections if name not in SECTIONS]:
        parser.error(f"there is no section {' or '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    for name in arguments.sections or SECTIONS:
        title, section = SECTIONS[name]
        print(f"{name} ...", file=sys.stderr)
        update(PAGE, HEAD, {title: section(arguments.hta_python)}, [each[0] for each in SECTIONS.values()])
    print(f"wrote {Path(PAGE).relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
