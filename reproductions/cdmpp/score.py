"""Training and scoring the program predictor on recorded programs; tasks are held out whole, never rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.programs.predictor import boost
from reproductions.cdmpp import data, learn
from reproductions.cdmpp.ast import Encoded, encode
from reproductions.cdmpp.data import Recording
from reproductions.cdmpp.learn import Settings
from reproductions.cdmpp.predictor import ProgramPredictor, Shape, load
from reproductions.cdmpp.prior import estimates, fit_costs
from reproductions.cdmpp.sampling import choose_tasks
from tables import ROOT, table, today

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
WEIGHTS = Path(__file__).parent / "programs.npz"
SMALL = Shape(width=32, layers=1, hidden=64, embedding=16, decoder=32)
SETTINGS = Settings(shape=SMALL, epochs=50, dropout=0.2, decay=0.1, squared=0.5, relative=2.0)
TUNING = replace(SETTINGS, epochs=30, rate=1e-3)
ALPHA = 0.1  # of CMD
SHOTS = (10, 20, 50)  # tasks measured on the new device


def split(recording: Recording) -> tuple[Ints, Ints, Ints]:
    """Tasks to train on, to choose settings on, and to score: of every kind one for choosing and one for the score."""
    rng = np.random.default_rng(5)
    kinds = np.array([each.kind for each in recording.tasks])
    chosen = [rng.permutation(np.flatnonzero(kinds == kind))[:2] for kind in dict.fromkeys(kinds.tolist())]
    choosing, test = (np.sort([each[i] for each in chosen]) for i in (0, 1))
    rest = np.setdiff1d(np.arange(len(kinds)), np.concatenate([choosing, test]))
    return rest, choosing, test


def of_tasks(recording: Recording, tasks: Ints) -> Ints:
    """Programs of these tasks."""
    return np.flatnonzero(np.isin(recording.task_of, tasks))


# --- training -----------------------------------------------------------------------------------------------------


def train(say: Callable[[str], None]) -> None:
    """The shipped weights: trained on all tasks but those of the score; the range from the tasks for choosing."""
    recording = data.read()
    rest, choosing, test = split(recording)
    encoded, seconds = encode(recording.programs(0)), recording.seconds[:, 0]
    fit, held = of_tasks(recording, rest), of_tasks(recording, choosing)
    trial = learn.train(encoded.take(fit), seconds[fit], SETTINGS, say=say)
    ratio = seconds[held] / trial.predict_encoded(encoded.take(held)).seconds
    low, high = np.quantile(ratio, [0.1, 0.9])
    say(f"tasks for choosing: {_errors(ratio)}; 80 % range x {low:.2f} to {high:.2f}")
    rows = np.concatenate([fit, held])
    final = learn.train(encoded.take(rows), seconds[rows], SETTINGS, say=say)
    about = f"{len(rows)} programs of {len(rest) + len(choosing)} tasks, float32, {recording.about['machine']}, "
    final = replace(final, low=float(low), high=float(high), about=about + recording.about["date"])
    final.save(WEIGHTS)
    say(f"wrote {WEIGHTS.relative_to(ROOT)}, {WEIGHTS.stat().st_size / 1e3:.0f} kB; {len(test)} tasks were left out")


def choose(say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Parts of the predictor left out or exchanged, one at a time, on the tasks for choosing."""
    recording = data.read()
    rest, choosing, _ = split(recording)
    encoded, seconds = encode(recording.programs(0)), recording.seconds[:, 0]
    fit, held = of_tasks(recording, rest), of_tasks(recording, choosing)
    variants = {
        "as shipped": SETTINGS,
        "no positions": replace(SETTINGS, shape=replace(SMALL, positions=False)),
        "no attention between leaves": replace(SETTINGS, shape=replace(SMALL, attention=False)),
        "twice as wide, two layers": replace(SETTINGS, shape=Shape()),
        "squared loss alone": replace(SETTINGS, relative=0.0),
        "relative loss alone": replace(SETTINGS, squared=0.0),
        "log labels": replace(SETTINGS, labels="log"),
        "Yeo-Johnson labels": replace(SETTINGS, labels="yeo-johnson"),
        "raw labels": replace(SETTINGS, labels="none"),
    }
    found = {}
    for name, settings in variants.items():
        model = learn.train(encoded.take(fit), seconds[fit], settings)
        found[name] = metrics(model.predict_encoded(encoded.take(held)).seconds, seconds[held], recording.task_of[held])
        say(f"{name}: {found[name]}")
    return found


# --- metrics ------------------------------------------------------------------------------------------------------


def _errors(ratio: Floats) -> str:
    """Of measured over predicted."""
    error = np.abs(1 / ratio - 1)
    return f"error {100 * error.mean():.1f} % mean, {100 * np.median(error):.1f} % median"


def metrics(predicted: Floats, seconds: Floats, task_of: Ints) -> dict[str, float]:
    """Errors over all programs; ranks and the best of k within tasks."""
    error = np.abs(predicted / seconds - 1)
    ranks, top = [], {1: [0.0, 0.0], 5: [0.0, 0.0]}
    for each in np.unique(task_of):
        rows = np.flatnonzero(task_of == each)
        truth, guess = seconds[rows], predicted[rows]
        if np.ptp(guess) > 0:
            ranks.append(float(np.corrcoef(_ranked(truth), _ranked(guess))[0, 1]))
        for k, sums in top.items():
            sums[0] += truth.min() / truth.min()
            sums[1] += truth[np.argsort(guess, kind="stable")[:k]].min() / truth.min()
    return {
        "mape": float(error.mean()),
        "median": float(np.median(error)),
        "spearman": float(np.mean(ranks)) if ranks else 0.0,
        "top1": top[1][0] / top[1][1],
        "top5": top[5][0] / top[5][1],
    }


def _ranked(values: Floats) -> Floats:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)


# --- baselines ----------------------------------------------------------------------------------------------------


def baselines(recording: Recording, encoded: Encoded, fit: Ints, test: Ints) -> dict[str, Floats]:
    """Seconds of the test programs by simpler predictors that saw the same training programs."""
    seconds, programs = recording.seconds[:, 0], recording.programs(0)
    log = np.log(seconds[fit])
    flops, nbytes = (np.array([float(getattr(each, name)) for each in programs]) for name in ("flops", "nbytes"))
    peak, bandwidth = (flops[fit] / seconds[fit]).max(), (nbytes[fit] / seconds[fit]).max()
    roof = np.maximum(flops / peak, nbytes / bandwidth)
    slower = np.exp(np.median(log - np.log(roof[fit])))
    x = encoded.summed()
    mean, deviation = x[fit].mean(axis=0), np.maximum(x[fit].std(axis=0), 1e-3)
    z = np.clip((x - mean) / deviation, -6, 6)
    weights = np.linalg.solve(z[fit].T @ z[fit] + 3.0 * np.eye(z.shape[1]), z[fit].T @ (log - log.mean()))
    return {
        "constant": np.full(len(test), np.exp(np.median(log))),
        "roofline": roof[test],
        "roofline x median": slower * roof[test],
        "costs per instruction, fitted": estimates(encoded.take(test), fit_costs(encoded.take(fit), seconds[fit]))[1],
        "ridge on summed features": np.exp(log.mean() + z[test] @ weights),
        "boosted trees on summed features": np.exp(boost(x[fit], log).predict(x[test])),
    }


# --- the score ----------------------------------------------------------------------------------------------------


def score(say: Callable[[str], None], *, ablate: bool) -> dict[str, Any]:
    """Everything that the page shows."""
    recording = data.read()
    rest, choosing, test = split(recording)
    learned = np.concatenate([rest, choosing])
    fit, held = of_tasks(recording, learned), of_tasks(recording, test)
    encoded = [encode(recording.programs(i)) for i in range(len(data.DOMAINS))]
    seconds, task_of = recording.seconds, recording.task_of
    shipped = load()
    found = shipped.predict_encoded(encoded[0].take(held))
    say("held-out tasks ...")
    rows = {
        name: metrics(each, seconds[held, 0], task_of[held])
        for name, each in baselines(recording, encoded[0], fit, held).items()
    }
    rows["compact AST, transformer (shipped)"] = metrics(found.seconds, seconds[held, 0], task_of[held])
    covered = float(((found.low_s <= seconds[held, 0]) & (seconds[held, 0] <= found.high_s)).mean())
    noise = np.abs(recording.second / recording.first - 1)
    spread = [np.ptp(np.log(seconds[task_of == t, 0])) for t in range(len(recording.tasks))]
    return {
        "about": recording.about, "programs": len(seconds), "tasks": len(recording.tasks),
        "scored_programs": len(held), "scored_tasks": len(test),
        "spread_within_task": float(np.exp(np.median(spread))),
        "noise_median": float(np.median(noise)), "noise_p90": float(np.quantile(noise, 0.9)),
        "timed_twice": len(noise),
        "held_out": rows, "covered": covered,
        "by_kind": _by_kind(recording, found.seconds, held),
        "transfer": {
            data.DOMAIN_NAMES[i]: transfer(recording, encoded, i, shipped, fit, held, say)
            for i in range(1, len(data.DOMAINS))
        },
        "choices": choose(say) if ablate else {},
    }  # fmt: skip


def _by_kind(recording: Recording, predicted: Floats, held: Ints) -> dict[str, float]:
    kinds = np.array([recording.tasks[t].kind for t in recording.task_of[held]])
    error = np.abs(predicted / recording.seconds[held, 0] - 1)
    return {str(kind): float(error[kinds == kind].mean()) for kind in dict.fromkeys(kinds.tolist())}


def transfer(
    recording: Recording, encoded: list[Encoded], domain: int, shipped: ProgramPredictor, fit: Ints, held: Ints,
    say: Callable[[str], None],
) -> dict[str, dict[str, dict[str, float]]]:  # fmt: skip
    """Errors on held-out tasks of another domain, by number of tasks measured there and by method."""
    source, target = encoded[0].take(fit), encoded[domain]
    ours, theirs, task_of = recording.seconds[:, 0], recording.seconds[:, domain], recording.task_of
    scored = target.take(held)
    unlabelled = target.take(fit)

    def judged(model: ProgramPredictor, factor: float = 1.0) -> dict[str, float]:
        return metrics(factor * model.predict_encoded(scored).seconds, theirs[held], task_of[held])

    nothing = target.take(fit[:0])
    found: dict[str, dict[str, dict[str, float]]] = {"0": {"source predictor": judged(shipped)}}
    found["0"]["CMD alone"] = judged(
        learn.adapt(shipped, source, ours[fit], nothing, theirs[fit[:0]], unlabelled, replace(TUNING, epochs=8),
                    alpha=ALPHA)
    )  # fmt: skip
    order = choose_tasks(shipped.embed(unlabelled), max(SHOTS), tasks=task_of[fit])
    anyhow = np.random.default_rng(7).permutation(np.unique(task_of[fit]))
    for k in SHOTS:
        row = found[str(k)] = {}
        picks = choose_tasks(shipped.embed(unlabelled), k, tasks=task_of[fit]) if k < max(SHOTS) else order
        for name, tasks, alpha in (
            ("tuned", picks, 0.0),
            ("tuned with CMD", picks, ALPHA),
            ("tuned, tasks at random", anyhow[:k], 0.0),
        ):
            if name.endswith("random") and k > SHOTS[0]:
                continue  # the choice matters where tasks are few
            rows = fit[np.isin(task_of[fit], tasks)]
            if name == "tuned":
                ratio = theirs[rows] / shipped.predict_encoded(target.take(rows)).seconds
                row["scaled by the median"] = judged(shipped, float(np.median(ratio)))
            model = learn.adapt(
                shipped, source, ours[fit], target.take(rows), theirs[rows], unlabelled, TUNING, alpha=alpha
            )
            row[name] = judged(model)
            say(f"{data.DOMAIN_NAMES[domain]}, {k} tasks, {name}: {100 * row[name]['mape']:.1f} %")
    return found


# --- the page -----------------------------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    """The page reproductions/cdmpp/transformer.md."""
    about = found["about"]

    def pct(value: float) -> str:
        return f"{100 * value:.1f}"

    held = table(
        ("predictor", "mean error", "median", "rank correlation in a task", "top-1", "top-5"),
        [
            [name, pct(m["mape"]), pct(m["median"]), f"{m['spearman']:.2f}", f"{m['top1']:.2f}", f"{m['top5']:.2f}"]
            for name, m in found["held_out"].items()
        ],
    )
    kinds = table(("kind of task", "mean error"), [[kind, pct(e)] for kind, e in found["by_kind"].items()])
    rows = [
        [domain, k, name, pct(m["mape"]), pct(m["median"]), f"{m['spearman']:.2f}"]
        for domain, curve in found["transfer"].items()
        for k, methods in curve.items()
        for name, m in methods.items()
    ]
    moved = table(("domain", "tasks measured", "method", "mean error", "median", "rank correlation"), rows)
    text = (
        f"*Scored {today()}; measured {about['date']}, {about['machine']}, other work running beside (load averages "
        f"{about['load']}).*\n\n"
        f"{found['programs']:,} schedules of {found['tasks']} tasks (17 kinds: products, convolutions, row and column "
        "reductions, norms, softmax, transposes, pointwise chains), drawn at random, compiled to exactly their loops "
        f"and measured in {about['minutes']:g} minutes: {about['protocol']}. The slowest schedule of a task takes "
        f"{found['spread_within_task']:.1f} times as long as its fastest (median). *Noise floor*: "
        f"{found['timed_twice']:,} programs were compiled and timed a second time minutes later, and differ then by "
        f"{pct(found['noise_median'])} % (median; 90 % of them by less than {pct(found['noise_p90'])} %); the less of "
        "both times counts.\n\n"
        f"**Tasks never seen** ({found['scored_programs']} programs of {found['scored_tasks']} tasks, one of every "
        "kind; settings were chosen on other tasks, these were scored once). "
        "CDMPP reports 14.03 % for models not seen; its latencies are not "
        "public, its programs come from another generator and other devices, so the two figures cannot be compared. "
        "*Top-k*: "
        "best time over best among the k that the predictor ranks first, mean over tasks, as 1 / mean slowdown. The "
        f"80 % range held {pct(found['covered'])} % of the programs. Errors in %.\n\n{held}\n\n{kinds}\n\n"
        "**Another device.** There is one machine, so the other devices are other settings of it: the same programs "
        "compiled for the oldest x86-64 processor (128-bit vectors, no fused multiply-add), and on 64-bit numbers. "
        f"That is a smaller step than from one processor to another. Tasks are chosen by KMeans on embeddings; CMD has "
        f"weight {ALPHA}. Features know the number type but not the instruction set: there CMD compares like with "
        "like and cannot say anything. One training each, so differences of a point or two mean nothing. "
        "CDMPP reports 10.85 % across devices, which cannot be run again either.\n\n"
        f"{moved}\n"
    )
    if found["choices"]:
        rows = [
            [name, pct(m["mape"]), pct(m["median"]), f"{m['spearman']:.2f}"] for name, m in found["choices"].items()
        ]
        text += (
            "**What the parts are worth**, one training each, trained without and scored on the tasks for choosing "
            f"(one of every kind):\n\n{table(('variant', 'mean error', 'median', 'rank correlation'), rows)}\n"
        )
    return text
