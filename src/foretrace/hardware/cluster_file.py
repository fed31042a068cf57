"""A `Cluster` from YAML, in a short form (all machines alike) or an explicit one (machines, switches, links by name).

docs/network.md shows both. Nothing is filled in silently: a key that is unknown, a number that cannot be, an end that
nothing declares are refused with the key and what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.hardware.cables import Cable, cycle_in, ring, route
from foretrace.hardware.cluster import Cluster, Link, Machine, parse_link
from foretrace.hardware.devices import Device, named
from foretrace.hardware.wiring import KNOWN, Wiring
from foretrace.names import near

_SHORT = ("nodes", "per_node", "device", "inside", "between", "nics", "oversubscription", "per_switch", "wiring")
_EXPLICIT = ("nodes", "switches", "links", "topology", "device", "per_node", "inside", "wiring")
_NODE = ("name", "per_node", "device", "inside", "wiring")
_LINK = ("from", "to", "rate", "count")
_MOST_NODES, _MOST_PER_NODE = 100_000, 1_024
_LATENCY_US = {"nvlink": 3.4, "pcie": 5.7}  # of a step of a ring with NCCL's Simple protocol, by its own tables
# Payload over the catalog's rate that a ring reaches: NVLink 229 of 300 (8 A100), 363 of 450 (8 H200), 682 of 900
# (8 B200) GB/s in published all-reduce tables; PCIe by analogy.
_EFFICIENCY = {"nvlink": 0.78, "pcie": 0.75}
_NETWORK_LATENCY_US, _NETWORK_EFFICIENCY = 10.0, 0.9  # aiconfigurator's latency; headers of RDMA, unconfirmed
_CABLE_EFFICIENCY = 0.9  # 22.5 of 25 GB/s of one NVLink2 cable, all-reduce of two V100


def load(path: Path) -> Cluster:
    """Return the cluster in a file. Raises ForetraceError with the key and what to do."""
    text = reading.read_text(path, mend="give a YAML file that describes a cluster")
    return _kept(text, where=str(path), name=path.stem)


def parse(text: str, *, where: str = "the cluster", name: str = "cluster") -> Cluster:
    """Return the cluster that YAML text describes. Raises ForetraceError."""
    found = reading.parse_yaml(text, where)
    if not isinstance(found, dict):
        raise ForetraceError(f"{where} describes no cluster; write keys like nodes: 2 and per_node: 8.")
    title = _text(found.pop("name", name), where, "name")
    if isinstance(found.get("nodes"), list) or "links" in found or "switches" in found:
        return _explicit(found, where, title)
    return _short(found, where, title)


_kept = lru_cache(maxsize=16)(parse)  # a technique that names a file reads it with every value that it tries


# --- all machines alike ---------------------------------------------------------------------------------------------


def _short(found: Mapping[str, Any], where: str, name: str) -> Cluster:
    _known(found, _SHORT, where)
    nodes = _count(found.get("nodes", 1), where, "nodes", _MOST_NODES)
    device = _device(found, where)
    machine = _machine(found, device, where, name, usual=device.node_devices if device is not None else 0)
    nics = _count(found.get("nics", 1), where, "nics", _MOST_PER_NODE)
    if "between" not in found and nodes > 1:
        raise ForetraceError(f"{where}: {nodes} machines need between:, e.g. between: 100gbit/5us.")
    between = Link(name="none", gbit_s=1.0, source="nothing to join")  # one machine with one device
    if found.get("between") == "usual":
        between = _usual_network(device, machine.per_node, where)
        nics = nics if "nics" in found else machine.per_node  # a card for each device
    elif "between" in found:
        between = _link(found["between"], where, "between", None, "network")
        if nics > 1:
            between = replace(between, name=f"{nics} × {between.name}", gbit_s=between.gbit_s * nics)
    elif "inside" in found:
        between = machine.inside
    oversubscription = _number(found.get("oversubscription", 1.0), where, "oversubscription")
    if oversubscription < 1:
        raise ForetraceError(
            f"{where}: oversubscription {oversubscription:g} is below 1; 1 means that nothing is shared."
        )
    per_switch = _count(found["per_switch"], where, "per_switch", _MOST_NODES) if "per_switch" in found else 0
    return Cluster(
        name=name,
        nodes=nodes,
        per_node=machine.per_node,
        inside=machine.inside if "inside" in found else between,
        between=between,
        device=machine.device,
        oversubscription=oversubscription,
        per_switch=per_switch,
        nics=nics,
        wiring=machine.wiring,
    )


# --- machines, switches and links by name ---------------------------------------------------------------------------


def _explicit(found: Mapping[str, Any], where: str, name: str) -> Cluster:
    _known(found, _EXPLICIT, where)
    given = found.get("nodes")
    if not isinstance(given, list) or not given:
        raise ForetraceError(f"{where}: with links: or switches:, nodes: is a list of one machine at least.")
    defaults = {key: found[key] for key in ("device", "per_node", "inside", "wiring") if key in found}
    machines = [_listed(each, defaults, f"{where}, nodes[{number}]") for number, each in enumerate(given, 1)]
    switches = tuple(_text(each, where, "switches") for each in _list(found.get("switches", []), where, "switches"))
    hosts = tuple(each.name for each in machines)
    names = hosts + switches
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise ForetraceError(f"{where}: {twice} is declared twice; give every machine and switch a name of its own.")
    cables = tuple(
        _cable(each, names, f"{where}, links[{number}]")
        for number, each in enumerate(_list(found.get("links", []), where, "links"), 1)
    )
    if len(names) > 1 or cables:
        _check_joined(cables, hosts, names, where)
    topology = found.get("topology", "tree")
    if topology not in ("tree", "mesh"):
        raise ForetraceError(f"{where}: topology {topology!r} is unknown; write tree or mesh.")
    cycle = cycle_in(each.ends for each in cables)
    if topology == "tree" and cycle is not None:
        raise ForetraceError(
            f"{where}: the link from {cycle[0]} to {cycle[1]} closes a cycle; remove it, or write topology: mesh if "
            "that is meant. Parallel cables are one link with count:."
        )
    most = max(machines, key=lambda each: each.per_node)
    between = most.inside
    if len(machines) > 1:
        rate, latency_us, bottleneck = ring(cables, hosts)
        between = Link(name=bottleneck, gbit_s=rate, latency_us=latency_us, source="given")
    return Cluster(
        name=name,
        nodes=len(machines),
        per_node=most.per_node,
        inside=min((each.inside for each in machines), key=lambda link: link.bytes_per_s),
        between=between,
        device=most.device,
        wiring=most.wiring,
        machines=tuple(machines),
        cables=cables if len(machines) > 1 else (),
    )


def _listed(given: Any, defaults: Mapping[str, Any], place: str) -> Machine:
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, dict):
        raise ForetraceError(f"{place} is no machine; write a name, or keys like name: a and per_node: 8.")
    _known(given, _NODE, place)
    if "name" not in given:
        raise ForetraceError(f"{place} has no name:, which links need.")
    both = {**defaults, **given}
    return _machine(both, _device(both, place), place, _text(given["name"], place, "name"))


def _machine(found: Mapping[str, Any], device: Device | None, where: str, name: str, *, usual: int = 0) -> Machine:
    """Return a machine of `usual` devices (1 where 0), unless the file says how many."""
    per_node = _count(found.get("per_node", usual or 1), where, "per_node", _MOST_PER_NODE)
    if "inside" not in found and per_node > 1:
        raise ForetraceError(f"{where}: {per_node} devices per machine need inside:, e.g. 300gbit/2us or nvlink.")
    wiring = _wiring(found, where, per_node)
    inside = Link(name="none", gbit_s=1e6, source="one device")
    if "inside" in found:
        inside = _link(found["inside"], where, "inside", device, "inside", wiring)
    return Machine(name=name, per_node=per_node, inside=inside, device=device.short if device else "", wiring=wiring)


def _cable(given: Any, names: Sequence[str], place: str) -> Cable:
    if not isinstance(given, dict):
        raise ForetraceError(f"{place} is no link; write from:, to: and rate:.")
    _known(given, _LINK, place)
    if lacking := [key for key in ("from", "to", "rate") if key not in given]:
        raise ForetraceError(f"{place} lacks {' and '.join(lacking)}.")
    ends = _text(given["from"], place, "from"), _text(given["to"], place, "to")
    for end in ends:
        if end not in names:
            raise ForetraceError(f"{place}: {end} is no machine and no switch; declare it under nodes: or switches:.")
    if ends[0] == ends[1]:
        raise ForetraceError(f"{place} joins {ends[0]} with itself.")
    count = _count(given.get("count", 1), place, "count", _MOST_PER_NODE)
    link = _link(given["rate"], place, "rate", None, "link")
    return Cable(ends=ends, gbit_s=link.gbit_s * link.efficiency * count, latency_us=link.latency_us)


def _check_joined(cables: tuple[Cable, ...], hosts: Sequence[str], names: Sequence[str], where: str) -> None:
    ends = {end for cable in cables for end in cable.ends}
    for name in names:
        if name not in ends:
            raise ForetraceError(f"{where}: {name} is joined to nothing; give it a link, or remove it.")
    for each in hosts[1:]:
        try:
            route(cables, hosts[0], each)
        except ForetraceError as error:
            raise ForetraceError(f"{where}: {error}") from None


# --- single values --------------------------------------------------------------------------------------------------


def _known(found: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in found:
        if key not in allowed:
            close = near(str(key), allowed)
            meant = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(allowed)}."
            raise ForetraceError(f"{where}: the key {key} is unknown{meant}")


def _number(value: Any, where: str, key: str) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not -sys.float_info.max <= value <= sys.float_info.max:
        raise ForetraceError(f"{where}: {key} is {str(value)[:40]}, which is no number that can be reckoned with.")
    return float(value)


def _count(value: Any, where: str, key: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ForetraceError(f"{where}: {key} is {value!r}; it is a whole number from 1 to {most:,}.")
    return value


def _text(value: Any, where: str, key: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ForetraceError(f"{where}: {key} is {value!r}, which is no name.")
    return str(value).strip()


def _list(value: Any, where: str, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ForetraceError(f"{where}: {key} is {value!r}; it is a list.")
    return value


def _device(found: Mapping[str, Any], where: str) -> Device | None:
    if "device" not in found:
        return None
    try:
        return named(_text(found["device"], where, "device"))
    except ForetraceError as error:
        raise ForetraceError(f"{where}: {error}") from None


def _wiring(found: Mapping[str, Any], where: str, per_node: int) -> Wiring | None:
    """Return a known wiring by name, or a list of [a, b] or [a, b, cables]."""
    if "wiring" not in found:
        return None
    given = found["wiring"]
    if isinstance(given, str):
        if given not in KNOWN:
            raise ForetraceError(f"{where}: wiring {given!r} is unknown; there are {', '.join(KNOWN)}, or list cables.")
        if per_node > KNOWN[given].devices:
            raise ForetraceError(f"{where}: {given} joins {KNOWN[given].devices} devices, not {per_node}.")
        return KNOWN[given]
    cables: dict[tuple[int, int], int] = {}
    for each in _list(given, where, "wiring"):
        whole = isinstance(each, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in each)
        if not whole or len(each) not in (2, 3) or each[0] == each[1]:
            raise ForetraceError(f"{where}: wiring {each!r} is no cable; write [0, 1] or [0, 1, 2] for two of them.")
        a, b, count = sorted(each[:2])[0], sorted(each[:2])[1], each[2] if len(each) == 3 else 1
        if a < 0 or b >= per_node or not 1 <= count <= 64:
            raise ForetraceError(
                f"{where}: wiring {each!r} leads beyond devices 0 to {per_node - 1}, or has no cables."
            )
        cables[a, b] = cables.get((a, b), 0) + count
    if per_node > 16:
        raise ForetraceError(f"{where}: wiring: is for up to 16 devices per machine; larger ones have switches.")
    return Wiring(
        name="wiring of the file",
        devices=per_node,
        cables=tuple((a, b, count) for (a, b), count in sorted(cables.items())),
        source="given",
    )


def _link(value: Any, where: str, key: str, device: Device | None, name: str, wiring: Wiring | None = None) -> Link:
    """Return a rate and latency, or what the device's catalog entry has: nvlink, pcie."""
    text = _text(value, where, key)
    preset = text.lower()
    if preset in _EFFICIENCY:
        if device is None:
            raise ForetraceError(f"{where}: {key}: {text} needs device:, whose links the catalog has; or give a rate.")
        rate = device.pcie_gb_s if preset == "pcie" else device.scaleup_gb_s / 2
        if not rate:
            raise ForetraceError(f"{where}: the catalog has no {preset} rate of {device.short}; give one: 300gbit/2us.")
        figure = "pcie_gb_s" if preset == "pcie" else "scaleup_gb_s"
        title = device.pcie if preset == "pcie" else device.scaleup_link
        efficiency = _EFFICIENCY[preset]
        if wiring is not None and preset == "nvlink":
            efficiency = _CABLE_EFFICIENCY
            rate /= max(sum(count for a, b, count in wiring.cables if device_at in (a, b)) for device_at in range(2))
        return Link(
            name=f"{device.short} {title}",
            gbit_s=8 * rate,
            latency_us=_LATENCY_US[preset],
            efficiency=efficiency,
            source=f"catalog, {device.confirmed.get(figure, 'unconfirmed')}",
        )
    try:
        return parse_link(text, name=f"{name} {text}")
    except ForetraceError as error:
        raise ForetraceError(f"{where}, {key}: {error}") from None


def _usual_network(device: Device | None, per_node: int, where: str) -> Link:
    """Return what a machine of such devices has to others, by the catalog: all its cards together."""
    if device is None or not device.network_gb_s:
        name = device.short if device else "a device that is not named"
        raise ForetraceError(f"{where}: the catalog has no network of {name}; give between: 100gbit/5us.")
    return Link(
        name=f"usual network of {device.short}",
        gbit_s=8 * device.network_gb_s * per_node,
        latency_us=_NETWORK_LATENCY_US,
        efficiency=_NETWORK_EFFICIENCY,
        source=f"catalog, {device.confirmed.get('network_gb_s', 'unconfirmed')}",
    )
