"""`Cluster`: how many devices there are and which links join them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from foretrace.errors import ForetraceError, GraphError
from foretrace.hardware.cables import Cable, exchange, ring, route
from foretrace.hardware.wiring import Wiring

# Rates as people write them: "100gbit", "100 Gbps", "100Gb/s", and bytes by their capital: "12.5 GB/s", "12.5GBps".
_NUMBER = r"(?P<value>\d+(\.\d*)?|\.\d+)\s*"
_RATE = re.compile(
    _NUMBER + r"(?P<unit>(?P<scale>[kKmMgGtT]?)(?P<of>[bB]its?(/s|ps)?|[bB]/s|[bB]ps|BIT(/S)?|BPS|B/S|[bB]yte(s)?/s))"
)
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
class Machine:
    """One machine of a cluster whose machines differ."""

    name: str
    per_node: int
    inside: Link
    device: str = ""
    wiring: Wiring | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` machines of `per_node` workers each: `inside` joins workers of one machine, `between` the machines.

    `between` is what one machine has to the others, all its network cards together. `oversubscription` is how many
    times the machines' links together exceed what the switch above them carries; the `per_switch` machines below one
    switch do not meet it among themselves (0: every transfer between machines does). With `wiring`, `inside` is one
    cable between two devices. `machines` and `cables` are filled where a file lists them one by one; workers count
    through the machines in the order of the file, and `per_node` is then that of the largest machine.

    `links` and `path` are the same as flows share it. Network cards are joined beside the links inside a machine: a
    transfer between machines does not touch those.
    """

    name: str
    nodes: int
    per_node: int
    inside: Link
    between: Link
    device: str = ""
    oversubscription: float = 1.0
    per_switch: int = 0
    nics: int = 1  # network cards of a machine, over which `between` is split
    wiring: Wiring | None = None
    machines: tuple[Machine, ...] = ()
    cables: tuple[Cable, ...] = ()  # between machines and switches by name

    @property
    def workers(self) -> int:
        """Devices of all machines."""
        return sum(each.per_node for each in self.machines) or self.nodes * self.per_node

    def spread_over(self, workers: int) -> tuple[int, int]:
        """Return machines that so many workers take, the first ones filled first, and most workers of one of them."""
        if not self.machines:
            return -(-workers // self.per_node), min(workers, self.per_node)
        on = self.machine_of[:workers]
        beyond = workers - len(on)  # more than there are: as if it went on so
        return on[-1] + 1 + -(-beyond // self.per_node), max(Counter(on).values())

    @cached_property
    def machine_of(self) -> tuple[int, ...]:
        """Machine of every worker."""
        sizes = [each.per_node for each in self.machines] or [self.per_node] * self.nodes
        return tuple(machine for machine, size in enumerate(sizes) for _ in range(size))

    def link_of(self, first: int, second: int) -> Link:
        """Return the link that a single transfer from one worker to another goes over: one card of a machine."""
        a, b = self.machine_of[first], self.machine_of[second]
        if a == b:
            return self.machines[a].inside if self.machines else self.inside
        if self.cables:
            rate, latency_us, where = ring(self.cables, [self.machines[a].name, self.machines[b].name])
            return replace(self.between, name=where, gbit_s=rate, latency_us=latency_us)
        name = f"one of {self.between.name}" if self.nics > 1 else self.between.name
        return replace(self.between, name=name, gbit_s=self.between.gbit_s / self.nics)

    def inside_for(self, workers: int) -> Link:
        """Return what a ring of `workers` devices of one machine gets: all cables of its wiring, else the link."""
        links = [each.inside for each in self.machines[: self.spread_over(workers)[0]]] or [self.inside]
        slowest = min(links, key=lambda link: link.bytes_per_s)
        wiring = self.wiring
        if wiring is None or workers < 2:
            return slowest
        rings = wiring.rings(min(workers, wiring.devices))
        if not rings:
            raise ForetraceError(
                f"{self.name}: no cable of {wiring.name} joins the first {workers} devices in a ring; give inside: "
                "and no wiring:, or list the cables."
            )
        return replace(slowest, name=f"{rings} × {slowest.name}", gbit_s=slowest.gbit_s * rings)

    def between_for(self, nodes: int, *, everyone: bool = False) -> Link:
        """Return what each of the first `nodes` machines gets while all of them send at once.

        In a ring each sends to the next; with `everyone`, to all others evenly.
        """
        if self.cables and nodes <= len(self.machines):
            names = [each.name for each in self.machines[:nodes]]
            rate, latency_us, where = (exchange if everyone else ring)(self.cables, names)
            return replace(self.between, name=where, gbit_s=rate, latency_us=latency_us)
        below = max(self.per_switch, 1)
        if self.oversubscription <= 1.0 or nodes <= below:
            return self.between
        # A switch of s machines has s links' worth divided by the oversubscription upwards. A ring leaves it by one
        # flow; evenly spread traffic by the share of machines that are elsewhere.
        leaving = below * (nodes - below) / (nodes - 1) if everyone else 1.0
        share = min(1.0, below / self.oversubscription / leaving)
        return replace(self.between, gbit_s=self.between.gbit_s * share) if share < 1 else self.between

    @cached_property
    def links(self) -> tuple[tuple[str, float], ...]:
        """Every link in one direction: its name, and payload bytes per second.

        A worker has a link out and one in. Between machines are the cables; or a link up and one down of every machine,
        and, where those together exceed what is above them, of every switch, or one core that all machines share. Of
        several cards of a machine a single transfer uses its worker's; these are the last links.
        """
        inside = [each.inside for each in self.machines] or [self.inside_for(self.per_node)] * self.nodes
        found = [(f"worker {w} {way}", inside[m].bytes_per_s) for w, m in enumerate(self.machine_of)
                 for way in ("out", "in")]  # fmt: skip
        if self.cables:
            for cable in self.cables:
                a, b = cable.ends
                found += [(f"{a} to {b}", cable.gbit_s * 1e9 / 8), (f"{b} to {a}", cable.gbit_s * 1e9 / 8)]
            return tuple(found)
        rate = self.between.bytes_per_s
        found += [(f"machine {m} {way}", rate) for m in range(self.nodes) for way in ("up", "down")]
        if self.oversubscription > 1 and self.per_switch:
            up = self.per_switch * rate / self.oversubscription
            switches = range(-(-self.nodes // self.per_switch))
            found += [(f"switch {s} {way}", up) for s in switches for way in ("up", "down")]
        elif self.oversubscription > 1:
            found.append(("core", self.nodes * rate / self.oversubscription))
        if self.nics > 1:
            card = rate / self.nics
            found += [(f"card of worker {w} {way}", card) for w in range(self.workers) for way in ("out", "in")]
        return tuple(found)

    def path(self, source: int, target: int, *, alone: bool = False) -> tuple[tuple[int, ...], float]:
        """Return the positions in `links` from one worker to another, and the seconds until a byte has crossed them.

        `alone`: a single transfer, which uses one card; a collective is split over all of them. Raises GraphError for
        a worker that is not there.
        """
        workers = len(self.machine_of)
        for worker in (source, target):
            if not 0 <= worker < workers:
                raise GraphError(f"worker {worker} is not in {self.name}, which has {workers}, counted from 0.")
        a, b = self.machine_of[source], self.machine_of[target]
        if source == target:
            return (), 0.0
        if a == b:
            return (2 * source, 2 * target + 1), self.link_of(source, target).latency_s
        base = 2 * workers
        if self.cables:
            steps = route(self.cables, self.machines[a].name, self.machines[b].name)
            latency_us = sum(self.cables[at].latency_us for at, _ in steps)
            return tuple(base + 2 * at + (0 if forwards else 1) for at, forwards in steps), latency_us * 1e-6
        across: tuple[int, ...] = ()
        above, per_switch = base + 2 * self.nodes, self.per_switch
        if self.oversubscription > 1 and not per_switch:
            across = (above,)
        elif self.oversubscription > 1 and a // per_switch != b // per_switch:
            across = (above + 2 * (a // per_switch), above + 2 * (b // per_switch) + 1)
        cards: tuple[int, ...] = ()
        if alone and self.nics > 1:
            first = len(self.links) - 2 * workers
            cards = (first + 2 * source, first + 2 * target + 1)
        return (base + 2 * a, *across, base + 2 * b + 1, *cards), self.between.latency_s


def parse_link(text: str, *, name: str = "link") -> Link:
    """Return a link from "1gbit" or "25gbit/10us" (rate, latency); a capital B is bytes. Raises ForetraceError."""
    found = _RATE.match(text.strip())
    rest = text.strip()[found.end() :].strip() if found else ""
    if not found or not float(found["value"]) or (rest and rest[0] not in "/, " and not rest[0].isdigit()):
        raise ForetraceError(
            f"{text!r} is no link; write a rate above 0 and, if known, a latency: 1gbit or 25gbit/10us."
        )
    latency = rest.lstrip("/, ")
    # "BPS" and "BIT" are bits in capitals; "B" and "byte" are bytes.
    of = found["of"]
    octets = (of.startswith("B") and of.upper() != of) or of in ("B/s", "B/S") or of.lower().startswith("byte")
    octets = octets and not of.lower().startswith("bit")
    gbit_s = float(found["value"]) * _SCALE[found["scale"].lower()] * (8 if octets else 1)
    seconds = 0.0
    if latency.strip():
        when = _TIME.fullmatch(latency.strip())
        if not when:
            raise ForetraceError(f"{text!r} is no link: {latency!r} is no latency; write 10us or 0.2ms.")
        seconds = float(when["value"]) * _SECONDS[when["unit"].lower()]
    return Link(name=name, gbit_s=gbit_s, latency_us=seconds * 1e6, source="given")
