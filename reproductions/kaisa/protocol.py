"""K-FAC against tuned SGD and Adam: steps and CPU seconds to a target, and the predicted step beside the measured one.

    python -m reproductions kaisa [--steps N] [--seeds N] [--task NAME] [--write] [--again]
    python -m reproductions kaisa --times                         seconds of steps and predictions, on a quiet machine
    python -m reproductions kaisa --write --library CHECKOUT      losses beside those of kfac-pytorch
    python -m reproductions kaisa --processes [ncf gnn]           rows of two workers on a shaped link (root)

Every method has six settings, tried with two seeds; the one with the fewest steps to the target is run again with
other seeds, methods in turns. One thread, CPU time of the steps alone. What was run is kept beside this file and not
run again; a run that was stopped goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from foretrace.errors import MissingExtraError
from foretrace.experiment.ledger import Row, export_lines, import_lines
from foretrace.experiment.links.job import LinkJob
from foretrace.experiment.links.judge import rows_of
from foretrace.experiment.links.measure import rig_for, verify
from foretrace.experiment.statistics import Ratio
from foretrace.experiment.trial import figured
from foretrace.files import write_text
from reproductions import ROOT, parser_of
from reproductions.kaisa.crossing import (
    CROSSED,
    GIVEN,
    RECORDED,
    SIZES,
    Crossing,
    cross,
    from_on,
    often,
    pays,
    said,
    timed_methods,
)
from reproductions.kaisa.library import compare
from reproductions.kaisa.runs import OFTEN, Runs
from reproductions.kaisa.tasks import AUTO_ENCODER, HANDWRITTEN, TASKS, LearningTask
from reproductions.kept import Cell, measured, where
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
    """A task at a batch size: the runs of each method with its best setting, its step, and that predicted for K-FAC."""

    task: LearningTask
    batch: int
    runs: dict[str, list[Cell]]
    step_s: dict[str, list[float]]  # by method and round
    ratio: Ratio  # of K-FAC's step over SGD's, predicted

    def told(self, method: str, form: str, unit_s: float = 1.0) -> str:
        """Steps to the target, times a unit: median (least – most)."""
        found = sorted(unit_s * (each["steps"] or inf) for each in self.runs[method])
        return said(Ratio(value=median(found), low=found[0], high=found[-1]), form)

    def seconds(self, method: str) -> float:
        """CPU seconds to the target, infinite where most runs do not reach it."""
        return median(each["steps"] or inf for each in self.runs[method]) * median(self.step_s[method])

    @property
    def fewer(self) -> float:
        """SGD's steps over K-FAC's; 0 or infinite where one does not reach the target."""
        sgd, kfac = (median(each["steps"] or inf for each in self.runs[name]) for name in ("sgd", "kfac"))
        return sgd / kfac if min(sgd, kfac) < inf else inf

    def row(self) -> Row:
        """What the ledger keeps."""
        ratio, sgd_s = self.ratio, median(self.step_s["sgd"])
        predicted_s = ratio.value * sgd_s, ratio.low * sgd_s, ratio.high * sgd_s
        return figured(predicted_s, self.step_s["kfac"], clock="cpu").row(
            "kfac step", model=self.task.name, size=f"batch {self.batch}", parameters={"often": OFTEN["kfac"]},
            notes=("predicted from a recording of SGD, over the SGD step of the same rounds",),
        )  # fmt: skip


def place(task: LearningTask, batch: int, runs: Runs, seeds: int) -> Place:
    """Time and predict the step, tune, run the best settings with other seeds."""
    step_s, (ratio,) = runs.timed(task, batch, timed_methods(task)), runs.predicted(task, batch, [batch])
    return Place(task=task, batch=batch, step_s=step_s, ratio=ratio, runs=runs.tuned(task, batch, METHODS, seeds))


def time_all(runs: Runs) -> None:
    """Seconds of steps and predictions of all tables, as far as they are missing."""
    for task in TASKS:
        with suppress(MissingExtraError):
            task.data(held_out=True)
            for batch in dict.fromkeys((*BATCHES[task.name], *SIZES.get(task.name, ()))):
                runs.timed(task, batch, timed_methods(task))
            for batch in BATCHES[task.name]:
                runs.predicted(task, batch, [batch])
            for method in CROSSED.get(task.name, ()):
                runs.predicted(task, RECORDED, SIZES[task.name], method)


def run_processes(models: Sequence[str]) -> list[Row]:
    """Two workers on a shaped link: the step of each fraction, predicted from one worker's recording, and measured."""
    jobs = [LinkJob(work=each, link=LINK, workers=WORKERS, arms=ARMS, seconds=40.0) for each in models]
    with rig_for(jobs) as rig:
        return [row for job in jobs for row in rows_of(verify(job, on=rig))]


def main(given: Sequence[str]) -> int:
    """Print the tables, or write README.md."""
    parser = parser_of("kaisa", __doc__)
    parser.add_argument("--steps", type=int, default=1000, help="at most, of a run; a task may have fewer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--crossing-seeds", type=int, default=6, help="of where K-FAC begins to pay; 0: none")
    parser.add_argument("--task", choices=[each.name for each in TASKS], help="only this one")
    parser.add_argument("--batch", type=int, help="only this one")
    parser.add_argument("--again", action="store_true", help="train anew; with --times, time anew")
    parser.add_argument("--times", action="store_true", help="only time steps and predict; on a quiet machine")
    parser.add_argument("--library", type=Path, help="a checkout of kfac-pytorch, to compare losses with")
    parser.add_argument("--processes", nargs="*", choices=MODELS, help="nothing but two workers on a shaped link")
    parser.add_argument("--write", action="store_true", help="keep runs, rows and README.md")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    if asked.processes is not None:
        for model in asked.processes or MODELS:
            others = [each for each in kept_rows(PROCESSES) if each.model != model]
            write_text(PROCESSES, export_lines([*others, *run_processes([model])]))
        return 0
    if asked.times:
        runs = Runs(HERE, asked.steps)
        if asked.again:
            runs.times.unlink(missing_ok=True)
        time_all(runs)
        return 0
    with ExitStack() as stack:
        folder = HERE if asked.write else Path(stack.enter_context(TemporaryDirectory()))
        runs = Runs(folder, asked.steps)
        if asked.again:
            runs.runs.unlink(missing_ok=True)
        places: list[Place] = []
        crossings: list[Crossing] = []
        for task in (each for each in TASKS if asked.task in (None, each.name)):
            try:
                for batch in (each for each in BATCHES[task.name] if asked.batch in (None, each)):
                    places.append(place(task, batch, runs, asked.seeds))
                    print(f"{task.name}, batch {batch}", file=sys.stderr)
                if task.name in CROSSED and asked.batch is None and asked.crossing_seeds:
                    crossings += cross(runs, task, asked.crossing_seeds)
            except MissingExtraError as error:
                print(f"{task.name}: left out, {error}", file=sys.stderr)
        kept = folder / "library.jsonl"
        wanted = [{"task": each.name} for each in TASKS if each.name != HANDWRITTEN]
        losses = measured(
            kept, wanted, lambda key: compare(key["task"], asked.library), again=bool(asked.library)
        ) if asked.library or kept.exists() else []  # fmt: skip
    rows = kept_rows(PROCESSES)
    text = "\n".join([tables(places), *crossing_section(crossings), *library_section(losses), *process_section(rows)])
    if not asked.write:
        print(text)
        return 0
    steps = [each.row() for each in places] + [row for each in crossings for row in each.rows()]
    kept_as = {identity(each): each for each in kept_rows(ROWS)}
    steps = [kept_as.get(identity(each), each) for each in steps]
    write_text(ROWS, export_lines(steps))
    command = f"`python -m reproductions kaisa --write`; {runs.cpu_s:.0f} s of processor"
    put(
        HERE / "README.md",
        f"{HEAD}\n*{today()}; {command}.*\n\n{measured_on(runs)}\n{text}\n{summary(places, steps)}\n",
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
    fewer = [each.fewer for each in places if 0 < each.fewer < inf]
    best = sum(each.seconds("kfac") < min(each.seconds("sgd"), each.seconds("adam")) for each in places)
    sooner = sum(each.seconds("kfac") < each.seconds("sgd") for each in places)
    steps = [each for each in rows if each.techniques == "kfac step"]
    times = [each for each in rows if each.techniques != "kfac step"]
    return (
        f"K-FAC takes {min(fewer, default=0):.1f} to {max(fewer, default=0):.1f} times fewer steps than SGD where both "
        f"reach the target; in CPU seconds it is sooner there than SGD in {sooner} of {len(places)} cells, and the "
        f"quickest of three in {best}. The predicted range of its step holds the measured one in "
        f"{sum(each.covered for each in steps)} of {len(steps)} rows, that of the time to the target in "
        f"{sum(each.covered for each in times)} of {len(times)} ([rows](../../benchmarks/data/kfac.jsonl))."
    )


def measured_on(runs: Runs) -> str:
    """Machines of runs and of times, and the load averages beside times."""
    trained, timed = (
        " and ".join(dict.fromkeys(each["machine"] for each in runs.cells[path])) for path in (runs.runs, runs.times)
    )
    loads = [float(each["load"].split(",")[0]) for each in runs.cells[runs.times]]
    return (
        f"Steps to a target (what else runs does not change them): {trained}. CPU seconds of a step and predictions, "
        f"by `--times`: {timed}; load {min(loads):.1f} – {max(loads):.1f}, of which these runs are 1. Seconds to a "
        "target are steps times the median step.\n"
    )


def tables(places: Sequence[Place]) -> str:
    """Both tables."""
    first = table(
        ["task", "batch", "steps SGD", "Adam", "K-FAC", "seconds SGD", "Adam", "K-FAC", "SGD's setting", "K-FAC's"],
        [
            [each.task.name, str(each.batch), *(each.told(name, "{:.0f}") for name in METHODS),
             *(each.told(name, "{:.2f}", median(each.step_s[name])) for name in METHODS),
             *("; ".join(f"{k} {v:g}" for k, v in each.runs[name][0]["setting"].items()) for name in ("sgd", "kfac"))]
            for each in places
        ],
    )  # fmt: skip
    second = table(
        ["task", "batch", "SGD step, ms", "K-FAC ÷ SGD step predicted", "measured", "time to target ÷ SGD's"],
        [
            [each.task.name, str(each.batch), f"{1e3 * median(each.step_s['sgd']):.2f}", said(each.ratio),
             f"{median(each.step_s['kfac']) / median(each.step_s['sgd']):.2f}",
             f"{each.seconds('kfac') / each.seconds('sgd'):.2f}" if 0 < each.fewer < inf else "–"]
            for each in places
        ],
    )  # fmt: skip
    return (
        "## Steps and CPU seconds to the target\n\nBatches of the same size for all methods; – is a target that is not "
        f"reached within the limit.\n\n{first}\n\n## The step\n\nPredicted from one recording of SGD at that size.\n\n"
        f"{second}\n"
    )


def crossing_section(crossings: Sequence[Crossing]) -> Iterator[str]:
    """All frequencies."""
    if not crossings:
        return
    given = " and ".join(map(str, GIVEN))
    yield (
        "## From which batch size on it pays\n\n*Every*: steps between factors and between inverses. Predicted: the "
        f"ratio of steps' seconds from one recording of SGD at {RECORDED}, times the share of SGD's steps that K-FAC "
        f"needs. At {given} both were measured, the share over seeds; at another size the share, and the scale of what "
        "K-FAC is said to add, are between that of the nearer one and what continues the trend of both (of the share, "
        "if K-FAC gains with the batch). Predictions know nothing of trainings at other sizes; these rules were fixed "
        "before those at 4000, and after all others. It pays where the whole range of the time is below 1, and loses "
        "where it is above. Measured: seeds in turns, medians with bootstrap intervals of 80 %; – is a target that "
        "half of the seeds do not reach within the limit.\n"
    )
    rows = [
        [
            each.task.name, often(each.method), f"{batch}{' *given*' if batch in GIVEN else ''}",
            said(each.ratio(batch)), said(each.step(batch)), said(each.share(batch)), said(each.steps(batch)[0]),
            said(each.predicted(batch)),
            said(each.measured(batch)), pays(each.predicted(batch)), pays(each.measured(batch)),
        ]
        for each in crossings for batch in each.runs
    ]  # fmt: skip
    header = ["task", "every", "batch", "K-FAC ÷ SGD step predicted", "measured", "steps ÷ SGD's predicted", "measured",
              "time ÷ SGD's predicted", "measured", "pays, predicted", "measured"]  # fmt: skip
    yield table(header, rows) + "\n"
    for each in crossings:
        said_from, seen_from = (from_on(each, ratio) for ratio in (each.predicted_from, each.measured_from))
        yield (
            f"{each.task.name}, {often(each.method)}: predicted to pay from a batch of {said_from} on; measured, from "
            f"{seen_from} on. Of {len(each.held_out)} held-out sizes, the prediction is {each.verdict()}\n"
        )


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
        f"predicted from its recording before it ran ({where(rows)}; "
        "[rows](../../benchmarks/data/kfac_processes.jsonl)).\n"
    )
    yield table(["model", "fraction", "alone, ms", "together, ms", "predicted", "measured", "error", "verdict"],
                body) + "\n"  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
