"""What `foretrace program` answers: the schedules of a tensor program, the fastest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from foretrace.cost.programs.rank import RankedSchedule, Ranking
from foretrace.report.blocks import About, Block, listing
from foretrace.report.units import digits, scaled, seconds, span, things
from foretrace.report.views import Report, taken


class ProgramView(Report, frozen=True, kw_only=True):
    """`foretrace program`: schedules of a task, the fastest first."""

    command: str = "program"
    kind: str
    sizes: dict[str, int]
    flops: int
    predictor: str
    other_processor: bool
    candidates: tuple[RankedSchedule, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield About((f"{self.kind} {' '.join(f'{name}={value}' for name, value in self.sizes.items())}", "one thread"))
        yield listing(
            self.candidates,
            ("loops", "loops from the outermost in", "name"),
            ("predicted_s", "predicted", "time"),
            (lambda each: span(each.low_s, each.high_s), "range"),
            ("measured_s", "measured", "time"),
            ("binds", "what binds"),
            top=top, noun="schedule", how="--top",
        )  # fmt: skip
        yield f"predicted by {self.predictor}"


def program(found: Ranking) -> ProgramView:
    """Return the answer about one task."""
    best, slowest = found.candidates[0], found.candidates[-1]
    told = "measured" if best.measured_s is not None else span(best.low_s, best.high_s)
    binding = Counter(each.binds for each in found.candidates).most_common(1)[0]
    notes = [f"{binding[0]} binds {binding[1]} of them; loops marked v are vector lanes, u are unrolled."]
    if found.foreign:
        notes.append("nothing was measured on this processor, so ranges are wide: --calibrate 30s fits them to it.")
    return taken(
        ProgramView,
        found,
        headline=(
            f"The best of {things(len(found.candidates), 'schedule')} takes {seconds(best.time_s)} ({told}), "
            f"{scaled(found.flops / best.time_s, 'FLOP/s')}; the slowest {digits(slowest.time_s / best.time_s)} times "
            f"as long. {best.binds.capitalize() if best.binds[0].islower() else best.binds} binds it."
        ),
        notes=tuple(notes),
        kind=found.task.kind,
        sizes=dict(found.task.sizes),
        predictor=found.predictor.about,
        other_processor=found.foreign,
    )
