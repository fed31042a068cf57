"""NCCL's own model of its collectives, by which it chooses algorithm and protocol (`src/graph/tuning.cc`, 2.2x).

Time = latency + bytes / bandwidth for every algorithm (ring, tree, NVLS) and protocol (LL, LL128, Simple); the quickest
is taken. Constants are NCCL's, in its units (microseconds, GB/s). It exists to choose, not to predict: published
comparisons find its bandwidths from 15 % below to 67 % above what is measured (NVIDIA/nccl #1154, #2343), which is the
interval given here. A table (`foretrace calibrate network`, nccl-tests) is better wherever there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2

from foretrace.cost.network.network import NOTHING, CollectiveKind, Cost, Network, asked, none_else, whole
from foretrace.errors import ForetraceError
from foretrace.hardware.cluster import parse_link
from foretrace.hardware.devices import Device, named
from foretrace.hardware.wiring import HYBRID_CUBE_MESH, Wiring

PROTOCOLS = ("LL", "LL128", "Simple")
_BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_HOP_US: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "pci": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "net": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
_NVLS_US = {"nvlink": 25.0, "pci": 0.0, "net": 0.0}
# By generation; the tables by number of machines: 1, 2, 4 and more.
_LL_MOST = {"volta": 39.0, "ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
_LL_MOST_NET = {"intel": (39.0, 20.4), "amd": (22.5, 19.0)}
_RING_LL128 = {"volta": 20.0, "ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}
_TREE_LL128 = {
    "volta": (20.0, 20.0, 20.0),
    "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}
_TREE_SIMPLE = {
    "volta": (26.5, 18.5, 10.0),
    "ampere": (24.0, 23.6, 17.8),
    "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}
_NVLS_SHARE = {"hopper": 0.85, "blackwell": 0.74}
_NVLS_FROM = {"hopper": 5, "blackwell": 6}  # ranks of a machine from which NCCL was seen to choose it
_TREE_BY_SIZE = {  # share of the bandwidth at 64 bytes x 2^i
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9,
        0.9,
    ),
}  # fmt: skip
_LOW, _HIGH = 1 / 1.18, 1.67  # of a time: bandwidths were seen 15 % (of the measured) too low to 67 % too high

# Channels and GB/s of each, as NCCL's search finds them inside a machine with all its devices.
_CHANNELS: Mapping[str, tuple[int, float]] = {
    "A100-SXM4-40GB": (12, 20.0),
    "A100-SXM4-80GB": (12, 20.0),
    "H100-SXM5-80GB": (12, 30.0),
    "H200-SXM-141GB": (12, 30.0),
    "B200-SXM": (16, 40.0),
    "B300-SXM": (16, 40.0),
    "GB200": (16, 40.0),
}
_CABLE_GB_S = {"volta": 20.0, "ampere": 20.0, "hopper": 20.6, "blackwell": 40.1}
_PCI_GB_S = 12.0  # of generation 3 with 16 lanes; each generation doubles it
_MOVED = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """What NCCL prints for one algorithm and protocol: latency in us and bytes / time in GB/s; 0 where not offered."""

    algorithm: str
    protocol: str
    latency_us: float
    gb_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    """One communicator: ranks on machines, and the channels that the search found. Rates in GB/s per channel."""

    generation: str
    ranks: int
    nodes: int = 1
    channels: int
    intra_gb_s: float
    inter_gb_s: float = 0.0
    tree_intra_gb_s: float = 0.0  # where the search found other rates for trees; 0: as the ring's
    link: str = "nvlink"  # inside a machine: nvlink or pci
    cpu: str = "intel"
    nvls: bool = False

    @property
    def per_node(self) -> int:
        """Ranks of one machine."""
        return -(-self.ranks // self.nodes)

    @property
    def row(self) -> int:
        """Column of the tables by machines: 1, 2, more."""
        return min(self.nodes, 3) - 1


def bandwidths(kind: CollectiveKind, comm: Comm) -> tuple[Bandwidth, ...]:
    """Return latency and bandwidth of every algorithm and protocol, as `NCCL_DEBUG_SUBSYS=TUNING` prints them."""
    found = [_ring(kind, comm, at) for at in range(3)]
    if kind == CollectiveKind.ALL_REDUCE:
        found += [_tree(comm, at) for at in range(3)]
        if comm.nvls and comm.nodes == 1 and comm.ranks >= _NVLS_FROM.get(comm.generation, 1 << 30):
            found.append(_nvls(comm))
    return tuple(found)


def seconds(kind: CollectiveKind, nbytes: float, comm: Comm) -> tuple[float, Bandwidth]:
    """Return the time of a collective, and the algorithm and protocol that give it."""
    return min(
        ((_time_us(kind, nbytes, comm, each) * 1e-6, each) for each in bandwidths(kind, comm) if each.gb_s),
        key=lambda pair: pair[0],
    )


def _time_us(kind: CollectiveKind, nbytes: float, comm: Comm, way: Bandwidth) -> float:
    rate, latency = way.gb_s, way.latency_us
    if way.algorithm == "tree":
        at = int(log2(nbytes / 64)) if nbytes >= 64 else 0
        factors = _TREE_BY_SIZE[way.protocol]
        rate *= factors[at] if at < len(factors) else 1.0
    plateau = kind == CollectiveKind.ALL_REDUCE and nbytes / (comm.channels * comm.ranks) >= 64
    if plateau and way.algorithm == "ring" and way.protocol == "Simple" and comm.nodes > 1:
        latency *= 1.9 if comm.generation == "volta" else 1.4
    return latency + nbytes / (1000 * rate)


def _ring(kind: CollectiveKind, comm: Comm, at: int) -> Bandwidth:
    n, nodes = comm.ranks, comm.nodes
    bus = comm.channels * (comm.intra_gb_s if nodes <= 2 else comm.inter_gb_s)
    if at == 0:
        bus = min(_most_ll(comm), 0.5 * bus)
    elif at == 1:
        bus = min(0.92 * bus, comm.channels * _RING_LL128[comm.generation]) if comm.link == "nvlink" else 0.0
    inter = _HOP_US["net"]["tree" if comm.per_node == 1 else "ring"][at]
    base = _BASE_US["ring"][at]
    if kind in _MOVED:
        hop = _HOP_US["net" if nodes > 1 else comm.link]["ring"][at]
        return Bandwidth(algorithm="ring", protocol=PROTOCOLS[at], latency_us=base + hop, gb_s=bus)
    rounds = 2 if kind == CollectiveKind.ALL_REDUCE else 1
    steps, crossing = rounds * (n - 1), rounds * (nodes - 1)
    overhead = (2.0 if comm.cpu == "amd" else 1.0) * (3 if at == 2 else 1) if nodes > 1 else 0.0
    hop = max(_HOP_US[comm.link]["ring"][at], overhead)
    latency = base + (steps - crossing) * hop + crossing * inter
    return Bandwidth(algorithm="ring", protocol=PROTOCOLS[at], latency_us=latency, gb_s=bus * n / steps)


def _tree(comm: Comm, at: int) -> Bandwidth:
    intra = comm.tree_intra_gb_s or comm.intra_gb_s
    bus = comm.channels * (intra if comm.nodes <= 2 else comm.inter_gb_s)
    bus = min(0.92 * bus, comm.channels * _TREE_SIMPLE[comm.generation][comm.row])
    if at == 0:
        bus = min(bus / 3.8, _most_ll(comm))
    elif at == 1:
        share = 7 / 9 if comm.nodes == 1 else 120 / 128
        most = comm.channels * _TREE_LL128[comm.generation][comm.row]
        bus = min(bus * share, most) if comm.link == "nvlink" else 0.0
    intra_us = _HOP_US[comm.link]["tree"][at]
    inter_us = _HOP_US["net"]["tree"][at]
    latency = _BASE_US["tree"][at] + 2 * ((comm.per_node - 1) * intra_us + log2(comm.nodes) * inter_us)
    return Bandwidth(algorithm="tree", protocol=PROTOCOLS[at], latency_us=latency, gb_s=0.85 * 0.5 * bus)


def _nvls(comm: Comm) -> Bandwidth:
    """Return in-switch reduction: one channel per rank, whose own part needs no link."""
    n = comm.ranks
    bus = comm.channels * comm.intra_gb_s * _NVLS_SHARE[comm.generation] * (n - 1) / n * 2
    return Bandwidth(algorithm="NVLS", protocol="Simple", latency_us=_NVLS_US["nvlink"], gb_s=bus * n / (2 * (n - 1)))


def _most_ll(comm: Comm) -> float:
    if comm.nodes == 1:
        return _LL_MOST[comm.generation]
    return _LL_MOST_NET[comm.cpu][comm.row - 1]


@dataclass(frozen=True, kw_only=True)
class NcclNetwork(Network):
    """NCCL's model as a network. `comm` is that of all workers; fewer fill the first machines."""

    comm: Comm
    per_node: int
    name: str = ""
    in_flight: int = 1
    wiring: Wiring | None = None
    nics: int = 1  # network cards of a machine
    between_gb_s: float = 0.0  # of all of them

    @property
    def workers(self) -> int:  # type: ignore[override]  # worked out, not stored
        return self.comm.ranks

    def cost(self, kind: CollectiveKind, nbytes: float, *, workers: int | None = None) -> Cost:
        """Return the time of one collective, with the range by which NCCL's model is known to be off."""
        n = asked(self, nbytes, workers)
        if n < 2 or not nbytes:
            return NOTHING
        comm = self.of(n)
        if kind in (CollectiveKind.SEND, CollectiveKind.ALL_TO_ALL):
            return self._direct(kind, nbytes, comm)
        time_s, way = seconds(kind, nbytes, comm)
        why = f"{kind} of {n} ranks, {way.algorithm} {way.protocol} by NCCL's tuning model ({self.name})"
        return Cost(seconds=time_s, low_s=time_s * _LOW, high_s=time_s * _HIGH, why=why)

    def of(self, ranks: int) -> Comm:
        """Return the communicator of the first so many ranks."""
        nodes = -(-ranks // self.per_node)
        comm = replace(self.comm, ranks=ranks, nodes=nodes)
        if self.wiring is not None:
            rings = self.wiring.rings(min(ranks, self.per_node))
            comm = replace(comm, channels=max(rings, 1))
        if nodes == 1:
            return comm
        # A ring enters and leaves a machine once per channel; two trees use the cards in both directions.
        card = self.between_gb_s / comm.channels
        ring = min(comm.intra_gb_s, card)
        return replace(comm, intra_gb_s=ring, inter_gb_s=ring, tree_intra_gb_s=min(comm.intra_gb_s, 2 * card))

    def _direct(self, kind: CollectiveKind, nbytes: float, comm: Comm) -> Cost:
        """Return the cost of a transfer point to point, which NCCL's model leaves out: its hop latency and its link,
        Simple.
        """
        n, per_node = comm.ranks, comm.per_node
        inside = self.comm.channels * self.comm.intra_gb_s
        if kind == CollectiveKind.SEND and self.wiring is not None:
            inside = self.comm.intra_gb_s  # one cable
        hop_us = _HOP_US[comm.link if comm.nodes == 1 else "net"]["ring"][2]
        if kind == CollectiveKind.SEND:
            rate, moved = (inside if comm.nodes == 1 else self.between_gb_s / self.nics), nbytes
        elif comm.nodes == 1:
            rate, moved = inside, nbytes * (n - 1) / n
        else:
            rate, moved = self.between_gb_s, nbytes * per_node * (n - per_node) / n
        time_s = (_BASE_US["ring"][2] + hop_us) * 1e-6 + moved / (rate * 1e9)
        why = f"{kind} of {n} ranks over {rate:g} GB/s ({self.name}); NCCL's model has no point-to-point transfers"
        return Cost(seconds=time_s, low_s=time_s * _LOW, high_s=time_s * _HIGH, why=why)


def nccl_network(device: str, workers: int, options: dict[str, str], *, in_flight: int = 1) -> NcclNetwork:
    """Return NCCL's model of a machine type. Raises ForetraceError.

    Options: `nodes` (1, or as many as eight devices per machine need), `per-node`, `nics` and `nic` (a rate, per card),
    `cpu` (intel or amd), `nvls` (yes or no).
    """
    found = named(device)
    generation = _generation(found)
    nodes = whole(options, "nodes", 0)
    per_node = whole(options, "per-node", 0) or (-(-workers // nodes) if nodes else min(workers, 8))
    nodes = nodes or -(-workers // per_node)
    if nodes * per_node < workers:
        raise ForetraceError(f"nccl:{device}: {nodes} × {per_node} devices are fewer than {workers} workers.")
    nic, nics = options.pop("nic", ""), whole(options, "nics", 1)
    cpu, nvls = options.pop("cpu", "intel"), options.pop("nvls", "yes")
    none_else(options, f"nccl:{device}", "nodes, per-node, nics, nic, cpu, nvls")
    if cpu not in _LL_MOST_NET or nvls not in ("yes", "no"):
        raise ForetraceError(f"nccl:{device}: cpu is intel or amd, nvls is yes or no.")
    if nodes > 1 and not nic:
        raise ForetraceError(f"nccl:{device}: {nodes} machines need nic=RATE, e.g. nic=400gbit, and nics= per machine.")
    wiring = HYBRID_CUBE_MESH if found.short == "V100-SXM2" and 2 <= per_node <= 8 else None
    nvlink = found.short in _CHANNELS or wiring or found.scaleup_link.startswith("NVLink")
    if found.scaleup_link.endswith("bridge") and per_node > 2:  # it joins two devices
        nvlink = False
    link = "nvlink" if nvlink else "pci"
    if found.short in _CHANNELS:
        channels, rate = _CHANNELS[found.short]
    elif link == "nvlink":
        cables = found.scaleup_gb_s / 2 / (25.0 if generation in ("volta", "ampere", "hopper") else 50.0)
        channels, rate = max(round(cables), 1), _CABLE_GB_S[generation]
    else:
        channels, rate = 1, _PCI_GB_S * found.pcie_gb_s / 16.0
    return NcclNetwork(
        comm=Comm(
            generation=generation,
            ranks=workers,
            nodes=nodes,
            channels=channels,
            intra_gb_s=rate,
            link=link,
            cpu=cpu,
            nvls=nvls == "yes" and generation in _NVLS_SHARE and link == "nvlink",
        ),
        per_node=per_node,
        name=f"nccl:{found.short}",
        in_flight=in_flight,
        wiring=wiring,
        nics=nics,
        between_gb_s=nics * parse_link(nic).bytes_per_s / 1e9 if nic else 0.0,
    )


def _generation(device: Device) -> str:
    words = {"Volta": "volta", "Turing": "volta", "Ampere": "ampere", "Ada": "ampere", "Hopper": "hopper",
             "Blackwell": "blackwell"}  # fmt: skip
    found = next((name for word, name in words.items() if device.arch.startswith(word)), "")
    if device.vendor != "NVIDIA" or not found:
        raise ForetraceError(
            f"NCCL's model has no constants for {device.short}; choose a device of the Volta to Blackwell generations, "
            "or measure a table."
        )
    return found
