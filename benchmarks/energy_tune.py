"""How many measurements find the setting with the least energy: Zeus' recorded trainings, every optimum known.

`python benchmarks/energy_tune.py TRACES --select` chooses the settings of the Bayesian optimisation by leaving out one
workload (both GPUs) or one GPU (all workloads) at a time, and writes what the others chose, and how it does on what is
left out, into docs/accuracy/energy.md. Without it the other sections of that page are written.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from foretrace import executor
from foretrace.hardware.power import BUSY_RANGE, IDLE_RANGE
from foretrace.search.constrained import ConstrainedBayes
from foretrace.search.minimise import minimise
from foretrace.search.strategies import RandomSearch
from foretrace.search.strategy import SearchStrategy
from foretrace.serving.energy import recorded
from foretrace.serving.energy.tune import STRATEGY, EnergyProblem, Setting, TunedEnvironment, tune
from tables import ROOT, machine, percent, table, today, update

WORKLOADS = ("cifar100", "imagenet", "librispeech", "movielens-1m", "squad", "sentiment140")
GPUS = ("v100", "a40")
PAGE = ROOT / "docs" / "accuracy" / "energy.md"
SECTIONS = (
    "Measurements until the best setting", "Energy saved", "Settings chosen without what they are held against",
    "Power of boards",
)  # fmt: skip
SLO = 1.1
NEAR = 1.02
FEW = 10  # of the seeds, every so many-th where a run is slow
CHOOSING = 5  # and where settings are compared, which are then judged by all


def trainings(traces: Path) -> dict[tuple[str, str], TunedEnvironment]:
    """The twelve recorded trainings by (GPU, workload)."""
    pairs = itertools.product(GPUS, WORKLOADS)
    return {(gpu, name): recorded.read([f"zeus:{traces}", f"workload={name}", f"gpu={gpu}"]) for gpu, name in pairs}


def default(training: TunedEnvironment) -> Setting:
    return tuple(knob.default for knob in training.knobs)


def evaluations(training: TunedEnvironment, strategy: SearchStrategy, seed: int) -> int:
    """Settings that are measured until one is within 2 % of the optimum and keeps the limit."""
    limit_s = SLO * training.points[training.fastest].time_s
    optimum = training.optimum(limit_s)
    assert optimum is not None
    problem = EnergyProblem(training, limit_s, {})
    enough = np.log(NEAR * training.points[optimum].energy_j)
    problem.bound = float(np.log(training.points[optimum].energy_j))  # so that the search ends where it has arrived
    near = np.log(NEAR) / abs(problem.bound)
    found = minimise(problem, strategy=strategy, starts=[default(training)], seed=seed, gap=near)
    return next(call for call, cost in found.curve if cost <= enough)


def tpe(training: TunedEnvironment, seed: int) -> int:
    """The same with optuna's TPE under the constraint; settings asked for again are not measured again."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    limit_s = SLO * training.points[training.fastest].time_s
    optimum = training.optimum(limit_s)
    assert optimum is not None
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=3, multivariate=True)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial({knob.name: knob.levels.index(knob.default) for knob in training.knobs})
    met: set[Setting] = set()
    while True:
        trial = study.ask()
        places = [trial.suggest_int(knob.name, 0, len(knob.levels) - 1) for knob in training.knobs]
        at = tuple(knob.levels[place] for knob, place in zip(training.knobs, places, strict=True))
        if at not in training.points:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        each = training.points[at]
        met.add(at)
        trial.set_constraint("time", float(np.log(each.time_s / limit_s)))
        study.tell(trial, float(np.log(each.energy_j)))
        if each.time_s <= limit_s and each.energy_j <= NEAR * training.points[optimum].energy_j:
            return len(met)
        if trial.number > 20 * len(training.points):
            return len(training.points)


def counts(strategy: SearchStrategy, them: Iterable[TunedEnvironment], seeds: int) -> list[list[int]]:
    return [[evaluations(each, strategy, seed) for seed in range(seeds)] for each in them]


def grid() -> list[ConstrainedBayes]:
    """The settings that are compared."""
    return [
        ConstrainedBayes(length=length, joint=joint, clip=clip, noise=(1e-4, noise))
        for length in (0.4, 0.6, 0.9)
        for joint in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))
        for clip in (1.0, float("inf"))
        for noise in (1e-2, 1e-1)
    ]


def select(them: dict[tuple[str, str], TunedEnvironment], seeds: int) -> str:
    """Evaluations of every workload and of every GPU with the settings that the others choose, see `chosen`."""
    jobs = [(strategy, tuple(them.values()), max(seeds // CHOOSING, 1)) for strategy in grid()]
    found = np.array(list(executor.map(_counts, jobs)))  # settings x trainings x seeds
    keys, text, judged = list(them), list[str](), dict[int, list[list[int]]]()
    for what, names, place in (("workload", WORKLOADS, 1), ("GPU", GPUS, 0)):
        rows, every = [], list[float]()
        for name in names:
            out = [i for i, key in enumerate(keys) if key[place] == name]
            best = chosen(np.delete(found, out, axis=1))
            if best not in judged:
                judged[best] = counts(jobs[best][0], them.values(), seeds)
            medians = [float(np.median(judged[best][i])) for i in out]
            every += medians
            left_out = ", ".join(f"{keys[i][1 - place]} {each:g}" for i, each in zip(out, medians, strict=True))
            rows.append([name, said(jobs[best][0]), left_out])
        few = sum(each <= 10 for each in every)
        text += [
            table([f"{what} left out", "chosen by the others", "medians of what is left out"], rows),
            f"{few} of {len(every)} medians are at most 10; the worst is {max(every):g}.",
        ]
    score = np.exp(np.log(found).mean(axis=(1, 2)))
    listed = "\n".join(
        f"- {score[i]:.2f}, worst median {np.median(found[i], axis=1).max():g}: {said(jobs[i][0])}"
        for i in np.argsort(score)
    )
    text.append(
        f"All twelve choose: {said(jobs[chosen(found)][0])}. The {len(jobs)} settings, mean (geometric) evaluations:"
    )
    return "\n\n".join([CHOICE.strip(), made(seeds), *text, listed])


def chosen(found: np.ndarray) -> int:
    """The lowest worst median, of settings within 1 % of the least geometric mean (settings x trainings x seeds)."""
    mean = np.exp(np.log(found).mean(axis=(1, 2)))
    worst = np.median(found, axis=2).max(axis=1)
    return int(np.argmin(np.where(mean <= 1.01 * mean.min(), worst + 1e-3 * mean, np.inf)))


def _counts(job: tuple[ConstrainedBayes, Sequence[TunedEnvironment], int]) -> list[list[int]]:
    return counts(*job)


def said(strategy: ConstrainedBayes) -> str:
    part = {(0.0, 0.0): "additive", (1.0, 1.0): "of all coordinates"}.get(strategy.joint, "mixed")
    return f"{part} kernel, length {strategy.length:g}, clipped at {strategy.clip:g}, noise up to {strategy.noise[1]:g}"


def measured_runs(training: TunedEnvironment, seeds: int) -> list[list[int]]:
    """Evaluations of ours, of random search and, for every tenth seed, of TPE, which is slow."""
    ours, random = ([evaluations(training, each, seed) for seed in range(seeds)] for each in (STRATEGY, RandomSearch()))
    return [ours, random, [tpe(training, seed) for seed in range(0, seeds, FEW)]]


def _runs(job: tuple[TunedEnvironment, int]) -> list[list[int]]:
    return measured_runs(*job)


def evaluation_table(them: dict[tuple[str, str], TunedEnvironment], seeds: int) -> str:
    """Medians with quartiles; the last line counts trainings."""
    found = executor.map(_runs, [(each, seeds) for each in them.values()])  # trainings x strategies x seeds
    rows = []
    for (gpu, name), training, runs in zip(them, them.values(), found, strict=True):
        quartiles = [np.quantile(each, [0.25, 0.5, 0.75]) for each in runs]
        kept = sum(each.time_s <= SLO * training.points[training.fastest].time_s for each in training.points.values())
        rows.append([f"{name}, {gpu}", str(len(training.points)), str(kept)])
        rows[-1] += [f"{middle:g} ({low:g} – {high:g})" for low, middle, high in quartiles]
    medians = np.array([[np.median(each) for each in runs] for runs in found])
    rows.append(["at most 10", "", "", *(f"{(each <= 10).sum()} of {len(medians)}" for each in medians.T)])
    rows.append(["worst", "", "", *(f"{each.max():g}" for each in medians.T)])
    return table(["training", "settings", "within the limit", "Bayesian", "random", "TPE"], rows)


def savings_table(them: dict[tuple[str, str], TunedEnvironment], seeds: int) -> str:
    """What 16 evaluations save: medians over the seeds."""
    rows = []
    for (gpu, name), training in them.items():
        runs = [tune(training, f"{SLO}x", seed=seed) for seed in range(0, seeds, FEW)]
        optimum = training.points[runs[0].optimum or default(training)]
        fastest, before = training.points[training.fastest], training.points[default(training)]
        saved = np.median([1 - run.at_best.energy_j / before.energy_j for run in runs])
        rows.append([
            f"{name}, {gpu}", percent(float(saved)), percent(1 - optimum.energy_j / before.energy_j),
            percent(float(np.median([run.at_best.energy_j / optimum.energy_j - 1 for run in runs]))),
            percent(float(np.median([run.at_best.time_s / fastest.time_s - 1 for run in runs]))),
            percent(1 - fastest.time_s / before.time_s), percent(1 - optimum.energy_j / fastest.energy_j),
        ])  # fmt: skip
    header = ["training", "saved against the default", "optimum saves", "energy above the optimum",
              "time above the fastest", "fastest against the default", "optimum saves against the fastest"]  # fmt: skip
    return table(header, rows)


def power_rows(traces: Path) -> dict[str, dict[str, list[float]]]:
    """Average power over board power, of trainings without a lowered limit, by workload and GPU; batches ascend."""
    found: dict[str, dict[str, list[float]]] = {}
    for gpu, limit_w in (("v100", 250), ("a40", 300)):
        with (traces / f"summary_power_{gpu}.csv").open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if float(row["power_limit"]) == limit_w]
        for row in sorted(rows, key=lambda each: int(each["batch_size"])):
            share = float(row["average_power"]) / limit_w
            if np.isfinite(share):
                found.setdefault(row["dataset"], {}).setdefault(gpu, []).append(share)
    return found


def power_table(traces: Path) -> str:
    """Each workload's highest share of the board power, held against the range of the other workloads."""
    shares = power_rows(traces)
    most = {name: max(max(each) for each in by.values()) for name, by in shares.items()}
    idle = "movielens-1m"  # its kernels hardly run: what it draws is the other end
    rows = []
    for name, by in shares.items():
        ends = [min(min(each) for each in by.values()), most[name]]
        others = [most[each] for each in most if each not in (name, idle)]
        low, high = min(others) - POWER_MARGIN, min(max(others) + POWER_MARGIN, 1.0)
        cells = [name, " – ".join(percent(each) for each in ends)]
        cells += ["–", "–"] if name == idle else [f"{percent(low)} – {percent(high)}", str(low <= most[name] <= high)]
        whole = [IDLE_RANGE[0] <= each <= BUSY_RANGE[1] for gpu in by.values() for each in gpu]
        rows.append([*cells, f"{sum(whole)} of {len(whole)}"])
    return table(
        [
            "workload, both GPUs",
            "share of the board power",
            "range of the others' busiest",
            "inside",
            "in the shipped range",
        ],
        rows,
    )


def server_table(folder: Path) -> str:
    """Servers with eight H100s: idle and load power of the other two runs, integrated over the third."""
    runs = {}
    for path in sorted(folder.glob("1xSMC-H100_*_node0.txt*")):
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        lines = [json.loads(line.split("MLLOG", 1)[1]) for line in text.splitlines() if '"power_reading"' in line]
        times, watts = np.array([[each["time_ms"] / 1e3, float(each["value"])] for each in lines]).T
        runs[path.name.split("_")[1]] = (np.diff(times), watts[:-1])
    rows = []
    for name, (length_s, watts) in runs.items():
        others = [each for other, (_, each) in runs.items() if other != name]
        idle_w = min(float(each.min()) for each in others)
        load_w = float(np.median([np.median(each) for each in others]))
        busy = watts > (idle_w + load_w) / 2
        energy = float((length_s * watts).sum())
        model = float((length_s * np.where(busy, load_w, idle_w)).sum())
        per_gpu = (np.median(watts) - idle_w) / 8
        rows.append([name, f"{energy / 1e6:.2f} MJ", f"{model / 1e6:.2f} MJ", percent(model / energy - 1, signed=True),
                     percent(float(busy.mean())), f"{per_gpu:.0f} W"])  # fmt: skip
    return table(
        ["run", "metered", "by the other two", "error", "readings under load", "load above idle, per GPU (of 700 W)"],
        rows,
    )


def made(seeds: int) -> str:
    """When, with how many seeds, and where."""
    return f"*{today()}, {seeds} seeds; {machine()}.*"


def sections(traces: Path, seeds: int) -> dict[str, str]:
    """All but how settings were chosen."""
    them, (evaluations, saved, _, power) = trainings(traces), SECTIONS
    return {
        evaluations: "\n\n".join([EVALUATIONS.strip(), made(seeds), evaluation_table(them, seeds)]),
        saved: "\n\n".join([SAVINGS.strip(), made(seeds), savings_table(them, seeds)]),
        power: "\n\n".join(
            [POWER.strip(), power_table(traces), SERVERS.strip(), server_table(traces.parent.parent / "power")]
        ),
    }


HEAD = """# Energy: settings found, and power of boards

Written by `python benchmarks/energy_tune.py TRACES` from Zeus' recordings (You et al., NSDI 2023) and the power logs
of MLPerf Training.
"""
EVALUATIONS = """Settings measured until one is within 2 % of the least energy of all that keep 1.1 times the fastest
time, both known by enumeration; median (quartiles) over seeds, of TPE over every tenth. Every
search begins at the default setting (published
batch size, highest power limit) and goes on with random points. TPE is optuna's, with the limit as a constraint; it
begins with three random points. Kernel, clipping and noise are those with the lowest worst median among settings
within 1 % of the fewest evaluations on average. All six workloads were seen by that choice: "Settings chosen without
what they are held against" below says what becomes of one that was not.
"""
CHOICE = """Written by `--select`: each workload is left out on both GPUs, then each GPU with all workloads; the others
choose among the settings listed by the rule above, with a fifth of the seeds. Medians are of what is left out, with
all seeds.
"""
SAVINGS = """After 16 evaluations: medians over every tenth seed.
The limit is 1.1 times the fastest time. The default is the
published batch size at the highest power limit, which is slow where another batch size needs fewer epochs: most of what
is saved there is time. The last column is what the limit's 10 % alone buy. PolyThrottle's 36 % are of inference on
Jetson boards, against their default: other work and other knobs.
"""
POWER = """`estimate` and `whatif` take a share of the board power while kernels run and another one between them. Zeus
tells average power without a lowered limit, but not how long kernels ran. So the busiest batch size of a workload
stands for kernels that always run, and movielens-1m, which hardly uses the GPU, for none. Left out is one workload on
both GPUs; the range is that of the others, 10 % of the board power wider.
"""
SERVERS = """A whole server with eight H100s, as two levels: idle, and under load. Both levels are those of the other
two runs; when it was under load is known. The last column holds host, fans and losses, too.
"""
POWER_MARGIN = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--select", action="store_true")
    given = parser.parse_args()
    them = {SECTIONS[2]: select(trainings(given.traces), given.seeds)} if given.select else {}
    update(PAGE, HEAD.strip(), them or sections(given.traces, given.seeds), SECTIONS)


if __name__ == "__main__":
    main()
