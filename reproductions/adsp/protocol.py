"""Time to a target loss of workers of unlike speed under ADSP and under policies that wait; written to README.md.

    python -m reproductions adsp [--seeds 3] [--again] [--processes] [--print]

Workers are virtual, gradients real. What was measured is kept in measured.jsonl, and a run that was stopped goes on.
--processes also runs them as processes of this machine, beside the prediction of `foretrace plan sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row, export_lines, import_lines
from foretrace.experiment.statistics import paired_ratio
from foretrace.files import write_text
from foretrace.plan.sync import SyncQuestion, rows_of, try_policies
from foretrace.training.workers.policies import parse
from foretrace.training.workers.virtual import WorkerTimes, train
from foretrace.zoo.partitioned import PartitionedJob
from reproductions import parser_of
from reproductions.kept import SECONDS, Cell, measured, where
from reproductions.partitioned import Text
from reproductions.systems import put
from tables import table, today

HERE = Path(__file__).parent
STEP_S = 0.1  # of the quickest worker
SPEEDS = ((1, 1, 1, 1), (1, 1, 1, 3), (1, 1, 3, 6), (1, 1, 1, 10))
COMMITS_S = (0.01, 0.2)
JOBS: dict[str, Callable[..., PartitionedJob]] = {
    "clusters": partial(PartitionedJob, rate=0.05, noise=3.0),
    "text": partial(Text, rate=0.3),
}
TARGETS = {"clusters": 0.4, "text": 1.75}
MOST_S, LOOK_S = 900.0, 0.25
STARTS = (2, 4, 8, 16, 32)
ARMS = {
    "synchronous": ("synchronous",),
    "SSP(3)": ("stale-synchronous staleness=3",),
    "local SGD": tuple(f"local-sgd every={each}" for each in STARTS),
    "ADACOMM": tuple(f"adacomm every={each}" for each in STARTS),
    "ADSP": ("adsp period_s=2",),
    "ADSP, fixed": tuple(f"adsp period_s=2 commits={each:g}" for each in (0.5, 1, 2, 4, 8)),
}
SEARCHED = ("local SGD", "ADACOMM", "ADSP, fixed")
PROCESSES = (
    "synchronous",
    "stale-synchronous",
    "local-sgd every=4",
    "gaia threshold=0.05",
    "adsp period_s=1 commits=2",
)
HEAD = """# ADSP: workers of unlike speed that never wait

ADSP (Hu, Wang and Wu, AAAI 2020) lets nobody wait and has all workers commit equally often; how often is searched while
training runs, and the search is part of the times below. `foretrace plan sync` predicts what policies do with given
workers, and runs them ([policies](../../docs/sync.md)). Written by `make reproduce NAME=adsp`.
"""


def keys(seeds: int, jobs: Sequence[str] = tuple(JOBS), speeds: Sequence[tuple[int, ...]] = SPEEDS) -> Iterator[Cell]:
    """All cells."""
    policies = [policy for each in ARMS.values() for policy in each]
    for job, speed, commit_s, seed, policy in product(jobs, speeds, COMMITS_S, range(seeds), policies):
        yield {"job": job, "speeds": list(speed), "commit_s": commit_s, "seed": seed, "policy": policy}


def measure(key: Cell) -> Cell:
    """One training until its target."""
    job = JOBS[key["job"]](workers=len(key["speeds"]), seed=key["seed"])
    times = WorkerTimes(step_s=tuple(STEP_S * each for each in key["speeds"]), commit_s=key["commit_s"])
    judge = job.judge(training=True)
    run = train(
        parse(key["policy"]), job.replicas(), times, until_s=MOST_S, every_s=LOOK_S, target=TARGETS[key["job"]],
        evaluate=lambda *state: judge(*state)[0],
    )  # fmt: skip
    return {
        "reached_s": run.reached_s, "steps": sum(run.steps), "commits": sum(run.commits),
        "waited_s": sum(run.waited_s), "searched": getattr(run.server.pace, "history", []),
    }  # fmt: skip


class Grid:
    """Cells by job, speeds, cost of a commit, and arm; an arm that is searched has its best setting of the mean."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = cells
        self.places = list(dict.fromkeys((each["job"], tuple(each["speeds"]), each["commit_s"]) for each in cells))

    def times(self, place: tuple[str, tuple[int, ...], float], arm: str) -> tuple[str, list[float]]:
        """The best setting of an arm, and its seconds by seed; the time limit where the target was not reached."""
        found = {}
        for policy in ARMS[arm]:
            mine = [
                each for each in self.cells
                if (each["job"], tuple(each["speeds"]), each["commit_s"]) == place and each["policy"] == policy
            ]  # fmt: skip
            found[policy] = [each["reached_s"] or MOST_S for each in sorted(mine, key=lambda each: each["seed"])]
        best = min(found, key=lambda each: mean(found[each]))
        return best, found[best]


def grid_rows(grid: Grid) -> Iterator[list[str]]:
    """The table of times."""
    for place in grid.places:
        job, speeds, commit_s = place
        cells = [job, ":".join(map(str, speeds)), f"{commit_s:g}"]
        for arm in ARMS:
            policy, times = grid.times(place, arm)
            setting = f" *{policy.rpartition('=')[2]}*" if arm in SEARCHED else ""
            cells.append(f"{mean(times):.1f} ({min(times):.1f} – {max(times):.1f}){setting}")
        yield cells


def saving_rows(grid: Grid) -> Iterator[list[str]]:
    """What ADSP saves over the others by speeds, over jobs, costs and seeds."""
    for speeds in dict.fromkeys(place[1] for place in grid.places):
        mine = [place for place in grid.places if place[1] == speeds]
        cells = [":".join(map(str, speeds))]
        for arm in ARMS:
            if arm == "ADSP":
                continue
            pairs = [pair for place in mine
                     for pair in zip(grid.times(place, arm)[1], grid.times(place, "ADSP")[1], strict=True)]  # fmt: skip
            ratio = paired_ratio([each for each, _ in pairs], [each for _, each in pairs])
            cells.append(f"{ratio.value - 1:+.0%} ({ratio.low - 1:+.0%} – {ratio.high - 1:+.0%})")
        yield cells


def process_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Runs of processes."""
    for row in rows:
        own = row.parameters["plan-sync"]
        yield [
            f"`{own['policy']}`", own["workers"], f"{own['commit_s']:.2g}", " ".join(map(str, own["foreseen_commits"])),
            " ".join(map(str, own["commits"])), f"{row.before_s:.2f}", f"{row.after_s:.2f}", f"{row.error:+.1%}",
        ]  # fmt: skip


def run_processes() -> tuple[Row, ...]:
    """Run policies as processes."""
    found: list[Row] = []
    for speeds, commit_s in (((1, 1, 1, 3), 0.04), ((1, 1, 1, 3), 0.0)):
        question = SyncQuestion(
            source=":".join(map(str, speeds)), step_s=tuple(0.05 * each for each in speeds), commit_s=commit_s,
            policies=PROCESSES, commits=24,
        )  # fmt: skip
        found += rows_of(question, try_policies(question))
    return tuple(found)


def implicit_momentum(*, period_s: float, commits: Sequence[float], step_s: Sequence[float]) -> float:
    """The momentum that asynchronous commits amount to: 1 - 1 / (1 + (1 - 1/m) sum_i G / (dC_i v_i)) (theorem 1).

    For m workers with dC_i commits in a period of G seconds and steps of v_i seconds.
    """
    if len(commits) != len(step_s) or not commits or min(*commits, *step_s, period_s) <= 0:
        raise ForetraceError("Give a number of commits and seconds of a step, above 0, for every worker.")
    steps = sum(period_s / (each * own) for each, own in zip(commits, step_s, strict=True))
    return 1 - 1 / (1 + (1 - 1 / len(commits)) * steps)


def page(cells: Sequence[Cell], rows: Sequence[Row], command: str) -> str:
    """README.md."""
    grid = Grid(cells)
    waiting = [arm for arm in ARMS if arm != "ADSP"]
    momentum = implicit_momentum(period_s=2.0, commits=[2.0] * 4, step_s=[0.1, 0.1, 0.1, 0.3])
    exact = sum(
        each.parameters["plan-sync"]["foreseen_commits"] == each.parameters["plan-sync"]["commits"] for each in rows
    )
    parts = [
        HEAD, f"*{today()}; `{command}`; {sum(each[SECONDS] for each in cells):.0f} s of processor.*\n",
        "## What ADSP saves\n",
        "Median over jobs, costs of a commit and seeds, with its bootstrap interval of 80 %; the search is part of "
        "ADSP's time, while settings of local SGD, ADACOMM and fixed ADSP were searched before and for nothing.\n",
        table(("speeds", *(f"against {arm}" for arm in waiting)), saving_rows(grid)) + "\n",
        "**Published: 62.4 % less time** than others. Here the "
        "other policies with searched settings are nearer where workers are alike, and further away the slower the "
        "slowest is: a barrier costs its step. Differences: generated data and small models, four workers, equal "
        "shares of the samples, a server that takes no time, links that are the same for all, and a search by the "
        "slope at a common loss (see `training/workers/adsp.py`); the paper's reward compares times from the beginning "
        "of each period, and periods that begin later begin lower.\n",
        "## Seconds to the target\n",
        f"Mean of the seeds (least – most); loss {TARGETS['clusters']} of `clusters`, {TARGETS['text']} of `text`, "
        f"looked at every {LOOK_S:g} s; a step of the quickest worker takes {STEP_S:g} s. *Setting* chosen by the mean "
        "of the same seeds, which favours the others over ADSP.\n",
        table(("job", "speeds", "commit, s", *ARMS), grid_rows(grid)) + "\n",
        f"The momentum that commits without waiting amount to (theorem 1) is {momentum:.2f} at 1:1:1:3 with two "
        "commits in two seconds; the global rate is 1 / workers.\n",
    ]  # fmt: skip
    if rows:
        errors = [abs(each.error) for each in rows]
        parts += [
            "## Processes\n",
            "Four processes and a server over gloo, steps with real gradients and commits that last as long as stated: "
            "what choosing elements, packing, sockets and the server take is part of it. Commits of other than "
            "0.04 s were stated to take no time: eight rounds at the start measured theirs. Seconds of the same "
            "number of commits, chosen before the run where two commits are far apart. Rows of the ledger "
            f"([rows.jsonl](rows.jsonl)): {where(rows)}.\n",
            table(("policy", "speeds", "commit, s", "commits foreseen", "counted", "foreseen, s", "measured, s",
                   "error"), process_rows(rows)) + "\n",
            f"Commits of every worker are as foreseen in {exact} of {len(rows)} runs, seconds within "
            f"{max(errors):.1%} (median {np.median(errors):.1%}).\n",
        ]  # fmt: skip
    return "\n".join(parts)


def main(given: Sequence[str]) -> int:
    """Measure what is missing and write the page."""
    parser = parser_of("adsp", __doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", nargs="*", default=tuple(JOBS), choices=tuple(JOBS))
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    parser.add_argument("--processes", action="store_true", help="run processes, too")
    parser.add_argument("--print", action="store_true", help="instead of writing README.md")
    chosen = parser.parse_args(given)
    cells = measured(HERE / "measured.jsonl", keys(chosen.seeds, chosen.jobs), measure, again=chosen.again)
    kept = HERE / "rows.jsonl"
    if chosen.processes:
        write_text(kept, export_lines(run_processes()))
    rows = import_lines(kept.read_text(encoding="utf-8"), str(kept)) if kept.exists() else ()
    text = page(cells, rows, " ".join(("python -m reproductions adsp", *given)))
    if chosen.print:
        print(text)
    else:
        put(HERE / "README.md", text)
    return 0
