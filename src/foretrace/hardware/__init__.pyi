"""What commands use of the package: `lazy.py` loads it from here."""

from foretrace.hardware.cluster import parse_link as parse_link
from foretrace.hardware.devices import catalog as catalog
from foretrace.hardware.devices import named as named
from foretrace.hardware.instances import instances as instance_types
from foretrace.hardware.probe import cpu_peaks as cpu_peaks
from foretrace.hardware.processor import operator_threads as operator_threads

__all__ = [  # under names of their own
    "instance_types",
]
