"""K-FAC against tuned SGD and Adam: steps and CPU seconds to a target, and the predicted step beside the measured one.

    python -m reproductions kaisa [--steps N] [--seeds N] [--task NAME] [--write]

Every method has six settings, tried with seed 0; the quickest to the target is run again with the other seeds. One
thread, CPU time of the steps alone. What was run is kept in runs.jsonl beside this file and not run again.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from foretrace.cost.operators import bench
from foretrace.experiment.ledger import Row, export_lines
from foretrace.experiment.statistics import Ratio
from foretrace.experiment.trial import figured
from foretrace.files import write_text
from foretrace.graph.builder import build
from foretrace.simulate.overhead import unprofiled
from foretrace.techniques.arguments import parse
from foretrace.techniques.distributed.kfac import Kfac
from foretrace.techniques.measuring import calibrated
from foretrace.techniques.whatif import WhatIf, whatif
from foretrace.trace.read import read
from foretrace.training.recording import record_training
from foretrace.training.training import Training
from reproductions import ROOT, parser_of
from reproductions.kaisa.tasks import TASKS, LearningTask
from reproductions.systems import put
from tables import machine, table, today

HERE = Path(__file__).parent
ROWS = ROOT / "benchmarks" / "data" / "kfac.jsonl"
EVERY = 10  # steps between two looks at the score
BATCHES = {"auto-encoder": (125, 250, 500, 1000), "convolutions": (250,), "deep-tanh": (250,)}
OFTEN = "factors_every=5 inverses_every=20"
SETTINGS: dict[str, tuple[dict[str, float], ...]] = {
    "sgd": tuple({"lr": lr} for lr in (0.01, 0.02, 0.04, 0.08, 0.12, 0.2)),
    "adam": tuple({"lr": lr} for lr in (0.001, 0.002, 0.004, 0.008, 0.016, 0.03)),
    "kfac": tuple({"lr": lr, "damping": damping, "clip": 0.03} for lr in (0.1, 0.3, 0.6) for damping in (0.01, 0.1)),
}

HEAD = """# KAISA: K-FAC shared out over workers

KAISA (SC 2021) trains with K-FAC and shares its work out by a gradient-worker fraction. Published, on 8 to 128 GPUs
and with models that train for days: 18 – 36 % less time than well-tuned first-order training.

| published | ours | reason of the difference |
|---|---|---|
| all fractions train alike | the same parameters on 2 and 4 gloo processes for every fraction | |
| less memory by the fraction | kept bytes are those predicted | in a small model the largest layer decides |
| 18 – 36 % less time to the target | tables below | small layers on a core: calls weigh as much as the step |

Images are generated (ten glyphs, stretched, moved, with noise), so nothing is downloaded. The auto-encoder's target is
a training loss, the others' a share of wrong answers on 1,000 held-out images. SGD has a momentum of 0.9. Every method
has six settings, chosen on one seed; the figures are medians of three others. Written by `make reproduce NAME=kaisa`.
"""


@dataclass(frozen=True, kw_only=True)
class TargetRun:
    """One training until its target. None where it is not reached."""

    task: str
    batch: int
    method: str
    setting: dict[str, float]
    seed: int
    steps: int | None
    cpu_s: float | None
    step_s: float

    @property
    def key(self) -> str:
        """What it is known by."""
        return json.dumps([self.task, self.batch, self.method, self.setting, self.seed])


def make(task: LearningTask, batch: int, method: str, setting: dict[str, float], seed: int) -> Training:
    """A training by a method."""
    rate = setting["lr"]
    if method == "adam":
        return task.training(batch, seed, lambda parameters: torch.optim.Adam(parameters, lr=rate))
    plain = task.training(batch, seed, lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9))
    if method == "sgd":
        return plain
    return parse(f"kfac {OFTEN} damping={setting['damping']} clip={setting['clip']}").apply(plain)


def train(task: LearningTask, batch: int, method: str, setting: dict[str, float], seed: int, limit: int) -> TargetRun:
    """Train until the score is at the target, `limit` steps at most."""
    training = make(task, batch, method, setting, seed)
    steps = training.steps()
    spent, at, number = 0.0, None, 0
    blocks = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what diverges cannot be decomposed
        while number < limit and at is None:
            begin = time.thread_time()
            for _ in range(EVERY):
                next(steps)
            blocks.append(time.thread_time() - begin)
            spent, number = spent + blocks[-1], number + EVERY
            score = task.score(training.model)
            if not score < inf:
                break
            at = number if score <= task.target else None
    return TargetRun(
        task=task.name, batch=batch, method=method, setting=setting, seed=seed, steps=at,
        cpu_s=spent if at is not None else None, step_s=mean(blocks[1:] or blocks) / EVERY,
    )  # fmt: skip


class Runs:
    """Runs that are kept in a file."""

    def __init__(self, path: Path | None, limit: int) -> None:
        self.path, self.limit = path, limit
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.known = {run.key: run for run in (TargetRun(**json.loads(each)) for each in lines)}

    def get(self, task: LearningTask, batch: int, method: str, setting: dict[str, float], seed: int) -> TargetRun:
        """The run, from the file or made now."""
        key = json.dumps([task.name, batch, method, setting, seed])
        if key not in self.known:
            self.known[key] = train(task, batch, method, setting, seed, self.limit)
            if self.path:
                write_text(self.path, "".join(json.dumps(asdict(each)) + "\n" for each in self.known.values()))
        return self.known[key]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A task at a batch size: the runs of each method with its best setting, and the step predicted for K-FAC."""

    task: LearningTask
    batch: int
    runs: dict[str, list[TargetRun]]
    predicted: WhatIf

    def steps(self, method: str) -> float:
        """Median over the seeds; infinite where most do not reach the target."""
        return median(each.steps or inf for each in self.runs[method])

    def seconds(self, method: str) -> float:
        """Median over the seeds of CPU seconds."""
        return median(each.cpu_s or inf for each in self.runs[method])

    def step_s(self, method: str) -> float:
        """Median step."""
        return median(each.step_s for each in self.runs[method])

    @property
    def ratio(self) -> Ratio:
        """K-FAC's step over SGD's, predicted."""
        low, high = self.predicted.ratio_interval
        return Ratio(value=self.predicted.after_s / self.predicted.before_s, low=low, high=high)

    @property
    def measured(self) -> float:
        """The same, measured."""
        return self.step_s("kfac") / self.step_s("sgd")

    def time_over_sgd(self, ratio: float) -> float:
        """Seconds to the target over those of SGD, with a ratio of steps' times."""
        return ratio * self.steps("kfac") / self.steps("sgd")

    def row(self) -> Row:
        """What the ledger keeps."""
        ratio, sgd_s = self.ratio, self.step_s("sgd")
        predicted_s = ratio.value * sgd_s, ratio.low * sgd_s, ratio.high * sgd_s
        steps = [each.step_s for each in self.runs["kfac"]]
        return figured(predicted_s, steps, clock="cpu").row(
            "kfac step", model=self.task.name, size=f"batch {self.batch}", parameters={"often": OFTEN},
            notes=("predicted from a recording of SGD, over the SGD step of the same runs",),
        )  # fmt: skip


def predict(task: LearningTask, batch: int) -> WhatIf:
    """K-FAC's step from a recording of SGD's, with its work timed alone."""
    technique = parse(f"kfac {OFTEN}")
    assert isinstance(technique, Kfac)
    with TemporaryDirectory() as folder:
        graph = unprofiled(build(read(record_training(make(task, batch, "sgd", {"lr": 0.01}, 0), folder)), None))
    return whatif(calibrated(graph, [technique], bench.measure).graph, [technique])


def cell(task: LearningTask, batch: int, runs: Runs, seeds: int) -> Cell:
    """Tune on seed 0, run the best setting with the others, predict."""
    found: dict[str, list[TargetRun]] = {}
    for method, settings in SETTINGS.items():
        tried = [runs.get(task, batch, method, setting, 0) for setting in settings]
        best = min(tried, key=lambda each: each.cpu_s or inf)
        found[method] = [runs.get(task, batch, method, best.setting, seed) for seed in range(1, seeds + 1)]
    return Cell(task=task, batch=batch, runs=found, predicted=predict(task, batch))


def main(given: Sequence[str]) -> int:
    """Print the tables, or write README.md."""
    parser = parser_of("kaisa", __doc__)
    parser.add_argument("--steps", type=int, default=400, help="at most, of a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", choices=[each.name for each in TASKS], help="only this one")
    parser.add_argument("--batch", type=int, help="only this one")
    parser.add_argument("--write", action="store_true", help="keep runs, rows and README.md")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    runs = Runs(HERE / "runs.jsonl" if asked.write else None, asked.steps)
    cells = []
    for task in TASKS:
        for batch in BATCHES[task.name]:
            if asked.task in (None, task.name) and asked.batch in (None, batch):
                cells.append(cell(task, batch, runs, asked.seeds))
                print(f"{task.name}, batch {batch}", file=sys.stderr)
    text = tables(cells)
    if not asked.write:
        print(text)
        return 0
    write_text(ROWS, export_lines([each.row() for each in cells]))
    put(
        HERE / "README.md",
        f"{HEAD}\n*{today()}, {machine()}; `python -m reproductions kaisa --write`.*\n\n{text}\n{summary(cells)}\n",
    )
    return 0


def summary(cells: Sequence[Cell]) -> str:
    """What the tables come to."""
    fewer = [each.steps("sgd") / each.steps("kfac") for each in cells if each.steps("kfac") < inf > each.steps("sgd")]
    best = sum(each.seconds("kfac") < min(each.seconds("sgd"), each.seconds("adam")) for each in cells)
    rows = [each.row() for each in cells]
    return (
        f"K-FAC takes {min(fewer, default=0):.1f} to {max(fewer, default=0):.1f} times fewer steps than SGD where both "
        f"reach the target, and is the quickest of three in CPU seconds in {best} of {len(cells)} cells. The predicted "
        f"range of its step holds the measured one in {sum(each.covered for each in rows)} of {len(rows)} cells "
        "([rows](../../benchmarks/data/kfac.jsonl))."
    )


def tables(cells: Sequence[Cell]) -> str:
    """Both tables."""
    body = [
        [each.task.name, str(each.batch), *(_cell(each.steps(name), "{:.0f}") for name in SETTINGS),
         *(_cell(each.seconds(name), "{:.2f}") for name in SETTINGS),
         *("; ".join(f"{k} {v:g}" for k, v in each.runs[name][0].setting.items()) for name in ("sgd", "kfac"))]
        for each in cells
    ]  # fmt: skip
    first = table(
        ["task", "batch", "steps SGD", "Adam", "K-FAC", "seconds SGD", "Adam", "K-FAC", "SGD's setting", "K-FAC's"],
        body,
    )
    rows = []
    for each in cells:
        ratio = each.ratio
        pays, paid = each.time_over_sgd(ratio.value), each.time_over_sgd(each.measured)
        ends = [each.time_over_sgd(end) for end in (ratio.low, ratio.high)]
        said = "yes" if ends[1] < 1 else "no" if ends[0] > 1 else "cannot tell"
        rows.append([
            each.task.name, str(each.batch), f"{1e3 * each.step_s('sgd'):.2f}",
            f"{ratio.value:.2f} ({ratio.low:.2f} – {ratio.high:.2f})", f"{each.measured:.2f}",
            f"{pays:.2f} ({ends[0]:.2f} – {ends[1]:.2f})", f"{paid:.2f}", said, "yes" if paid < 1 else "no",
        ])  # fmt: skip
    second = table(
        ["task", "batch", "SGD step, ms", "K-FAC ÷ SGD step predicted", "measured", "time to target ÷ SGD's, predicted",
         "measured", "pays, predicted", "measured"], rows,
    )  # fmt: skip
    return f"## Steps and CPU seconds to the target\n\n{first}\n\n## The step, and where it pays\n\n{second}\n"


def _cell(value: Any, form: str) -> str:
    return form.format(value) if value < inf else "not reached"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
