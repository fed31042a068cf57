"""`rewrite`: the whole story for one model: capture, verify rules, search, fold weights, check, measure.

found = rewrite(model, args, name="mine", wanted=Wanted(alpha=1.05))
found.module(*args)         # what the original returns
found.used                  # (RuleUse(name="merge-convolutions", uses=9, ...), ...)
found.check.equal, found.gain.gains["rewritten"]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace.cost.devices.roofline import Roofline
from foretrace.cost.operators.bench import settle_allocator
from foretrace.deadline import Deadline
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import named
from foretrace.hardware.processor import operator_threads
from foretrace.plan.rewrite import catalog, measure
from foretrace.plan.rewrite.capture import Model, capture, of_training, settled
from foretrace.plan.rewrite.costs import MeasuredCosts, ModelCosts, OperatorCosts
from foretrace.plan.rewrite.emit import Emitted, emit
from foretrace.plan.rewrite.substitute import PART, Rewriting, substitute
from foretrace.plan.rewrite.terms import Graph
from foretrace.plan.rewrite.verifier import RuleVerdict

if TYPE_CHECKING:
    from torch import nn

Tell = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class RewriteRequest:
    """What to do."""

    alpha: float = 1.05  # how much more than the best a graph may cost to be followed; 1 is greedy
    budget: int = 60  # graphs to expand per part
    part: int = PART  # operators of a part
    seconds: float | None = None  # of search, then the best so far
    rules: Path | None = None  # TASO's file
    measure: bool = True  # time both models in turns
    rounds: int = 11

    def checked(self) -> RewriteRequest:
        """Return itself. Raises ForetraceError for values that mean nothing."""
        if not 1.0 <= self.alpha <= 10.0:
            raise ForetraceError(f"alpha {self.alpha:g} is not between 1 (greedy) and 10; try 1.05.")
        if self.budget < 1:
            raise ForetraceError(f"a budget of {self.budget} graphs allows no search; give at least 1.")
        if self.seconds is not None and not self.seconds > 0:
            raise ForetraceError(f"{self.seconds:g} seconds are no time to search; give more than 0.")
        return self


@dataclass(frozen=True, kw_only=True)
class RuleUse:
    """A rule on the way to the rewritten graph."""

    name: str
    uses: int  # at single places
    sweeps: int  # at all places of a part at once
    what: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewritten:
    """The answer."""

    model: Model
    emitted: Emitted
    rewriting: Rewriting
    verdicts: tuple[RuleVerdict, ...]
    idle: tuple[str, ...]  # imported rules that hold but have nothing to match
    check: measure.Check
    gain: measure.MeasuredGain | None
    costs: str  # "measured" or what model on which device
    near: float | None  # share of data in warm caches, where costs were measured
    untimed: dict[str, str]  # operators without a cost, and why
    priced: int  # distinct operators
    search_s: float

    @property
    def module(self) -> Emitted:
        """What is called like the original."""
        return self.emitted

    @property
    def used(self) -> tuple[RuleUse, ...]:
        """The rules that led to it, those used most often first."""
        what = {each.name: each.what for each in catalog.RULES}
        names = [each.removesuffix(" (all)") for each in self.rewriting.rules]
        sweeps = Counter(each.removesuffix(" (all)") for each in self.rewriting.rules if each.endswith(" (all)"))
        return tuple(
            RuleUse(name=name, uses=count - sweeps[name], sweeps=sweeps[name], what=what.get(name, "imported"))
            for name, count in sorted(Counter(names).items(), key=lambda each: (-each[1], each[0]))
        )

    @property
    def predicted(self) -> float:
        """Old time over new time, as the costs have it."""
        return self.rewriting.before_s / self.rewriting.after_s if self.rewriting.after_s else 1.0


def rewrite_named(
    source: str, size: str, batch: int | None, *, wanted: RewriteRequest, device: str = "", threads: int = 1,
    tell: Tell | None = None,
) -> tuple[Rewritten, int]:  # fmt: skip
    """Rewrite a model of the zoo or of a script; the answer, and how many samples a run has.

    Costs are those of a roofline of `device`, or measured. Models of the zoo are untrained and get the statistics of
    their own batch. Raises ForetraceError.
    """
    from foretrace.training.batches import size as samples
    from foretrace.zoo.registry import job, script_mistakes

    costs = ModelCosts(Roofline(), named(device)) if device else None
    with operator_threads(threads):
        with script_mistakes(source):
            model, args, kwargs = of_training(job(source, size)(), batch)
        if not source.endswith(".py"):
            settled(model, args, kwargs)
        found = rewrite(model, args, kwargs, name=source, wanted=wanted, costs=costs, tell=tell)
    return found, samples(args) or samples(kwargs)


def rewrite(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, name: str = "model",
    wanted: RewriteRequest | None = None, costs: OperatorCosts | None = None, tell: Tell | None = None,
) -> Rewritten:  # fmt: skip
    """Rewrite a model for inference on inputs of these sizes.

    Args:
        module: the model; it is put into eval mode and otherwise left as it is.
        args: positional arguments of an example call.
        kwargs: keyword arguments of it.
        name: what messages call the model.
        wanted: settings.
        costs: what operators cost; by default measured on this machine.
        tell: (what is done, share of it), as it continues.

    Raises ForetraceError where the model cannot be captured.

    """
    wanted = (wanted or RewriteRequest()).checked()
    tell = tell or (lambda what, share: None)
    tell("verifying rules", 0.0)
    rules, verdicts = catalog.usable()
    idle: tuple[str, ...] = ()
    if wanted.rules is not None:
        more = catalog.imported(wanted.rules)
        rules, verdicts, idle = (*rules, *more.rules), (*verdicts, *more.verdicts), more.idle
    tell("capturing the model", 0.0)
    model = capture(module, args, kwargs, name=name)
    costs = costs or MeasuredCosts()
    fit(model, costs)
    until = Deadline(float("inf") if wanted.seconds is None else wanted.seconds)
    found = substitute(
        model.graph, rules, costs, alpha=wanted.alpha, budget=wanted.budget, until=until, most=wanted.part,
        tell=lambda share, now_s, before_s: tell(f"searching; best {before_s / max(now_s, 1e-12):.2f}×", share),
    )  # fmt: skip
    search_s = until.spent
    priced = len(costs.priced)
    found, costs = again(model, found, costs)
    near = costs.near if isinstance(costs, MeasuredCosts) else None
    emitted = emit(model, found.after, way=costs.way)
    tell("checking", 0.0)
    checked = measure.check(model, found.after, emitted)
    timed = None
    if wanted.measure:
        timed = compared(model, {"rewritten": emitted}, rounds=wanted.rounds, tell=lambda s: tell("measuring", s))
    return Rewritten(
        model=model, emitted=emitted, rewriting=found, verdicts=verdicts, idle=idle, check=checked, gain=timed,
        costs=costs.described, near=near, untimed=costs.untimed, priced=priced, search_s=search_s,
    )  # fmt: skip


def again(model: Model, found: Rewriting, costs: OperatorCosts) -> tuple[Rewriting, OperatorCosts]:
    """Return the prediction from times taken again, and what runs say of the choice.

    A search by measured costs believes some times that came out low by chance. So the graph as captured, that with the
    rules that always pay, and the one found run in turns for a moment, and the fastest is kept.
    """
    if not isinstance(costs, MeasuredCosts):
        return found, costs
    graphs = {"found": found.after, "folded": found.folded, "captured": found.before}
    new = fresh(model, costs, graphs.values())
    emitted = {name: emit(model, graph, way=new.way) for name, graph in graphs.items()}
    timed = measure.gain({name: running(each, model) for name, each in emitted.items()}, rounds=7, block_s=0.05)
    best = min(timed.arms, key=lambda name: timed.arms[name].median_s)
    rules = found.rules
    if best != "found":
        always = {each.name for each in catalog.RULES if each.always}
        rules = tuple(each for each in rules if each in always) if best == "folded" else ()
    after = graphs[best]
    return replace(found, after=after, rules=rules, before_s=new.of(found.before), after_s=new.of(after)), new


def fresh(model: Model, costs: MeasuredCosts, graphs: Iterable[Graph]) -> MeasuredCosts:
    """Return costs timed again for these graphs, and fitted to runs of the captured model of the same minute."""
    found = costs.fresh(model.graph, *graphs)
    fit(model, found)
    return found


def fit(model: Model, costs: OperatorCosts) -> None:
    """Fit, for measured costs, where the data of the operators lie, from runs of the captured model.

    They stand before and after its operators are timed, and the least counts: a run takes so little time that others
    who use the machine may slow all of one, and then all data would seem to be far.
    """
    if isinstance(costs, MeasuredCosts):
        plain = emit(model, model.graph)
        flat = plain.flat(model.args, model.kwargs)
        settle_allocator()
        first = measure.once(lambda: plain.module(*flat))
        costs.learn((model.graph,))
        costs.fit(model.graph, min(first, *(measure.once(lambda: plain.module(*flat)) for _ in range(2))))


def compared(
    model: Model, arms: dict[str, Emitted], *, rounds: int, tell: Callable[[float], None] | None = None
) -> measure.MeasuredGain:
    """Run the original and rewritten models in turns on the example inputs.

    Beside them "captured" runs: the original's operators without its Python code, which is no merit of a rewriting.
    """
    original, args, kwargs = model.module, model.args, model.kwargs
    plain = emit(model, model.graph)
    runs: dict[str, Callable[[], object]] = {"original": lambda: original(*args, **kwargs)}
    for name, each in {"captured": plain, **arms}.items():
        runs[name] = running(each, model)
    return measure.gain(runs, rounds=rounds, tell=tell)


def running(each: Emitted, model: Model) -> Callable[[], object]:
    """Return a run of an emitted graph on the example inputs of its model."""
    flat = each.flat(model.args, model.kwargs)
    return lambda: each.module(*flat)
