"""`foretrace devices`: the catalog of devices, each figure with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import completion

if TYPE_CHECKING:
    from foretrace.report.views import Result


def devices(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="One device, with the source of every figure.",
            show_default=False,
            autocompletion=completion.devices,
        ),
    ] = "",
) -> Result:
    """List known devices with their rates, memory and links.

    Example: foretrace devices H100-SXM5-80GB
    """
    from foretrace.hardware.devices import catalog, named
    from foretrace.report import network as report

    return report.devices([named(name)] if name else catalog())
