"""What commands use of the package: `lazy.py` loads it from here."""

from foretrace.fleet import ask as ask
from foretrace.fleet import comparison as comparison
from foretrace.fleet import scene as scene
from foretrace.fleet import variants as variants
from foretrace.fleet.export import export as exported
from foretrace.fleet.formats import write_csv as write_csv
from foretrace.fleet.live.history import read_past as read_past
from foretrace.fleet.live.questions import ask as ask_queue
from foretrace.fleet.live.sources import ask_slurm as ask_slurm
from foretrace.fleet.live.sources import read_folder as read_folder
from foretrace.fleet.policies import parse as policy_of
from foretrace.fleet.policies.registry import described as described_policies
from foretrace.fleet.policies.registry import names as policy_names
from foretrace.fleet.policies.slurm_options import windows as windows
from foretrace.fleet.result import per_job as rows_by_job
from foretrace.fleet.rig import against as rig_against
from foretrace.fleet.rig.cluster import SlurmSetup as SlurmSetup
from foretrace.fleet.rig.cluster import missing as missing_slurm
from foretrace.fleet.rig.on_ray import missing as missing_ray
from foretrace.fleet.scene import workload_of as workload_of
from foretrace.fleet.synthetic import fit as fit_generator
from foretrace.fleet.synthetic import load_generator as load_generator

__all__ = [  # under names of their own
    "ask_queue",
    "described_policies",
    "exported",
    "fit_generator",
    "missing_ray",
    "missing_slurm",
    "policy_names",
    "policy_of",
    "rig_against",
    "rows_by_job",
]
