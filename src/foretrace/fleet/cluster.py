"""`ClusterTree`: GPUs as the leaves of a tree of any depth, in ranges: every unit of every level is a run of GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from foretrace import reading
from foretrace.arrays import Mask
from foretrace.errors import ForetraceError
from foretrace.fleet.workload import Int64

MOST_GPUS = 2**24  # a picture of who holds what still fits into memory
MOST_PER_NODE = 4096
_DEFAULT_LEVELS = {
    1: ("node",),
    2: ("rack", "node"),
    3: ("region", "rack", "node"),
    4: ("region", "rack", "node", "nvlink"),
}
_SPEC = re.compile(r"\s*(?:(?P<name>[a-z][a-z0-9_-]*)\s*=\s*)?(?P<count>\d+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterTree:
    """L levels of units above the GPUs, innermost first, the last being the whole cluster (one unit).

    levels: names, e.g. ("node", "rack", "cluster"). starts: per level the first GPU of each unit and, at the end, the
    number of GPUs: (units + 1,) int64. Units of a level lie wholly inside units of the next. gpu_type: (GPUs,) codes
    into `types`; all GPUs of an innermost unit are of one kind. names: per level what the units are called.
    gbit_s: per level the bandwidth that one GPU has towards the others inside a unit of this level, 0 unknown.
    """

    name: str
    levels: tuple[str, ...]
    starts: tuple[Int64, ...]
    gpu_type: Int64
    types: tuple[str, ...]
    names: tuple[tuple[str, ...], ...] = ()
    gbit_s: tuple[float, ...] = ()
    quotas: Mapping[str, int] | None = None  # GPUs that a tenant may hold at once; who is not named has no limit

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return len(self.gpu_type)

    def units(self, level: int) -> int:
        """Return how many units of this level (0 the innermost)."""
        return len(self.starts[level]) - 1

    def unit_of(self, level: int, gpu: int) -> int:
        """Return the unit of this level that holds a GPU."""
        return int(np.searchsorted(self.starts[level], gpu, side="right")) - 1

    def units_of(self, level: int) -> Int64:
        """Return (GPUs,) the unit of this level that holds each."""
        return np.asarray(np.searchsorted(self.starts[level], np.arange(self.gpus), side="right") - 1, np.int64)

    def numbered(self) -> tuple[Int64, Int64, Int64, Int64]:
        """Return all units, innermost level first: first of each level, first GPU, end, unit around (-1 none)."""
        at = np.cumsum([0, *(self.units(level) for level in range(len(self.levels)))], dtype=np.int64)
        lo = np.concatenate([starts[:-1] for starts in self.starts])
        hi = np.concatenate([starts[1:] for starts in self.starts])
        inside = zip(at[1:], self.starts[1:], self.starts[:-1], strict=False)
        parent = [first + np.searchsorted(outer, inner[:-1], side="right") - 1 for first, outer, inner in inside]
        return at, lo, hi, np.append(np.concatenate([np.zeros(0, np.int64), *parent]), -1)

    def counts(self, level: int, gpus: Mask) -> Int64:
        """Return how many of these GPUs, a mask, each unit of a level holds."""
        return np.add.reduceat(gpus, self.starts[level][:-1], dtype=np.int64)

    def tightest(self, able: Mask, level: int, wanted: int) -> int:
        """Return the unit of a level with the fewest of these GPUs, a mask, that are enough: the first, −1 none."""
        have = self.counts(level, able)
        enough = np.flatnonzero(have >= wanted)
        return int(enough[have[enough].argmin()]) if len(enough) else -1

    def packed(self, able: Mask, level: int, unit: int, wanted: int) -> list[int]:
        """Return so many of these GPUs, a mask, of a unit: whole children, most first, the rest where it just fits."""
        chosen: list[int] = []
        lo, hi = self.starts[level][unit : unit + 2].tolist()
        for starts in reversed(self.starts[:level]):
            edges = starts[np.searchsorted(starts, lo) : np.searchsorted(starts, hi) + 1]
            left = np.add.reduceat(able[lo:hi], edges[:-1] - lo, dtype=np.int64)
            while not len(enough := np.flatnonzero(left >= wanted - len(chosen))):
                most = int(left.argmax())
                chosen += (edges[most] + np.flatnonzero(able[edges[most] : edges[most + 1]])).tolist()
                left[most] = 0
            child = enough[left[enough].argmin()]
            lo, hi = edges[child : child + 2].tolist()
        chosen += (lo + np.flatnonzero(able[lo:hi])[: wanted - len(chosen)]).tolist()
        return chosen

    def largest(self) -> Int64:
        """Return (kinds, levels) GPUs of a kind in the unit that has most of them."""
        kinds, levels = range(len(self.types)), range(len(self.levels))
        return np.array([[self.counts(level, self.gpu_type == kind).max() for level in levels] for kind in kinds])

    def around(self, gpus: Sequence[int] | Int64) -> int:
        """Return the smallest level that has all these GPUs in one unit."""
        first, last = int(np.min(gpus)), int(np.max(gpus))
        return next(i for i in range(len(self.levels)) if self.unit_of(i, first) == self.unit_of(i, last))

    def usable(self, wanted: str) -> list[bool]:
        """Return which kinds of GPU a job may use that names these, joined by "|"; all where it names none."""
        kinds = {each.strip().lower() for each in wanted.split("|") if each.strip()}
        return [not kinds or kind.lower() in kinds for kind in self.types]

    def level(self, name: str) -> int:
        """Return the position of a level by name; raises ForetraceError where the cluster has none of that name."""
        if name not in self.levels:
            raise ForetraceError(f"cluster {self.name!r} has no level {name!r}; it has {', '.join(self.levels)}.")
        return self.levels.index(name)

    def unit_name(self, level: int, unit: int) -> str:
        """Return what a unit is called: by the source, or level and number."""
        if self.names and self.names[level]:
            return self.names[level][unit]
        return f"{self.levels[level]}{unit}"

    @property
    def machine_level(self) -> int:
        """Position of the level called node (islands of NVLink lie below); 0, the innermost, where none is."""
        return self.levels.index("node") if "node" in self.levels else 0

    @property
    def per_node(self) -> int:
        """GPUs of the largest innermost unit."""
        return int(np.diff(self.starts[0]).max())

    @classmethod
    def of(
        cls,
        counts: Sequence[int],
        *,
        levels: Sequence[str] | None = None,
        gpu_type: str = "",
        name: str = "",
        gbit_s: Sequence[float] = (),
    ) -> ClusterTree:
        """Return units alike everywhere: `counts` outermost first, GPUs last: (2, 4, 8) is 64 GPUs."""
        if any(count < 1 for count in counts):
            raise ForetraceError(f"a cluster needs at least one of everything, not {'x'.join(map(str, counts))}.")
        depth = len(counts) - 1
        named = tuple(levels or _DEFAULT_LEVELS.get(depth, ()))
        if depth and len(named) != depth:
            raise ForetraceError(f"name the {depth} levels of a cluster of that depth, e.g. pod=2,rack=4,node=8,gpu=8.")
        total = prod(counts)
        _affordable(total)
        starts, size = [], 1
        for count in reversed(counts):
            size *= count
            starts.append(np.arange(0, total + 1, size, dtype=np.int64))
        return cls(
            name=name or "x".join(map(str, counts)),
            levels=(*reversed(named), "cluster"),
            starts=tuple(starts),
            gpu_type=np.zeros(total, np.int64),
            types=(gpu_type,),
            gbit_s=tuple(gbit_s),
        )

    def bigger(self, more: int) -> ClusterTree:
        """Return it with `more` outermost units like the last one (racks where that level is racks)."""
        if more < 1:
            raise ForetraceError(f"a cluster grows by one unit or more, not by {more}.")
        _affordable(self.gpus + more)
        top = len(self.levels) - 2
        if top < 0:
            raise ForetraceError(
                f"cluster {self.name!r} has no units that could be added; describe it as 1x{self.gpus}."
            )
        first = int(self.starts[top][-2])
        starts = (*(each[each >= first] - first for each in self.starts[:-1]), np.array([0, self.gpus - first]))
        last = replace(self, starts=starts, gpu_type=self.gpu_type[first:], names=())
        made = side_by_side((self, *[last] * more), name=f"{self.name} + {more} {self.levels[top]}")
        return replace(made, quotas=self.quotas)


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One machine: its name, GPUs (0 leaves it out), their kind, and the units that hold it, outermost first."""

    name: str
    gpus: int
    gpu_type: str = ""
    above: tuple[str, ...] = ()


def tree(where: str, nodes: Sequence[ClusterNode], levels: Sequence[str], *, name: str) -> ClusterTree:
    """Return nodes as innermost units, `levels` (outermost first) above them, the whole cluster last.

    Units keep the order in which they first appear, and nodes theirs within a unit. Raises ForetraceError where no
    node has a GPU, a node stands twice or has another depth than `levels`.
    """
    kept = [node for node in nodes if node.gpus]
    if not kept:
        raise ForetraceError(f"{where}: no node has a GPU; name a description of nodes with GPUs.")
    seen: set[str] = set()
    rank: dict[tuple[str, ...], int] = {}
    for node in kept:
        if node.name in seen:
            raise ForetraceError(f"{where}: node {node.name!r} stands twice; name every node once.")
        seen.add(node.name)
        if len(node.above) != len(levels):
            raise ForetraceError(f"{where}: node {node.name!r} lies at another depth than others; correct its units.")
        if node.gpus > MOST_PER_NODE:
            raise ForetraceError(f"{where}: node {node.name!r} cannot have {node.gpus:,} GPUs; correct their number.")
        for depth in range(1, len(levels) + 1):
            rank.setdefault(node.above[:depth], len(rank))

    def place(node: ClusterNode) -> tuple[int, ...]:
        return tuple(rank[node.above[:depth]] for depth in range(1, len(levels) + 1))

    kept.sort(key=place)  # stable
    counts = np.array([node.gpus for node in kept], np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    starts, names = [ends], [tuple(node.name for node in kept)]
    for depth in range(len(levels), 0, -1):
        firsts = [at for at in range(len(kept)) if at == 0 or kept[at].above[:depth] != kept[at - 1].above[:depth]]
        starts.append(np.append(ends[firsts], ends[-1]).astype(np.int64))
        names.append(tuple(kept[at].above[depth - 1] for at in firsts))
    kinds = tuple(dict.fromkeys(node.gpu_type for node in kept))
    codes = np.array([kinds.index(node.gpu_type) for node in kept], np.int64)
    return ClusterTree(
        name=name,
        levels=("node", *reversed(levels), "cluster"),
        starts=(*starts, np.array([0, int(ends[-1])], np.int64)),
        gpu_type=np.repeat(codes, counts),
        types=kinds,
        names=(*names, ()),
    )


def parse_cluster(text: str) -> ClusterTree:
    """Return a cluster from what a user writes.

    `2x4x8` (racks x nodes x GPUs; `4x8` nodes x GPUs; `64` one unit), `rack=2,node=4,gpu=8`, either with `@v100`, kinds
    side by side as `4x8@v100+2x4@k80`, or the path of a YAML file (`load_cluster`). Raises ForetraceError.
    """
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        return load_cluster(path)
    parts = [_part(each, text) for each in text.split("+")]
    return parts[0] if len(parts) == 1 else side_by_side(parts, name=text)


def _affordable(gpus: int) -> None:
    if gpus > MOST_GPUS:
        raise ForetraceError(f"a cluster of {gpus:,} GPUs is too large; {MOST_GPUS:,} are the most that can be played.")


def _part(text: str, whole: str) -> ClusterTree:
    body, at, kind = text.partition("@")
    pieces = [_SPEC.fullmatch(each) for each in re.split(r"[x×,]", body)]
    if not body or any(piece is None for piece in pieces) or (at and not kind.strip()):
        raise ForetraceError(
            f"cannot read the cluster {whole!r}; write racks x nodes x GPUs such as 2x4x8, or rack=2,node=4,gpu=8, "
            "each with @v100 for the kind, or name a .yaml file."
        )
    found = [piece for piece in pieces if piece is not None]
    names = [piece["name"] for piece in found]
    levels = None
    if any(names):
        if not all(names) or names[-1] not in ("gpu", "gpus"):
            raise ForetraceError(f"cluster {whole!r}: name every level and end with gpu=, e.g. rack=2,node=4,gpu=8.")
        levels = names[:-1]
        if len(set(levels)) < len(levels):
            raise ForetraceError(f"cluster {whole!r} names a level twice; give each its own name.")
    return ClusterTree.of(
        [int(piece["count"]) for piece in found], levels=levels, gpu_type=kind.strip(), name=text.strip()
    )


def side_by_side(parts: Sequence[ClusterTree], *, name: str) -> ClusterTree:
    """Return one cluster of several, which must have the same levels; raises ForetraceError where they do not."""
    first = parts[0]
    if any(part.levels != first.levels for part in parts):
        raise ForetraceError(f"cluster {name!r}: its parts have different levels; write each with the same depth.")
    kinds = tuple(dict.fromkeys(kind for part in parts for kind in part.types))
    shift = np.concatenate([[0], np.cumsum([part.gpus for part in parts])])
    starts = []
    for level in range(len(first.levels) - 1):
        runs = [part.starts[level][:-1] + shift[i] for i, part in enumerate(parts)]
        starts.append(np.concatenate([*runs, [shift[-1]]]).astype(np.int64))
    codes = [np.array([kinds.index(kind) for kind in part.types], np.int64)[part.gpu_type] for part in parts]
    return ClusterTree(
        name=name,
        levels=first.levels,
        starts=(*starts, np.array([0, int(shift[-1])], np.int64)),
        gpu_type=np.concatenate(codes),
        types=kinds,
        gbit_s=first.gbit_s,
    )


_Count = Annotated[int, msgspec.Meta(gt=0)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e300)]


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    gpus: _Count
    count: list[_Count] | _Count
    type: str | int = ""


class _ClusterFile(msgspec.Struct, forbid_unknown_fields=True):
    units: Annotated[list[_Part], msgspec.Meta(min_length=1)]
    levels: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("node",)
    gbit_s: dict[str, _Rate] = {}
    quotas: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = {}
    name: str | int = ""


def load_cluster(path: Path) -> ClusterTree:
    """Read a cluster from YAML: `levels` (outermost first), `units` (a list of parts, each `count` per level, `gpus`,
    `type`), `gbit_s` by level name, `quotas` by tenant. Raises ForetraceError naming the key that cannot be read.
    """
    help_ = "write levels: [rack, node], units: [{count: [2, 4], gpus: 8, type: v100}]"
    try:
        said = msgspec.convert(reading.parse_yaml(reading.read_text(path), str(path)), _ClusterFile)
    except msgspec.ValidationError as error:
        raise ForetraceError(f"{path} describes no cluster ({error}); {help_}.") from None
    if set(said.gbit_s) - {*said.levels, "cluster"}:
        raise ForetraceError(f"{path}: gbit_s names a level that is not among {', '.join(said.levels)}, cluster.")
    parts = []
    for at, unit in enumerate(said.units):
        count = unit.count if isinstance(unit.count, list) else [unit.count]
        if len(count) != len(said.levels):
            raise ForetraceError(f"{path}: units[{at}] needs count (one whole number per level) and gpus; {help_}.")
        parts.append(ClusterTree.of([*count, unit.gpus], levels=said.levels, gpu_type=str(unit.type)))
    name = str(said.name or path.stem)
    made = replace(parts[0], name=name) if len(parts) == 1 else side_by_side(parts, name=name)
    rates = tuple(said.gbit_s.get(level, 0.0) for level in made.levels) if said.gbit_s else ()
    return replace(made, gbit_s=rates, quotas=said.quotas or None)
