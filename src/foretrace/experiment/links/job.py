"""One rig session as it is asked for, and as it ended."""

from __future__ import annotations

from typing import Any

import msgspec

from foretrace.experiment.job import Assumed
from foretrace.experiment.statistics import Arm, Ratio
from foretrace.experiment.trial import TriedPrediction


class LinkJob(msgspec.Struct, frozen=True, kw_only=True):
    """Arms to be predicted and measured on one link, interleaved."""

    work: str  # an emulation ("12x1mb/20ms"), a model of the zoo, or a script
    link: str  # "300mbit", as it was written
    workers: int
    arms: tuple[tuple[str, ...], ...]  # techniques of each, applied together
    against: tuple[str, ...] = ()  # techniques of the baseline; none: one worker alone
    size: str = "tiny"
    seconds: float = 60.0  # for the arms; the rest comes on top
    seed: int = 0
    threads: int = 1
    keep: str = ""  # a folder for the graph of the worker alone and the table of the link; "": thrown away


class MeasuredLink(msgspec.Struct, frozen=True, kw_only=True):
    """The link as it was measured before anything was predicted for it."""

    mbit_s: float  # payload of the largest all-reduce, as bus bandwidth
    spread: float
    nbytes: tuple[float, ...]  # all-reduce
    seconds: tuple[float, ...]
    hosts: dict[str, tuple[float, float, float]]  # what workers take beside it: value, low, high by parameter


class ArmOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One arm: predicted and measured."""

    techniques: tuple[str, ...]  # as they write themselves, the link by its name
    parameters: dict[str, dict[str, Any]]
    predicted_s: float  # step, from the recording of one worker; of one that computes, at the speed of these minutes
    predicted_low_s: float
    predicted_high_s: float
    trial: TriedPrediction  # its step over the baseline's
    predicted_buckets: tuple[int, ...]  # bytes, in the order of the exchange
    buckets: tuple[int, ...]  # as PyTorch formed them; empty where the arm is not made of its data parallelism
    losses: tuple[float | None, ...]  # last one of every block of the first worker
    assumptions: tuple[Assumed, ...]
    foretold_s: float  # step, as predicted before anything of this ran

    @property
    def step_error(self) -> float:
        """Predicted over measured step, less one."""
        return self.predicted_s / self.trial.after.median_s - 1.0


class LinkOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A session of the rig."""

    job: LinkJob
    link: MeasuredLink
    recorded_s: float  # step of the worker alone, recorded
    baseline_predicted_s: float  # the same, or the predicted step of `against`
    before: Arm
    again: Arm  # the baseline's second arm
    same: Ratio
    arms: tuple[ArmOutcome, ...]
    rounds: int
    steps_per_block: int
    operators_timed: int
    samples: int
    machine: dict[str, Any]
    versions: dict[str, str]
    allocator: dict[str, str]
    notes: tuple[str, ...]
    took_s: float
