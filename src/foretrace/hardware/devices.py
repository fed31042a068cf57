"""The catalog of devices: peak rates and bandwidths of common accelerators, found by the name that a recording gives.

The figures are dense vendor peaks, not what a kernel reaches. `devices.csv` names for each figure the public device
tables that give the same; what none of them gives is from the vendor's documents alone, and counts as unconfirmed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from foretrace import shipped
from foretrace.errors import ForetraceError
from foretrace.hardware.accelerators import accelerator
from foretrace.hardware.device import DESIGNED, Device
from foretrace.names import plain, question

__all__ = ["Device", "catalog", "find", "named"]


@cache
def catalog() -> tuple[Device, ...]:
    """Return all devices, the more specific patterns first."""
    special: dict[str, Callable[[str], Any]] = {
        "patterns": lambda text: text.split("|"),
        "confirmed": lambda text: dict(pair.split("=") for pair in text.split(";")),
    }
    return shipped.rows("foretrace.hardware", "devices.csv", Device, special)


def find(name: str) -> Device | None:
    """Return the device that a recording calls `name`, e.g. "Tesla V100-DGXS-32GB"; None if the catalog lacks it."""
    if name.startswith(DESIGNED):
        return named(name)
    return next((device for device in catalog() if device.matches(name)), None)


# What people mean by a family's name where it has several members: the one that most machines have.
_USUAL = {"h100": "H100-SXM5-80GB", "a100": "A100-SXM4-80GB", "v100": "V100-SXM2", "p100": "P100-SXM2-16GB"}
# The same with its memory, which the pattern of another member would take.
_SIZED = {"a10080gb": "A100-SXM4-80GB", "a10040gb": "A100-SXM4-40GB", "h10080gb": "H100-SXM5-80GB"}


def named(name: str) -> Device:
    """Return the device of a short or full name, or a unique part of one, e.g. "h200", "A100-SXM4-80GB".

    What a driver or a recording calls it will do, too: "NVIDIA H100 80GB HBM3".

    Of several members of a family its name alone is the usual one: "h100" is an H100-SXM5-80GB. Raises ForetraceError
    with names that come near. "accelerator:..." is a design (`accelerators.py`).
    """
    if name.lower().startswith(DESIGNED):
        return accelerator(name).device()
    wanted = plain(name)
    wanted = plain((_USUAL | _SIZED).get(wanted.removeprefix("nvidia").removeprefix("tesla"), wanted))
    for device in catalog():
        if wanted in (plain(device.short), plain(device.name)):
            return device
    part = [device for device in catalog() if wanted and wanted in plain(device.short)]
    begin = [device for device in part if plain(device.short).startswith(wanted)]
    if 1 in (len(part), len(begin)):
        return (begin if len(begin) == 1 else part)[0]
    if part:
        several = " or ".join(device.short for device in part)
        raise ForetraceError(f"device {name!r} is several devices; choose {several}.")
    stated = None if wanted.startswith(("nvidia", "tesla")) else re.search(r"(\d+)(?:gb.?)?$", wanted)
    if (found := find(name)) and (stated is None or int(stated[1]) == found.memory_gb):  # not of another member
        return found
    known = [*_USUAL, *(device.short for device in catalog())]
    hint = question(name.removeprefix("nvidia").strip(), known, lists="foretrace devices lists them.")
    raise ForetraceError(f"device {name!r} is in no catalog; {hint}")
