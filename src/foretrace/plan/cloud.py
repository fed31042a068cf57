"""Which rented machines would train a recorded job: epoch time with stalls, and money (Stash, ICDCS 2023, section V).

Every offer is a number of machines of one type. Its step is simulated: the recorded step with kernels as
`faster-device` predicts them there, data-parallel over the machine's links, batches prepared by its processors.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import ceil, isfinite
from pathlib import Path

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.experiment.stalls import loader_s, need_one_rank
from foretrace.graph.edit import scale
from foretrace.graph.taskgraph import TaskGraph
from foretrace.hardware.cluster import Cluster
from foretrace.hardware.devices import Device
from foretrace.hardware.instances import Instance
from foretrace.names import question, resolve
from foretrace.simulate.timeline import simulate
from foretrace.techniques.compute.batching import recorded_size
from foretrace.techniques.compute.faster_device import FasterDevice
from foretrace.techniques.compute.other_device import recorded_on
from foretrace.techniques.distributed.data_parallel import DataParallel

HOUR_S = 3600.0
# Time of preparing a batch over the recorded one, likely, at the fast and at the slow end: a processor may be quicker,
# and two vCPUs share a core.
_PREPARING = (1.0, 1 / 1.5, 2.0)
_SPENT = 4  # times slower is a network of bursts once its credits are spent
_UNCERTAIN = ("transfer", "waiting_ms", "company")  # priors of data-parallel that are taken to their ends together


@dataclass(frozen=True, kw_only=True)
class RentalRequest:
    """What is to be trained, and within which bounds (0: none)."""

    samples: int  # of an epoch
    epochs: int = 1
    hours: float = 0.0
    dollars: float = 0.0
    counts: tuple[int, ...] = (1, 2, 4)  # machines
    gradient_mb: float = 0.0
    steps_s: dict[str, float] = field(default_factory=dict)  # measured step of one device, by its short name

    def checked(self) -> RentalRequest:
        """Return itself. Raises ForetraceError for amounts that are none."""
        if self.samples < 1 or self.epochs < 1:
            raise ForetraceError(f"`samples={self.samples}` `epochs={self.epochs}` trains nothing; give both above 0.")
        for name, value in (("within", self.hours), ("budget", self.dollars), ("gradient_mb", self.gradient_mb)):
            if not isfinite(value) or value < 0:
                raise ForetraceError(f"`{name}={value}` is no amount; give a number above 0, or leave it out.")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """So many machines of one type: step, epochs and money, with 80 % ranges."""

    name: str  # as in "2 x p3.16xlarge"
    instance: str
    count: int
    device: str
    workers: int  # devices of all machines
    step_s: float
    step_low_s: float
    step_high_s: float
    compute_s: float  # of the step: one device alone, batches ready
    communication_s: float  # longer because of other workers
    data_s: float  # longer because of preparing batches
    steps_per_epoch: int
    hours: float  # of all epochs
    hours_low: float
    hours_high: float
    dollars: float
    dollars_low: float
    dollars_high: float
    price_per_h: float  # of one machine, as all money in `currency`
    price_date: str
    region: str
    currency: str
    on_front: bool  # nothing else is both faster and cheaper


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalAdvice:
    """All offers, fastest first, and the one to take."""

    offers: tuple[Offer, ...]
    chosen: Offer | None
    why: str
    left_out: tuple[str, ...]  # types that could not be predicted, and why
    batch: int  # samples of a worker's step
    assumed: tuple[str, ...]


def advise(
    graph: TaskGraph, types: Sequence[Instance], wanted: RentalRequest, progress: Callable[[float], None] | None = None
) -> RentalAdvice:
    """Predict every type and count, and choose: cheapest within the time, else fastest within the money, else cheapest.

    Raises ForetraceError where the recording does not say how many samples a step has, or nothing can be predicted.
    """
    need_one_rank(graph)
    if len(currencies := sorted({each.currency for each in types})) > 1:
        raise ForetraceError(f"prices in {' and '.join(currencies)} cannot be compared; give a file in one currency.")
    batch = recorded_size(graph)
    if not batch:
        raise ForetraceError("the recording does not show how many samples a step has; record with shapes.")
    offers, reasons = list[Offer](), defaultdict[str, dict[str, None]](dict)  # why, and which devices
    kinds = {each.device: each for each in types}
    steps_s = _measured(wanted.steps_s, kinds)

    @cache
    def graphs_on(short: str) -> tuple[TaskGraph, TaskGraph, TaskGraph]:
        return _on(graph, kinds[short].kind, steps_s.get(short))

    tried = list(product(types, wanted.counts))
    for number, (each, count) in enumerate(tried, 1):
        several = sum(other.name == each.name for other in types) > 1
        region = f" in {each.region}" if several and each.region else ""
        try:
            graphs, measured = graphs_on(each.device), each.device in steps_s
            offers.append(_offer(graphs, each, count, batch, wanted, region, measured=measured))
        except NotApplicableError as error:
            reasons[str(error)][each.device] = None
        if progress is not None:
            progress(number / len(tried))
    left_out = tuple(f"{', '.join(shorts)}: {why}" for why, shorts in reasons.items())
    if not offers:
        others = f" (and {len(left_out) - 1} more devices alike)" if len(left_out) > 1 else ""
        raise ForetraceError(f"no instance type could be predicted: {left_out[0]}{others}")
    offers = _with_front(sorted(offers, key=lambda offer: (offer.hours, offer.dollars)))
    chosen, why = _choose(offers, wanted)
    return RentalAdvice(
        offers=tuple(offers), chosen=chosen, why=why, left_out=left_out, batch=batch,
        assumed=(
            "the batch of a worker stays as recorded, so the global batch grows with the workers",
            "links inside a machine carry 75 % of their rate, the network 85 %; where its rate is a burst, a "
            "quarter of it at the slow end",
            "an epoch is paid to the second, without starting machines, storage or traffic",
            "batches are read fast enough; preparing them takes the recorded processor time on all but one vCPU of "
            "a device's share, two thirds of it to twice as long",
        ),
    )  # fmt: skip


def _measured(steps_s: Mapping[str, float], kinds: Mapping[str, Instance]) -> dict[str, float]:
    """Return measured steps by what offers call their device. Raises ForetraceError for one that no offer has."""
    names = {alias: short for short, each in kinds.items() for alias in (each.kind.short, each.kind.name)}
    found = {}
    for name, seconds in steps_s.items():
        if (short := resolve(name, kinds, names)) is None:
            raise ForetraceError(f"`step={name}`: no offer has such a device; {question(name, kinds, names)}")
        found[short] = seconds
    return found


def _on(graph: TaskGraph, device: Device, measured_s: float | None) -> tuple[TaskGraph, TaskGraph, TaskGraph]:
    """Return the recorded step on one device of a kind: likely, at the fast end, at the slow end."""
    if measured_s is not None:
        by = measured_s / simulate(graph).step_time_s
        same = scale(graph, ~graph.gone, by)
        return same, same, same
    recorded = recorded_on(graph)
    if not graph.on_device.any() or recorded is None:
        raise NotApplicableError(
            "recorded on no device of the catalog; say what a step takes there: "
            f"`step={device.short}=SECONDS`, or record on a GPU."
        )
    if recorded.name == device.name:
        return graph, graph, graph
    there = FasterDevice(device=device.name)
    priors = there.priors(graph).items()
    ends = ({key: getattr(prior, end) for key, prior in priors} for end in ("low", "high"))
    likely, fast, slow = (replace(there, **values).predict(graph) for values in ({}, *ends))
    return likely, fast, slow


def _offer(
    graphs: tuple[TaskGraph, TaskGraph, TaskGraph], instance: Instance, count: int, batch: int, wanted: RentalRequest,
    region: str, *, measured: bool = False,
) -> Offer:  # fmt: skip
    workers = count * instance.devices
    alone = [simulate(each) for each in graphs]
    loading = [each.breakdown().median_s()["data_loading"] for each in alone]
    clean = [each.step_time_s - lost for each, lost in zip(alone, loading, strict=True)]
    if measured:  # which includes what the loader was waited for there, as much as nothing or as the recorded share
        clean[0], clean[2] = alone[0].step_time_s, alone[2].step_time_s
    apart = [0.0, 0.0, 0.0]
    if workers > 1:
        cluster = instance.cluster(count)
        spent = replace(cluster.between, gbit_s=cluster.between.gbit_s / (_SPENT if instance.bursts else 1))
        with tempfile.TemporaryDirectory(prefix="foretrace-") as folder:
            path = _written(cluster, Path(folder) / "cluster.yaml")
            slow = _written(replace(cluster, between=spent), Path(folder) / "spent.yaml")
            dp = DataParallel(workers=workers, network=str(path), gradient_mb=wanted.gradient_mb)
            priors = dp.priors(graphs[0])
            ends = [{key: getattr(priors[key], end) for key in _UNCERTAIN} for end in ("low", "high")]
            variants = (dp, replace(dp, **ends[0]), replace(dp, **ends[1], network=str(slow)))
            apart = [
                max(simulate(variant.predict(each)).step_time_s - before.step_time_s, 0.0)
                for variant, each, before in zip(variants, graphs, alone, strict=True)
            ]
    recorded_s = loader_s(graphs[0])
    prepare = loading[0] if recorded_s is None else recorded_s
    share = max(instance.vcpus / instance.devices - 1, 1.0)
    noise = alone[0].interval_s()
    clean[1] *= noise.low_s / alone[0].step_time_s
    clean[2] *= noise.high_s / alone[0].step_time_s
    steps = [a + b for a, b in zip(clean, apart, strict=True)]
    data = [max(prepare * each / share - step, 0.0) for each, step in zip(_PREPARING, steps, strict=True)]
    total = [a + b for a, b in zip(steps, data, strict=True)]
    per_epoch = max(ceil(wanted.samples / (batch * workers)), 1)
    hours = [wanted.epochs * per_epoch * each / HOUR_S for each in total]
    rate = count * instance.price_per_h
    return Offer(
        name=f"{count} x {instance.name}{region}", instance=instance.name, count=count, device=instance.kind.name,
        workers=workers, step_s=total[0], step_low_s=min(total), step_high_s=max(total), compute_s=clean[0],
        communication_s=apart[0], data_s=data[0], steps_per_epoch=per_epoch,
        hours=hours[0], hours_low=min(hours), hours_high=max(hours),
        dollars=hours[0] * rate, dollars_low=min(hours) * rate, dollars_high=max(hours) * rate,
        price_per_h=instance.price_per_h, price_date=instance.date, region=instance.region,
        currency=instance.currency, on_front=False,
    )  # fmt: skip


def money(currency: str) -> str:
    """Return how an amount of a currency ends."""
    return "$" if currency == "USD" else currency


def _written(cluster: Cluster, path: Path) -> Path:
    """Return a cluster as a file, as techniques take a network; rates are what payload reaches."""

    def link(gbit_s: float, efficiency: float, latency_us: float) -> str:
        return f"{gbit_s * efficiency:.6g}gbit/{latency_us:g}us"

    inside, between = cluster.inside, cluster.between
    path.write_text(
        f"name: {cluster.name}\nnodes: {cluster.nodes}\nper_node: {cluster.per_node}\n"
        f"inside: {link(inside.gbit_s, inside.efficiency, inside.latency_us)}\n"
        f"between: {link(between.gbit_s, between.efficiency, between.latency_us)}\n",
        encoding="utf-8",
    )
    return path


def _with_front(offers: Sequence[Offer]) -> list[Offer]:
    """Return the same offers (fastest first), those marked that nothing else beats in both time and money."""
    cheapest, found = float("inf"), []
    for offer in offers:
        on_front = offer.dollars < cheapest
        cheapest = min(cheapest, offer.dollars)
        found.append(replace(offer, on_front=on_front))
    return found


def _choose(offers: Sequence[Offer], wanted: RentalRequest) -> tuple[Offer | None, str]:
    in_time = [o for o in offers if not wanted.hours or o.hours <= wanted.hours]
    fitting = [o for o in in_time if not wanted.dollars or o.dollars <= wanted.dollars]
    if not fitting:
        fastest, cheapest = offers[0], min(offers, key=lambda o: o.dollars)
        return None, (
            f"nothing fits: the fastest, {fastest.name}, takes {fastest.hours:.3g} h, the cheapest, {cheapest.name}, "
            f"{cheapest.dollars:.4g} {money(cheapest.currency)}"
        )
    if wanted.dollars and not wanted.hours:
        best = min(fitting, key=lambda o: (o.hours, o.dollars))
        return best, f"fastest within {wanted.dollars:g} {money(best.currency)}"
    why = f"cheapest within {wanted.hours:g} h" if wanted.hours else "cheapest"
    return min(fitting, key=lambda o: (o.dollars, o.hours)), why
