"""Runs on a private Slurm, kept one JSON line each, and what the simulation says of each."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foretrace.fleet.policies import parse
from foretrace.fleet.policies.slurm import SlurmPolicy
from foretrace.fleet.policies.slurm_options import BACKGROUND_S
from foretrace.fleet.policy import Policy
from foretrace.fleet.rig import against
from foretrace.fleet.rig.against import RigErrors
from foretrace.fleet.rig.cluster import SlurmSetup, private
from foretrace.fleet.rig.play import RigRun, for_rig, play, slurm_setup
from foretrace.fleet.workload import Workload
from reproductions.slurm.cells import SETUP, Cell, kept, restored, workload

RUNS = Path(__file__).parent / "runs.jsonl.gz"
_LOCK = threading.Lock()


class Row(NamedTuple):
    """One workload: errors of the simulation over its runs, and what the runs differ by (None of one)."""

    cell: Cell
    jobs: int
    runs: int
    mean_jct_s: float
    simulated: RigErrors
    repeats: RigErrors | None
    plain: RigErrors  # the same policy without Slurm's own rules


def stored(path: Path) -> list[dict[str, Any]]:
    """All runs of a file, none where there is no file."""
    if not path.exists():
        return []
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def run(cells: Iterable[Cell], *, repeats: int, together: int, path: Path) -> None:
    """Play what the file does not have yet, so many at a time; each is kept when it is done."""
    have = {(Cell(*each["cell"]), each["repeat"]) for each in stored(path)}
    os.nice(-10)  # submissions have to be in time on a machine that does other things, too
    wanted = [(cell, at) for at in range(repeats) for cell in cells if (cell, at) not in have]
    with ThreadPoolExecutor(together) as pool:
        for done in pool.map(lambda each: _played(each[0], each[1], path), wanted):
            print(done, flush=True)


def _played(cell: Cell, repeat: int, path: Path) -> str:
    policy = parse(cell.policy)
    assert isinstance(policy, SlurmPolicy)
    setup = slurm_setup(SETUP, policy)
    work = for_rig(workload(cell), setup, 1.0)
    with private(setup) as slurm:
        ran = play(slurm, work, policy)
    keep(path, {"cell": list(cell), "repeat": repeat, "workload": kept(work)}, ran)
    return f"{cell.name}, {cell.policy}, run {repeat + 1}"


def keep(path: Path, what: dict[str, Any], ran: RigRun) -> None:
    """Add a run to a file, under what it was a run of."""
    row = what | {
        "epoch_s": ran.epoch_s, "backfill_s": ran.backfill_s, "background_s": ran.background_s,
        "launch_s": ran.launch_s, "checks_s": ran.checks_s, "background_every_s": turn_s(ran.passes_s),
        "submit_s": ran.submit_s.astype(int).tolist(),
        "start_s": ran.start_s.astype(int).tolist(), "end_s": ran.end_s.astype(int).tolist(),
        "nodes": [list(each) for each in ran.nodes],
    }  # fmt: skip
    with _LOCK, gzip.open(path, "at") as lines:
        lines.write(json.dumps(row, separators=(",", ":")) + "\n")


def ran_of(row: dict[str, Any]) -> RigRun:
    """A run that `keep` wrote."""
    times: dict[str, Any] = {name: np.array(row[name], float) for name in ("submit_s", "start_s", "end_s")}
    nodes = tuple(tuple(each) for each in row["nodes"])
    known: dict[str, Any] = {name: row[name] for name in ("epoch_s", "launch_s", "checks_s") if name in row}
    # the first runs say 0 where the backfill scheduler had not looked yet; it starts with the background thread
    looked = row["backfill_s"] or row["background_s"]
    return RigRun(**times, nodes=nodes, backfill_s=looked, passes_s=(row["background_s"],), **known)


def turn_s(passes: Sequence[float]) -> float:
    """How long a turn of the background thread takes; its passes are whole numbers of turns apart."""
    apart = np.diff(passes)
    apart = apart[(apart > 0.5) & (apart < 20)]  # beyond, who knows how many turns
    return float(apart.sum() / np.rint(apart).sum()) if len(apart) else BACKGROUND_S


def _span(run: dict[str, Any]) -> tuple[float, float]:
    return run["epoch_s"], run["epoch_s"] + max(run["end_s"])


def pace(run: dict[str, Any], others: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """How quick the machine was, on average over those of other runs that went on at the same time, else that day."""
    begin, end = _span(run)
    day = [each for each in others if abs(each["epoch_s"] - begin) < 43_200]
    same = [each for each in day if _span(each)[0] < end and _span(each)[1] > begin] or day
    defaults = {"launch_s": against.LAUNCH_S, "background_every_s": BACKGROUND_S} if same else {}
    return {name: float(np.mean([each.get(name, default) for each in same])) for name, default in defaults.items()}


def compared(
    work: Workload, setup: SlurmSetup, policy: Policy, ran: Sequence[RigRun], paces: Sequence[dict[str, Any]],
    **known: Any,
) -> RigErrors:  # fmt: skip
    """Errors of simulations of runs of the same jobs. paces: of the machine, per run; known: as `predicted` has it."""
    made = [against.predicted(work, setup, policy, one, **at, **known) for one, at in zip(ran, paces, strict=True)]
    return against.errors(list(zip(made, ran, strict=True)), setup, policy)


def rows(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """Simulate every stored run and compare, a row per cell.

    How long the machine takes to start a job and to notice its end is taken from runs of other cells (`pace`).
    """
    found = []
    by = itertools.groupby(sorted(runs, key=lambda each: (each["cell"], each["repeat"])), lambda each: each["cell"])
    for said, group in by:
        cell, each = Cell(*said), list(group)
        paces = [pace(run, (other for other in runs if other["cell"] != said)) for run in each]
        policy = parse(cell.policy)
        assert isinstance(policy, SlurmPolicy)
        work, ran = restored(each[0]["workload"]), [ran_of(row) for row in each]
        made = compared(work, SETUP, policy, ran, paces)
        plain = parse("priority" if policy.by_priority else "backfill" if policy.backfill else "fifo")
        mean_s = float(np.mean([one.jct_s.mean() for one in ran]))
        ideal = compared(work, SETUP, plain, ran, paces)
        found.append(Row(cell, len(work), len(ran), mean_s, made, against.between(ran, SETUP, policy), ideal))
    return found
