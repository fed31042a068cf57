"""The runs of the Dally study: which policies, which cells, what is kept of a cell. One cell is one file of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import metrics
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.comparison import jitter
from foretrace.fleet.policies.dally import dally, dally_las, dally_manual, dally_rr
from foretrace.fleet.policies.fifo import fifo, fifo_skip
from foretrace.fleet.policies.gandiva import gandiva_like
from foretrace.fleet.policies.las import las
from foretrace.fleet.policies.tiresias import LOW_SKEW, tiresias
from foretrace.fleet.policy import OrderRule, PlaceRule, Policy
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import Simulation
from foretrace.fleet.speeds.closed_form import ClosedFormSpeeds
from foretrace.fleet.workload import Workload
from reproductions.dally.workload import LOADS, PHILLY_SPREAD, SPREAD, consecutive, published_like

Cell = Mapping[str, Any]
VERSION = 1  # of what a cell means; a folder of another version is refused
HOUR_NS = 3.6e12

CLUSTERS: tuple[str, ...] = ("4x4x4", "2x4x8", "4x4x8", "8x4x8", "8x1x8")
CONGESTIONS = (1, 10, 100)
NETWORKS: tuple[str, ...] = ("50/25/12.5", "300/50/50", "300/12.5/3.1")  # GB/s in a machine, in a rack, between racks
SCALES: tuple[str, ...] = ("full", "0.1", "published")
LARGEST: tuple[int | None, ...] = (None, 8)
CAP = 60_000  # events of one run; runs that need more are reported as capped

# Policies by name; times in seconds. `dally-inf` and `dally-0` are the ends of the delay: never, and at once.
NAMED: Mapping[str, Callable[[float], Policy]] = {
    "dally-auto": lambda lease: dally(lease_s=lease),
    "fifo-hol": lambda _: fifo(),
    "fifo-skip": lambda _: fifo_skip(),
    "fifo-greedy": lambda _: fifo_skip(consolidate=False),
    "gandiva-like": lambda _: gandiva_like(),
    "tiresias": lambda lease: replace(las(lease_s=lease), name="tiresias", eager_models=frozenset(LOW_SKEW)),
    "tiresias-queues": lambda _: tiresias(),
    "las-strict": lambda lease: las(lease_s=lease),
    "dally-manual": lambda lease: dally_manual(lease_s=lease),
    "dally-inf": lambda lease: leased("network", "strict", lease),
    "dally-0": lambda lease: leased("network", "greedy", lease),
    "rr-auto": lambda lease: dally_rr(lease_s=lease),
    "las-auto": lambda lease: dally_las(lease_s=lease),
}
FEW = ("dally-auto", "fifo-hol", "fifo-skip", "gandiva-like", "tiresias", "las-strict", "las-auto")
LEASED = ("dally-auto", "dally-inf", "tiresias", "las-strict")
ORDERS: Mapping[str, OrderRule] = {"fifo": "key", "las": "service", "rr": "last", "network": "network"}
PLACES: Mapping[str, PlaceRule] = {"strict": "strict", "manual": "delay", "auto": "auto", "greedy": "greedy"}


def leased(order: OrderRule, place: PlaceRule, lease_s: float, waits_s: tuple[float, ...] = ()) -> Policy:
    """Any order with any placement, with leases."""
    return Policy(
        name=f"{order}-{place}",
        order_rule=order,
        place_rule=place,
        preempt_rule="lease",
        lease_s=lease_s,
        waits_s=waits_s or ((lease_s, 2 * lease_s) if place == "delay" else ()),
    )


def factorial(lease_s: float) -> dict[str, Policy]:
    """Order × placement with leases, as "lease/ORDER/PLACEMENT", and without ("keep/fifo/PLACEMENT").

    Without leases who waits has had no service, so that every order is that of submission; and timers that are counted
    in leases cannot be tuned. Infinite timers are "strict".
    """
    found = {
        f"lease/{order}/{place}": leased(rule, how, lease_s)
        for (order, rule), (place, how) in product(ORDERS.items(), PLACES.items())
    }
    for place, how in PLACES.items():
        if how != "auto":
            waits = (lease_s, 2 * lease_s) if how == "delay" else ()
            found[f"keep/fifo/{place}"] = Policy(name=f"keep-{place}", place_rule=how, waits_s=waits)
    return found


# Factorial policies that are one of NAMED; they are not played twice.
SAME = {
    "lease/las/strict": "las-strict", "lease/las/auto": "las-auto", "lease/rr/auto": "rr-auto",
    "lease/network/strict": "dally-inf", "lease/network/manual": "dally-manual", "lease/network/auto": "dally-auto",
    "lease/network/greedy": "dally-0", "keep/fifo/strict": "fifo-skip", "keep/fifo/greedy": "fifo-greedy",
}  # fmt: skip


def cell(part: str, **values: Any) -> dict[str, Any]:
    """A cell: what is not said is as in the cell 2x4x8 at 100 jobs a day."""
    base = {
        "part": part, "load": "100/day", "largest": None, "cluster": "2x4x8", "congestion": 10,
        "network": "50/25/12.5", "scale": "0.1", "spread": SPREAD, "draw": 0, "jitter": None, "lease_s": 3600.0,
        "restart_s": 0.0, "restart_s_per_gpu": 1.0, "policies": "named", "cap": CAP,
    }  # fmt: skip
    unknown = set(values) - set(base) - {"named", "waits", "history", "trace", "jobs", "gpus_from", "first"}
    if unknown:
        raise ValueError(f"a cell has no value {min(unknown)!r}")
    return base | values


def grid(*, quick: bool = False) -> list[dict[str, Any]]:
    """All loads, clusters, congestions, networks and compute scales; jobs capped at 8 GPUs where machines have 8.

    quick: one cluster and network. Every order with every placement is played in a part of the cells.
    """
    loads, networks, scales = (LOADS[:2], NETWORKS[:1], SCALES[:2]) if quick else (LOADS, NETWORKS, SCALES)
    clusters = ("2x4x8",) if quick else CLUSTERS
    found = []
    for load, cluster, congestion, network, scale in product(loads, clusters, CONGESTIONS, networks, scales):
        where = {"load": load, "cluster": cluster, "congestion": congestion, "network": network, "scale": scale}
        every = congestion == 10 and scale != "published" and cluster in ("2x4x8", "4x4x4", "4x4x8")
        found.append(cell("grid", **where, policies="all" if every else "named"))
        if cluster in ("2x4x8", "8x1x8") and scale != "published" and not (quick and load == LOADS[1]):
            found.append(cell("grid", **where, largest=8))
    return found


def slow_cells(*, quick: bool = False) -> list[dict[str, Any]]:
    """The published compute scale on congested networks with a lease of a day: with one of an hour most are capped."""
    loads, networks = (LOADS[1:2], NETWORKS[:1]) if quick else (LOADS, NETWORKS)
    axes = product(loads, CONGESTIONS[1:], networks)
    return [
        cell("slow", load=load, congestion=congestion, network=network, scale="published", lease_s=86400.0)
        for load, congestion, network in axes
    ]


# Cells that are repeated: name, and how they differ from the cell that `cell` makes
REPEATED: Mapping[str, dict[str, Any]] = {
    "2x4x8, ×10, compute ×0.1": {},
    "2x4x8, ×1, full compute": {"congestion": 1, "scale": "full"},
    "2x4x8, ×100, full compute, all at 0, ≤ 8 GPUs": {
        "congestion": 100, "load": "all-at-0", "largest": 8, "scale": "full",
    },
}  # fmt: skip


def repeated(seeds: int, *, quick: bool = False) -> list[dict[str, Any]]:
    """Every named cell under so many jitters (60 s) of one draw of jobs, and under so many draws."""
    found = []
    for name, values in list(REPEATED.items())[: 1 if quick else None]:
        found += [cell("jitter", **values, jitter=seed, named=name) for seed in range(seeds)]
        found += [cell("redraw", **values, draw=1 + seed, named=name) for seed in range(seeds) if not quick]
    return found


MANUAL_WAITS = ((0.0, 0.0), (1.0, 2.0), (6.0, 12.0), (24.0, 48.0), (288.0, 576.0), (None, None))  # in leases
MANUAL_SEEDS = 5
TUNED = ((3600.0, 24), (3600.0, 168), (600.0, 144), (120.0, 720))  # lease in seconds, history in leases


def timer_cells(*, quick: bool = False) -> list[dict[str, Any]]:
    """Tuned timers with leases short and long against queueing, and stated ones (None: infinite)."""
    found = [
        cell("tuned", cluster=each, lease_s=lease, history=history, cap=50 * CAP)
        for each in (("2x4x8",) if quick else ("2x4x8", "4x4x8"))
        for lease, history in (TUNED[2:3] if quick else TUNED)
    ]
    seeds = range(1 if quick else MANUAL_SEEDS)
    found += [
        cell("manual", lease_s=600.0, waits=waits, jitter=seed, cap=20 * CAP)
        for waits in (*(MANUAL_WAITS[1::4] if quick else MANUAL_WAITS), "auto")
        for seed in seeds
    ]
    return found


def lease_cells(*, quick: bool = False) -> list[dict[str, Any]]:
    """Lengths of a lease, with a restart of 1 s × GPUs and of 60 s."""
    leases = (3600.0, 86400.0) if quick else (120.0, 600.0, 3600.0, 14400.0, 86400.0)
    scales = ("0.1",) if quick else ("0.1", "published")
    costs = (0.0, 60.0)
    return [
        cell(
            "lease", lease_s=lease, restart_s=fixed, restart_s_per_gpu=0.0 if fixed else 1.0, scale=scale,
            congestion=10 if scale == "0.1" else 1, cap=10 * CAP, policies="leased",
        )
        for scale in scales for lease in leases for fixed in (costs[:1] if quick else costs)
    ]  # fmt: skip


def spread_cells(*, quick: bool = False) -> list[dict[str, Any]]:
    """How much the unknown distribution of work matters: spreads, several draws each."""
    spreads, draws = ((1.0,), 2) if quick else ((0.5, 1.0, SPREAD, PHILLY_SPREAD), 5)
    return [
        cell("spread", spread=spread, draw=100 + draw, policies="few") for spread in spreads for draw in range(draws)
    ]


def philly_cells(trace: str, *, quick: bool = False) -> list[dict[str, Any]]:
    """Consecutive jobs of a log on two clusters, and those of several GPUs on a congested one, with longer leases.

    The queue of the last is long, and with leases of 600 s it needs millions of decisions.
    """
    jobs = 500 if quick else 5000
    rows = [
        {"cluster": "8x4x8", "congestion": 1, "jobs": jobs, "gpus_from": 1, "lease_s": 600.0},
        {"cluster": "5x4x8", "congestion": 1, "jobs": jobs, "gpus_from": 1, "lease_s": 600.0},
        {"cluster": "8x4x8", "congestion": 10, "jobs": jobs // 2, "gpus_from": 2, "lease_s": 3600.0},
    ]
    return [
        cell("philly", load="as logged", scale="full", trace=trace, cap=10 * CAP, **row)
        for row in rows[: 1 if quick else 3]
    ]


# ---------------------------------------------------------------- playing a cell


def play_cell(given: Cell) -> dict[str, Any]:
    """Figures of every policy in a cell, and how the timers went where that is what the cell is for."""
    workload, cluster = jobs_of(given), _cluster(str(given["cluster"]))
    speeds = ClosedFormSpeeds(
        bandwidth_gb_s=tuple(float(each) for each in str(given["network"]).split("/")),
        congestion=float(given["congestion"]),
        compute_scale=str(given["scale"]) if given["scale"] in ("full", "published") else float(given["scale"]),
        levels=cluster.levels,
    )
    costs = Costs(restart_s=float(given["restart_s"]), restart_s_per_gpu=float(given["restart_s_per_gpu"]))
    runs: dict[str, dict[str, float] | None] = {}
    timers: list[list[float]] = []
    capped = False
    for name, policy in _policies(given).items():
        if capped and policy.preempt_rule == "lease":
            runs[name] = None  # one with as many leases to come needed too many events already
            continue
        played = Simulation(workload, cluster, policy, speeds=speeds, costs=costs, record="segments")
        played.run(max_events=int(given["cap"]))
        if not played.finished:
            capped, runs[name] = True, None
            continue
        runs[name] = figures(played)
        if given["part"] == "tuned":
            timers = _timers(played)
    return {"runs": runs, "timers": timers} if timers else {"runs": runs}


def figures(played: Simulation) -> dict[str, float]:
    """What is kept of a run that was played to its end; hours, of communication and running per job."""
    result = played.result()
    done = result.finished
    talk = metrics.communication(result)
    low, high = talk.above_machine_low_s or 0.0, talk.above_machine_high_s or 0.0
    jct = metrics.spread(result.jct_s)
    jobs = int(done.sum())
    return {
        "jct_h": jct.mean / 3600,
        "p99_jct_h": jct.p99 / 3600,
        "makespan_h": metrics.makespan_s(result) / 3600,
        "comm_h": talk.total_s / 3600 / jobs,
        "above_h": (talk.above_machine_s or 0.0) / 3600 / jobs,
        "above_low_h": low / 3600 / jobs,
        "above_high_h": high / 3600 / jobs,
        "comm_share": talk.share_of_running,
        "run_h": float((result.held_ns - result.dead_ns).sum() / HOUR_NS) / jobs,
        "lost_gpu_h": metrics.lost(result).gpu_h,
        "starts": float(result.starts.mean()),
        "busy": metrics.utilisation(result),
        "events": int(result.events),
        "never": int(result.never.sum()),
    }


def _policies(given: Cell) -> dict[str, Policy]:
    lease = float(given["lease_s"])
    if given["part"] == "tuned":
        return {"dally-auto": dally(lease_s=lease, history_leases=int(given["history"]))}
    if given["part"] == "manual":
        waits = given["waits"]
        if waits == "auto":
            return {"waits": dally(lease_s=lease, history_leases=144)}
        leases = tuple(float("inf") if each is None else lease * each for each in waits)
        return {"waits": dally_manual(lease_s=lease, waits_s=leases)}
    found = {name: made(lease) for name, made in NAMED.items()}
    if given["policies"] == "all":
        return found | {name: policy for name, policy in factorial(lease).items() if name not in SAME}
    some = {"few": FEW, "leased": LEASED}.get(given["policies"], tuple(found))
    return {name: found[name] for name in some}


def jobs_of(given: Cell) -> Workload:
    """Return the jobs of a cell. Raises ForetraceError where its log cannot be read or has too few."""
    if given["part"] == "philly":
        return _logged(str(given["trace"]), int(given["jobs"]), int(given["gpus_from"]))
    made = _made(given["load"], given["largest"], float(given["spread"]), int(given["draw"]))
    if "first" in given:
        made = made.take(np.arange(int(given["first"])))
    return made if given["jitter"] is None else jitter(made, int(given["jitter"]))


@lru_cache(maxsize=8)
def _made(load: str, largest: int | None, spread: float, draw: int) -> Workload:
    return published_like(load, largest=largest, spread=spread, draw=draw)


@lru_cache(maxsize=2)
def _logged(trace: str, jobs: int, gpus_from: int) -> Workload:
    from foretrace.fleet.formats import read

    return consecutive(read(trace), jobs=jobs, gpus_from=gpus_from)


@lru_cache(maxsize=8)
def _cluster(name: str) -> ClusterTree:
    return parse_cluster(name)


def _timers(played: Simulation) -> list[list[float]]:
    """Every change of a tuned timer: hours, GPUs asked for, level (1 rack, 2 between racks), leases."""
    rows = played.state.timer_log[: played.state.s["timers"][0]]
    lease = float(played.state.s["lease"][0])
    if len(rows) == len(played.state.timer_log):
        raise ForetraceError("the log of timers is full; lengthen the lease.")
    kept = np.column_stack([rows["time"] / HOUR_NS, rows["gpus"], rows["level"], rows["wait"] / lease])
    return [[float(each) for each in row] for row in kept]
