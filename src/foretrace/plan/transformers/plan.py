"""`plan_decoder`: the quickest way to train a large transformer on devices that are named, not used."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, inf
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.plan.transformers import kernels
from foretrace.plan.transformers.model import DESIGNED, DeviceRates, Parallelism, StepCost, machine, softwares
from foretrace.plan.transformers.shape import TransformerSizes, transformer
from foretrace.plan.transformers.space import ParallelismSpace, SweptSpace
from foretrace.simulate.timeline import Timeline, simulate

_TRIES = 64  # other numbers of devices
_NODES = 32  # more nodes that are tried one by one, beside doubled devices
_MOST_PASSES = 100_000  # that are simulated unasked, in some seconds
_KEPT = 256  # quickest configurations of which the shown ones are taken


@dataclass(frozen=True, kw_only=True)
class Loser:
    """A configuration that is not the best, and why in a few words."""

    cost: StepCost
    why: str


@dataclass(frozen=True, kw_only=True)
class TransformerPlan:
    """The best plan with its 80 % range, memory by stage, and what lost to it."""

    space: ParallelismSpace
    best: StepCost
    runners_up: tuple[Loser, ...]  # that fit
    too_large: tuple[Loser, ...]  # quicker than the best, but they do not fit
    valid: int  # configurations, all of them timed
    fitting: int
    lost: dict[str, int]  # reason -> configurations
    seconds: float  # of the search
    notes: tuple[str, ...]  # what was assumed

    @property
    def configuration(self) -> Parallelism:
        return self.best.configuration

    @cached_property
    def simulated(self) -> Timeline:
        """The best one's step on the simulator, one device per stage."""
        return simulate(self.space.expand(self.configuration))

    def simulated_s(self, at: Parallelism) -> float | None:
        """Return seconds of a configuration's step on the simulator; None where its passes are more than 100,000."""
        if 2 * at.pipeline * at.virtual * self.space.batch // (at.data * at.micro) > _MOST_PASSES:
            return None
        timeline = self.simulated if at == self.configuration else simulate(self.space.expand(at))
        return timeline.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.space.batch * self.space.model.length / self.best.seconds

    def gpu_hours(self, tokens: float) -> float:
        """Return hours of devices to train on so many words. Raises ForetraceError for a number that is none."""
        if not 0 < tokens < inf:
            raise ForetraceError(f"`tokens={tokens:g}` must be finite and above 0; give e.g. 300e9.")
        return tokens / self.tokens_per_s * self.space.devices / 3600

    @property
    def utilisation(self) -> float:
        """Share of the devices' peak that products of forward and backward pass take, recomputation not counted."""
        m, space = self.space.model, self.space
        layer = m.attention_parameters + m.active * m.expert_parameters + 2 * m.length * m.heads * m.head
        work = 6 * space.batch * m.length * (m.layers * layer + m.words * m.hidden)
        return work / (self.best.seconds * space.devices * space.on.peak)


def plan_decoder(
    name: str | TransformerSizes, *, devices: int, device: str, batch: int, length: int = 0, network_gb_s: float = 0.0,
    fixed: dict[str, int] | None = None, runners_up: int = 5,
) -> TransformerPlan:  # fmt: skip
    """Time every valid configuration and take the quickest that fits in memory.

    `batch`: samples of a step, of `length` words each (the model's own by default); `network_gb_s`: one direction, per
    device, where it is not the catalog's; `fixed`: fields of a `Parallelism` that are given. Raises ForetraceError
    where nothing is valid or nothing fits, with the nearest change that would.
    """
    begun = time.perf_counter()
    model = name if isinstance(name, TransformerSizes) else transformer(name, length=length)
    on = machine(device, network_gb_s=network_gb_s)
    by = DESIGNED if any(on.design) else softwares()["megatron"]
    space = ParallelismSpace(model=model, on=on, software=by, devices=devices, batch=batch, fixed=fixed or {})
    found = space.search(_KEPT)
    if not found.fitting:
        raise _misfit(space, found)
    best, *rest = (space.cost(each) for each in found.configurations)
    spilled = [space.cost(each) for each in found.spilled]
    lost = {f"more {part}": count for part, count in found.lost.items() if count}
    return TransformerPlan(
        space=space, best=best,
        runners_up=tuple(Loser(cost=each, why=why_slower(each, best)) for each in _apart(best, rest)[:runners_up]),
        too_large=tuple(
            Loser(cost=each, why=_too_large(each, on)) for each in _apart(None, spilled) if each.seconds < best.seconds
        )[:runners_up],
        valid=found.valid, fitting=found.fitting,
        lost={"out of memory": found.valid - found.fitting, **lost}, seconds=time.perf_counter() - begun,
        notes=_assumed(space, best.configuration),
    )  # fmt: skip


def why_slower(loser: StepCost, best: StepCost) -> str:
    """Say by how much a configuration loses, and the part of the step that loses most."""
    more = {part: loser.parts[part] - best.parts[part] for part in kernels.PARTS}
    worst = max(more, key=lambda part: more[part])
    behind = loser.seconds / best.seconds - 1
    if behind < 5e-4:
        return "as quick as the best"
    share = more[worst] / best.seconds
    return f"{100 * behind:.1f} % slower, most of all by {worst}: {100 * share:.1f} % of the step more"


def _too_large(loser: StepCost, on: DeviceRates) -> str:
    stage, held = max(enumerate(loser.memory), key=lambda each: sum(each[1].values()))
    largest, most = max(held.items(), key=lambda each: each[1])
    return (
        f"out of memory: stage {stage} needs {sum(held.values()) / 1e9:,.1f} GB of {on.capacity / 1e9:g}, "
        f"{most / 1e9:,.1f} of them {largest}"
    )


def _apart(best: StepCost | None, costs: list[StepCost]) -> list[StepCost]:
    """Return the quickest of each split over devices (tensor, context, pipeline, data); not that of the best."""

    def split(each: StepCost) -> tuple[int, ...]:
        at = each.configuration
        return at.tensor, at.context, at.pipeline, at.data

    seen, found = {split(best)} if best else set(), []
    for each in costs:
        if split(each) not in seen:
            seen.add(split(each))
            found.append(each)
    return found


def _misfit(space: ParallelismSpace, found: SweptSpace) -> ForetraceError:
    """Return why nothing can be done, with the nearest number of devices or memory with which something can."""
    name, n = space.model.name, space.devices
    if not found.valid:
        near = next((each for each in sorted(range(1, 2 * n + 1), key=lambda each: (abs(each - n), each))[1:_TRIES]
                     if _sweep(space, devices=each).valid), None)  # fmt: skip
        change = f"give {near} devices" if near else "fix less, or give another batch"
        return ForetraceError(
            f"no degrees of tensor, context, pipeline and data for {name} and a batch of {space.batch} multiply to "
            f"{n} devices{' with what is fixed' if space.fixed else ''}; {change}."
        )
    node, whole = space.on.node, n - n % space.on.node
    larger = sorted({*(n << power for power in range(1, 13)), *range(whole + node, whole + _NODES * node, node)})
    enough = next((each for each in larger if _sweep(space, devices=each).fitting), None)
    change = f"give {enough} devices, or" if enough else "choose"
    each = "a device" if n == 1 else f"each of {n} devices"
    return ForetraceError(
        f"{name} does not fit into {space.on.capacity / 1e9:g} GB of {each} in any of {found.valid} configurations; "
        f"{change} devices with {_least_memory(space) / 1e9:.1f} GB."
    )


def _sweep(space: ParallelismSpace, **changes: Any) -> SweptSpace:
    """Return what there is after a change; nothing where that breaks what is fixed."""
    try:
        return replace(space, **changes).sweep(1)
    except ForetraceError:
        return SweptSpace()


def _least_memory(space: ParallelismSpace) -> float:
    """Return bytes per device that the configuration with the least memory needs, to a thousandth, rounded up."""
    low, high = space.on.capacity, 2 * space.on.capacity
    while not _sweep(space, on=replace(space.on, capacity=high)).fitting:
        low, high = high, 2 * high
    while high > 1.001 * low:
        middle = (low + high) / 2
        if _sweep(space, on=replace(space.on, capacity=middle)).fitting:
            high = middle
        else:
            low = middle
    return high


def _assumed(space: ParallelismSpace, at: Parallelism) -> tuple[str, ...]:
    by, on = space.software, space.on
    low, high = by.range_on(on.device)
    found = [
        f"times of {by.what}; 80 % of the rows that no fit saw were {100 * (exp(low) - 1):+.0f} to "
        f"{100 * (exp(high) - 1):+.0f} % off",
        f"{on.network / 1e9:g} GB/s between nodes for each device",
        "layers are shared out equally; biases, norms and workspaces are not counted in memory",
    ]
    if space.model.experts > 1:
        found.append("words are shared out to experts evenly; no mixture was scored: the range is twice as wide")
    if at.zero > 1:
        found.append("no row with ZeRO 2 or 3 was scored: the range is twice as wide; compare a plan with zero=1")
    if at.versions > 1:
        found.append("no row without a flush was scored: the range is twice as wide; gradients are one batch old")
    if at.context > 1:
        found.append("one model split by context was scored; compare a plan with context=1")
    return tuple(found)
