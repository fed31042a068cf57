"""What the commands answer that list things (zoo, techniques, calibrate, check): the JSON contract beside `views`.

These answers have one face besides their JSON, the lines that the command itself prints, so no renderer takes them.
"""

from __future__ import annotations

import msgspec

from foretrace.report.views import Result


class ParametersView(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of trained parameters in both sizes."""

    tiny: int
    full: int


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the zoo."""

    name: str
    task: str
    summary: str
    source: str  # paper
    needs: str  # a package beside torch; "" if none
    parameters: ParametersView


class TrialTimeView(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of a trial, seconds."""

    median: float
    p10: float
    p90: float


class TrialView(msgspec.Struct, frozen=True, kw_only=True):
    """Some steps of one model."""

    size: str
    seed: int
    step_time_s: TrialTimeView
    steps: int  # that were timed
    loading_s: float  # of the median step, until its batch was there
    batch_size: int
    samples_per_s: float
    threads: int
    losses: tuple[float, ...]  # of the warm-up, too


class ZooView(Result, frozen=True, kw_only=True):
    """`foretrace zoo`: the models there are, or one of them with `run`."""

    command: str = "zoo"
    models: tuple[ModelView, ...]
    run: TrialView | None


class PriorView(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in for a number that no recording gives."""

    value: float
    low: float
    high: float
    unit: str
    why: str


class ParameterView(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a technique."""

    name: str
    type: str
    doc: str
    unit: str
    default: str | float | bool | None
    required: bool
    choices: tuple[str, ...]
    prior: PriorView | None


class TechniqueView(msgspec.Struct, frozen=True, kw_only=True):
    """One technique."""

    name: str
    summary: str
    source: str
    apply: bool
    not_applied: str  # why it cannot be, "" where it can
    effort: str  # what it costs to do
    needs: str
    verified_on: tuple[str, ...]  # models with a conclusive row in the ledger
    shipped_on: tuple[str, ...]  # the same in the ledger that docs/accuracy/techniques.md is made of
    parameters: tuple[ParameterView, ...]


class TechniquesView(Result, frozen=True, kw_only=True):
    """`foretrace techniques`: all of them, or the one that was named."""

    command: str = "techniques"
    techniques: tuple[TechniqueView, ...]


class CalibratedMachineView(msgspec.Struct, frozen=True, kw_only=True):
    """What times hold for; null where the system does not tell."""

    cpu: str | None
    architecture: str | None
    cores: int | None
    torch: str | None
    threads: int | None
    thread_cores: float | None  # cores that these threads can have, at most as many as threads
    instruction_sets: list[str] | None  # that libraries of the process may use
    capability: str | None  # of PyTorch's own kernels
    device: str | None
    allocator: dict[str, str]  # environment variables


class CalibrateView(Result, frozen=True, kw_only=True):
    """`foretrace calibrate device` and `run`: seconds per call, and what could not be timed."""

    command: str = "calibrate"
    of: str  # "device" or "run"
    machine: CalibratedMachineView
    stored: str  # file
    seconds: dict[str, float]  # "NAME JSON" of a call -> seconds; "near NAME JSON" with data near the core
    failed: dict[str, str]  # call -> why it has no time


class CalibrateGpuView(Result, frozen=True, kw_only=True):
    """`foretrace calibrate device --gpu`: the 16-bit products worth timing on a GPU, and their times."""

    command: str = "calibrate device"
    gpu: str  # as the catalog calls it
    stored: str  # file
    products: list[tuple[int, int, int]]  # m, n, k; those worth most first
    seconds: list[float] | None  # of each; None where they are still to be timed


class AlignView(Result, frozen=True, kw_only=True):
    """`foretrace align`: how far the clock of every rank is ahead of that of the first one."""

    command: str = "align"
    offsets_s: dict[str, float | None]  # by rank; null where no collective ties it to the first
    uncertainty_s: float | None  # the largest standard error
    drift: dict[str, float]  # seconds per second, only ranks whose clock drifts
    matched: int  # collectives that all recorded ranks of their group share
    unmatched: tuple[str, ...]
    notes: tuple[str, ...]
