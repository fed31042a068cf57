"""Every reader of files that others made, by name.

The list is complete: `test_readers.py` fails where a module of the package reads files and no reader here stands for
it, and the kinds of fleet logs come from the package's own registry. A new reader goes to the file of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tests.fuzz.cost_readers import cost_readers
from tests.fuzz.energy_readers import energy_readers
from tests.fuzz.fleet_readers import fleet_readers
from tests.fuzz.model_readers import model_readers
from tests.fuzz.plan_readers import plan_readers
from tests.fuzz.reader import Reader
from tests.fuzz.recording_readers import recording_readers
from tests.fuzz.serving_readers import serving_readers


@cache
def readers() -> Mapping[str, Reader]:
    """All readers by name."""
    kinds = (
        recording_readers, model_readers, cost_readers, fleet_readers, plan_readers, serving_readers, energy_readers
    )  # fmt: skip
    found = [reader for kind in kinds for reader in kind()]
    named = {reader.name: reader for reader in found}
    assert len(named) == len(found), "two readers of one name"
    return named
