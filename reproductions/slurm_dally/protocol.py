"""Delay timers, strict consolidation and spreading on a real Slurm, as the simulator said it would be.

python -m reproductions slurm_dally [--choose] [--run] [--repeats N] [--together N] [--write README.md] [--json]

--choose simulates all loads and says which two are played. --run plays what is not kept, three minutes to ten a run,
in real time. Without either the kept runs are simulated again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row, export_lines
from foretrace.experiment.statistics import Arm, Ratio
from foretrace.experiment.trial import TriedPrediction, changed, figured
from foretrace.files import write_text
from foretrace.fleet.rig import against
from foretrace.fleet.rig.cluster import private
from foretrace.fleet.rig.play import play, slurm_setup, switches_of
from reproductions import ROOT, parser_of
from reproductions.slurm.cells import kept
from reproductions.slurm.runs import compared as simulated
from reproductions.slurm.runs import keep, ran_of, stored
from reproductions.slurm_dally import study
from reproductions.slurm_dally.study import ARMS, SETUP, Level, Outcome
from reproductions.systems import put
from tables import machine, table, today

HERE = Path(__file__).parent
ROWS = ROOT / "benchmarks" / "data" / "slurm_switches.jsonl"
RUNS, LEVELS, SAID = HERE / "runs.jsonl.gz", HERE / "levels.json", HERE / "predictions.json"
PAIRS = (("timers", "strict"), ("timers", "spread"), ("spread", "strict"))
_ONCE = threading.Lock()


class Row_(NamedTuple):
    """One arm at one load: what was simulated before, the runs, and one simulation of each run."""

    level: str
    load: float
    seed: int
    arm: str
    jobs: int
    said: list[Outcome]
    ran: list[Outcome]
    errors: against.RigErrors
    repeats: against.RigErrors | None


def main(given: Sequence[str]) -> int:
    parser = parser_of("slurm_dally", __doc__)
    parser.add_argument("--choose", action="store_true", help="simulate all loads again (two minutes)")
    parser.add_argument("--run", action="store_true", help="play what is not kept yet, in real time")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm at each load")
    parser.add_argument("--together", type=int, default=5, help="private Slurms at the same time")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where runs are kept")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the page and the ledger's rows")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    if options.choose:
        write_text(LEVELS, msgspec.json.encode([[each.load, each.jct_s.tolist()] for each in study.levels()]).decode())
    scanned = [Level(load, np.array(jct_s)) for load, jct_s in msgspec.json.decode(LEVELS.read_bytes())]
    if options.choose:
        print(_scan(scanned))
    if options.run:
        _play(study.chosen(scanned), options.repeats, options.together, options.runs)
    have = stored(options.runs)
    if not have:
        raise ForetraceError(f"no runs are kept in {options.runs}; play some with --run.")
    found = rows(have)
    if options.write is not None:
        put(options.write, _page(scanned, found))
        write_text(ROWS, export_lines(ledger(found)))
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if options.json else _section(found))
    return 0


def _play(chosen: dict[str, tuple[float, int]], repeats: int, together: int, path: Path) -> None:
    have = {(each["arm"], each["load"], each["seed"], each["repeat"]) for each in stored(path)}
    predictions(chosen)
    os.nice(-10)  # submissions have to be in time on a machine that does other things, too
    wanted = [
        (level, load, seed, arm, at)
        for at in range(repeats) for level, (load, seed) in chosen.items() for arm in ARMS
        if (arm, load, seed, at) not in have
    ]  # fmt: skip

    def one(each: tuple[str, float, int, str, int]) -> None:
        level, load, seed, arm, at = each
        policy, work = study.policy(arm), study.jobs(load, seed)
        with private(slurm_setup(SETUP, policy)) as slurm:
            ran = play(slurm, work, policy, script=study.script)
        what = {"level": level, "load": load, "seed": seed, "arm": arm, "repeat": at, "workload": kept(work)}
        with _ONCE:
            keep(path, what, ran)
        print(f"load {load:g}, {arm}, run {at + 1}: mean JCT {ran.jct_s.mean():.1f} s", flush=True)

    with ThreadPoolExecutor(together) as pool:
        list(pool.map(one, wanted))


def predictions(chosen: dict[str, tuple[float, int]]) -> dict[str, list[Outcome]]:
    """What was said of each arm of each level before it was played; what is not kept yet is simulated now."""
    said = msgspec.json.decode(SAID.read_bytes(), type=dict[str, list[Outcome]]) if SAID.exists() else {}
    for level, (load, seed) in chosen.items():
        for arm in ARMS:
            if f"{level}/{arm}" not in said:
                said[f"{level}/{arm}"] = study.predicted(study.jobs(load, seed), arm)
                write_text(SAID, msgspec.json.encode(said).decode())
    return said


def rows(have: Sequence[dict[str, Any]]) -> list[Row_]:
    """A row for every arm of every load, in their order."""
    found = []
    said = predictions({})
    for level, load, seed in sorted({(each["level"], each["load"], each["seed"]) for each in have}):
        work = study.jobs(load, seed)
        for arm in ARMS:
            mine = [each for each in have if (each["level"], each["load"], each["seed"], each["arm"]) == (
                level, load, seed, arm)]  # fmt: skip
            if not mine:
                continue
            if kept(work) != mine[0]["workload"]:
                raise ForetraceError(f"the jobs of load {load:g} are not those that were played; play them again.")
            ran, policy = [ran_of(each) for each in mine], study.policy(arm)
            others = [each for each in have if each["level"] != level]
            launches = [study.launch_s(study.jobs(each["load"], each["seed"]), ran_of(each)) for each in others]
            pace = {"launch_s": float(np.mean(launches))} if launches else {}
            found.append(Row_(
                level, load, seed, arm, len(work), said[f"{level}/{arm}"],
                [
                    Outcome.of(work, each.jct_s, each.end_s, np.array([switches_of(on, SETUP) for on in each.nodes]))
                    for each in ran
                ],
                simulated(work, SETUP, policy, ran, [pace] * len(ran), speeds=study.SPEEDS),
                against.between(ran, SETUP, policy),
            ))  # fmt: skip
    return found


def _ratio(values: Sequence[float]) -> Ratio:
    return Ratio(value=float(np.median(values)), low=min(values), high=max(values))


def compared(found: Sequence[Row_]) -> list[tuple[Row_, Row_, TriedPrediction]]:
    """Mean JCT of one arm over another's, as simulated before and as it came, per load."""
    by = {(each.level, each.arm): each for each in found}
    made = []
    for level in dict.fromkeys(each.level for each in found):
        for one, other in PAIRS:
            if (level, one) in by and (level, other) in by:
                top, base = by[level, one], by[level, other]
                said = _ratio([a.jct_s / b.jct_s for a, b in zip(top.said, base.said, strict=True)])
                count = min(len(top.ran), len(base.ran))
                before = [each.jct_s for each in base.ran[:count]]
                arms = [before, [*before[1:], before[0]], [each.jct_s for each in top.ran[:count]]]
                # the next run of the same arm stands for its second copy
                made.append((top, base, changed(said, *(Arm.of(each) for each in arms))))
    return made


def ledger(found: Sequence[Row_]) -> list[Row]:
    """Rows of the ledger: mean JCT of every arm, and of one over another."""
    made = []
    for row in found:
        said = _ratio([each.jct_s for each in row.said])
        made.append(figured((said.value, said.low, said.high), [each.jct_s for each in row.ran]).row(
            f"slurm-switches {row.arm}.mean-jct", model="slurm 22.05 16x4", size=f"load {row.load:g} seed {row.seed}",
            parameters={"policy": ARMS[row.arm], "seed": row.seed, "jobs": row.jobs},
        ))  # fmt: skip
    for top, base, trial in compared(found):
        made.append(trial.row(
            f"slurm-switches {top.arm}.over-{base.arm}", model="slurm 22.05 16x4",
            size=f"load {top.load:g} seed {top.seed}",
            parameters={"arm": ARMS[top.arm], "baseline": ARMS[base.arm], "seed": top.seed, "jobs": top.jobs},
        ))  # fmt: skip
    return made


def _range(values: Sequence[float], form: str) -> str:
    return f"{np.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def _section(found: Sequence[Row_]) -> str:
    """What came, arm by arm, and the ratios."""
    lines = []
    for row in found:
        cells = [f"{row.level}: load {row.load:g}, {row.jobs} jobs", row.arm, str(len(row.ran))]
        for name, form in (("jct_s", ".1f"), ("makespan_s", ".0f"), ("spread", ".0%")):
            cells += [_range([getattr(each, name) for each in many], form) for many in (row.said, row.ran)]
        same = "–" if row.repeats is None else f"{row.repeats.jct_error:.1%}, {row.repeats.switches_equal:.0%}"
        cells += [f"{row.errors.jct_error:.1%}, {row.errors.switches_equal:.0%}", same]
        lines.append(cells)
    titles = ("load", "arm", "runs", "mean JCT s, predicted", "run", "makespan s, predicted", "run",
              "spread, predicted", "run", "JCT error, racks equal", "of runs")  # fmt: skip
    ratios = [
        [
            f"{top.level}: load {top.load:g}",
            f"{top.arm} over {base.arm}",
            _words(trial.predicted),
            _words(trial.measured),
            trial.verdict,
        ]
        for top, base, trial in compared(found)
    ]
    return "\n\n".join([
        table(titles, lines), table(("load", "mean JCT of", "predicted", "run", "verdict"), ratios),
    ])  # fmt: skip


def _words(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f} – {ratio.high:.3f})"


def _scan(scanned: Sequence[Level]) -> str:
    lines = [
        [f"{each.load:g}", *(f"{value:.1f}" for value in each.jct_s.mean(axis=0)), f"{each.gaps.mean():.1%}",
         f"{each.gaps.min():.1%} – {each.gaps.max():.1%}"]
        for each in scanned
    ]  # fmt: skip
    return table(("load", *(f"{arm}, mean JCT s" for arm in ARMS), "slowest over fastest", "by seed"), lines)


HEAD = """# Delay timers of a real Slurm

```
make reproduce NAME=slurm_dally                                                     # simulate the kept runs again
make reproduce NAME=slurm_dally ARGS="--choose --run --write reproductions/slurm_dally/README.md"   # half an hour
```

Dally (arXiv 2401.16492) lets a job wait for GPUs close together, but only for a while. In Slurm that is
`--switches=1@WAIT`. The same jobs run under three arms on a private Slurm 22.05.8 of 16 nodes × 4 GPUs below four
leaf switches, in real time: **strict** insists on one switch for ever, **timers** for 30 s (one and a half mean run
times), **spread** never. A job's length follows the nodes it got: its script reads `SLURM_JOB_NODELIST`, counts nodes
per rack, and sleeps for its work over the speed that the simulator's closed form gives its model in that shape (300,
12.5 and 2 GB/s inside a node, inside a rack and between racks; AlexNet on four nodes is two to three times slower
over two racks than in one). Everything else is equal: sched/backfill (`bf_interval=5`, `bf_resolution=1`), Poisson
arrivals over three minutes, jobs of 1, 4, 8 and 16 GPUs, limits of 1.2 times what the job takes where it is slowest.

**Chosen by the simulator alone**, before anything was played: the load where the arms are farthest apart in the mean
of five seeds, and of these the seed where they are; and the largest load at which no seed tells them apart by 1 %.

**Predicted** is made before a run: median and whole range of 12 simulations over what cannot be known then (when the
two schedulers wake, and 0.1 to 0.8 s for starting a job). **Run**: median and range of the runs. *Spread*: jobs of
several nodes below several leaf switches. *JCT error, racks equal*: job by job, with the run's own phases of the
schedulers, as in [slurm](../slurm/README.md); *of runs* the same between two runs of Slurm. All are rows of a ledger:
`benchmarks/data/slurm_switches.jsonl`.
"""
SAYS = """## What it says

- **The real scheduler shows what the simulation said**: the same order of the arms at the contended load, on both lists
  of jobs, and no difference where none was predicted.
- On these jobs strict consolidation is the best and timers lie between it and spreading. A timer that runs out makes
  a job spread just when the cluster is full, and a spread job holds its GPUs for longer. Dally's own study here finds
  the same of completion times ([dally](../dally/README.md)); leases, which Dally adds to the timers, are not part of
  Slurm.
- **One range was too narrow.** The predictions of *largest* and *none* drew one launch time for all jobs of a
  simulation; spreading then ran faster than its range said. Since then every job's launch is drawn, with which the
  *second* list (the same load, the seed with the next largest difference) was predicted before it was played.
- A second's difference at one decision sends later jobs elsewhere: job by job, runs of Slurm differ from each other
  about as much as from the simulation, while means over the jobs agree.
- Slurm notices that a timer ran out at its next pass only (`sched_interval`, or `bf_interval`), and a job that still
  insists gets a reservation on one switch from the backfill scheduler, so that it is not starved.
"""


def _page(scanned: Sequence[Level], found: Sequence[Row_]) -> str:
    return "\n".join([
        HEAD, f"*{today()}, {machine()}; other work on the machine.*", "", "## Predicted and run", "", _section(found),
        "", SAYS, "## By load, simulated", "", _scan(scanned), "",
    ])  # fmt: skip
