"""FlexFlow's six models on its two clusters: gains of the search, and how fast strategies are priced; to README.md.

    python -m reproductions flexflow [--calls N] [--model NAME] [--on ray] [--out README.md] [gains] [longer] [speed]

Times of operators are a roofline's, not measured: what is compared is strategies under one cost model, for both ways
to exchange gradients and for few and many samples per device, because the size of the gain depends on both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from pathlib import Path
from random import Random

from foretrace.arrays import Int64
from foretrace.plan.soap.problem import SYNCHRONISATIONS, Codes, SoapProblem, best_strategy
from foretrace.search.strategies import MCMC
from reproductions import parser_of
from reproductions.flexflow.cluster import SoapCluster
from reproductions.flexflow.layers import problem as problem_of
from reproductions.flexflow.models import MODELS, k80_cluster, p100_cluster
from reproductions.flexflow.plain import PlainStep
from tables import load as load_averages
from tables import machine, table, today, update

PAGE = Path(__file__).with_name("README.md")
GAINS = """{calls} strategies per search, {chains} chains, one seed, started from the better baseline, so never worse
than it. *0.05 per ms* is the published rule of acceptance, back to the best after every {reset} proposals; *5 per ms*
accepts less, and goes back after 1,000. Gains are those of the better rule unless named. *GB of a device*: the fullest
one. *CPU s*: of the published rule.
"""
LONGER = """By *5 per ms* with ten times the strategies, where these are quick to price: the table above stops before
its searches have converged.
"""
SPEED = """Strategies priced per CPU second, 64 samples per device, all-reduce. *Compiled*: the full simulation along a
walk of 200 random changes that are all accepted, which has more messages than what a search keeps to. *Search*: all of
a search by the published rule. *Plain*: a simulator in Python on 4 strategies of that walk, with the same answers.
Delta simulation is not used. *Moved*: share of all tasks that are new or end at another time after one operator has
changed at random, of data parallelism and of the strategy found; what re-timing could leave out is the rest.
"""
PER_DEVICE = (4, 64)  # samples
CHAINS = 4
COLD = 5.0  # per ms


def clusters() -> tuple[SoapCluster, ...]:
    """The published ones."""
    return (p100_cluster(), k80_cluster())


def problems(names: Sequence[str], per_device: Sequence[int] = PER_DEVICE) -> Iterator[tuple[int, SoapProblem]]:
    """Samples per device, and the problem."""
    for cluster, name, samples, sync in product(clusters(), names, per_device, SYNCHRONISATIONS):
        yield samples, problem_of(MODELS[name](samples * cluster.devices), cluster, sync)


def gains(names: Sequence[str], calls: int, on: str | None = None) -> str:
    """The table of step times."""
    rows = []
    for samples, problem in problems(names):
        data, expert = problem.cost(problem.data_parallel()), problem.cost(problem.expert())
        cold = MCMC(beta=COLD, reset=1000)
        began = time.process_time()
        published = best_strategy(problem, calls=calls, chains=CHAINS, on=on)
        seconds = time.process_time() - began
        other = best_strategy(problem, calls=calls, chains=CHAINS, strategy=cold, on=on)
        best = min(published.cost, other.cost)
        point = published.best if published.cost == best else other.best
        assert point is not None and best <= min(data, expert) < inf  # else the table would be of something else
        counted = problem.counted(point)
        rows.append((
            f"{problem.cluster.name}, {problem.model.name}", f"{samples}", problem.synchronisation, f"{data:.1f}",
            f"{expert:.1f}", f"{published.cost:.1f}", f"{other.cost:.1f}", f"{data / published.cost:.2f}",
            f"{data / best:.2f}", f"{expert / best:.2f}", f"**{min(data, expert) / best:.2f}**",
            f"{max(counted.held_bytes) / 1e9:.1f}", f"{seconds:.1f}",
        ))  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    return table(
        ("cluster, model", "samples per device", "gradients by", "data parallel, ms", "expert, ms", "0.05 per ms",
         "5 per ms", "gain by 0.05", "gain, data parallel", "gain, expert", "gain, better of both", "GB of a device",
         "CPU s"),
        rows,
    )  # fmt: skip


def longer(names: Sequence[str], calls: int) -> str:
    """The table of searches with ten times the budget, where strategies are quick to price."""
    rows = []
    for samples, problem in problems(names):
        if problem.cluster.name != clusters()[0].name or problem.model.name in ("Inception-v3", "ResNet-101"):
            continue
        data, expert = problem.cost(problem.data_parallel()), problem.cost(problem.expert())
        cold = MCMC(beta=COLD, reset=1000)
        few, many = (best_strategy(problem, calls=n * calls, chains=CHAINS, strategy=cold).cost for n in (1, 10))
        rows.append((
            f"{problem.cluster.name}, {problem.model.name}", f"{samples}", problem.synchronisation, f"{few:.1f}",
            f"{many:.1f}", f"{data / many:.2f}", f"{expert / many:.2f}", f"**{min(data, expert) / many:.2f}**",
        ))  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    return table(
        ("cluster, model", "samples per device", "gradients by", f"{calls:,}, ms", f"{10 * calls:,}, ms",
         "gain, data parallel", "gain, expert", "gain, better of both"),
        rows,
    )  # fmt: skip


def ends(problem: SoapProblem, point: Codes) -> dict[int, Int64]:
    """When tasks end, by what they belong to: an operator, an input, a layer."""
    problem.simulated(point)
    _, tasks = problem.simulated(point)
    count = problem.counted(point).tasks
    owners, end = tasks.owner[:count], tasks.end[:count]
    return {int(owner): end[owners == owner].copy() for owner in set(owners.tolist())}


def moved(problem: SoapProblem, point: Codes, changes: int) -> float:
    """Share of all tasks that are new or end at another time after one operator has changed at random."""
    before, rng, other, total = ends(problem, point), Random(1), 0, 0
    for _ in range(changes):
        op = rng.randrange(len(point))
        after = ends(problem, (*point[:op], rng.randrange(problem.space.counts[op]), *point[op + 1 :]))
        for owner, end in after.items():
            total += len(end)
            was = before.get(owner)
            same = 0 if owner == op or was is None or len(was) != len(end) else int((was == end).sum())
            other += len(end) - same
    return other / total


def speed(names: Sequence[str], calls: int) -> str:
    """The table of proposals per CPU second."""
    rows = []
    for _, problem in problems(names, (64,)):
        if problem.synchronisation == "gather":
            continue
        rng, point = Random(0), problem.data_parallel()
        points = [point := problem.space.neighbour(point, rng) for _ in range(200)]
        found = best_strategy(problem, calls=calls, chains=CHAINS).best
        assert found is not None
        began = time.process_time()
        times = [problem.simulated(point)[0] for point in points]
        compiled = len(points) / (time.process_time() - began)
        few = points[:: len(points) // 4]
        began = time.process_time()
        plain = [PlainStep(problem, point).makespan_ns for point in few]
        plainly = len(few) / (time.process_time() - began)
        assert plain == times[:: len(points) // 4]
        began = time.process_time()
        searched = best_strategy(problem, calls=calls, chains=CHAINS, seed=1).calls
        search = searched / (time.process_time() - began)
        data = problem.data_parallel()
        rows.append((
            f"{problem.cluster.name}, {problem.model.name}", f"{problem.counted(data).tasks:,}", f"{compiled:,.0f}",
            f"{search:,.0f}", f"{plainly:.2f}", f"{compiled / plainly:,.0f}", f"{100 * moved(problem, data, 60):.0f} %",
            f"{100 * moved(problem, found, 60):.0f} %",
        ))  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    return table(
        ("cluster, model", "tasks", "compiled", "search", "plain", "times", "moved, data parallel",
         "moved, found"),
        rows,
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("flexflow", __doc__)
    parser.add_argument("sections", nargs="*", help="gains, longer, speed; default: all")
    parser.add_argument("--calls", type=int, default=2000, help="strategies that each search may price")
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="this model alone; may be repeated")
    parser.add_argument("--on", help="where the chains of gains run: here (processes) or ray, with the same gains")
    parser.add_argument("--out", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    if unknown := set(given.sections) - {"gains", "longer", "speed"}:
        parser.error(f"there is no section {' or '.join(sorted(unknown))}; choose gains, longer, speed")
    names = given.model or list(MODELS)
    warm = next(problems(["rnntc"], (1,)))[1]
    warm.cost(warm.data_parallel())  # compiles the loop
    figures = f"*{today()}, {machine()}; load averages {load_averages()}.*\n"
    sections = {}
    if "gains" in given.sections or not given.sections:
        about = GAINS.format(calls=f"{given.calls:,}", chains=CHAINS, reset=max(1, given.calls // CHAINS // 100))
        sections["Gains"] = "\n".join([figures, about, gains(names, given.calls, given.on)])
    if "longer" in given.sections or not given.sections:
        sections["Longer searches"] = "\n".join([figures, LONGER, longer(names, given.calls)])
    if "speed" in given.sections or not given.sections:
        sections["Speed"] = "\n".join([figures, SPEED, speed(names, min(given.calls, 1000))])
    head = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    update(given.out, head, sections, ("Gains", "Longer searches", "Speed"))
    return 0
