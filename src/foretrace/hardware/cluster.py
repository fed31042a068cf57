"""`Cluster`: how many devices there are and which links join them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foretrace.errors import ForetraceError

_RATE = re.compile(r"(?P<value>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[kmgt]?bit(/s)?|[kmg]bps)", re.IGNORECASE)
_TIME = re.compile(r"(?P<value>\d+(\.\d*)?|\.\d+)\s*(?P<unit>ns|us|µs|ms|s)", re.IGNORECASE)
_SCALE = {"": 1e-9, "k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection. `efficiency` is the share of the rate that payload reaches (headers, protocol)."""

    name: str
    gbit_s: float
    latency_us: float = 0.0
    efficiency: float = 1.0
    source: str = ""

    @property
    def bytes_per_s(self) -> float:
        """Payload bytes per second."""
        return self.gbit_s * 1e9 / 8 * self.efficiency

    @property
    def latency_s(self) -> float:
        """Seconds until the first byte arrives."""
        return self.latency_us * 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` machines of `per_node` workers each: `inside` joins workers of one machine, `between` the machines.

    `oversubscription` is how many times the machines' links together exceed what the switch above them carries.
    """

    name: str
    nodes: int
    per_node: int
    inside: Link
    between: Link
    device: str = ""
    oversubscription: float = 1.0

    @property
    def workers(self) -> int:
        """Devices of all machines."""
        return self.nodes * self.per_node


def parse_link(text: str, *, name: str = "link") -> Link:
    """A link from "1gbit", "300mbit" or "25gbit/10us" (rate, then latency). Raises ForetraceError."""
    rate, _, latency = text.strip().partition("/")
    found = _RATE.fullmatch(rate.strip())
    if not found or not float(found["value"]):
        raise ForetraceError(
            f"{text!r} is no link; write a rate above 0 and, if known, a latency: 1gbit or 25gbit/10us."
        )
    unit = found["unit"].lower()
    gbit_s = float(found["value"]) * _SCALE["" if unit.startswith("bit") else unit[0]]
    seconds = 0.0
    if latency.strip():
        when = _TIME.fullmatch(latency.strip())
        if not when:
            raise ForetraceError(f"{text!r} is no link: {latency!r} is no latency; write 10us or 0.2ms.")
        seconds = float(when["value"]) * _SECONDS[when["unit"].lower()]
    return Link(name=name, gbit_s=gbit_s, latency_us=seconds * 1e6, source="given")
