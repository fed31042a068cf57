"""What the commands answer that list things (zoo, techniques, calibrate, check): the JSON contract beside `views`.

These answers have one face besides their JSON, the lines that the command itself prints, so no renderer takes them.
"""

from __future__ import annotations

import msgspec

from foretrace.report.compression import CompressionAdviseView
from foretrace.report.estimate import EstimateView
from foretrace.report.fleet_question_views import FleetPoliciesView, FleetSweepView, FleetWhatifView, FleetWhyView
from foretrace.report.fleet_views import FleetCompareView, FleetFitView, FleetRunView, FleetSlotsView
from foretrace.report.network_views import CalibrateNetworkView, DevicesView, NetworkCheckView
from foretrace.report.operators import OperatorsView
from foretrace.report.optimise import OptimiseView
from foretrace.report.rewriting import RewriteView
from foretrace.report.rig import RigCalibrateView, RigCheckView, RigCleanView, RigVerifyView
from foretrace.report.scaling import ScaleView
from foretrace.report.stash import CloudAdviseView, StashView
from foretrace.report.utilisation import UtilisationView
from foretrace.report.views import SCHEMA_VERSION


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


class ZooView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace zoo`: the models there are, or one of them with `run`."""

    schema_version: int = SCHEMA_VERSION
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


class TechniquesView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace techniques`: all of them, or the one that was named."""

    schema_version: int = SCHEMA_VERSION
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


class CalibrateView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace calibrate device` and `run`: seconds per call, and what could not be timed."""

    schema_version: int = SCHEMA_VERSION
    command: str = "calibrate"
    of: str  # "device" or "run"
    machine: CalibratedMachineView
    stored: str  # file
    seconds: dict[str, float]  # "NAME JSON" of a call -> seconds; "near NAME JSON" with data near the core
    failed: dict[str, str]  # call -> why it has no time


class CalibrateGpuView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace calibrate device --gpu`: the 16-bit products worth timing on a GPU, and their times."""

    schema_version: int = SCHEMA_VERSION
    command: str = "calibrate device"
    gpu: str  # as the catalog calls it
    stored: str  # file
    products: list[tuple[int, int, int]]  # m, n, k; those worth most first
    seconds: list[float] | None  # of each; None where they are still to be timed


class FindingView(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a graph."""

    name: str
    verdict: str  # ok, warn, fail, skip
    value: float
    limit: float
    says: str


class CheckView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace check`: whether the graph of a recording stands up to being changed."""

    schema_version: int = SCHEMA_VERSION
    command: str = "check"
    headline: str
    ok: bool
    gpu_whatifs: bool
    findings: tuple[FindingView, ...]


Stash = StashView | CloudAdviseView
Modelled = EstimateView | OperatorsView | UtilisationView | RewriteView
Net = NetworkCheckView | CalibrateNetworkView | DevicesView | CompressionAdviseView
Rig = RigCheckView | RigCalibrateView | RigVerifyView | RigCleanView


class AlignView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace align`: how far the clock of every rank is ahead of that of the first one."""

    schema_version: int = SCHEMA_VERSION
    command: str = "align"
    offsets_s: dict[str, float | None]  # by rank; null where no collective ties it to the first
    uncertainty_s: float | None  # the largest standard error
    drift: dict[str, float]  # seconds per second, only ranks whose clock drifts
    matched: int  # collectives that all recorded ranks of their group share
    unmatched: tuple[str, ...]
    notes: tuple[str, ...]


Looked = ZooView | TechniquesView | CalibrateView | CalibrateGpuView | CheckView
Fleet = FleetRunView | FleetCompareView | FleetSlotsView | FleetFitView
FleetAsked = FleetWhyView | FleetWhatifView | FleetSweepView | FleetPoliciesView
Listing = Looked | OptimiseView | AlignView | ScaleView | Rig | Net | Stash | Modelled | Fleet | FleetAsked
LISTINGS: dict[str, type[Listing]] = {
    "zoo": ZooView,
    "techniques": TechniquesView,
    "calibrate": CalibrateView,
    "calibrate device": CalibrateGpuView,
    "check": CheckView,
    "align": AlignView,
    "scale": ScaleView,
    "optimise": OptimiseView,
    "rewrite": RewriteView,
    "compression advise": CompressionAdviseView,
    "network check": NetworkCheckView,
    "calibrate network": CalibrateNetworkView,
    "devices": DevicesView,
    "estimate": EstimateView,
    "operators": OperatorsView,
    "utilisation": UtilisationView,
    "stash": StashView,
    "cloud advise": CloudAdviseView,
    "fleet run": FleetRunView,
    "fleet compare": FleetCompareView,
    "fleet why": FleetWhyView,
    "fleet whatif": FleetWhatifView,
    "fleet slots": FleetSlotsView,
    "fleet sweep": FleetSweepView,
    "fleet fit": FleetFitView,
    "fleet policies": FleetPoliciesView,
    "rig check": RigCheckView,
    "rig calibrate": RigCalibrateView,
    "rig verify": RigVerifyView,
    "rig clean": RigCleanView,
}
