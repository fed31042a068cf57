"""What each command answers, as plain structs: the one source of the terminal, the JSON and the page.

A view encodes to the JSON contract as it stands (docs/json.md): names, units and order. Times are seconds.
Fields are only ever added; a field that changes its meaning or goes away raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

import msgspec

from foretrace.report.advise_views import AdviceRow, LeftOutView
from foretrace.report.ranks_views import ClockView, CollectivesView

SCHEMA_VERSION = 1

PARTS = (
    "compute",
    "exposed_copy",
    "exposed_communication",
    "launch_bound",
    "data_loading",
    "synchronisation",
    "idle",
)

# What people read; `part_word` knows that without a device nothing is launched.
_PART_WORDS = {
    "compute": "compute",
    "exposed_copy": "exposed copy",
    "exposed_communication": "exposed communication",
    "launch_bound": "launch-bound",
    "data_loading": "data loading",
    "synchronisation": "sync",
    "idle": "idle",
}


def part_word(part: str, platform: str) -> str:
    """The word for a part of the step: "launch-bound", or "Python" where there is no device to launch on."""
    return "Python" if platform == "cpu" and part == "launch_bound" else _PART_WORDS[part]


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Step times over the steps of a recording or prediction, seconds."""

    median: float
    p10: float
    p90: float
    mean: float


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step goes, seconds; the parts exclude each other and sum to the step."""

    compute: float
    exposed_copy: float
    exposed_communication: float
    launch_bound: float
    data_loading: float
    synchronisation: float
    idle: float

    def parts(self) -> dict[str, float]:
        """Part name -> seconds, in a fixed order."""
        return {name: getattr(self, name) for name in PARTS}


class BlameRow(msgspec.Struct, frozen=True, kw_only=True):
    """One suspect: how long it takes and what the step would save, per step, seconds.

    `time_s` and `count` are per step; `saved_*` come from replays of the changed graph, so work that
    something else hides saves less than it takes.
    """

    name: str
    layer: str
    kind: str
    count: float
    time_s: float
    saved_if_removed_s: float
    saved_if_10pct_faster_s: float


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the critical path in one kind of work, per step, waits for it included, seconds."""

    name: str
    time_s: float


class ChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """What one edit did."""

    technique: str
    what: str
    tasks: int


class AssumptionView(msgspec.Struct, frozen=True, kw_only=True):
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


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """The step after one more technique of a what-if."""

    name: str
    before_s: float
    after_s: float
    saved_s: float
    why_not_more: str


class NotOfStepView(msgspec.Struct, frozen=True, kw_only=True):
    """Work in a one-step recording that belongs to other steps or to the process's start, and was left out."""

    reason: str
    tasks: int
    time_s: float
    share: float  # of the device's time for its work, of the recorded step else


class ShowView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace show`: what is in a recording and what holds its step back."""

    schema_version: int = SCHEMA_VERSION
    command: str = "show"
    headline: str
    bottleneck: str  # a part of the breakdown
    source: str
    device: str
    devices: tuple[str, ...]
    platform: str
    ranks: int  # ranks in this recording
    rank_numbers: tuple[int, ...]
    world_size: int
    steps: int
    step_numbers: tuple[int, ...]
    step_source: str
    tasks: int
    step_time_s: StepTime
    interval_s: tuple[float, float] | None = None  # 80 % range of an estimated or predicted step, else None
    step_times_s: tuple[float, ...]  # every step, as recorded
    breakdown_s: Breakdown  # sums to step_time_s.median
    breakdown_mean_s: Breakdown  # sums to step_time_s.mean
    attributed_gpu_share: float | None  # None without a GPU
    unexplained_gpu_share: float | None
    holds_back: tuple[BlameRow, ...]
    collectives: CollectivesView | None = None  # None for one rank
    clock: ClockView | None = None
    not_of_step: tuple[NotOfStepView, ...]
    advice: tuple[AdviceRow, ...]  # what answers the bottleneck and gains beyond doubt
    notes: tuple[str, ...]
    next: str  # the command to try next


class SimulateView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace simulate`: the plain replay beside the recording, and the structural one (edges alone)."""

    schema_version: int = SCHEMA_VERSION
    command: str = "simulate"
    headline: str
    source: str
    rank_numbers: tuple[int, ...]  # ranks that the answer is about
    steps: int
    tasks: int
    edges: int
    step_time_s: float
    measured_s: float
    error: float  # (step_time_s − measured_s) / measured_s
    structural_step_time_s: float
    structural_error: float
    interval_s: tuple[float, float]
    interval_level: float
    interval_source: str
    notes: tuple[str, ...]
    next: str


class BlameView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace blame`: suspects ranked by what the step would save."""

    schema_version: int = SCHEMA_VERSION
    command: str = "blame"
    headline: str
    source: str
    platform: str
    rank_numbers: tuple[int, ...]  # ranks that the answer is about
    steps: int
    by: str
    step_time_s: float
    interval_s: tuple[float, float] | None = None  # as in `show`
    rows: tuple[BlameRow, ...]
    next: str


class WhatIfView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace whatif`: the predicted step, what was changed and what was assumed."""

    schema_version: int = SCHEMA_VERSION
    command: str = "whatif"
    headline: str
    source: str
    platform: str
    name: str  # the techniques, joined: "prefetch-data + mixed-precision"
    techniques: tuple[str, ...]
    rank_numbers: tuple[int, ...]  # ranks that the answer is about
    steps: int
    before_s: float
    before_interval_s: tuple[float, float]
    after_s: float
    saved_s: float
    speedup: float
    speedup_interval: tuple[float, float | None]  # what moves both steps alike does not count; None: without limit
    interval_s: tuple[float, float]
    interval_level: float
    interval_source: str
    breakdown_before_s: Breakdown
    breakdown_after_s: Breakdown
    critical_path_before: tuple[PathPart, ...]
    critical_path_after: tuple[PathPart, ...]
    critical_path_moved: bool
    stages: tuple[StageView, ...]
    changes: tuple[ChangeView, ...]
    assumptions: tuple[AssumptionView, ...]
    why_not_more: str
    notes: tuple[str, ...]
    next: str


class AdviseView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace advise`: what to do first, what together, and what was left out."""

    schema_version: int = SCHEMA_VERSION
    command: str = "advise"
    headline: str
    source: str
    platform: str
    rank_numbers: tuple[int, ...]  # ranks that the answer is about
    steps: int
    before_s: float
    interval_level: float
    rows: tuple[AdviceRow, ...]  # told apart from no change, most saved first
    together: AdviceRow | None  # the best of them applied together; null where there are no two
    hidden: tuple[AdviceRow, ...]  # cannot be told apart from no change
    slower: tuple[AdviceRow, ...]  # by a first estimate
    refused: tuple[LeftOutView, ...]
    asks: tuple[LeftOutView, ...]  # not tried: `why` lists the parameters that have no default
    failed: tuple[LeftOutView, ...]  # mistakes of foretrace
    notes: tuple[str, ...]
    next: str


class CompareRow(msgspec.Struct, frozen=True, kw_only=True):
    """One layer and phase of both sides in a typical step; 0 on the side that lacks it.

    `before_s` and `after_s` are busy times; `critical_*_s` are what the layer adds to the critical path,
    waits included, so over all rows they sum to the compared step.
    """

    name: str
    phase: str
    before_s: float
    after_s: float
    change_s: float
    critical_before_s: float
    critical_after_s: float
    matched: int  # tasks that both sides have
    changed: int  # matched tasks whose duration differs
    replaced: int  # matched tasks that carry another name
    only_before: int
    only_after: int


class CompareView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace compare`: two recordings or predictions, and where their difference lies.

    `breakdown_change_s` sums to `change_s`; `rows` are busy times, which may overlap and need not.
    """

    schema_version: int = SCHEMA_VERSION
    command: str = "compare"
    headline: str
    platform: str
    before_source: str
    after_source: str
    before_steps: int
    after_steps: int
    before_s: float
    after_s: float
    change_s: float
    speedup: float
    before_time_s: StepTime
    after_time_s: StepTime
    before_interval_s: tuple[float, float] | None = None  # as in `show`
    after_interval_s: tuple[float, float] | None = None
    breakdown_before_s: Breakdown
    breakdown_after_s: Breakdown
    breakdown_change_s: Breakdown
    matched_share: float  # share of both sides' busy time in tasks that both have
    rows: tuple[CompareRow, ...]
    notes: tuple[str, ...]
    next: str


class RatioView(msgspec.Struct, frozen=True, kw_only=True):
    """Treated over baseline step, with its 80 % interval."""

    value: float
    low: float
    high: float


class ArmView(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one arm of a verification: seconds per step on the clock that decides; `spread` is IQR over median."""

    name: str  # "before", "after", "again" (the baseline's second copy)
    median_s: float
    p10_s: float
    p90_s: float
    spread: float
    wall_s: float  # medians on both clocks
    cpu_s: float


class ResidualView(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of the treated step, as predicted and as recorded: busy seconds per step."""

    name: str
    phase: str
    predicted_s: float
    recorded_s: float
    difference_s: float  # recorded − predicted


class VerifyView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace verify`: the predicted change beside the measured one."""

    schema_version: int = SCHEMA_VERSION
    command: str = "verify"
    headline: str
    name: str  # the techniques, joined
    techniques: tuple[str, ...]
    model: str
    size: str
    threads: int
    batches: str
    device: str
    verdict: str
    covered: bool
    uncertain: str  # why nothing was concluded, if nothing was
    predicted: RatioView
    measured: RatioView
    same: RatioView  # the baseline against itself
    floor: float  # smallest change that could be seen
    error: float  # predicted / measured − 1
    recorded_s: float
    arms: tuple[ArmView, ...]
    clock: str
    rounds: int
    repeated_rounds: int
    disturbed_rounds: int
    steps_per_block: int
    samples_before: int
    samples_after: int
    losses_before: tuple[float | None, ...]
    losses_after: tuple[float | None, ...]
    calibrated: int
    assumptions: tuple[AssumptionView, ...]
    residual: tuple[ResidualView, ...]
    treated_recorded_s: float
    ledger: str  # file that the row went to; "" where none was written
    row: str  # its id
    notes: tuple[str, ...]
    next: str


class LedgerRowView(msgspec.Struct, frozen=True, kw_only=True):
    """One verification as the ledger keeps it."""

    id: str
    time: str
    techniques: str
    model: str
    size: str
    threads: int
    device: str
    predicted: RatioView
    measured: RatioView
    before_s: float
    after_s: float
    error: float
    covered: bool
    floor: float
    verdict: str


class LedgerSummaryView(msgspec.Struct, frozen=True, kw_only=True):
    """How well the rows of one technique were predicted; errors and coverage over those that were concluded."""

    name: str
    rows: int
    concluded: int
    median_error: float | None
    worst_error: float | None
    coverage: float | None


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace ledger`: what was verified so far."""

    schema_version: int = SCHEMA_VERSION
    command: str = "ledger"
    headline: str
    source: str
    rows: tuple[LedgerRowView, ...]
    summary: tuple[LedgerSummaryView, ...]
    notes: tuple[str, ...]
    next: str


class PeaksView(msgspec.Struct, frozen=True, kw_only=True):
    """What the device can reach, FLOP/s and bytes/s; null where not known. `source`: catalog, measured or given."""

    name: str
    source: str
    fp32_flops_per_s: float | None
    tf32_flops_per_s: float | None
    fp16_flops_per_s: float | None
    bf16_flops_per_s: float | None
    bytes_per_s: float | None
    ridge: float | None  # FLOP/B above which float32 work is bound by arithmetic


class RatesView(msgspec.Struct, frozen=True, kw_only=True):
    """What a class of work, an operator or a kernel computes and moves, per step.

    Rates are over the part of its time whose FLOPs and bytes are known (`known_share`).
    """

    name: str
    count: float
    time_s: float
    share: float  # of the time of all work
    known_share: float
    flops: float
    bytes: float
    flops_per_s: float
    bytes_per_s: float
    intensity: float  # FLOP/B
    of_peak_flops: float | None  # of the peak of each task's precision
    of_peak_bandwidth: float | None
    of_roofline: float | None  # shortest time that both peaks allow, over the time taken


class CpuUseView(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of the process over cores x elapsed time, in unprofiled steps."""

    share: float
    cores: int
    busy_cores: float
    steps: int


class MemoryView(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device by category at its peak and over the step that holds the peak."""

    device: str
    peak_bytes: int
    at_peak_bytes: dict[str, int]  # sums to peak_bytes
    peak_phase: str
    peak_operator: str
    step: int
    over_time_bytes: dict[str, tuple[int, ...]]  # the fullest moment of equal pieces of that step
    allocated_per_step_bytes: float
    allocations_per_step: float
    recorded_peak_bytes: int | None  # the allocator's own figure
    notes: tuple[str, ...]


class ProfileView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace profile`: how much of the device a step uses, and what holds its memory."""

    schema_version: int = SCHEMA_VERSION
    command: str = "profile"
    headline: str
    source: str
    device: str
    platform: str
    steps: int
    step_time_s: StepTime
    interval_s: tuple[float, float]
    interval_level: float
    samples_per_step: float | None
    samples_per_s: float | None
    samples_per_s_p10: float | None
    samples_per_s_p90: float | None
    busy_share: float
    peaks: PeaksView | None
    total: RatesView
    step_flops_per_s: float  # over the whole step, idle time included
    compute_bound_share: float | None
    bandwidth_bound_share: float | None
    cpu: CpuUseView | None
    threads_busy: dict[str, float]  # CPU thread -> share of the time with recorded work
    classes: tuple[RatesView, ...]
    operators: tuple[RatesView, ...]  # longest first, at most 100
    memory: MemoryView | None
    notes: tuple[str, ...]
    next: str


View = (
    ShowView | SimulateView | BlameView | WhatIfView | AdviseView | CompareView | VerifyView | LedgerView | ProfileView
)
VIEWS: dict[str, type[View]] = {
    "show": ShowView,
    "simulate": SimulateView,
    "blame": BlameView,
    "whatif": WhatIfView,
    "advise": AdviseView,
    "compare": CompareView,
    "verify": VerifyView,
    "ledger": LedgerView,
    "profile": ProfileView,
}
