"""What `foretrace plan second-order` answers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from math import isfinite

from foretrace.plan.second_order import SecondOrderCandidate, SecondOrderPlan
from foretrace.report.blocks import About, Block, Column, Line, listing
from foretrace.report.units import nbytes, ranged, seconds, span, things
from foretrace.report.views import Report, taken

_FEWER = "how many steps K-FAC saves no recording tells: train both for a while, each with tuned rates"
_COUNTED = "K-FAC's work was counted, not timed; on the machine of the recording, --measure times it"


class SecondOrderView(Report, frozen=True, kw_only=True):
    """`foretrace plan second-order`: the gradient-worker fraction of distributed K-FAC."""

    command: str = "plan second-order"
    source: str
    workers: int
    network: str
    layers: int
    memory_limit_bytes: int | None  # null: any
    before_s: float  # step without it
    before_interval_s: tuple[float, float]
    pays_below: float  # share of the steps that K-FAC may need at most to pay in time
    pays_below_interval: tuple[float, float]
    measured: bool  # whether K-FAC's work was timed on the machine of the recording
    choice: SecondOrderCandidate
    candidates: tuple[SecondOrderCandidate, ...]  # memory-optimal first, by frequency as asked

    def shown(self, top: int) -> Iterator[Block]:
        link = (self.network,) if self.network else ()
        yield About((self.source, things(self.workers, "worker"), *link, things(self.layers, "layer")))
        yield listing(
            self.candidates, ("gradient_workers", "gradient workers", "count"), ("fraction", "of them", "digits"),
            (lambda each: "*" * (each.technique == self.choice.technique), ""),
            (lambda each: f"{each.factors_every}/{each.inverses_every}", Column("every", right=True)),
            ("memory_bytes", "memory", "bytes"), ("peak_bytes", Column("at most", "bytes", least=90)),
            ("sent_bytes", "sent", "bytes"), ("added_s", "added", "time"),
            ("added_interval_s", Column("range", "seconds", least=110)),
            ("step_s", "step", "time"), ("interval_s", "range", "seconds"),
            (lambda each: "" if each.fits else "too large", ""), top=top, noun="candidate", how="--top",
        )  # fmt: skip
        yield Line(f"in {ranged(self.pays_below, *self.pays_below_interval)} of the steps or fewer", label="it pays")
        yield Line(
            "memory of a worker, kept and at most; sent: bytes of a worker in a step; every: steps between "
            "factors and between inverses",
            label="columns",
        )


def planned_second_order(plan: SecondOrderPlan, source: str) -> SecondOrderView:
    """Return the answer about a plan."""
    each, (value, low, high) = plan.choice, plan.pays_below
    within = f" within {nbytes(plan.memory_bytes)}" if isfinite(plan.memory_bytes) else ""
    who = f"{each.gradient_workers} of {plan.workers} workers" if plan.workers > 1 else "one worker"
    sentence = (
        f"K-FAC with {who} per layer is quickest{within}: {seconds(each.step_s)} ({span(*each.interval_s)}) a step, "
        f"{seconds(each.added_s)} ({span(*each.added_interval_s)}) more than without; "
        f"{nbytes(each.memory_bytes)} per worker."
    )
    parallel = [f"data-parallel workers={plan.workers} network={plan.network}"] if plan.workers > 1 else []
    words = ["foretrace", "whatif", source, *(word for text in (*parallel, each.technique) for word in ("--do", text))]
    return taken(
        SecondOrderView, plan, headline=sentence, source=source,
        memory_limit_bytes=int(plan.memory_bytes) if isfinite(plan.memory_bytes) else None, pays_below=value,
        pays_below_interval=(low, high), notes=(_FEWER,) if plan.measured else (_FEWER, _COUNTED),
        next=shlex.join(words),
    )  # fmt: skip
