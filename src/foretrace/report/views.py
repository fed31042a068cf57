"""What each command answers, as plain structs: the one source of the terminal, the JSON and the page.

A view encodes to the JSON contract as it stands (docs/json.md): names, units and order. Times are seconds.
Fields are only ever added; a field that changes its meaning or goes away raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

import msgspec

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
    step_times_s: tuple[float, ...]  # every step, as recorded
    breakdown_s: Breakdown  # sums to step_time_s.median
    breakdown_mean_s: Breakdown  # sums to step_time_s.mean
    attributed_gpu_share: float | None  # None without a GPU
    unexplained_gpu_share: float | None
    holds_back: tuple[BlameRow, ...]
    notes: tuple[str, ...]
    next: str  # the command to try next


class SimulateView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace simulate`: the plain replay beside the recording, and the structural one (edges alone)."""

    schema_version: int = SCHEMA_VERSION
    command: str = "simulate"
    headline: str
    source: str
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
    steps: int
    by: str
    step_time_s: float
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
    steps: int
    before_s: float
    after_s: float
    saved_s: float
    speedup: float
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
    breakdown_before_s: Breakdown
    breakdown_after_s: Breakdown
    breakdown_change_s: Breakdown
    matched_share: float  # share of both sides' busy time in tasks that both have
    rows: tuple[CompareRow, ...]
    notes: tuple[str, ...]
    next: str


View = ShowView | SimulateView | BlameView | WhatIfView | CompareView
VIEWS: dict[str, type[View]] = {
    "show": ShowView,
    "simulate": SimulateView,
    "blame": BlameView,
    "whatif": WhatIfView,
    "compare": CompareView,
}
