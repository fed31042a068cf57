"""The product's predictor of tensor programs (`foretrace.cost.programs`) on the labels that were measured quietly.

Everything is scored on tasks, or kinds of tasks, that were left out of the fit whole. What is shipped is fitted to all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import foretrace.cost.programs
from foretrace.cost.programs.predictor import BINDS, ROW, ProgramPredictor, boost, fit, fit_formula, left_out, relative
from foretrace.cost.programs.rank import packed
from foretrace.files import write_bytes
from reproductions.cdmpp import data
from reproductions.cdmpp.score import metrics
from tables import table, today

Floats = NDArray[np.float64]
SHIPPED = Path(foretrace.cost.programs.__file__).parent / "shipped.npz"
FOLDS = 6
SHOTS = (5, 10, 20, 50)  # tasks measured on the other processor
DRAWS = 3
_CODE = slice(0, ROW.index("l1_next"))  # what comes from the listing; the rest from the caches


def ship(say: Callable[[str], None]) -> None:
    """Fit what comes with the package to all programs of this machine's labels."""
    quiet, recording = data.quiet(), data.read()
    about = f"{quiet.about['machine'].split(',')[0]}, {len(quiet.seconds):,} programs, {quiet.about['date']}"
    found = fit(quiet.rows[0], quiet.seconds[:, 0], recording.task_of, about)
    write_bytes(SHIPPED, packed(found))
    say(f"wrote {SHIPPED.name}, {SHIPPED.stat().st_size / 1e3:.0f} kB: range x {found.low:.2f} to {found.high:.2f}")


def results(say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that the page shows."""
    quiet, recording = data.quiet(), data.read()
    task_of, seconds, rows = recording.task_of, quiet.seconds, quiet.rows
    kinds = np.array([recording.tasks[t].kind for t in task_of])
    found: dict[str, Any] = {
        "about": quiet.about, "programs": len(task_of), "tasks": len(recording.tasks),
        "gap": np.quantile(quiet.gap, [0.5, 0.9, 0.99]).tolist(), "firm": float((quiet.gap <= 0.02).mean()),
    }  # fmt: skip
    say("tasks left out ...")
    native = seconds[:, 0]
    by_task = left_out(rows[0], native, task_of, FOLDS)
    formula = _formula_left_out(rows[0], native, task_of)
    found["left_out"] = {
        "formula of ten constants": metrics(formula, native, task_of),
        "trees on what it leaves": metrics(by_task, native, task_of),
    }
    error = np.abs(by_task / native - 1)
    found["by_kind"] = {str(kind): float(error[kinds == kind].mean()) for kind in dict.fromkeys(kinds.tolist())}
    found["firm_error"] = float(error[quiet.gap.max(axis=1) <= 0.003].mean())
    formula_of_all = ProgramPredictor(formula=fit_formula(rows[0], native), trees=None, low=1, high=1)
    binds = np.array(formula_of_all.binds(rows[0]))
    found["by_bind"] = {
        each: (int((binds == each).sum()), float(np.median(error[binds == each]))) for each in BINDS if each in binds
    }
    known = left_out(rows[0], native, np.arange(len(native)), FOLDS)
    found["task_known"] = metrics(known, native, task_of)["median"]
    found["half_the_tasks"] = metrics(left_out(rows[0], native, task_of, 2), native, task_of)["median"]
    say("kinds left out ...")
    groups = np.unique(kinds, return_inverse=True)[1]
    found["kind_unseen"] = metrics(left_out(rows[0], native, groups, FOLDS), native, task_of)
    say("parts ...")
    for name, part in (("machine code", _CODE), ("caches", slice(_CODE.stop, None))):
        kept = np.full_like(rows[0], 1e-9)
        kept[:, part] = rows[0][:, part]
        alone = _formula_left_out(kept, native, task_of)
        found["left_out"][f"formula of {name} alone"] = metrics(alone, native, task_of)
    say("another instruction set ...")
    found["transfer"] = _transfer(rows, seconds, task_of)
    return found


def _formula_left_out(rows: Floats, seconds: Floats, groups: NDArray[np.int64]) -> Floats:
    found = np.zeros(len(seconds))
    for out in _folds(groups):
        found[out] = fit_formula(rows[~out], seconds[~out]).seconds(rows[out])
    return found


def _folds(groups: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
    names = np.unique(groups)
    fold = np.random.default_rng(0).permutation(len(names)) % FOLDS
    return [np.isin(groups, names[fold == each]) for each in range(FOLDS)]


def _transfer(rows: Floats, seconds: Floats, task_of: NDArray[np.int64]) -> dict[str, dict[str, dict[str, float]]]:
    """Errors on the last third of tasks at the other instruction set, by number of tasks measured there."""
    names = np.random.default_rng(3).permutation(np.unique(task_of))
    held = np.isin(task_of, names[: len(names) // 3])
    rest = names[len(names) // 3 :]
    source = _fitted(rows[0][~held], seconds[~held, 0])
    found: dict[str, dict[str, dict[str, float]]] = {
        "0": {"fitted to the source": metrics(source.predict(rows[1][held]), seconds[held, 1], task_of[held])}
    }
    for shots in SHOTS:
        judged: dict[str, list[dict[str, float]]] = {}
        for draw in range(DRAWS):
            few = np.isin(task_of, np.random.default_rng(draw).permutation(rest)[:shots])
            both = _fitted(rows[1][few], seconds[few, 1])
            ways = {
                "constants fitted again": replace(both, trees=None),
                "constants and trees fitted again": both,
                "constants again, trees of the source": replace(both, trees=source.trees),
            }
            for name, predictor in ways.items():
                one = metrics(predictor.predict(rows[1][held]), seconds[held, 1], task_of[held])
                judged.setdefault(name, []).append(one)
        found[str(shots)] = {
            name: {key: float(np.mean([each[key] for each in draws])) for key in draws[0]}
            for name, draws in judged.items()
        }
    return found


def _fitted(rows: Floats, seconds: Floats) -> ProgramPredictor:
    formula = fit_formula(rows, seconds)
    prior = formula.seconds(rows)
    trees = boost(relative(rows, prior), np.log(seconds / prior))
    return ProgramPredictor(formula=formula, trees=trees, low=1, high=1)


def page(found: dict[str, Any]) -> str:
    """The page docs/accuracy/programs.md."""

    def pct(value: float) -> str:
        return f"{100 * value:.1f}"

    def line(m: dict[str, float]) -> list[str]:
        return [pct(m["mape"]), pct(m["median"]), f"{m['top1']:.2f}", f"{m['top5']:.2f}"]

    head = ("predictor", "mean error", "median", "top-1", "top-5")
    held = table(head, [[name, *line(m)] for name, m in found["left_out"].items()])
    kinds = table(("kind of task", "mean error"), [[kind, pct(e)] for kind, e in found["by_kind"].items()])
    moved = table(
        ("tasks measured there", *head),
        [[k, name, *line(m)] for k, ways in found["transfer"].items() for name, m in ways.items()],
    )
    about, gap = found["about"], found["gap"]
    bound = ", ".join(f"{name} {pct(median)} ({count:,})" for name, (count, median) in found["by_bind"].items())
    return (
        f"*Scored {today()}; measured {about['date']}, {about['machine']}, load {about['load']}.*\n\n"
        f"{found['programs']:,} schedules of {found['tasks']} tasks (17 kinds: products, convolutions, row and column "
        "reductions, norms, softmax, transposes, pointwise chains), drawn at random, compiled to exactly their loops, "
        f"every result checked against numpy: {about['protocol']}. *Noise floor*: the two least passes of a program "
        f"differ by {pct(gap[0])} % (median; 90 % by less than {pct(gap[1])} %, 99 % by less than {pct(gap[2])} %); "
        f"{pct(found['firm'])} % agree within 2 %.\n\n"
        "**Tasks never seen** (all tasks, in six parts, each left out in turn). *Top-k*: best time over best among "
        "the k that the predictor ranks first, mean over tasks, as 1 / mean slowdown. Errors in %.\n\n"
        f"{held}\n\nKinds never seen (left out in six parts): {pct(found['kind_unseen']['mape'])} mean, "
        f"{pct(found['kind_unseen']['median'])} median. Programs whose label is firm within 0.3 %: "
        f"{pct(found['firm_error'])} mean. By kind, tasks never seen:\n\n{kinds}\n\n"
        f"**What is left.** Median error of programs left out whose tasks others show: {pct(found['task_known'])}; of "
        f"tasks never seen, learned from half of the tasks: {pct(found['half_the_tasks'])}. So most of it is what the "
        "description of a program does not tell, less what tasks do not share, least noise. By the formula's largest "
        f"term, median (programs): {bound}. Dirty lines, second-level pages, stores' misses and strides as further "
        "features brought nothing. The size of the trees and the share of programs that each sees were chosen on "
        "halves of the tasks that a part learns from.\n\n"
        "CDMPP reports 14.03 % for models not seen and 10.85 % for devices not seen. What separates these figures "
        "from it: its latencies are not public, so neither its programs nor its labels can be used; its programs come "
        "from another generator and are many more; these are drawn at random, good and bad, from 84 tasks, and their "
        "labels have the noise stated above, which programs with firm labels show the weight of.\n\n"
        "**Another processor**: the same programs for the oldest x86-64 processor (128-bit vectors, no fused "
        f"multiply-add), on the same machine; a third of the tasks is scored, mean of {DRAWS} draws of the measured "
        f"ones.\n\n{moved}\n\n"
        "The transformer that this replaced, on the first recording: "
        "[cdmpp](../../reproductions/cdmpp/transformer.md).\n"
    )
