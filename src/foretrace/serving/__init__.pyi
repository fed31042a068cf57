"""What commands use of the package: `lazy.py` loads it from here."""

from foretrace.serving.energy import colocate as colocation
from foretrace.serving.energy import command as energy_command
from foretrace.serving.energy import recorded as recorded_energy
from foretrace.serving.energy import tune as energy_tuning
from foretrace.serving.llm import calibration as llm_calibration
from foretrace.serving.llm.capacity import capacities as capacities
from foretrace.serving.llm.deployment import step_times as step_times
from foretrace.serving.llm.engine import EngineRules as EngineRules
from foretrace.serving.llm.served_model import served_model as served_model
from foretrace.serving.llm.simulation import SimulationConfig as SimulationConfig
from foretrace.serving.llm.step_graph import steps_graph as steps_graph
from foretrace.serving.llm.step_law import law_of as law_of
from foretrace.serving.server import load as server_load
from foretrace.serving.server import run as server_run
from foretrace.serving.server.models import ModelSource as ModelSource
from foretrace.serving.server.models import TensorSpec as TensorSpec
from foretrace.serving.server.plan import plan_splits as plan_splits
from foretrace.serving.server.plan import try_plan as try_splits
from foretrace.serving.server.split import CoreSplit as CoreSplit
from foretrace.serving.speculative.drafts import DraftSetting as DraftSetting
from foretrace.serving.speculative.drafts import search_drafts as search_drafts

__all__ = [  # under names of their own
    "colocation",
    "energy_command",
    "energy_tuning",
    "llm_calibration",
    "recorded_energy",
    "server_load",
    "server_run",
    "try_splits",
]
