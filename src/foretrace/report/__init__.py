"""How foretrace answers: a struct per command, and its text, JSON, page and timeline.

`report.plan.placed(...)` loads `report/plan.py` when it is called, so that a command loads its own answer alone.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # isort: off
    from foretrace.report import (
        advise as advise, calibrate as calibrate, check as check, codesign as codesign, compare as compare,
        energy as energy, estimate as estimate, fleet as fleet, fleet_page as fleet_page,
        fleet_policies as fleet_policies, fleet_questions as fleet_questions, fleet_slurm as fleet_slurm, html as html,
        llm as llm, models as models, names as names, optimise as optimise, perfetto as perfetto, plan as plan,
        plan_rows as plan_rows, plan_training as plan_training, profile as profile, programs as programs,
        ranks as ranks, serve as serve, show as show, tools as tools, units as units, verification as verification,
        whatif as whatif, workers as workers,
    )  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name in {each.name for each in iter_modules(__path__)}:
        return import_module(f"foretrace.report.{name}")
    raise AttributeError(f"module 'foretrace.report' has no attribute {name!r}")
