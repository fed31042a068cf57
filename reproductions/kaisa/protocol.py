"""K-FAC against tuned SGD and Adam: steps and CPU seconds to a target, and the predicted step beside the measured one.

    python -m reproductions kaisa [--steps N] [--seeds N] [--task NAME] [--write] [--again]
    python -m reproductions kaisa --write --library CHECKOUT      losses beside those of kfac-pytorch
    python -m reproductions kaisa --processes [ncf gnn]           rows of two workers on a shaped link (root)

Every method has six settings, tried with two seeds; the one with the fewest steps to the target is run again with
other seeds, methods in turns. One thread, CPU time of the steps alone. What was run is kept beside this file and not
run again; a run that was stopped goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row, export_lines, import_lines
from foretrace.experiment.links.job import LinkJob
from foretrace.experiment.links.judge import rows_of
from foretrace.experiment.links.measure import rig_for, verify
from foretrace.experiment.statistics import Ratio
from foretrace.experiment.trial import figured
from foretrace.files import write_text
from reproductions import ROOT, parser_of
from reproductions.kaisa.crossing import cross, crossing_section
from reproductions.kaisa.library import compare
from reproductions.kaisa.runs import OFTEN, Runs
from reproductions.kaisa.tasks import AUTO_ENCODER, HANDWRITTEN, TASKS, LearningTask
from reproductions.kept import Cell, measured
from reproductions.systems import put
from tables import table, today

HERE = Path(__file__).parent
ROWS = ROOT / "benchmarks" / "data" / "kfac.jsonl"
PROCESSES = ROOT / "benchmarks" / "data" / "kfac_processes.jsonl"
BATCHES = {
    AUTO_ENCODER: (16, 32, 64, 125, 250, 500, 1000), "convolutions": (250,), "deep-tanh": (250,),
    HANDWRITTEN: (250,),
}  # fmt: skip
METHODS = ("sgd", "adam", "kfac")

HEAD = """# KAISA: K-FAC shared out over workers

KAISA (SC 2021) trains with K-FAC and shares its work out by a gradient-worker fraction. Published, on 8 to 128 GPUs
and with models that train for days: 18 – 36 % less time than well-tuned first-order training.

| published | ours | reason of the difference |
|---|---|---|
| all fractions train alike | the same parameters on 2 and 4 gloo processes for every fraction | |
| less memory by the fraction | kept bytes are those predicted | in a small model the largest layer decides |
| 18 – 36 % less time to the target | tables below | small layers on a core: calls weigh as much as the step |

Images are generated (ten glyphs, stretched, moved, with noise), or scikit-learn's own, so nothing is downloaded. An
auto-encoder's target is the loss of 1,000 training images, the others' a share of wrong answers on 1,000 held-out ones.
SGD has a momentum of 0.9. Every method has six settings, chosen by steps on two seeds; figures are medians of others
(least – most), methods in turns. Written by `make reproduce NAME=kaisa`.
"""
LINK, WORKERS = "1gbit", 2
MODELS = ("ncf", "gnn")  # that two workers train
ARMS = tuple(("data-parallel", f"kfac fraction={each} factors_every=1 inverses_every=10") for each in (0.5, 1))


@dataclass(frozen=True, kw_only=True)
class Place:
    """A task at a batch size: the runs of each method with its best setting, and the step predicted for K-FAC."""

    task: LearningTask
    batch: int
    runs: dict[str, list[Cell]]
    ratio: Ratio  # of K-FAC's step over SGD's, predicted

    def all(self, method: str, what: str) -> list[float]:
        """Of the seeds: steps or seconds, infinite where the target was not reached; or the step."""
        return [each[what] or inf for each in self.runs[method]]

    def median(self, method: str, what: str) -> float:
        """Median over the seeds."""
        return median(self.all(method, what))

    def said(self, method: str, what: str, form: str) -> str:
        """Median (least – most)."""
        low, high = (form.format(each) if each < inf else "–" for each in (min(self.all(method, what)),
                                                                          max(self.all(method, what))))  # fmt: skip
        value = self.median(method, what)
        return f"{form.format(value)} ({low} – {high})" if value < inf else "not reached"

    @property
    def measured(self) -> float:
        """K-FAC's step over SGD's."""
        return self.median("kfac", "step_s") / self.median("sgd", "step_s")

    def time_over_sgd(self, ratio: float) -> float:
        """Seconds to the target over those of SGD, with a ratio of steps' times."""
        return ratio * self.median("kfac", "steps") / self.median("sgd", "steps")

    @property
    def reached(self) -> bool:
        """Whether most runs of both reach the target."""
        return max(self.median(name, "steps") for name in ("sgd", "kfac")) < inf

    @property
    def pays(self) -> tuple[str, str]:
        """Whether K-FAC is sooner at the target than SGD: predicted, and measured."""
        if not self.reached:
            return "–", "yes" if self.median("kfac", "steps") < inf else "no"
        ends = [self.time_over_sgd(end) for end in (self.ratio.low, self.ratio.high)]
        said = "yes" if ends[1] < 1 else "no" if ends[0] > 1 else "cannot tell"
        return said, "yes" if self.time_over_sgd(self.measured) < 1 else "no"

    def row(self) -> Row:
        """What the ledger keeps."""
        ratio, sgd_s = self.ratio, self.median("sgd", "step_s")
        predicted_s = ratio.value * sgd_s, ratio.low * sgd_s, ratio.high * sgd_s
        return figured(predicted_s, self.all("kfac", "step_s"), clock="cpu").row(
            "kfac step", model=self.task.name, size=f"batch {self.batch}", parameters={"often": OFTEN["kfac"]},
            notes=("predicted from a recording of SGD, over the SGD step of the same runs",),
        )  # fmt: skip


def place(task: LearningTask, batch: int, runs: Runs, seeds: int) -> Place:
    """Tune, run the best setting with other seeds, predict."""
    found = runs.tuned(task, batch, METHODS, seeds)
    return Place(task=task, batch=batch, runs=found, ratio=runs.predicted(task, batch, [batch])[0])


def run_processes(models: Sequence[str]) -> list[Row]:
    """Two workers on a shaped link: the step of each fraction, predicted from one worker's recording, and measured."""
    jobs = [LinkJob(work=each, link=LINK, workers=WORKERS, arms=ARMS, seconds=40.0) for each in models]
    with rig_for(jobs) as rig:
        return [row for job in jobs for row in rows_of(verify(job, on=rig))]


def main(given: Sequence[str]) -> int:
    """Print the tables, or write README.md."""
    parser = parser_of("kaisa", __doc__)
    parser.add_argument("--steps", type=int, default=400, help="at most, of a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--crossing-seeds", type=int, default=6, help="of where K-FAC begins to pay; 0: none")
    parser.add_argument("--task", choices=[each.name for each in TASKS], help="only this one")
    parser.add_argument("--batch", type=int, help="only this one")
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    parser.add_argument("--library", type=Path, help="a checkout of kfac-pytorch, to compare losses with")
    parser.add_argument("--processes", nargs="*", choices=MODELS, help="nothing but two workers on a shaped link")
    parser.add_argument("--write", action="store_true", help="keep runs, rows and README.md")
    asked = parser.parse_args(given)
    if asked.processes is not None:
        for model in asked.processes or MODELS:
            others = [each for each in kept_rows(PROCESSES) if each.model != model]
            write_text(PROCESSES, export_lines([*others, *run_processes([model])]))
        return 0
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = HERE if asked.write else Path(stack.enter_context(TemporaryDirectory()))
        if asked.again:
            (folder / "runs.jsonl").unlink(missing_ok=True)
        runs = Runs(folder / "runs.jsonl", asked.steps)
        places = []
        for task in TASKS:
            for batch in BATCHES[task.name]:
                if asked.task in (None, task.name) and asked.batch in (None, batch):
                    try:
                        places.append(place(task, batch, runs, asked.seeds))
                        print(f"{task.name}, batch {batch}", file=sys.stderr)
                    except ForetraceError as error:
                        print(f"{task.name}, batch {batch}: left out, {error}", file=sys.stderr)
        kept = folder / "library.jsonl"
        wanted = [{"task": each.name} for each in TASKS if each.name != HANDWRITTEN]
        losses = measured(
            kept, wanted, lambda key: compare(key["task"], asked.library), again=bool(asked.library)
        ) if asked.library or kept.exists() else []  # fmt: skip
        wanted_task = asked.task in (None, AUTO_ENCODER) and asked.batch is None
        crossings = cross(runs, asked.crossing_seeds) if wanted_task and asked.crossing_seeds else []
    rows = kept_rows(PROCESSES)
    text = "\n".join([tables(places), *crossing_section(crossings), *library_section(losses), *process_section(rows)])
    if not asked.write:
        print(text)
        return 0
    kept_as = {identity(each): each for each in kept_rows(ROWS)}
    steps = [each.row() for each in places]
    steps += [row for each in crossings for row in each.rows()]
    steps = [kept_as.get(identity(each), each) for each in steps]
    write_text(ROWS, export_lines(steps))
    command = f"`python -m reproductions kaisa --write`; {runs.cpu_s:.0f} s of processor"
    put(
        HERE / "README.md",
        f"{HEAD}\n*{today()}; {command}.*\n\n{measured_on(places)}\n{text}\n{summary(places, steps)}\n",
    )
    return 0


def identity(row: Row) -> tuple[object, ...]:
    """What two rows of the same measurement share."""
    return row.techniques, row.model, row.size, row.measured, row.predicted_low


def kept_rows(path: Path) -> tuple[Row, ...]:
    """Rows of what ran before."""
    return import_lines(path.read_text(encoding="utf-8"), str(path)) if path.exists() else ()


def summary(places: Sequence[Place], rows: Sequence[Row]) -> str:
    """What the tables come to."""
    reached = [each for each in places if each.reached]
    fewer = [each.median("sgd", "steps") / each.median("kfac", "steps") for each in reached]
    others = [min(each.median(name, "seconds") for name in ("sgd", "adam")) for each in places]
    best = sum(each.median("kfac", "seconds") < other for each, other in zip(places, others, strict=True))
    told = [each.pays for each in places if each.pays[0] in ("yes", "no")]
    rows = [each for each in rows if "recorded" not in each.size]  # at the batch size that was recorded
    return (
        f"K-FAC takes {min(fewer, default=0):.1f} to {max(fewer, default=0):.1f} times fewer steps than SGD where both "
        f"reach the target, and is the quickest of three in CPU seconds in {best} of {len(places)} cells. The "
        f"predicted range of its step holds the measured one in {sum(each.covered for each in rows)} of {len(rows)} "
        "cells ([rows](../../benchmarks/data/kfac.jsonl)).\n\n"
        f"Where it pays: with the steps of each cell itself, the prediction says yes or no in {len(told)} of "
        f"{len(places)} cells and is right in {sum(said == found for said, found in told)} of them."
    )


def measured_on(places: Sequence[Place]) -> str:
    """Machines of the cells, with the load averages of the last minute while their runs ended."""
    found: dict[str, list[str]] = {}
    loads: dict[str, list[float]] = {}
    for each in places:
        cells = [cell for cells in each.runs.values() for cell in cells]
        found.setdefault(cells[0]["machine"], []).append(f"{each.task.name} {each.batch}")
        loads.setdefault(cells[0]["machine"], []).extend(
            float(cell["load"].split(",")[0]) for cell in cells if cell.get("load")
        )
    lines = [
        f"{', '.join(cells)}: {name}"
        + (f"; load {min(loads[name]):.0f} – {max(loads[name]):.0f}" if loads[name] else "")
        for name, cells in found.items()
    ]
    return (
        "Measured on (steps are the same everywhere; under load, CPU seconds are longer, and compare within a cell "
        "only):\n\n" + "\n".join(f"- {each}" for each in lines) + "\n"
    )


def tables(places: Sequence[Place]) -> str:
    """Both tables."""
    first = table(
        ["task", "batch", "steps SGD", "Adam", "K-FAC", "seconds SGD", "Adam", "K-FAC", "SGD's setting", "K-FAC's"],
        [
            [each.task.name, str(each.batch), *(each.said(name, "steps", "{:.0f}") for name in METHODS),
             *(each.said(name, "seconds", "{:.2f}") for name in METHODS),
             *("; ".join(f"{k} {v:g}" for k, v in each.runs[name][0]["setting"].items()) for name in ("sgd", "kfac"))]
            for each in places
        ],
    )  # fmt: skip
    rows = []
    for each in places:
        ratio, times = each.ratio, ["–", "–"]
        if each.reached:
            value, low, high, paid = (
                each.time_over_sgd(of) for of in (ratio.value, ratio.low, ratio.high, each.measured)
            )  # fmt: skip
            times = [f"{value:.2f} ({low:.2f} – {high:.2f})", f"{paid:.2f}"]
        rows.append([
            each.task.name, str(each.batch), f"{1e3 * each.median('sgd', 'step_s'):.2f}",
            f"{ratio.value:.2f} ({ratio.low:.2f} – {ratio.high:.2f})", f"{each.measured:.2f}", *times, *each.pays,
        ])  # fmt: skip
    second = table(
        ["task", "batch", "SGD step, ms", "K-FAC ÷ SGD step predicted", "measured", "time to target ÷ SGD's, predicted",
         "measured", "pays, predicted", "measured"], rows,
    )  # fmt: skip
    return f"## Steps and CPU seconds to the target\n\n{first}\n\n## The step, and where it pays\n\n{second}\n"


def library_section(cells: Sequence[Cell]) -> Iterator[str]:
    """Losses beside those of kfac-pytorch."""
    if not cells:
        return
    rows = [
        [cell["task"], str(each["workers"]), f"{each['fraction']:g}", str(len(each["ours"])),
         f"{each['ours'][0]:.6g}", f"{each['ours'][-1]:.6g}", f"{each['theirs'][-1]:.6g}", f"{each['apart']:.1e}"]
        for cell in cells for each in cell["cases"]
    ]  # fmt: skip
    yield (
        f"## Losses beside the library's\n\nkfac-pytorch {cells[0]['version']} from a checkout, the same start, "
        f"batches and settings ({OFTEN['kfac']}, `scaling=mean`), `--library CHECKOUT`. *Apart*: largest difference of "
        "a loss, relative.\n"
    )
    yield table(["task", "workers", "fraction", "steps", "first loss", "last, ours", "library's", "apart"], rows) + "\n"


def process_section(rows: Sequence[Row]) -> Iterator[str]:
    """Two workers."""
    if not rows:
        return
    body = [
        [row.model, f"{row.parameters['kfac']['fraction']:g}", f"{1e3 * row.before_s:.1f}", f"{1e3 * row.after_s:.1f}",
         f"{row.predicted:.2f} ({row.predicted_low:.2f} – {row.predicted_high:.2f})",
         f"{row.measured:.2f} ({row.measured_low:.2f} – {row.measured_high:.2f})", f"{row.error:+.0%}", row.verdict]
        for row in rows
    ]  # fmt: skip
    yield (
        f"## {WORKERS} workers\n\nData parallelism with K-FAC (factors in every step, inverses every 10) on "
        f"{WORKERS} processes over a link of {LINK}, by `--processes`: the step over that of one worker alone, "
        "predicted from its recording before it ran ([rows](../../benchmarks/data/kfac_processes.jsonl)).\n"
    )
    yield table(["model", "fraction", "alone, ms", "together, ms", "predicted", "measured", "error", "verdict"],
                body) + "\n"  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
