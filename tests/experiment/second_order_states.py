"""K-FAC on real processes: what every worker keeps and sends at a gradient-worker fraction, and where it leads."""

from __future__ import annotations

import msgspec

from foretrace.errors import ForetraceError
from foretrace.experiment.links.arms import RunningArm, make, run_steps
from foretrace.experiment.messages import Make, RunSteps, Setup, Worker
from foretrace.experiment.processes import together


class SecondOrderState(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that K-FAC keeps in storages and has handed to collectives, and the parameters that it has led to."""

    held_bytes: int
    factors_bytes: int
    inverses_bytes: int
    gradients_bytes: int
    failures: int  # decompositions that kept the old inverse
    parameters: tuple[float, ...]  # sum of the values of each and of their squares, in turns


def run_second_order(
    work: str, *, workers: int, fraction: float, steps: int, factors_every: int = 1, inverses_every: int = 10
) -> list[SecondOrderState]:
    """Train so many steps of a zoo model or script with K-FAC on gloo processes of this machine; by rank.

    Raises ForetraceError for a fraction that gives no grid, NotApplicableError where K-FAC does not fit.
    """
    parallel = (f"data-parallel workers={workers} network=10gbit",) if workers > 1 else ()
    kfac = f"kfac fraction={fraction} factors_every={factors_every} inverses_every={inverses_every}"
    with together(workers) as processes:
        processes.ask(make, Make(name="kfac", setup=Setup(work=work, techniques=(*parallel, kfac))), "making K-FAC")
        run = RunSteps(name="kfac", discarded=0, steps=steps, together=True)
        processes.ask(run_steps, run, "training with K-FAC", seconds=60.0)
        return processes.ask(state_of, "kfac", "reading what K-FAC keeps")


def state_of(name: str, worker: Worker) -> SecondOrderState:
    """What K-FAC of an arm keeps and has sent, in a worker. Raises ForetraceError where the arm has none."""
    arm: RunningArm = worker.kept[name]
    found = getattr(arm.training.optimizers[0], "preconditioner", None)
    if found is None:
        raise ForetraceError("the arm has no K-FAC; make it with the technique kfac.")
    sums = [
        float(part)
        for each in arm.training.model.parameters()
        for part in (each.detach().sum(), each.detach().square().sum())
    ]
    return SecondOrderState(
        held_bytes=found.held_bytes, failures=found.failures, parameters=tuple(sums),
        **{f"{name}_bytes": sent for name, sent in found.sent.items()},
    )  # fmt: skip
