"""What `foretrace optimise` answers: its result, sentences and blocks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from foretrace.experiment.job import Assumed
from foretrace.plan.advise import LeftOut
from foretrace.plan.answer import Configuration
from foretrace.plan.result import Answer, Gain
from foretrace.report import shared
from foretrace.report.blocks import Block, Column, Line, notes, table
from foretrace.report.names import command, listed
from foretrace.report.shared import assumption
from foretrace.report.units import between, count, digits, level, nbytes, seconds, share, speed, things, unit_for
from foretrace.report.views import Report, taken

SHOWN_BUCKETS = 8
SHOWN_ASSUMPTIONS = 4
_CLOSE = 0.05  # the coarsened view proves little about a graph that it is off by more


class OvertakingView(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that overtake each other, which DistributedDataParallel cannot do."""

    step_s: float  # by the coarsened view
    checked_s: float | None  # by the whole graph; null where too few steps were recorded
    bound_s: float  # no plan of any kind is faster with the same compute
    proven: bool  # whether the step meets the bound
    buckets: int
    parts: int  # messages per step
    rounds: int
    evaluations: int


class SearchView(msgspec.Struct, frozen=True, kw_only=True):
    """What the search did."""

    seconds: float
    sets: int  # of techniques, predicted on the graph
    plans: int  # states of the dynamic programming and plans that were evaluated
    tensors: int  # of the coarsened view
    tasks: int  # of the recorded graph
    finished: bool  # false where time ran out
    difference: float  # of the coarsened view from the whole graph, relative


class OptimiseView(Report, frozen=True, kw_only=True):
    """`foretrace optimise`: the fastest configuration found."""

    command: str = "optimise"
    source: str
    workers: int
    network: str
    recorded_s: float  # one worker, as recorded
    default_s: float  # without this search
    step_s: float
    interval_s: tuple[float, float]
    interval_level: float
    bound_s: float  # no buckets are faster with these techniques
    proven: bool  # whether the buckets meet that bound
    techniques: tuple[str, ...]  # for foretrace whatif --do
    gains: tuple[Gain, ...]
    left_out: tuple[LeftOut, ...]
    configuration: Configuration
    snippet: str  # Python that applies it
    overtaking: OvertakingView | None
    memory_recorded_bytes: int | None
    memory_bytes: int | None  # at the peak, predicted
    memory_limit_bytes: int | None
    assumptions: tuple[Assumed, ...]
    search: SearchView

    def shown(self, top: int) -> Iterator[Block]:
        label = "data-parallel by default" if self.workers > 1 else "as recorded"
        gains = ((gain.name, gain.after_s, -gain.saved_s, gain.what) for gain in self.gains)
        yield table(
            ["change", Column("step", "time"), Column("saved", "change", unknown=""), Column("what", wide=True)],
            [(label, self.default_s, None, ""), *gains],
        )
        yield from _buckets(self.configuration)
        yield Line(_sure(self), label="sure")
        if self.memory_bytes is not None and self.memory_recorded_bytes is not None:
            limit = "" if self.memory_limit_bytes is None else f", limit {nbytes(self.memory_limit_bytes)}"
            yield Line(
                f"{nbytes(self.memory_recorded_bytes)} recorded, {nbytes(self.memory_bytes)} now{limit}", "memory"
            )
        if self.overtaking is not None and self.overtaking.step_s < self.step_s * (1 - 1e-3):
            over = self.overtaking
            checked = "" if over.checked_s is None else f", {seconds(over.checked_s)} by the whole graph"
            yield Line(
                f"messages that overtake each other (P3): {seconds(over.step_s)}{checked}; nothing is faster than "
                f"{seconds(over.bound_s)} with this compute",
                label="beyond DDP",
            )
        yield from notes((f"{each.name}: {each.why}" for each in self.left_out), "left out")
        yield from notes(map(shared.assumption_text, self.assumptions[:SHOWN_ASSUMPTIONS]), "assumed")
        if len(self.assumptions) > SHOWN_ASSUMPTIONS:
            yield Line(f"{count(len(self.assumptions) - SHOWN_ASSUMPTIONS)} more assumptions: --json.", soft=True)
        search = self.search
        done = (
            f"{count(search.sets)} sets of techniques and {count(search.plans)} plans in {seconds(search.seconds)}; "
            f"the coarsened self ({count(search.tensors)} gradients of {count(search.tasks)} tasks) is off the whole "
            f"graph by {share(abs(search.difference))}."
            if self.workers > 1
            else f"{count(search.sets)} sets of techniques in {seconds(search.seconds)}."
        )
        yield Line(done, soft=True)


def optimise(answer: Answer, found: Configuration, python: str, *, source: str) -> OptimiseView:
    """Return the answer of a search as its view."""
    wanted, best, over = answer.wanted, answer.best, answer.overtaking
    techniques = tuple(_without_search(str(each)) if each is best.parallel else str(each) for each in best.chain)
    return taken(
        OptimiseView, answer, headline=headline(answer, found), source=source, workers=wanted.workers,
        network=wanted.network, interval_s=answer.whatif.interval_s, interval_level=answer.whatif.level,
        proven=best.found is None or best.found.proven, techniques=techniques, configuration=found, snippet=python,
        overtaking=None
        if over is None
        else taken(OvertakingView, over, buckets=len(over.plan.ends), parts=sum(over.plan.chunks)),
        memory_recorded_bytes=answer.memory_recorded, memory_bytes=best.memory, memory_limit_bytes=wanted.memory_limit,
        assumptions=tuple(
            assumption(each.assumption, each.at_low_s, each.at_high_s) for each in answer.whatif.assumptions
        ),
        search=taken(
            SearchView,
            answer,
            plans=answer.states + (over.evaluations if over else 0),
            tensors=0 if answer.problem is None else len(answer.problem),
            tasks=len(answer.graph),
        ),
        notes=_notes(answer), next=command("whatif", source, do=techniques) if techniques else "",
    )  # fmt: skip


def headline(answer: Answer, found: Configuration) -> str:
    """Return text such as "1.43× faster on 4 workers: 4.77 → 3.33 ms per step (2.93 – 4.15) with 2 buckets, …."."""
    wanted = answer.wanted
    where = f" on {wanted.workers} workers" if wanted.workers > 1 else ""
    unit = unit_for(max(answer.default_s, answer.step_s))
    low, high = answer.whatif.interval_s
    numbers = (
        f"{seconds(answer.default_s)} → {seconds(answer.step_s)} per step ({between(low, high, unit)} {unit.name})"
    )
    names = [each.split()[0] for each in map(str, answer.best.techniques)]
    if found.buckets and any(gain.name == "tensor fusion" for gain in answer.gains):
        names.insert(0, things(len(found.buckets), "bucket"))
    if answer.step_s >= answer.default_s * (1 - 1e-3) and not names:
        return f"Nothing that was tried is faster{where}: {seconds(answer.default_s)} per step as it is."
    return f"{speed(answer.default_s, answer.step_s)}{where}: {numbers} with {listed(names) or 'gradients as views'}."


def _buckets(found: Configuration) -> Iterator[Block]:
    if not found.buckets:
        return
    yield table(
        [Column("bucket", "count"), Column("size", "bytes"), Column("gradients", "count"), "from", "to"],
        [(i, each.bytes, each.gradients, each.first, each.last) for i, each in enumerate(found.buckets)],
        top=SHOWN_BUCKETS, noun="bucket", how="--write FILE",
    )  # fmt: skip
    if found.bucket_cap_mb is not None and found.bucket_cap_step_s is not None:
        yield Line(
            f"bucket_cap_mb={digits(found.bucket_cap_mb)} comes to {seconds(found.bucket_cap_step_s)}, where "
            "PyTorch lacks bucket_cap_mb_list",
            label="single size",
        )


def _sure(view: OptimiseView) -> str:
    unit = unit_for(view.step_s)
    interval = f"{level(view.interval_level)} interval {between(*view.interval_s, unit)} {unit.name}"
    if view.workers == 1:
        return interval
    if view.proven and abs(view.search.difference) < _CLOSE:
        return f"{interval}; no other buckets are faster with these techniques (proven in the model)"
    return f"{interval}; other buckets reach {seconds(view.bound_s)} at best, by the coarsened view"


def _notes(answer: Answer) -> tuple[str, ...]:
    notes = list(answer.notes)
    if not answer.finished:
        notes.append("Time ran out before all was looked at; --resume FILE keeps the state and continues.")
    if answer.wanted.memory_limit is not None:
        notes.append("The memory estimate counts activations that need not be kept; it does not count 16-bit ones.")
    if answer.graph.n_steps < 3 and answer.overtaking is not None:
        notes.append("Messages that overtake are not checked by the whole graph: that needs three recorded steps.")
    return tuple(notes)


def _without_search(text: str) -> str:
    """Return a technique of the search as the registered one is written."""
    words = [word for word in shlex.split(text) if not word.startswith(("parts=", "ahead=", "region_us="))]
    return shlex.join(words)
