"""`PlacementProblem`: operators with costs, to be shared out over accelerators and CPUs; what a placement costs.

The model is that of Tarnawski et al. (NeurIPS 2020, section 3). An accelerator's load is the time of its operators
plus the transfer of every output that crosses the boundary of its set, once per device and direction; a CPU's load is
the time of its operators alone. The largest load is the time per sample of a pipeline that is kept full.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.model.readers.sources import first_bytes
from foretrace.reading import parse_json, read_bytes

ROUNDING = 1e-9  # relative: loads are sums of some hundred numbers


@dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """One device of a placement and what it runs."""

    kind: str  # accelerator or cpu
    nodes: tuple[int, ...]  # rows of the problem
    load: float
    memory: float  # bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementProblem:
    """n operators, their edges, and the devices. Times in one unit, that of the file or seconds."""

    name: str
    ids: tuple[int, ...]  # as the file counts them, or rows
    labels: tuple[str, ...]  # what each is, for people
    accelerator_time: Float64  # (n,), inf where no accelerator can run it
    accelerator_range: tuple[Float64, Float64] | None = None  # (n,) each: what it may take; None where times are given
    host_time: Float64 | None = None  # (n,) that a host needs to launch them; None where it is not known
    cpu_time: Float64  # (n,)
    nbytes: Float64  # (n,) of memory on an accelerator; all 0 where the source says nothing of sizes
    saved: Float64 | None = None  # (n,) of these, what a forward pass keeps, for as many batches as accelerators
    transfer: Float64  # (n,) to move its output between accelerator and host
    backward: npt.NDArray[np.bool_]  # (n,)
    colour: Int64  # (n,), same number, same device
    edges: Int64  # (m, 2), rows from and to
    accelerators: int
    cpus: int
    memory_limit: float  # bytes of one accelerator

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Distinct successors of every row."""
        found: list[dict[int, None]] = [{} for _ in self.ids]
        for source, target in self.edges.tolist():
            found[source][target] = None
        return tuple(map(tuple, found))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Rows in topological order. Raises ForetraceError naming an operator on a cycle."""
        found = topological(self.successors)
        if len(found) < len(self):
            at = min(set(range(len(self))).difference(found))
            raise ForetraceError(
                f"{self.name}: the operators wait for each other in a circle that node {self.ids[at]} is on or behind; "
                "leave out an edge."
            )
        return tuple(found)

    def changed(
        self, *, devices: int | None = None, memory_limit: float | None = None, progress: object = None, **others: Any
    ) -> PlacementProblem:
        """Return the same operators on other accelerators; None leaves what there is.

        `others` are of models. Raises ForetraceError for one that is given.
        """
        usual = {"training": True, "size": "full"}
        if given := [name for name, value in others.items() if (value or name in usual) and value != usual.get(name)]:
            asked = {"training": "inference"}.get(given[0], given[0])
            raise ForetraceError(f"{self.name} has its operators' times, so `{asked}=` means nothing; leave it out.")
        return replace(
            self,
            accelerators=self.accelerators if devices is None else devices,
            memory_limit=self.memory_limit if memory_limit is None else memory_limit,
        )

    def on(self, accelerators: int) -> PlacementProblem:
        """Return the same operators on so many accelerators, with as many batches of a model on their way."""
        more = 0.0 if self.saved is None else self.saved * (accelerators / self.accelerators - 1)
        return replace(self, accelerators=accelerators, nbytes=self.nbytes + more)

    def ends(self) -> tuple[PlacementProblem, ...]:
        """Return the problem with every operator as fast as it may be, and as slow."""
        return tuple(replace(self, accelerator_time=end) for end in self.accelerator_range or ())

    def device(self, kind: str, rows: Iterable[int]) -> DeviceLoad:
        """Return a device that runs these rows, with its load and memory; its load is inf where it cannot."""
        chosen = sorted(rows)
        memory = float(self.nbytes[chosen].sum())
        if kind == "cpu":
            return DeviceLoad(kind=kind, nodes=tuple(chosen), load=float(self.cpu_time[chosen].sum()), memory=memory)
        inside = np.zeros(len(self), dtype=np.bool_)
        inside[chosen] = True
        crossing = inside[self.edges[:, 0]] != inside[self.edges[:, 1]]
        moved = np.unique(self.edges[crossing, 0])
        load = float(self.accelerator_time[chosen].sum() + self.transfer[moved].sum())
        return DeviceLoad(
            kind=kind, nodes=tuple(chosen), load=load if memory <= self.memory_limit else inf, memory=memory
        )

    def check(self, devices: Sequence[DeviceLoad]) -> float:
        """Return the largest load of a placement. Raises ForetraceError where it is none of this problem."""
        kinds = Counter(each.kind for each in devices)
        for kind, most in (("accelerator", self.accelerators), ("cpu", self.cpus)):
            if kinds[kind] > most:
                raise ForetraceError(f"a placement has {kinds[kind]} devices of kind {kind}, and there are {most}.")
        placed = np.full(len(self), -1)
        for number, each in enumerate(devices):
            if (placed[list(each.nodes)] >= 0).any():
                raise ForetraceError(f"device {number} of the placement runs what another one runs.")
            placed[list(each.nodes)] = number
        if (placed < 0).any():
            raise ForetraceError(f"the placement leaves out node {self.ids[int(np.argmin(placed))]}.")
        pairs = np.unique(np.stack([self.colour, placed]), axis=1)
        if len(np.unique(self.colour)) < pairs.shape[1]:
            raise ForetraceError("the placement tears nodes apart that must be on one device.")
        return max(self.device(each.kind, each.nodes).load for each in devices)


def topological(after: Sequence[Iterable[int]], *, deep: bool = False) -> list[int]:
    """Return nodes behind those before them, breadth or depth first; without those on a circle, or behind one."""
    waiting = Counter(chain.from_iterable(after))
    ready = deque(node for node in range(len(after)) if not waiting[node])
    found = []
    while ready:
        found.append(ready.pop() if deep else ready.popleft())
        for each in after[found[-1]]:
            waiting[each] -= 1
            if not waiting[each]:
                ready.append(each)
    return found


Figure = Annotated[float, msgspec.Meta(ge=0, lt=1e100)]  # so that sums stay finite


class _Node(msgspec.Struct, kw_only=True):
    id: int
    name: str = ""
    cpu_latency: Figure = msgspec.field(name="cpuLatency")
    accelerator_latency: float = msgspec.field(name="fpgaLatency")  # anything where it is not supported
    size: Figure = 0.0
    supported: bool = msgspec.field(name="supportedOnFpga", default=True)
    backward: bool = msgspec.field(name="isBackwardNode", default=False)
    colour: int | None = msgspec.field(name="colorClass", default=None)


class _Edge(msgspec.Struct, kw_only=True):
    source: int = msgspec.field(name="sourceId")
    target: int = msgspec.field(name="destId")
    cost: Figure


class _File(msgspec.Struct, kw_only=True):
    nodes: list[_Node]
    edges: list[_Edge]
    memory_limit: Annotated[float, msgspec.Meta(gt=0, lt=1e100)] = msgspec.field(name="maxSizePerFPGA")
    accelerators: int = msgspec.field(name="maxFPGAs")
    cpus: int = msgspec.field(name="maxCPUs")


def is_problem(path: Path) -> bool:
    """Return whether a file begins as a placement problem does."""
    begin = first_bytes(path) if path.is_file() else b""
    return b'"maxFPGAs"' in begin or b'"fpgaLatency"' in begin


def load(path: Path) -> PlacementProblem:
    """Read a problem as dnn-partitioning writes it (JSON). Raises ForetraceError with the file and the place."""
    try:
        found = msgspec.convert(parse_json(read_bytes(path), str(path)), _File, strict=False)
    except msgspec.ValidationError as error:
        raise ForetraceError(f"{path} must be a placement problem ({error}); see docs/plans.md.") from None
    row = {each.id: at for at, each in enumerate(found.nodes)}
    if not found.nodes or len(row) < len(found.nodes):
        what = "has no nodes" if not found.nodes else "gives an id to two nodes"
        raise ForetraceError(f"{path} {what}; give every operator once, with an id of its own.")
    colours = {each.colour for each in found.nodes if each.colour is not None}
    number = {colour: at for at, colour in enumerate(sorted(colours))}
    transfer: dict[int, float] = {}
    edges = []
    for each in found.edges:
        for end in (each.source, each.target):
            if end not in row:
                raise ForetraceError(f"{path}: an edge names node {end}, which is not there; correct the edge.")
        if transfer.setdefault(row[each.source], each.cost) != each.cost:
            raise ForetraceError(f"{path}: edges of node {each.source} must have one cost, that of its output.")
        edges.append((row[each.source], row[each.target]))
    columns = {
        "accelerator_time": [each.accelerator_latency if each.supported else inf for each in found.nodes],
        "cpu_time": [each.cpu_latency for each in found.nodes],
        "nbytes": [each.size for each in found.nodes],
        "transfer": [transfer.get(at, 0.0) for at in range(len(row))],
    }
    arrays: dict[str, Any] = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
    if wrong := [each.id for each in found.nodes if each.supported and not 0 <= each.accelerator_latency < 1e100]:
        raise ForetraceError(f"{path}: fpgaLatency of node {wrong[0]} must be finite and 0 or more; correct it.")
    return PlacementProblem(
        name=path.name.removesuffix(".gz").removesuffix(".json"),
        ids=tuple(row),
        labels=tuple(each.name or f"node {each.id}" for each in found.nodes),
        backward=np.array([each.backward for each in found.nodes]),
        colour=np.array(
            [len(number) + at if each.colour is None else number[each.colour] for at, each in enumerate(found.nodes)],
            dtype=np.int64,
        ),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        accelerators=found.accelerators,
        cpus=found.cpus,
        memory_limit=found.memory_limit,
        **arrays,
    )
