"""`Job` and `Outcome`: one verification as it is asked for, and as it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from foretrace.experiment.ledger import Row
from foretrace.experiment.statistics import Arm
from foretrace.experiment.trial import TriedPrediction

LOADING = frozenset(["prefetch-data"])  # techniques that are about loading: batches must come from the loader


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One verification: techniques applied together to one model."""

    techniques: tuple[str, ...]  # as they are written on the command line
    model: str  # of the zoo, or a script
    size: str = "tiny"
    threads: int = 1
    seconds: float = 20.0  # for the arms; recording and calibration come on top
    batches: str = ""  # "ready", "loader", or "" for what the techniques are about
    seed: int = 0
    device: str = "cpu"  # where the training runs: "cpu", "cuda", "cuda:1"
    keep: str = ""  # a folder for both recordings; "": they are thrown away
    steps: int = 0  # recorded; 0: as many as the recorder's default

    @property
    def loads(self) -> bool:
        """Whether steps take their batches from the loader."""
        if self.batches:
            return self.batches == "loader"
        return any(text.split()[0] in LOADING for text in self.techniques)


class Assumed(msgspec.Struct, frozen=True, kw_only=True):
    """A number that the prediction rests on and the recording does not give, with its plausible range."""

    technique: str
    name: str
    value: float
    low: float
    high: float
    unit: str
    why: str
    flag: str  # the technique's parameter that replaces it
    step_at_low_s: float  # the predicted step with `low` instead of `value`
    step_at_high_s: float


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """One layer (or operator) of the treated step, predicted and recorded; busy seconds per step.

    Recorded times are scaled so that their step takes the measured share of the step that the prediction starts from:
    a machine that has become faster or slower since then is no error of the prediction.
    """

    layer: str
    phase: str
    predicted_s: float
    recorded_s: float

    @property
    def difference_s(self) -> float:
        """Recorded minus predicted."""
        return self.recorded_s - self.predicted_s


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A verification: predicted and measured. Ratios are treated step over baseline step."""

    job: Job
    techniques: tuple[str, ...]  # as they write themselves
    parameters: dict[str, dict[str, Any]]  # per technique, what the user set
    recorded_s: float  # step of the recording that the prediction starts from
    trial: TriedPrediction
    assumptions: tuple[Assumed, ...]
    before: Arm
    again: Arm  # the baseline's second arm
    walls: dict[str, Arm]  # the same blocks on the wall clock, by arm
    cpus: dict[str, Arm]  # and on the CPU clock
    stretch: float  # wall over CPU time of the baseline's blocks
    rounds: int
    repeated_rounds: int  # run once more because others disturbed them
    disturbed_rounds: int  # disturbed and used all the same
    steps_per_block: int
    samples_before: int  # per step; 0 if unknown
    samples_after: int
    losses_before: tuple[float | None, ...]  # first steps of both arms, from the same weights and random numbers
    losses_after: tuple[float | None, ...]  # None where it is not a finite number
    residual: tuple[Residual, ...]
    treated_recorded_s: float  # step of the recording that the residual comes from; 0 where there is none
    calibrated: int  # operators that were timed alone
    free_cores: float
    machine: dict[str, Any]
    device: str
    versions: dict[str, str]
    allocator: dict[str, str]
    notes: tuple[str, ...]
    took_s: float

    def row(self) -> Row:
        """Return what the ledger keeps of it."""
        job = self.job
        kept = (
            "rounds", "repeated_rounds", "disturbed_rounds", "steps_per_block", "stretch", "free_cores", "recorded_s",
            "treated_recorded_s", "calibrated", "losses_before", "losses_after",
        )  # fmt: skip
        arms = {"wall": msgspec.to_builtins(self.walls), "cpu": msgspec.to_builtins(self.cpus)}
        return self.trial.row(
            " + ".join(self.techniques), parameters=self.parameters, model=Path(job.model).name,
            size=job.size if not job.model.endswith(".py") else "", threads=job.threads,
            batches="loader" if job.loads else "ready", device=self.device,
            samples=(self.samples_before, self.samples_after), notes=self.notes, machine=self.machine,
            allocator=self.allocator, **self.versions,
            arms=arms | {name: getattr(self, name) for name in kept} | {"uncertain": self.trial.uncertain},
            assumptions=tuple(msgspec.to_builtins(each) for each in self.assumptions),
            residual=tuple(msgspec.to_builtins(each) for each in self.residual),
        )  # fmt: skip
