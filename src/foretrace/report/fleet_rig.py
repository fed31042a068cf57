"""`foretrace fleet rig` as an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foretrace.fleet.rig.against import Against, RigErrors, StartError
from foretrace.fleet.rig.play import RigRun
from foretrace.report.blocks import Block, Column, table
from foretrace.report.units import count, digits, seconds, share
from foretrace.report.views import Report, taken


class FleetRigView(Report, frozen=True, kw_only=True):
    """`foretrace fleet rig`: a workload on a real scheduler, beside the simulation of it."""

    command: str = "fleet rig"
    source: str
    policy: str
    nodes: int
    gpus: int
    racks: int
    speedup: float
    jobs: int
    repeats: int
    seconds: float
    mean_jct_s: float
    simulated_mean_jct_s: float
    start_error_s: StartError
    jct_error: float
    jct_worst_s: float
    order_equal: float
    within: float
    switches_equal: float
    launch_s: float
    repeat_jct_difference: float | None
    repeated: RigErrors | None

    def shown(self, top: int) -> Iterator[Block]:
        """Yield errors of the simulation, beside the differences between runs."""
        always, wide = ("start, mean", "p95"), ("worst", "JCT", "order", "switches")
        yield table(
            ["against the run", *(Column(name, right=True) for name in always),
             *(Column(name, right=True, least=96) for name in wide)],
            [
                [name, *map(seconds, (each.start_error_s.mean, each.start_error_s.p95, each.start_error_s.worst)),
                 *map(share, (each.jct_error, each.order_equal, each.switches_equal))]
                for name, each in (("simulated", self), ("another run", self.repeated)) if each is not None
            ],
        )  # fmt: skip


def _mean_jct_s(runs: Sequence[RigRun]) -> float:
    return sum(float(each.jct_s.mean()) for each in runs) / len(runs)


def rig(found: Against, *, on: str, source: str, policy: str, speedup: float, next_: str) -> FleetRigView:
    """Return the answer of a rig."""
    jobs, again = len(found.ran[0].start_s), found.repeated
    notes = [f"times are on the rig's clock: a second stands for {digits(speedup)} s of the workload."]
    if again is None:
        notes.append("one run: what the scheduler itself differs by is not known; repeat with --repeats 3.")
    return taken(
        FleetRigView, found, found.errors, found.setup, source=source, policy=policy, speedup=speedup, jobs=jobs,
        repeats=len(found.ran), mean_jct_s=_mean_jct_s(found.ran), simulated_mean_jct_s=_mean_jct_s(found.simulated),
        launch_s=sum(each.launch_s for each in found.ran) / len(found.ran),
        repeat_jct_difference=None if again is None else again.jct_error, notes=tuple(notes), next=next_,
        headline=f"{count(jobs)} jobs ran on a private {on.capitalize()} of {count(found.setup.nodes)} nodes; the "
        f"simulation misses their completion times by {share(found.errors.jct_error)}, their starts by "
        f"{seconds(found.errors.start_error_s.mean)}.",
    )  # fmt: skip
