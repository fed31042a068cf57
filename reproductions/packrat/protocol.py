"""Packrat's published splits, recomputed from the points that its tables give; written to README.md.

    python -m reproductions packrat [--shared-data PATH] [--print]

All 80 published optima are compared to the last digit, without idle threads as published, then with them; thin
instances are compared with the optimum, and one fat instance as far as a law fitted to the points can tell.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isinf
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.serving.server.measure import LatencyProfile, read
from foretrace.serving.server.split import CoreSplit, ModelInstance, split_table
from reproductions import parser_of, shared_data
from reproductions.packrat.law import fit
from reproductions.systems import put
from tables import machine, percent, table, today

HERE = Path(__file__).parent
THREADS, MOST = 16, 1024  # of the paper's comparison with fat and thin
BATCHES = tuple(2**k for k in range(11))
PUBLISHED = {"resnet": "ResNet-50", "inception": "Inception-v3", "gpt2": "GPT-2", "bert": "BERT"}
_MOST_FITTED = 8  # threads of the points that the law is fitted to where it has to tell the others
HEAD = """# Packrat: published splits

Packrat shares a batch out over instances of a model, each on cores of its own, so that the slowest ends soonest.
`foretrace serve plan` does so with profiles that it measures; here it gets the points of single instances that stand in
Packrat's published tables of optima: 230 of four models, with up to 18 threads and 1,024 samples. A point that no
published optimum uses is not known, so it is not used here either. Written by `make reproduce NAME=packrat`.
"""
BASELINES = """By batch. Thin is an instance per thread, for small batches one per sample. Fat is one instance with all
threads: **the paper's headline, 1.43 – 1.83 times over fat in the mean of the batches, cannot be recomputed**: the
table holds points of optima alone, and fat is none beyond batch 1. Its latencies below are estimates of the law, for
more threads and samples than nearly all points have. – is a point that is not known.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A published optimum beside ours, seconds; infinite where no multiset of points makes up the batch."""

    model: str
    threads: int
    batch: int
    published_s: float
    ours_s: float  # without idle threads, as published
    idle_s: float  # with them


def least_s(profile: LatencyProfile, threads: int, *, idle: bool = True) -> dict[int, float]:
    """Least latency by batch, from 1 to MOST."""
    found = split_table(profile.latency_s(), threads=threads, batch=MOST, idle=idle)
    return dict(enumerate(found.latency.min(axis=0).tolist()))


def cells(folder: Path) -> list[Cell]:
    """All published optima."""
    profiles = {each.model: each for each in read(folder / "packrat_profile.csv")}
    with (folder / "packrat_known_optima.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    tables = {
        (model, threads, idle): least_s(profiles[model], threads, idle=idle)
        for model, threads in {(row["model"], int(row["threads"])) for row in rows}
        for idle in (False, True)
    }
    found = []
    for row in rows:
        model, threads, batch = row["model"], int(row["threads"]), int(row["batch"])
        found.append(
            Cell(
                model=model, threads=threads, batch=batch, published_s=float(row["optimal_latency_ms"]) / 1e3,
                ours_s=tables[model, threads, False][batch], idle_s=tables[model, threads, True][batch],
            )
        )  # fmt: skip
    return found


def thin_over_optimum(profile: LatencyProfile) -> dict[int, float]:
    """By batch, how many times the optimum an instance per thread takes; infinite where its point is not known."""
    latency, least = profile.latency_s(), least_s(profile, THREADS)
    thin = {batch: CoreSplit.thin(THREADS, batch).instances for batch in BATCHES}
    return {
        batch: max(latency.get(each, inf) for each in instances) / least[batch] for batch, instances in thin.items()
    }


def fat_over_optimum(profile: LatencyProfile) -> dict[int, float]:
    """By batch, how many times the optimum one instance takes: as published where known, else as the law has it."""
    latency, least, law = profile.latency_s(), least_s(profile, THREADS), fit(profile)
    fat = [ModelInstance(THREADS, batch) for batch in BATCHES]
    estimated = dict(zip(fat, law.latency_s(fat).tolist(), strict=True))
    return {each.batch: (estimated | latency)[each] / least[each.batch] for each in fat}


def extrapolated(profile: LatencyProfile) -> float:
    """Median absolute error of the law at points with more threads than all that it was fitted to."""
    few = {point: each for point, each in profile.samples_s.items() if point.threads <= _MOST_FITTED}
    many = {point: each for point, each in profile.samples_s.items() if point.threads > _MOST_FITTED}
    errors = fit(replace(profile, samples_s=few)).errors(replace(profile, samples_s=many))
    return float(np.median(np.abs(errors)))


def _optima(found: Sequence[Cell]) -> str:
    exact = sum(each.ours_s == each.published_s for each in found)
    none = sum(isinf(each.published_s) for each in found)
    gains = [each for each in found if each.idle_s < each.ours_s and not isinf(each.ours_s)]
    rows = [
        (f"{PUBLISHED[each.model]}, {each.threads} threads, batch {each.batch}", f"{1e3 * each.published_s:.3f}",
         f"{1e3 * each.idle_s:.3f}", f"{each.ours_s / each.idle_s:.3f}")
        for each in gains
    ]  # fmt: skip
    return (
        f"{exact} of {len(found)} published optima are reproduced to the last digit: {len(found) - none} latencies, "
        f"and {none} batches that no multiset of profiled ones makes up.\n\n"
        f"Threads may stay idle here, which the published program does not allow. That gains in {len(gains)} of the "
        "cells:\n\n" + table(("cell", "published, ms", "with idle threads, ms", "gain"), rows)
    )


def _baselines(profiles: Sequence[LatencyProfile]) -> str:
    rows = []
    for kind, of in (("thin", thin_over_optimum), ("fat", fat_over_optimum)):
        for profile in profiles:
            ratios = of(profile)
            means = [np.mean([each for batch, each in ratios.items() if batch >= first and not isinf(each)])
                     for first in (1, THREADS)]  # fmt: skip
            shown = ["–" if isinf(each) else f"{each:.2f}" for each in ratios.values()]
            rows.append((f"{kind}, {PUBLISHED[profile.model]}", *shown, *(f"{each:.2f}" for each in means)))
    return table(("latency over the optimum's", *map(str, BATCHES), "mean", f"mean from {THREADS}"), rows)


def _laws(profiles: Sequence[LatencyProfile]) -> str:
    rows = []
    for profile in profiles:
        errors = np.abs(fit(profile).errors(profile))
        rows.append(
            (PUBLISHED[profile.model], str(len(errors)), f"{percent(float(np.median(errors)))} %",
             f"{percent(float(np.quantile(errors, 0.9)))} %", f"{percent(float(errors.max()))} %",
             f"{percent(extrapolated(profile))} %")
        )  # fmt: skip
    more = f"median above {_MOST_FITTED} threads, fitted to the others"
    return table(("model", "points", "median error", "90th percentile", "worst", more), rows)


def _speed(profiles: Sequence[LatencyProfile]) -> str:
    begun = time.process_time()
    for profile in profiles:
        least_s(profile, 18)
    return f"{1e3 * (time.process_time() - begun) / len(profiles):.0f}"


def page(folder: Path) -> str:
    """What README.md says."""
    profiles = read(folder / "packrat_profile.csv")
    return "\n".join([
        HEAD, f"*{today()}, {machine()}.*\n",
        "## Optima\n", _optima(cells(folder)), "",
        f"All batches up to {MOST:,} and all numbers of instances on 18 threads take {_speed(profiles)} ms of CPU time "
        "per model.\n",
        f"## Against thin and fat, {THREADS} threads\n",
        BASELINES, _baselines(profiles), "",
        "## The law\n",
        "`a + b/t + n·(c + d/t) + e·n²/(n + 8)/t` for t threads and n samples, five constants per model "
        "([law.py](law.py)), held against the points that it was fitted to, and against points with more threads than "
        "those.\n",
        _laws(profiles), "",
    ])  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("packrat", __doc__)
    default = shared_data()
    parser.add_argument("--shared-data", type=Path, default=default)
    parser.add_argument("--print", action="store_true", help="print instead of writing README.md")
    given = parser.parse_args(arguments)
    folder = given.shared_data / "serving" / "packrat"
    if not folder.is_dir():
        raise ForetraceError(f"{folder} must hold the published optima; name their folder with --shared-data.")
    if given.print:
        print(page(folder))
    else:
        put(HERE / "README.md", page(folder))
    return 0
