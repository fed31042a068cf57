"""How fast and how good `foretrace optimise` is: against plain searches and against dPRO's published search times.

    python -m reproductions dpro [--seconds 2] [--out README.md] [search] [quality] [recordings] [rates]

Two kinds of problems. *Shapes*: the tensors of the models in dPRO's table, with compute worked out from their
operations at fixed rates of a V100-class device (stated on the page), 16 workers. *Recordings*: small models of the
zoo, recorded here. Without names every section is made anew.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.cost.network.parse import network
from foretrace.deadline import Deadline
from foretrace.plan.buckets import best_buckets, default
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.problem import CoarseStep, Plan
from foretrace.plan.search import overtaking
from foretrace.report.units import seconds as as_text
from foretrace.simulate.timeline import simulate
from reproductions import parser_of
from reproductions.dpro.baselines import greedy, mcmc
from reproductions.dpro.coarse import as_graph
from tables import load, machine, table, today, update

if TYPE_CHECKING:
    from torch import nn

    from foretrace.graph.taskgraph import TaskGraph

PAGE = Path(__file__).with_name("README.md")
HEAD = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]

WORKERS, SAMPLES = 16, 32
FLOP_PER_S, BYTES_PER_S, OPERATOR_S = 9.4e12, 700e9, 8e-6  # of a V100-class device, float32
REGION_NS = 40_000  # compute that a bucket boundary costs, as operators are not fused across it
UPDATE_PASSES = 7  # arrays that Adam reads or writes
NETWORKS = ("10gbit/25us", "25gbit/15us", "100gbit/5us")
# dPRO (MLSys 2022), search time on its replayer without and with its accelerations, hours.
PUBLISHED_H = {"resnet50": (14.60, 0.29), "vgg16": (11.97, 0.04), "inception-v3": (16.75, 0.47), "bert": (24.0, 0.49)}
OPERATORS = {"resnet50": 8, "vgg16": 40, "inception-v3": 6, "bert": 10}  # per group, so that a worker has thousands


# --- problems ----------------------------------------------------------------------------------------------------


def shaped(name: str) -> list[tuple[str, int, float]]:
    """(parameter, elements, seconds of its module's forward pass) in the order of registration."""
    import torch

    model, feed = from_zoo(name)
    found: dict[str, float] = {}
    hooks = []

    def timed(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            own = list(module.parameters(recurse=False))
            matrix = [p for p in own if p.dim() > 1]
            size = out.numel() * SAMPLES / 2
            flops = sum(2.0 * p.numel() * size / p.shape[0] for p in matrix)
            found[path] = max(flops / FLOP_PER_S, 8.0 * size / BYTES_PER_S) + OPERATOR_S

        return hook

    for path, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks.append(module.register_forward_hook(timed(path)))
    with torch.no_grad():
        feed(model)
    rows = []
    for path, parameter in model.named_parameters():
        owner = path.rpartition(".")[0]
        first = next(model.get_submodule(owner).named_parameters(recurse=False))[0] == path.rpartition(".")[2]
        rows.append((path, parameter.numel(), found.get(owner, 0.0) if first else 0.0))
    return rows


def from_zoo(name: str) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """A model of the zoo as published, on two samples."""
    import torch

    from foretrace.zoo.registry import training

    job = training(name, "full")

    def two(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[:2] if value.dim() else value
        if isinstance(value, dict):
            return {key: two(each) for key, each in value.items()}
        return type(value)(map(two, value)) if isinstance(value, (list, tuple)) else value

    return job.model, lambda m: job.loss(m, two(next(iter(job.loader))))


def shaped_problem(name: str, rows: list[tuple[str, int, float]], text: str) -> CoarseStep:
    """The data-parallel step of a model of these shapes on 16 workers; gradients in the reverse order."""
    backward = rows[::-1]
    n = len(rows)
    nbytes = np.array([4 * elements for _, elements, _ in backward], dtype=np.int64)
    forward = np.array([round(1e9 * time_s) for _, _, time_s in backward], dtype=np.int64)
    update = np.rint(UPDATE_PASSES * nbytes / BYTES_PER_S * 1e9).astype(np.int64)
    net = network(text, WORKERS)
    return CoarseStep(
        name=name,
        first_ns=500_000,
        forward_ns=forward,
        forward_place=np.arange(n, dtype=np.int64)[::-1].copy(),
        backward_ns=2 * forward,
        last_ns=0,
        update_ns=update,
        rest_ns=500_000,
        nbytes=nbytes,
        cut_ns=np.full(n - 1, REGION_NS, dtype=np.int64),
        tensors=tuple(path for path, _, _ in backward),
        network=net,
    ).checked()


def problems(names: tuple[str, ...] = tuple(PUBLISHED_H)) -> Iterator[tuple[str, str, CoarseStep]]:
    """Every model on every network."""
    for name in names:
        rows = shaped(name)
        for text in NETWORKS:
            yield name, text, shaped_problem(name, rows, text)


# --- sections ----------------------------------------------------------------------------------------------------


def made() -> str:
    return f"*{today()}, {machine()}; load averages {load()}.*\n\n"


@dataclass(frozen=True, kw_only=True)
class Searched:
    """A whole search on a problem of a published size."""

    seconds: float  # in the published space: buckets with fused operators, checked on the global graph
    more_s: float  # for messages that overtake
    tasks: int
    tensors: int
    off: float  # of the search's own step from the simulated global graph
    gap: float  # of the overtaking step above its bound
    plans: int


def searched(problem: CoarseStep, operators: int) -> Searched:
    """Best buckets with proof, the answer on the global graph; then messages that overtake until nothing is gained."""
    begin = time.process_time()
    evaluator = Evaluator.of(problem)
    found = best_buckets(evaluator)
    graph = as_graph(problem, found.plan, evaluator.costs, steps=1, workers=WORKERS, operators=operators)
    checked_ns = float(simulate(graph).step_times_ns[0])
    middle = time.process_time()
    over = overtaking(evaluator)
    return Searched(
        seconds=middle - begin,
        more_s=time.process_time() - middle,
        tasks=len(graph),
        tensors=len(problem),
        off=found.step_ns / checked_ns - 1,
        gap=over.cost / over.bound - 1,
        plans=found.states + over.calls,
    )


def warm_up() -> None:
    """Load what numba has compiled, or compile it: nobody's search is timed with that."""
    searched(shaped_problem("warm", [("a", 10, 1e-3), ("b", 10, 1e-3)], NETWORKS[0]), 1)


def search_section(_: float) -> str:
    """Search times beside the published ones."""
    lines = []
    warm_up()
    for name, (plain, fast) in PUBLISHED_H.items():
        rows = shaped(name)
        for text in NETWORKS:
            row = searched(shaped_problem(name, rows, text), OPERATORS[name])
            ratio = 3600 * fast / row.seconds
            lines.append(
                (
                    f"{name}, {text}",
                    f"{row.tensors}",
                    f"{row.tasks:,}",
                    f"{row.seconds:.2f}",
                    f"{'> ' if name == 'bert' else ''}{plain:g} → {fast:g}",
                    f"{ratio:,.0f}",
                    "met" if ratio >= 100 else "**missed**",
                    f"{100 * row.off:+.3f} %",
                    f"{row.more_s:.2f}",
                    f"{100 * row.gap:.2f} %",
                    f"{row.plans:,}",
                )
            )
    return (
        made()
        + (
            f"{WORKERS} workers, CPU time. *Seconds*: costs of all buckets, the best ones with their proof, the global "
            "graph of all workers built and the answer simulated on it. Operators are fused or not together with the "
            f"tensors: a bucket boundary costs {REGION_NS / 1000:g} µs of compute. *Published*: dPRO, MLSys 2022, "
            "without → with its accelerations, on its authors' machine and graphs; so the ratio says how long people "
            "waited, not who is better. *Off*: the search's own step against the global graph. *Overtaking*: CPU "
            "seconds of the search for messages that overtake, until it gains nothing more, and how far above its "
            "bound it ends.\n\n"
        )
        + table(
            ("model, network", "tensors", "tasks of the global graph", "seconds", "published, hours", "times",
             "target ≥ 100", "off", "overtaking, s", "above bound", "plans"),
            lines,
        )
    )  # fmt: skip


def quality_section(seconds: float) -> str:
    """Quality at equal time, and with four times as much."""
    lines, wins, ties, losses = [], 0, 0, 0
    warm_up()
    for name, text, problem in problems():
        for ahead in (False, True):
            evaluator = Evaluator.of(problem)
            begin = time.process_time()
            if ahead:
                over = overtaking(evaluator, seconds=Deadline(seconds, time.process_time))
                ours, bound = over.cost, over.bound
            else:
                found = best_buckets(evaluator)
                ours, bound = found.step_ns, found.bound_ns
            spent = time.process_time() - begin
            start = replace(default(problem), ahead=ahead)
            others = [
                search_by(evaluator, start, seconds=share * spent).step_ns
                for share in (1, 4)
                for search_by in (greedy, mcmc)
            ]
            best = min(others[:2])
            wins += ours < best * (1 - 1e-4)
            ties += abs(ours / best - 1) <= 1e-4
            losses += ours > best * (1 + 1e-4)
            kind = "overtaking" if ahead else "in order"
            lines.append(
                (
                    f"{name}, {text}, {kind}",
                    as_text(evaluator.step_ns(start) / 1e9),
                    as_text(ours / 1e9),
                    f"{1e3 * spent:.0f}",
                    f"{100 * (ours / bound - 1):.2f} %",
                    *(f"{100 * (each / ours - 1):+.2f} %" for each in others),
                )
            )
    verdict = (
        f"Ours against the better of both at equal time: {wins} better, {ties} equal within 0.01 %, {losses} worse."
    )
    return (
        made()
        + (
            f"{verdict}\n\n*Default*: what DDP does by itself. *Above bound*: how far our step is above what no plan "
            "can reach (0 is proven best). The others: how much longer their step is with the CPU time that ours took, "
            "and with four times as much. All use the same moves and the same evaluation and start from the default; "
            "for what goes in order, ours is dynamic programming and makes no moves.\n\n"
        )
        + table(("problem", "default", "ours", "ms", "above bound", "greedy", "MCMC", "greedy ×4", "MCMC ×4"), lines)
    )


def recordings_section(seconds: float) -> str:
    """The whole command on recordings made here."""
    from foretrace.plan.optimise import Optimiser
    from foretrace.plan.result import OptimiseRequest

    lines = []
    for name, graph in recordings():
        for text, workers in (("1gbit/100us", 4), ("10gbit/20us", 16)):
            answer = Optimiser(recorded=graph, wanted=OptimiseRequest(workers=workers, network=text)).run(10 * seconds)
            over = "" if answer.overtaking is None else as_text(answer.overtaking.step_s)
            buckets = 0 if answer.best.found is None else len(answer.best.found.plan.ends)
            lines.append(
                (f"{name}, {workers} × {text}", as_text(answer.default_s), as_text(answer.step_s),
                 " – ".join(as_text(each) for each in answer.whatif.interval_s), str(buckets),
                 ", ".join(str(each) for each in answer.best.techniques) or "none", over, f"{answer.seconds:.1f}",
                 f"{100 * answer.difference:+.2f} %")
            )  # fmt: skip
    return (
        made()
        + (
            f"At most {10 * seconds:g} s (wall time) of search each; what was not tried by then is not in the answer. "
            "*Off*: the coarsened view against the whole graph. The predictions are not measured here.\n\n"
        )
        + table(
            ("recording", "default", "best", "80 % interval", "buckets", "techniques", "overtaking", "seconds", "off"),
            lines,
        )
    )


def recordings() -> Iterator[tuple[str, TaskGraph]]:
    """Small models of the zoo, recorded on this machine."""
    import torch

    from foretrace.testing.technique import recorded
    from foretrace.zoo.registry import training

    torch.set_num_threads(1)
    for name in ("resnet50", "vgg11", "inception-v3", "bert", "transformer"):
        yield name, recorded(training(name, "tiny"), steps=4)


def rates_section(_: float) -> str:
    """Plans per second."""
    lines = []
    for name, _text, problem in problems():
        if _text != NETWORKS[1]:
            continue
        evaluator = Evaluator.of(problem)
        plans = [Plan.capped(problem.nbytes, cap) for cap in np.geomspace(1e5, 1e8, 2000)]
        costs_s = timed(lambda problem=problem: Evaluator.of(problem))  # type: ignore[misc]
        many = timed(lambda: evaluator.steps_ns(plans)) / len(plans)  # noqa: B023
        loop = timed(prepared(evaluator, plans)) / len(plans)
        one = Plan.capped(problem.nbytes, 4 << 20)
        ahead = timed(lambda: evaluator.step_ns(replace(one, ahead=True)))  # noqa: B023
        proof = timed(lambda: best_buckets(evaluator))  # noqa: B023
        lines.append(
            (
                name,
                str(len(problem)),
                f"{1e3 * costs_s:.1f}",
                f"{1 / many:,.0f}",
                f"{1 / loop:,.0f}",
                f"{1 / ahead:,.0f}",
                f"{1e3 * proof:.2f}",
            )
        )
    return (
        made()
        + (
            "Plans per second: *in order*, two thousand prepared in Python and evaluated at once; *loop*, the compiled "
            "loop alone; *overtaking*, one at a time over seven steps. *Costs*: of all buckets and parts, once per "
            "problem. *Proof*: the best buckets.\n\n"
        )
        + table(("model", "tensors", "costs, ms", "in order", "loop", "overtaking", "proof, ms"), lines)
    )


def prepared(evaluator: Evaluator, plans: Sequence[Plan]) -> Callable[[], None]:
    """The compiled loop over plans whose columns are ready."""
    from foretrace.plan import engine

    problem = evaluator.problem
    counts = [len(plan.ends) for plan in plans]
    ends, chunks = (
        np.concatenate([np.array(getattr(plan, key), dtype=np.int64) for plan in plans]) for key in ("ends", "chunks")
    )
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    times = np.concatenate([evaluator.costs.of_plan(plan) for plan in plans])
    out, latency = np.empty(len(plans), dtype=np.int64), evaluator.costs.latency_ns
    given = (problem.ready_ns, problem.cut_ns, ends, bounds, chunks, times, latency, problem.slots, problem.last_ns)
    return lambda: engine.all_finish(*given, out)


def timed(run: Callable[[], Any]) -> float:
    """CPU seconds of the fastest of several runs behind one that compiles."""
    run()
    times = []
    for _ in range(5):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


SECTIONS: dict[str, tuple[str, Callable[[float], str]]] = {
    "search": ("Search times", search_section),
    "quality": ("Quality against plain searches", quality_section),
    "recordings": ("Recordings of this machine", recordings_section),
    "rates": ("Plans per second", rates_section),
}


def main(given: Sequence[str]) -> int:
    parser = parser_of("dpro", __doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a search for messages that overtake")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    arguments = parser.parse_args(given)
    if unknown := [name for name in arguments.sections if name not in SECTIONS]:
        parser.error(f"there is no section {' or '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    for name in arguments.sections or SECTIONS:
        title, section = SECTIONS[name]
        print(f"{name} ...", file=sys.stderr)
        update(arguments.out, HEAD, {title: section(arguments.seconds)}, [each[0] for each in SECTIONS.values()])
    print(f"wrote {arguments.out}", file=sys.stderr)
    return 0
