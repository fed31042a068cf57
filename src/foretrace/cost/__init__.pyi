"""What commands use of the package: `lazy.py` loads it from here."""

from foretrace.cost.accelerators.product_quantised import Surroundings as Surroundings
from foretrace.cost.accelerators.sparse import SparseArray as SparseArray
from foretrace.cost.devices.measured import Measured as Measured
from foretrace.cost.devices.scaled import Scaled as Scaled
from foretrace.cost.network.collective_files import read as read_collectives
from foretrace.cost.network.parse import network as parse_network
from foretrace.cost.operators.calibration import Calibration as Calibration
from foretrace.cost.programs.rank import rank as rank_schedules
from foretrace.cost.programs.tasks import KINDS as PROGRAM_KINDS
from foretrace.cost.programs.tasks import SIZES as PROGRAM_SIZES
from foretrace.cost.programs.tasks import task as program_task

__all__ = [  # under names of their own
    "PROGRAM_KINDS",
    "PROGRAM_SIZES",
    "parse_network",
    "program_task",
    "rank_schedules",
    "read_collectives",
]
