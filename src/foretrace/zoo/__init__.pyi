"""What commands use of the package: `lazy.py` loads it from here."""

from foretrace.zoo import registry as registry
from foretrace.zoo.operators import operators_in as operators_in
from foretrace.zoo.operators import operators_of as operators_of
from foretrace.zoo.registry import entries as entries
from foretrace.zoo.registry import job as job
from foretrace.zoo.registry import script_mistakes as script_mistakes
from foretrace.zoo.trial import trial as run_trial

__all__ = [  # under names of their own
    "run_trial",
]
