"""Views of `foretrace fleet why`, `whatif`, `sweep` and `policies`."""

from __future__ import annotations

import msgspec

from foretrace.report.views import Result


class RoomView(msgspec.Struct, frozen=True, kw_only=True):
    """Free GPUs, of kinds that the job may use, in the units of a level."""

    level: str
    units: int
    free: int
    most: int  # in one unit
    fits: int  # units that could hold the job


class HolderView(msgspec.Struct, frozen=True, kw_only=True):
    """A job that holds GPUs at that moment."""

    job: str
    gpus: int
    until_s: float  # from that moment


class FleetDecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """One decision about the job."""

    time_s: float
    what: str
    why: str


class RemedyView(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was tried, and what becomes of this job and of all."""

    change: str
    queue_s: float | None
    mean_jct_s: float | None
    helps: bool


class FleetWhyView(Result, frozen=True, kw_only=True):
    """`foretrace fleet why`: one job at one moment."""

    command: str = "fleet why"
    headline: str
    source: str
    policy: str
    cluster: str
    job: str
    tenant: str
    gpus: int
    at_s: float
    status: str
    reason: str
    queue_s: float | None
    start_s: float | None
    end_s: float | None
    causes_s: dict[str, float]
    room: tuple[RoomView, ...]
    holders: tuple[HolderView, ...]
    decisions: tuple[FleetDecisionView, ...]
    remedies: tuple[RemedyView, ...]
    next: str


class ChangedFigureView(msgspec.Struct, frozen=True, kw_only=True):
    """One figure before and after; `ratio` is after over before (None where before is 0 or unknown)."""

    name: str
    before: float | None
    after: float | None
    ratio: float | None


class FleetWhatifView(Result, frozen=True, kw_only=True):
    """`foretrace fleet whatif`: the same jobs on a changed cluster, network or policy."""

    command: str = "fleet whatif"
    headline: str
    source: str
    before: str
    after: str
    changes: tuple[str, ...]
    jobs: int
    figures: tuple[ChangedFigureView, ...]
    sooner: int  # jobs that end sooner
    later: int
    notes: tuple[str, ...]
    next: str


class FleetSweepView(Result, frozen=True, kw_only=True):
    """`foretrace fleet sweep`: one row per cell; `columns` names the values, cells' own first."""

    command: str = "fleet sweep"
    headline: str
    source: str
    folder: str
    cells: int
    reused: int
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]
    next: str


class PolicyParameterView(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter of a policy."""

    name: str
    default: str


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduling policy."""

    name: str
    about: str
    parameters: tuple[PolicyParameterView, ...]


class FleetPoliciesView(Result, frozen=True, kw_only=True):
    """`foretrace fleet policies`: what --policy takes."""

    command: str = "fleet policies"
    policies: tuple[PolicyView, ...]
