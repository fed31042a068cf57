"""`foretrace devices`: the catalog of devices, each figure with its source."""

from __future__ import annotations

from typing import Annotated

import typer

from foretrace.cli import options


def devices(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="One device, with the source of every figure.", show_default=False)
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """List the devices whose rates, memory and links are known.

    Example: foretrace devices H100-SXM5-80GB
    """
    from foretrace.hardware.devices import catalog, named
    from foretrace.report import network as report

    view = report.devices([named(name)] if name else catalog())
    if as_json:
        from foretrace.report.jsonout import dumps

        print(dumps(view))
    else:
        print("\n".join(report.devices_lines(view)))
