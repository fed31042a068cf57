"""Machines that can be rented, with dated list prices; a user's own table takes their place."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.hardware.cluster import Cluster, Link
from foretrace.hardware.devices import Device, catalog

_INSIDE_EFFICIENCY = 0.75  # of the links between devices of a machine: what NCCL's all-reduce reaches of the data sheet
_BETWEEN_EFFICIENCY = 0.85  # of the machine's network: headers, and what sockets reach
_INSIDE_US, _BETWEEN_US = 5.0, 30.0
_MOST = 1e9  # of anything that a machine has or costs per hour
_NUMBERS = ("devices", "vcpus", "memory_gb", "network_gbit_s", "price_per_h")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One type of machine. `bursts`: the network holds its rate for a while only."""

    name: str
    provider: str
    region: str
    device: str  # as the catalog of devices calls it in short
    devices: int
    vcpus: int
    memory_gb: float
    network_gbit_s: float
    bursts: bool
    price_per_h: float
    date: str
    source: str
    currency: str = "USD"

    @property
    def kind(self) -> Device:
        """Its device. Raises ForetraceError where the catalog lacks it."""
        found = [each for each in catalog() if self.device in (each.short, each.name)]
        if not found:
            raise ForetraceError(
                f"instance type {self.name}: the catalog has no device {self.device!r}; "
                "`foretrace devices` lists what it has."
            )
        return found[0]

    def cluster(self, count: int) -> Cluster:
        """Return `count` of these machines: their devices inside over NVLink or PCIe, the machines over the network.

        Raises ForetraceError where the catalog lacks the device or its link.
        """
        device = self.kind
        inside_gb_s = device.scaleup_gb_s / 2 or device.pcie_gb_s
        if not inside_gb_s:
            raise ForetraceError(
                f"instance type {self.name}: the catalog knows no link between devices of a machine of {device.name}; "
                "choose types with another device."
            )
        return Cluster(
            name=f"{count} x {self.name}",
            nodes=count,
            per_node=self.devices,
            device=device.name,
            inside=Link(
                name="inside",
                gbit_s=inside_gb_s * 8,
                latency_us=_INSIDE_US,
                efficiency=_INSIDE_EFFICIENCY,
                source=device.source,
            ),
            between=Link(
                name="network",
                gbit_s=self.network_gbit_s,
                latency_us=_BETWEEN_US,
                efficiency=_BETWEEN_EFFICIENCY,
                source=self.source,
            ),
        )


def instances(path: Path | None = None, *, types: str = "") -> tuple[Instance, ...]:
    """Return types of the package, or of a CSV file with its columns, whose name begins as one of `types` does.

    Raises ForetraceError with file, line and field, or where no type begins so.
    """
    if path is None:
        text, where = files("foretrace.hardware").joinpath("instances.csv").read_text(encoding="utf-8"), "instances.csv"
    else:
        where = str(path)
        text = reading.read_text(path, mend="give a CSV file of instance types")
    found = [_instance(row, where, number) for number, row in enumerate(csv.DictReader(text.splitlines()), start=2)]
    if not found:
        raise ForetraceError(f"{where} lists no instance types; it needs a header and a line for each.")
    wanted = tuple(each.strip() for each in types.split(",") if each.strip())
    chosen = tuple(each for each in found if not types or each.name.startswith(wanted))
    if not chosen:
        raise ForetraceError(f"`types={types}`: no instance type begins so.")
    return chosen


def _instance(row: dict[str, str | None], where: str, number: int) -> Instance:
    given = {key: (value or "").strip() for key, value in row.items() if isinstance(value, str)}
    for needed in ("name", "device", *_NUMBERS):
        if not given.get(needed):
            raise ForetraceError(f"{where}, line {number}: no {needed}; every instance type needs one.")
    numbers: dict[str, Any] = {}
    for key in _NUMBERS:
        try:
            value = float(given[key])
        except ValueError:
            value = float("nan")
        if not 0 < value <= _MOST:
            raise ForetraceError(
                f"{where}, line {number}: {key} is {given[key]!r}; give a number above 0, {_MOST:g} at most."
            )
        numbers[key] = value
    if numbers["devices"] != int(numbers["devices"]):
        raise ForetraceError(
            f"{where}, line {number}: devices is {given['devices']!r}, and a part of a device cannot be predicted; "
            "give a whole number."
        )
    whole = {key: int(numbers[key]) for key in ("devices", "vcpus")}
    words: dict[str, Any] = {each.name: given.get(each.name, "") for each in fields(Instance)}
    words["currency"] = words["currency"].upper() or "USD"
    return Instance(**words | numbers | whole | {"bursts": words["bursts"].lower() in ("yes", "true", "1")})
