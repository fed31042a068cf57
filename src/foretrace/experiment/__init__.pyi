"""What commands use of the package: `lazy.py` loads it from here."""

from foretrace.experiment import collectives as collectives
from foretrace.experiment import ledger as ledger
from foretrace.experiment import processes as processes
from foretrace.experiment.calibrate import as_here as as_here
from foretrace.experiment.calibrate import environment_like as environment_like
from foretrace.experiment.calibrate import every_operator as every_operator
from foretrace.experiment.calibrate import few_operators as few_operators
from foretrace.experiment.calibrate import machine_of as machine_of
from foretrace.experiment.calibrate import recorded_operators as recorded_operators
from foretrace.experiment.calibrate import with_hooks as with_hooks
from foretrace.experiment.differential import DifferentialRequest as DifferentialRequest
from foretrace.experiment.differential import differential as run_differently
from foretrace.experiment.job import Job as Job
from foretrace.experiment.kernels import step_kernels as step_kernels
from foretrace.experiment.ledger import Ledger as Ledger
from foretrace.experiment.ledger import shipped_on as shipped_on
from foretrace.experiment.ledger import verified_on as verified_on
from foretrace.experiment.links import measure as link_runs
from foretrace.experiment.links import netns as netns
from foretrace.experiment.links.calibrate import alone as calibrate_link
from foretrace.experiment.links.job import LinkJob as LinkJob
from foretrace.experiment.links.judge import rows_of as rows_of_links
from foretrace.experiment.stalls import stalls as stalls_of

__all__ = [  # under names of their own
    "calibrate_link",
    "link_runs",
    "rows_of_links",
    "run_differently",
    "stalls_of",
]
