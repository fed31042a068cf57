"""`foretrace devices`: the catalog of devices, each figure with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.cli import completion
from foretrace.cli.options import argument

if TYPE_CHECKING:
    from foretrace.report.views import Result


def devices(
    name: str = argument("", "[NAME]", "One device, with the source of every figure.", complete=completion.devices),
) -> Result:
    """List known devices with their rates, memory and links.

    Example: foretrace devices H100-SXM5-80GB
    """
    from foretrace.hardware.devices import catalog, named
    from foretrace.report import network as report

    return report.devices([named(name)] if name else catalog())
