"""`foretrace fleet rig` as an answer."""

from __future__ import annotations

from collections.abc import Iterator

from foretrace.fleet.rig.against import Against, RigErrors, StartError
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
        rows = [("simulated", _row(self))]
        if self.repeated is not None:
            rows.append(("another run", _row(self.repeated)))
        yield table(
            [
                "against the run", *(Column(name, right=True) for name in ("start, mean", "p95")),
                *(Column(name, right=True, least=96) for name in ("worst", "JCT", "order", "switches")),
            ],
            [(name, *row) for name, row in rows],
        )  # fmt: skip


def _row(of: FleetRigView | RigErrors) -> list[str]:
    start = of.start_error_s
    return [
        *(seconds(each) for each in (start.mean, start.p95, start.worst)), share(of.jct_error), share(of.order_equal),
        share(of.switches_equal),
    ]  # fmt: skip


def rig(found: Against, *, on: str, source: str, policy: str, speedup: float, next_: str) -> FleetRigView:
    """Return the answer of a rig."""
    ran, made = found.ran, found.simulated
    jct = sum(float(each.jct_s.mean()) for each in ran) / len(ran)
    simulated = sum(float(each.jct_s.mean()) for each in made) / len(made)
    notes = [f"times are on the rig's clock: a second stands for {digits(speedup)} s of the workload."]
    if found.repeats is None:
        notes.append("one run: what the scheduler itself differs by is not known; repeat with --repeats 3.")
    return taken(
        FleetRigView, found.errors, source=source, policy=policy, nodes=found.setup.nodes, gpus=found.setup.gpus,
        racks=found.setup.racks, speedup=speedup, jobs=len(found.workload), repeats=len(ran), seconds=found.seconds,
        mean_jct_s=jct, simulated_mean_jct_s=simulated, launch_s=sum(each.launch_s for each in ran) / len(ran),
        repeat_jct_difference=None if found.repeats is None else found.repeats.jct_error,
        repeated=found.repeats,
        headline=f"{count(len(found.workload))} jobs ran on a private {on.capitalize()} of "
        f"{count(found.setup.nodes)} nodes; the simulation misses their completion times by "
        f"{share(found.errors.jct_error)}, their starts by {seconds(found.errors.start_error_s.mean)}.",
        notes=tuple(notes), next=next_,
    )  # fmt: skip
