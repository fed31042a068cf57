"""`SplitPlan`: the best split of a batch on one machine beside one fat instance and thin ones, and why.

Splits come from the latencies of single instances. Interference, how much longer instances take that run at once, is
measured by running fat, thin and the most promising splits in turns; where nothing can be run it is a range.
`try_plan` runs fat, thin and the choice afterwards, with new processes, and judges the plan by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from foretrace.cost.operators import store
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.statistics import LEAST_FLOOR, Arm, Ratio, paired_ratio
from foretrace.experiment.trial import changed
from foretrace.serving.server import measure
from foretrace.serving.server.measure import LatencyProfile, Tell, samples_for
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.run import usable
from foretrace.serving.server.split import CoreSplit, split_table

FAT, THIN = "fat", "thin"
AGAIN = "again"  # fat's second arm
# One process with all cores and PyTorch's own settings, beside no server: instances of a server let threads that wait
# sleep, so a gain over fat alone would be one over the server's settings, too.
ALONE = "alone"
# Instances that run at once share caches, memory bandwidth and clock frequency: not measured on the recorded machine.
INTERFERENCE = (1.0, 1.5)
NOISE = 0.10  # of a latency that was recorded without its spread
_ODDS = 9.0  # of the quantile, this many times lower and higher: p10 and p90 of the median
_MOST_RUN = 6  # splits that are run in turns, fat and thin among them
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


class RejectedSplit(msgspec.Struct, frozen=True, kw_only=True):
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
    notes: tuple[str, ...] = ()
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


class SplitTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Splits that were run in turns after the plan was made. Ratios are latencies over fat's."""

    after: str  # the split that is compared with fat: the planned one, the runner-up where that is fat
    quickest: str  # the split with the least median latency
    predicted: Ratio
    measured: Ratio
    same: Ratio  # fat against itself
    over_alone: Ratio | None  # latency over that of PyTorch without a server; null with ONNX Runtime
    error: float
    verdict: str
    uncertain: str
    arms: dict[str, Arm]  # by split, `again` for fat's second copy, `alone`


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
    tell = tell or (lambda what, share: None)
    recorded = measure.read(profile) if profile is not None and profile.exists() else ()
    if recorded and not any(each.origin for each in recorded):
        found = next((each for each in recorded if each.model == source.name), None)
        if found is None:
            names = ", ".join(each.model for each in recorded)
            raise ForetraceError(f"{profile} has no profile of {source.name}; choose {names}, or name another file.")
        if memory_limit is not None:
            raise ForetraceError(f"{profile} does not say what weights take; leave `memory_limit=` out.")
        threads = threads or max(each.threads for each in found.samples_s)
        return replace(_planned(found, batch, threads, tail, None), path=profile)
    cores = usable(threads)
    path = profile or store.cache() / "latencies" / f"{re.sub('[^A-Za-z0-9.]+', '-', source.name)}-{source.size}.csv"
    if profile is None:
        store.make_folder(path.parent)
    facts = measure.facts_of(source, cores)
    weights = max(facts.weight_bytes, 1)
    most = None if memory_limit is None else memory_limit // weights
    if most == 0:
        raise ForetraceError(
            f"no split fits: the weights of one instance take {weights / 1e6:.3g} MB; give more `memory_limit=`."
        )
    measured = measure.measure_profile(
        source, facts, cores=cores, batch=batch, path=path, samples=max(measure.SAMPLES, samples_for(tail)),
        ours=profile is None, tell=tell,
    )  # fmt: skip
    counted = f"Of memory, weights are counted, {weights / 1e6:.3g} MB per instance, and nothing else."
    planned = _planned(measured, batch, len(cores), tail, most)
    planned = replace(planned, source=source, cores=cores, path=path, notes=() if most is None else (counted,))
    return _with_interference(planned, tell)


def _planned(profile: LatencyProfile, batch: int, threads: int, quantile: float, most: int | None) -> SplitPlan:
    """Return the best split for each number of instances, fat and thin, as the profile alone has them.

    Points that were refused say what they can of fat and thin, which are what others are compared with.
    """
    calm = {point: each for point, each in profile.latency_s(quantile).items() if point not in profile.refused}
    wanted = {FAT: CoreSplit.fat(threads, batch), THIN: CoreSplit.thin(threads, batch)}
    best = split_table(calm, threads=threads, batch=batch, instances=most).splits(batch)
    wanted |= {split.text: split for split in best if split not in wanted.values()}
    splits, rejected = list[PlannedSplit](), dict[str, str]()
    for name, split in wanted.items():
        missing = next((each for each in split.instances if each not in profile.samples_s), None)
        if most is not None and len(split) > most:
            rejected[name] = f"the weights of {len(split)} instances exceed the memory, which holds {most}"
        elif missing is not None:
            rejected[name] = f"the profile has no latency of {missing.threads} threads with batch {missing.batch}"
        elif name == FAT or split != wanted[FAT]:  # of one sample or thread, fat is thin
            splits.append(_alone(name, split, profile, quantile))
    if not splits:
        why = "; ".join(f"{name}: {why}" for name, why in rejected.items())
        raise ForetraceError(f"no split of {batch} samples over {threads} threads can be predicted ({why}).")
    for each in profile.refused:
        rejected[f"{each.threads} threads, batch {each.batch}"] = (
            "its latencies vary too much, others disturbed it, so that the search did not use it"
        )
    return SplitPlan(
        profile=profile, batch=batch, threads=threads, quantile=quantile,
        splits=tuple(sorted(splits, key=lambda each: each.latency_s)),
        rejected=tuple(RejectedSplit(name=name, why=why) for name, why in rejected.items()),
    )  # fmt: skip


def _alone(name: str, split: CoreSplit, profile: LatencyProfile, quantile: float) -> PlannedSplit:
    """Return what the latencies of single instances say of a split."""
    low_s, alone_s, high_s = (profile.alone_s(split, each) for each in _around(quantile))
    if min(len(profile.samples_s[each]) for each in split.instances) == 1:
        low_s, high_s = low_s * (1 - NOISE), high_s * (1 + NOISE)
    least, most = INTERFERENCE if len(split) > 1 else (1.0, 1.0)
    return PlannedSplit(
        name=name, split=split.text, alone_s=alone_s, latency_s=alone_s, low_s=low_s * least, high_s=high_s * most
    )


def _with_interference(plan: SplitPlan, tell: Tell) -> SplitPlan:
    """Run fat, thin and the splits that would be best if their instances did not disturb each other, all in turns.

    So every one that ran has a ratio to fat of the same rounds. What another run may find for it has the range of
    single rounds (p10 to p90), and not that of their median: what processes that are started again change, and
    neighbours on the machine, does not average out over the rounds of one run. LEAST_FLOOR comes on top.
    """
    assert plan.source is not None
    first = sorted(plan.splits, key=lambda each: each.name not in (FAT, THIN))[:_MOST_RUN]
    runs = measure.run_in_turns(
        plan.source, {each.name: each.instances for each in first}, cores=plan.cores, seconds=_RUN_S,
        batches=samples_for(plan.quantile), tell=lambda share: tell("running splits in turns", share),
    )  # fmt: skip
    means = {name: np.mean(blocks, axis=1) for name, blocks in runs.items()}
    ran, left = list[PlannedSplit](), [each for each in plan.splits if each not in first]
    for each in first:
        low_s, middle_s, high_s = np.quantile(np.concatenate(runs[each.name]), _around(plan.quantile)).tolist()
        over_fat = None
        if each.name != FAT and FAT in runs:
            low, middle, high = np.quantile(means[each.name] / means[FAT], [0.1, 0.5, 0.9]).tolist()
            over_fat = Ratio(value=middle, low=low - LEAST_FLOOR, high=high + LEAST_FLOOR)
        ran.append(
            msgspec.structs.replace(
                each, latency_s=middle_s, low_s=low_s, high_s=high_s, interference=middle_s / each.alone_s,
                over_fat=over_fat,
            )
        )  # fmt: skip
    return replace(plan, splits=(*sorted(ran, key=lambda each: each.latency_s), *left))


def _around(quantile: float) -> tuple[float, float, float]:
    """Return the quantile between those whose odds are _ODDS times lower and higher."""
    odds = quantile / (1 - quantile)
    return odds / _ODDS / (1 + odds / _ODDS), quantile, odds * _ODDS / (1 + odds * _ODDS)


def try_plan(
    plan: SplitPlan, *, seconds: float, tell: Callable[[float], None] | None = None
) -> tuple[SplitTrial, Row]:  # fmt: skip
    """Run the splits of a plan in turns, fat twice, and return what came of it, and the row of the ledger.

    There fat is the baseline, a batch is a step, and `arms["serve"]` has all splits. Raises ForetraceError where there
    is nothing to compare.
    """
    if plan.source is None:
        raise ForetraceError("a recorded profile has no model that could be run; leave `run=` out.")
    after = next((each for each in plan.splits if each.over_fat is not None), None)
    if after is None or after.over_fat is None:
        raise ForetraceError(
            "there are no two splits to compare: one thread or one sample cannot be split, and fat needs a profile; "
            "leave `run=` out."
        )
    splits = {each.name: each.instances for each in plan.splits if each.name in (FAT, THIN, after.name)}
    copies = {AGAIN: splits[FAT]} | ({ALONE: splits[FAT]} if "torch" in plan.source.libraries else {})
    runs = measure.run_in_turns(plan.source, splits | copies, cores=plan.cores, seconds=seconds, own=ALONE, tell=tell)
    arms = {name: Arm.of(np.mean(blocks, axis=1).tolist()) for name, blocks in runs.items()}
    tried = changed(after.over_fat, arms[FAT], arms[AGAIN], arms[after.name])
    trial = SplitTrial(
        after=after.name, quickest=min(splits, key=lambda name: arms[name].median_s), predicted=tried.predicted,
        measured=tried.measured, same=tried.same, error=tried.error, verdict=tried.verdict, uncertain=tried.uncertain,
        over_alone=paired_ratio(arms[ALONE].blocks_s, arms[after.name].blocks_s) if ALONE in arms else None, arms=arms,
    )  # fmt: skip
    kept = msgspec.to_builtins(trial)
    predicted_s = {each.name: each.latency_s for each in plan.splits if each.name in splits}
    row = tried.row(
        f"serve-split batch={plan.batch} split={after.split}",
        parameters={"batch": plan.batch, "split": after.split}, model=plan.source.name, size=plan.source.size,
        threads=plan.threads, samples=(plan.batch, plan.batch), notes=plan.notes,
        arms={
            "wall": kept["arms"], "uncertain": trial.uncertain,
            "serve": {"chosen": plan.chosen.name, "quickest": trial.quickest, "predicted_s": predicted_s,
                      "over_alone": kept["over_alone"]},
        },
    )  # fmt: skip
    return trial, row
