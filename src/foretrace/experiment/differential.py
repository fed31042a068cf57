"""Stalls by differential runs, for real (Stash, ICDCS 2023, section III; the idea is DS-Analyzer's, VLDB 2021).

Four runs over the same number of samples per worker, in turns, several times:

    RUN0  ready batches, one worker              RUN1  ready batches, all workers
    RUN2  real batches, nothing cached           RUN3  real batches, cached

    interconnect = RUN1 - RUN0        preparation = RUN3 - RUN1        fetch = RUN2 - RUN3
    network = RUN1 over a shaped link - RUN1 on this machine

All of them are in turns, the one over the link by workers of its own: machines drift within a minute by more than a
stall of a few per cent. What else runs on a machine slows all of them but RUN0, which leaves it the other cores: a
block whose workers waited for a core for longer than such a block has to is run again. What never leaves the cores is
in every block: free cores are counted before and after the runs.

The released analysis of Stash subtracts the preparation stall from RUN2 to get fetch, which leaves computing in it;
here fetch is what the paper means.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import hypot, inf
from pathlib import Path

import numpy as np
from msgspec import structs

from foretrace import executor
from foretrace.cost.network.network import CollectiveKind
from foretrace.errors import ForetraceError, spelled
from foretrace.experiment.collectives import time_collectives
from foretrace.experiment.cores import free_cores, taken
from foretrace.experiment.links import netns
from foretrace.experiment.links.arms import forget, make, record, run_steps
from foretrace.experiment.messages import Collectives, Make, Record, RunSteps, Setup, TimedSteps
from foretrace.experiment.processes import Workers, alone, together
from foretrace.experiment.stalls import Stall, Stalls, stalls
from foretrace.experiment.statistics import LEAST_FLOOR
from foretrace.experiment.trial import in_turns
from foretrace.files import evict
from foretrace.graph import store
from foretrace.graph.taskgraph import TaskGraph
from foretrace.hardware.cluster import parse_link

Tell = Callable[[str, float], None]

ROUNDS = 8
DISCARDED = 3  # first steps of a block, up to an eighth longer than those that follow
CALM = 0.1  # share of a step for which workers may wait for cores, beyond the calmest block of the same kind
TRIES = 3  # at a calm block, in every round
_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24)
_RECORDING_S = 240.0
_PAGE_CACHE = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, kw_only=True)
class DifferentialRequest:
    """What to run."""

    work: str  # a model of the zoo, or a script with training()
    workers: int
    size: str = "tiny"
    link: str = ""  # shaped link between machines, for the network stall; "": none
    data: tuple[str, ...] = ()  # files and folders of the data set, to be taken out of the page cache
    steps: int = 8  # of a block
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Bars that were measured, beside those predicted from one worker's recording."""

    predicted: Stalls
    measured: tuple[Stall, ...]
    runs_s: dict[str, tuple[float, ...]]  # seconds per step by run and round
    notes: tuple[str, ...]


def differential(wanted: DifferentialRequest, tell: Tell) -> Compared:
    """Record one worker, predict the stalls, then run all four kinds of runs and subtract.

    Raises ForetraceError where the training does not exist, there are fewer cores than workers, or a worker fails.
    """
    if wanted.workers < 2:
        raise ForetraceError("`workers=` must be 2 or more: stalls between workers need at least two.")
    if wanted.workers > executor.cores():
        raise ForetraceError(
            f"`workers={wanted.workers}` compute on {executor.cores()} cores: their steps would tell of the scheduler; "
            "use at most as many workers as cores."
        )
    if wanted.steps < 1:
        raise ForetraceError(f"`steps={wanted.steps}` times nothing; give 1 or more.")
    files = _files(wanted.data)
    link = parse_link(wanted.link) if wanted.link else None
    runs: dict[str, list[TimedSteps]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foretrace-stash-")))
        tell("recording one worker alone", 0.0)
        graph = _recorded(wanted, folder)
        tell("starting workers", 0.15)
        workers = stack.enter_context(together(wanted.workers, threads=wanted.threads))
        tell("measuring this machine's own network", 0.2)
        near, far = _table(workers, folder / "near.json", "this machine"), ""
        distant = workers
        if link is not None:
            tell("measuring the shaped link", 0.25)
            net = stack.enter_context(netns.made(wanted.workers, link))
            distant = stack.enter_context(netns.running(net, threads=wanted.threads))
            far = _table(distant, folder / "far.json", wanted.link)
        cold = bool(files) or _can_drop()
        names = ["alone", "all", *(["cold"] if cold else []), "cached", *(["network"] if far else [])]
        needed = wanted.workers * wanted.threads
        free = [free_cores(most=needed)]
        runs = _run(wanted, workers, distant, names, files, lambda share: tell("running", 0.35 + 0.6 * share))
        free.append(free_cores(most=needed))
        tell("predicting", 0.95)
        predicted = stalls(graph, workers=wanted.workers, inside=near, between=far)
    told = {near: "this machine's network, measured", far: wanted.link}
    predicted = replace(predicted, bars=tuple(_with_link(bar, told) for bar in predicted.bars))
    warm = "nothing could be taken out of the page cache: fetch was not measured; give `data=`."
    others = taken(needed, free)
    notes = () if cold else (spelled(warm),)
    if others:
        notes = (*notes, f"{others}: what others took of the runs is in their ranges, not taken off.")
    tell("done", 1.0)
    return Compared(
        predicted=predicted,
        measured=_bars(runs, crowded=bool(others)),
        runs_s={name: tuple(each.wall_s for each in blocks) for name, blocks in runs.items()},
        notes=notes,
    )


def _bars(runs: dict[str, list[TimedSteps]], *, crowded: bool = False) -> tuple[Stall, ...]:
    """Return differences between runs, round by round: median and 80 % range of the rounds' median.

    It reaches to that without what workers waited for cores beyond the calmest block, and holds how copies differ. On a
    `crowded` machine, whose cores others never left, no block was calm, and all waiting may be due to them.
    """
    pairs = {
        "interconnect": ("all", "alone"),
        "network": ("network", "all"),
        "preparation": ("cached", "all"),
        "fetch": ("cold", "cached"),
    }
    names = {"alone": "RUN0", "all": "RUN1", "cold": "RUN2", "cached": "RUN3", "network": "RUN1 over the link"}
    wall = {name: np.array([each.wall_s for each in blocks]) for name, blocks in runs.items()}
    queued = {name: np.array([each.queued_s for each in blocks]) for name, blocks in runs.items()}
    calm = {name: wall[name] - (queued[name] - (0.0 if crowded else queued[name].min())) for name in runs}
    bars = []
    for name, (more, less) in pairs.items():
        if more not in runs or less not in runs:
            continue
        difference = wall[more] - wall[less]
        drawn = np.random.default_rng(0).integers(0, len(difference), size=(2000, len(difference)))
        low, high = np.quantile(np.median(difference[drawn], axis=1), [0.1, 0.9]).tolist()
        found, without = float(np.median(difference)), float(np.median(calm[more] - calm[less]))
        step_s = float(np.median(wall[more]))
        copies = LEAST_FLOOR * step_s
        between = found - hypot(found - min(low, without), copies), found + hypot(max(high, without) - found, copies)
        bars.append(
            Stall.of(name, found, between, step_s, f"{names[more]} less {names[less]}, {len(difference)} rounds")
        )
    return tuple(bars)


def _recorded(wanted: DifferentialRequest, folder: Path) -> TaskGraph:
    """Return the graph of one worker alone that reads real batches."""
    file = folder / "alone.graph"
    setup = Setup(work=wanted.work, size=wanted.size, loads=True)
    evicted = tuple(map(str, _files(wanted.data)))  # what waits for storage is to be in the recording
    request = Record(setup=setup, arms=(), threads=wanted.threads, graph=str(file), evict=evicted)
    with alone(threads=wanted.threads) as worker:
        worker.ask(record, request, "recording one worker alone", seconds=_RECORDING_S)
    return store.load(file)


def _table(workers: Workers, file: Path, name: str) -> str:
    """Return times of collectives between the workers, as the file that techniques take for a network."""
    request = Collectives(
        kinds=(CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST),
        sizes=_SIZES,
        repetitions=15,
        wanted_spread=0.1,
        name=name,
        table=str(file),
    )
    workers.ask(time_collectives, request, "measuring the network", seconds=600.0)
    return str(file)


def _run(
    wanted: DifferentialRequest,
    workers: Workers,
    distant: Workers,
    names: Sequence[str],
    files: Sequence[Path],
    tell: Callable[[float], None],
) -> dict[str, list[TimedSteps]]:
    """Return the slowest worker's block by kind of run and round; `distant` workers make the one over the link."""
    exchange = (f"data-parallel workers={len(workers)} network=1gbit",)  # the network is real: the text says nothing
    setups = {
        "alone": Setup(work=wanted.work, size=wanted.size),
        "all": Setup(work=wanted.work, size=wanted.size, techniques=exchange),
        "network": Setup(work=wanted.work, size=wanted.size, techniques=exchange),
        "cold": Setup(work=wanted.work, size=wanted.size, techniques=exchange, loads=True),
        "cached": Setup(work=wanted.work, size=wanted.size, techniques=exchange, loads=True),
    }

    least: dict[str, float] = {}

    def block(name: str, _: int) -> TimedSteps:
        found: list[TimedSteps] = []
        while len(found) < TRIES:
            found.append(tried(name))
            least[name] = min(least.get(name, inf), found[-1].queued_s)
            if found[-1].queued_s <= least[name] + CALM * found[-1].wall_s:
                break
        return min(found, key=lambda each: each.queued_s)

    def tried(name: str) -> TimedSteps:
        if name == "cold":
            _evict(files)
        # A new arm begins its epoch again, so that every block reads the same batches.
        asked = distant if name == "network" else workers
        asked.ask(make, Make(name=name, setup=setups[name]), f"making the run {name}")
        request = RunSteps(name=name, discarded=DISCARDED, steps=wanted.steps, together=name != "alone")
        blocks = asked.ask(run_steps, request, f"running {name}", seconds=600.0, first=name == "alone")
        asked.ask(forget, None, f"ending the run {name}")
        slowest = max(blocks, key=lambda each: each.wall_s)
        return structs.replace(slowest, queued_s=max(each.queued_s for each in blocks))

    return in_turns(names, block, ROUNDS, warm_up=1, tell=tell)


def _files(paths: Sequence[str]) -> list[Path]:
    """Return every file under these paths. Raises ForetraceError for one that does not exist or holds none."""
    found: list[Path] = []
    for text in paths:
        path = Path(text)
        if not path.exists():
            raise ForetraceError(f"`data={text}`: there is no such file or folder.")
        found += [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    if paths and not found:
        raise ForetraceError(f"`data={' '.join(paths)}` holds no files.")
    return found


def _can_drop() -> bool:
    return os.access(_PAGE_CACHE, os.W_OK)


def _evict(files: Sequence[Path]) -> None:
    """Take files out of the page cache, or everything where none are named."""
    evict(files)
    if not files:
        _PAGE_CACHE.write_text("1\n", encoding="ascii")


def _with_link(bar: Stall, told: dict[str, str]) -> Stall:
    why = bar.why
    for path, name in told.items():
        why = why.replace(path, name) if path else why
    return replace(bar, why=why)
