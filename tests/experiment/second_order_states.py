"""K-FAC on real processes: what every worker keeps and sends at a gradient-worker fraction, and where it leads."""

from __future__ import annotations

from collections.abc import Sequence

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


def run_second_order(work: str, fractions: Sequence[float], *, steps: int, every: int) -> list[list[SecondOrderState]]:
    """Train so many steps of a zoo model on two gloo processes with K-FAC, once per fraction; by fraction and rank."""
    found = []
    with together(2) as processes:
        for fraction in fractions:
            name = f"kfac fraction={fraction} factors_every={every} inverses_every={every}"
            setup = Setup(work=work, techniques=("data-parallel workers=2 network=10gbit", name))
            processes.ask(make, Make(name=name, setup=setup), "making K-FAC")
            processes.ask(run_steps, RunSteps(name=name, discarded=0, steps=steps, together=True), "training")
            found.append(processes.ask(state_of, name, "reading what K-FAC keeps"))
    return found


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
