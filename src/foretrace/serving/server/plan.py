"""`SplitPlan`: the best split of a batch on one machine beside one fat instance and thin ones, and why.

Splits come from the latencies of single instances. Interference, how much longer instances take that run at once, is
measured by running the most promising splits, fat and thin in turns; where nothing can be run it is a range.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from foretrace.cost.operators import store
from foretrace.errors import ForetraceError
from foretrace.experiment.statistics import LEAST_FLOOR, Ratio
from foretrace.serving.server.latencies import LatencyProfile, read, samples_for
from foretrace.serving.server.measure import (
    SAMPLES,
    Tell,
    cores_for,
    facts_of,
    measure_profile,
    run_in_turns,
)
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.split import CoreSplit, split_table

FAT, THIN = "fat", "thin"
# Instances that run at once share caches, memory bandwidth and clock frequency: not measured on the recorded machine.
INTERFERENCE = (1.0, 1.5)
NOISE = 0.10  # of a latency that was recorded without its spread
_ODDS = 9.0  # of the quantile, this many times lower and higher: p10 and p90 of the median
_AT_ONCE, _MOST_RUN = 2, 6  # splits beside fat and thin that are run in turns, and in all
_RUN_S = 8.0  # for running splits in turns, or as long as their rounds take


class PlannedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """A split and the latency of a batch that is predicted of it, seconds."""

    name: str  # fat: one instance; thin: one per thread; or the split as text
    split: str  # 2x4:16+1x1:8 are two instances with 4 threads and batch 16, one with 1 thread and batch 8
    alone_s: float  # if its instances did not disturb each other
    latency_s: float
    low_s: float
    high_s: float
    interference: float | None = None  # latency over `alone_s`; null where it was not run with all of its instances
    over_fat: Ratio | None = None  # latency over fat's in the same minutes; null where they did not run together

    @property
    def instances(self) -> CoreSplit:
        """What `split` says."""
        return CoreSplit.parse(self.split)


@dataclass(frozen=True, kw_only=True)
class RejectedSplit:
    """A split that could not be predicted, or an instance that could not be measured, and why."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """The splits of a batch, the best first, and what was left out."""

    profile: LatencyProfile
    batch: int
    threads: int
    quantile: float  # of the latency of a batch that is least
    splits: tuple[PlannedSplit, ...]
    rejected: tuple[RejectedSplit, ...]
    notes: tuple[str, ...]
    source: ModelSource | None = None  # None: planned from a recorded profile
    cores: tuple[int, ...] = ()
    path: Path | None = None  # of the profile

    @property
    def chosen(self) -> PlannedSplit:
        """The best."""
        return self.splits[0]

    def named(self, name: str) -> PlannedSplit | None:
        """Return the split of this name; None where it could not be predicted."""
        return next((each for each in self.splits if each.name == name), None)


def plan_splits(
    source: ModelSource, *, batch: int, threads: int | None = None, tail: float = 0.5, memory_limit: int | None = None,
    profile: Path | None = None, tell: Tell | None = None,
) -> SplitPlan:  # fmt: skip
    """Find the split of a batch over cores of this machine whose latency is least; its median, or the quantile `tail`.

    What `profile` lacks of a model that runs here is measured and kept there, by default in the cache folder, and the
    most promising splits are run. A file of latencies that were recorded elsewhere is planned with as it is.
    `memory_limit` bytes hold the weights of all instances. Raises ForetraceError where nothing fits, with the reason.
    """
    if not 0.5 <= tail < 1:
        raise ForetraceError(f"`tail={tail:g}` must be from 0.5 (the median) to below 1; write 0.99.")
    recorded = read(profile) if profile is not None and profile.exists() else ()
    if profile is None or not recorded or any(each.origin for each in recorded):
        return _plan_measured(source, batch, threads, tail, memory_limit, profile, tell)
    found = next((each for each in recorded if each.model == source.name), None)
    if found is None:
        names = ", ".join(each.model for each in recorded)
        raise ForetraceError(f"{profile} has no profile of {source.name}; choose {names}, or name another file.")
    if memory_limit is not None:
        raise ForetraceError(f"{profile} does not say what weights take; leave `memory_limit=` out.")
    threads = threads or max(each.threads for each in found.samples_s)
    return replace(_planned(found, batch, threads, tail, None), path=profile)


def _plan_measured(
    source: ModelSource, batch: int, threads: int | None, quantile: float, memory_limit: int | None,
    path: Path | None, tell: Tell | None,
) -> SplitPlan:  # fmt: skip
    """Profile the model on this machine, plan, and run the most promising splits."""
    cores, warning = cores_for(threads)
    kept = path or store.cache() / "latencies" / f"{re.sub('[^A-Za-z0-9.]+', '-', source.name)}-{source.size}.csv"
    if path is None:
        store.make_folder(kept.parent)
    facts = facts_of(source, cores)
    weights = max(facts.weight_bytes, 1)
    most = None if memory_limit is None else memory_limit // weights
    if most == 0:
        raise ForetraceError(
            f"no split fits: the weights of one instance take {weights / 1e6:.3g} MB; give more `memory_limit=`."
        )
    samples = max(SAMPLES, samples_for(quantile))
    measured = measure_profile(
        source, facts, cores=cores, batch=batch, path=kept, samples=samples, ours=path is None, tell=tell
    )
    found = _planned(measured, batch, len(cores), quantile, most)
    why = "its latencies vary too much, others disturbed it, so that the search did not use it"
    refused = tuple(
        RejectedSplit(name=f"{each.threads} threads, batch {each.batch}", why=why) for each in measured.refused
    )
    notes = [warning] if warning else []
    if memory_limit is not None:
        notes.append(f"Of memory, weights are counted, {weights / 1e6:.3g} MB per instance, and nothing else.")
    found = replace(
        found, source=source, cores=cores, path=kept, rejected=(*found.rejected, *refused), notes=tuple(notes)
    )
    return _with_interference(found, tell)


def _planned(profile: LatencyProfile, batch: int, threads: int, quantile: float, most: int | None) -> SplitPlan:
    """Return the best split for each number of instances, fat and thin, as the profile alone has them.

    Points that were refused say what they can of fat and thin, which are what others are compared with.
    """
    calm = {point: each for point, each in profile.latency_s(quantile).items() if point not in profile.refused}
    table = split_table(calm, threads=threads, batch=batch, instances=most)
    wanted = {FAT: CoreSplit.fat(threads, batch), THIN: CoreSplit.thin(threads, batch)}
    known = set(wanted.values())
    wanted |= {split.text: split for split in table.splits(batch) if split not in known}
    splits, rejected = list[PlannedSplit](), list[RejectedSplit]()
    for name, split in wanted.items():
        missing = next((each for each in split.instances if each not in profile.samples_s), None)
        if most is not None and len(split) > most:
            why = f"the weights of {len(split)} instances exceed the memory, which holds {most}"
            rejected.append(RejectedSplit(name=name, why=why))
        elif missing is not None:
            why = f"the profile has no latency of {missing.threads} threads with batch {missing.batch}"
            rejected.append(RejectedSplit(name=name, why=why))
        elif name == FAT or split != wanted[FAT]:  # of one sample or thread, fat is thin
            splits.append(_alone(name, split, profile, quantile))
    if not splits:
        why = "; ".join(f"{each.name}: {each.why}" for each in rejected)
        raise ForetraceError(f"no split of {batch} samples over {threads} threads can be predicted ({why}).")
    splits.sort(key=lambda each: each.latency_s)
    return SplitPlan(
        profile=profile, batch=batch, threads=threads, quantile=quantile, splits=tuple(splits),
        rejected=tuple(rejected), notes=(),
    )  # fmt: skip


def _alone(name: str, split: CoreSplit, profile: LatencyProfile, quantile: float) -> PlannedSplit:
    """Return what the latencies of single instances say of a split."""
    low_s, alone, high_s = (profile.alone_s(split, each) for each in _around(quantile))
    if min(len(profile.samples_s[each]) for each in split.instances) == 1:
        low_s, high_s = low_s * (1 - NOISE), high_s * (1 + NOISE)
    most = INTERFERENCE[1] if len(split) > 1 else 1.0
    return PlannedSplit(
        name=name, split=split.text, alone_s=alone, latency_s=alone, low_s=low_s * INTERFERENCE[0], high_s=high_s * most
    )


def _with_interference(found: SplitPlan, tell: Tell | None) -> SplitPlan:
    """Run what may be best: whatever would beat what was run, if its instances did not disturb each other.

    Fat and the best so far run beside all others, so that every split has a ratio to them of the same minutes.
    """
    assert found.source is not None
    splits = {each.name: each for each in found.splits}
    ran = dict[str, PlannedSplit]()
    while len(ran) < _MOST_RUN:
        best = min(ran.values(), key=lambda each: each.latency_s, default=None)
        new = [each for each in found.splits if each.name not in ran and (not best or each.alone_s < best.latency_s)]
        if not new:
            break
        beside = [splits[name] for name in (FAT, *([best.name] if best else [THIN])) if name in splits]
        names = dict.fromkeys(each.name for each in (*beside, *new[:_AT_ONCE]))
        runs = run_in_turns(
            found.source, {name: splits[name].instances for name in names}, cores=found.cores, seconds=_RUN_S,
            batches=samples_for(found.quantile),
            tell=None if tell is None else lambda share: tell("running splits in turns", share),
        )  # fmt: skip
        fat = runs.get(FAT)
        for name, run in runs.items():
            low, middle, high = np.quantile(np.concatenate(run.latencies_s), _around(found.quantile)).tolist()
            ran[name] = msgspec.structs.replace(
                splits[name], latency_s=middle, low_s=low, high_s=high, interference=middle / splits[name].alone_s,
                over_fat=_expected(run.wall_s, fat.wall_s) if fat and name != FAT else splits[name].over_fat,
            )  # fmt: skip
    ranked = sorted(ran.values(), key=lambda each: each.latency_s)
    return replace(found, splits=(*ranked, *(each for each in found.splits if each.name not in ran)))


def _expected(latencies_s: Sequence[float], fat_s: Sequence[float]) -> Ratio:
    """Return what another run may find for the ratio of two splits, from the rounds of this one.

    Its range is that of single rounds (p10 to p90), and not that of their median: what processes that are started again
    change, and neighbours on the machine, does not average out over the rounds of one run. LEAST_FLOOR comes on top.
    """
    low, middle, high = np.quantile(np.divide(latencies_s, fat_s), [0.1, 0.5, 0.9]).tolist()
    return Ratio(value=middle, low=low - LEAST_FLOOR, high=high + LEAST_FLOOR)


def _around(quantile: float) -> tuple[float, float, float]:
    """Return the quantile between those whose odds are _ODDS times lower and higher."""
    odds = quantile / (1 - quantile)
    return odds / _ODDS / (1 + odds / _ODDS), quantile, odds * _ODDS / (1 + odds * _ODDS)
