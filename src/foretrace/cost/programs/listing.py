"""Cycles that machine code takes by itself, all data in the first cache: counted in its listing, nothing is run.

Every block costs what its busiest resource needs (instructions issued, vector units, loads, stores, divider); an
innermost loop at least what its chain of dependent instructions needs, found by letting values flow through a few
iterations. How often a block runs follows from the program's loops, whose names LLVM keeps in the listing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

COUNTS = (
    "instructions", "multiply", "add", "shuffle", "vector", "load", "store", "integer", "divide", "wide", "blocks",
)  # fmt: skip
CYCLES = ("throughput", "long_chain", "short_chain", "window", "exits")
"""What a listing costs: at the busiest resource, waiting for chains in long and in short loops, and for values of an
iteration that is so long that the next one is not in sight; loops left that a branch predictor does not count to."""

_WINDOW = 256  # instructions in flight
_LONG = 320  # instructions of a whole loop: a shorter one overlaps with what follows it
_COUNTED_TRIPS = 24  # as far as a branch predictor counts
_KINDS = {
    "multiply": r"v?(mul|fn?m(add|sub)\d*)[sp][sd]",
    "divide": r"v?(div|sqrt)[sp][sd]",
    "add": r"v?(add|sub|max|min|cmp\w*|ucomi|comi)[sp][sd]|v?cvt\w+|v?round[sp][sd]",
    "shuffle": r"v?(p?shuf\w*|unpck\w+|perm\w+|p?broadcast\w+|p?insr?\w*|p?extr\w*|p?blend\w*"
    r"|mov(ddup|s[lh]dup|lhps|hlps)|punpck\w+|palignr|p?gather\w+)",
    "vector": r"v?(xor|and|andn|or)p[sd]|vp?\w+|p(add|sub|sll|srl|xor|and|or|cmp)\w*"
    r"|v?mov[auhl]p[sd]|v?movs[sd]|v?movdq\w+",
}
_KIND = {name: re.compile(f"({pattern})$") for name, pattern in _KINDS.items()}
_LATENCY = {"multiply": 4, "add": 3, "shuffle": 1, "vector": 1, "integer": 1, "divide": 12}
_LOAD, _FORWARD = 6, 8  # cycles from a load, and from a store to the load of it
_MOVES = re.compile(r"(v?mov[auhl]p[sd]|v?movs[sd]|v?movdq\w+|v?movntps|mov[qlbw]?|movabsq)$")
_REGISTER = re.compile(r"%[a-z]+\d*[a-z]*")
_NAME = re.compile(r"# %([hx])(\d+)")
_ALIAS = {f"e{name}": f"r{name}" for name in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line: what it reads and writes, by name of register or text of address."""

    kind: str
    wide: bool
    loads: bool
    stores: bool
    reads: tuple[str, ...]
    address: tuple[str, ...]  # registers of its address
    memory: str
    writes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Whole counts and cycles of a run, by the names in COUNTS and CYCLES."""

    counts: Mapping[str, float]
    cycles: Mapping[str, float]


def read(text: str, trips: Sequence[Mapping[int, tuple[int, int]]]) -> Listing:
    """Return what a listing costs.

    Args:
        text: of the whole module, with LLVM's comments.
        trips: per nest how often each of its loops is entered and iterates (`emit.WrittenModule.trips`).

    """
    counts: dict[str, float] = defaultdict(float)
    cycles = dict.fromkeys(CYCLES, 0.0)
    for nest, runs, inner, body in _blocks(text, trips):
        found = _count(body)
        throughput = _throughput(found)
        for name, number in found.items():
            counts[name] += number * runs
        cycles["throughput"] += throughput * runs
        if inner is not None:
            entered, iterations = trips[nest][inner]
            chain, depth = _chain(body)
            long = len(body) * iterations / entered > _LONG
            cycles["long_chain" if long else "short_chain"] += max(0.0, chain - throughput) * iterations
            seen = min(1.0, len(body) / _WINDOW)  # share of an iteration that fills the window
            cycles["window"] += max(0.0, depth * seen - max(chain, throughput)) * iterations
    cycles["exits"] = float(sum(e for nest in trips for e, n in nest.values() if n > _COUNTED_TRIPS * e))
    return Listing(counts={name: counts[name] for name in COUNTS}, cycles=cycles)


def _blocks(
    text: str, trips: Sequence[Mapping[int, tuple[int, int]]]
) -> Iterator[tuple[int, int, int | None, list[Instruction]]]:
    """Yield (nest, how often it runs, number of its loop if it is an innermost one, instructions) of every block."""
    nest, runs, inner, body = -1, 1, None, list[Instruction]()
    for line in text.splitlines():
        if (head := re.match(r"(nest(\d+)|repeat):", line)) or line.startswith(".LBB") or line.startswith("# %bb."):
            if body and nest >= 0:
                yield nest, runs, inner, body
            body, inner = [], None
            if head:
                nest, runs = int(head[2]) if head[2] else -1, 1
            if (named := _NAME.search(line)) and nest >= 0 and int(named[2]) in trips[nest]:
                loop = int(named[2])
                runs = trips[nest][loop][named[1] == "h" and "preheader" not in line]
        elif "This Inner Loop Header" in line and nest >= 0:
            inner = loop
        elif line.startswith("\t") and not line.startswith(("\t.", "\t#")):
            body.append(_instruction(line))
    if body and nest >= 0:
        yield nest, runs, inner, body


def _instruction(line: str) -> Instruction:
    name, _, rest = line.split("#", maxsplit=1)[0].strip().partition("\t")
    operands = re.split(r",\s*(?![^(]*\))", rest.strip()) if rest.strip() else []
    kind = next((each for each, pattern in _KIND.items() if pattern.match(name)), "integer")
    memory = next((each for each in operands if "(" in each), "") if not name.startswith(("lea", "call")) else ""
    last = operands[-1] if operands else ""
    compares = name.startswith(("cmp", "test", "ucomi", "vucomi", "comi", "vcomi", "j", "push", "call", "ret"))
    stores = bool(memory) and last == memory and not compares
    moves = bool(_MOVES.match(name)) or (name.startswith("v") and len(operands) > 2 and "fm" not in name[:3])
    overwrites = moves or name.startswith(("lea", "vbroadcast", "vsqrt", "sqrt", "cvt", "vcvt", "vmov", "mov"))
    fused = name.startswith(("vfm", "vfnm"))
    target = "" if compares or not last or "(" in last else _root(last)
    sources = operands[:-1] if (overwrites and not fused) or not target else operands
    reads = [_root(each) for each in sources if each.startswith("%")]
    zeroing = "xor" in name and len(set(reads)) == 1
    address = [_root(each) for each in _REGISTER.findall(memory or (rest if name.startswith("lea") else ""))]
    if name.startswith("lea"):
        reads += [each for each in address if each != target or rest.count(f"%{each}") > 1]
        address = []
    return Instruction(
        kind=kind, wide="%zmm" in rest, loads=bool(memory) and not stores, stores=stores,
        reads=() if zeroing else tuple(reads), address=tuple(address), memory=memory, writes=target,
    )  # fmt: skip


def _root(register: str) -> str:
    """Return one name for all widths of a register."""
    name = register.lstrip("%")
    if name[1:3] == "mm":
        return "v" + name[3:]
    return _ALIAS.get(name, name.rstrip("dwb") if re.match(r"r\d+", name) else name)


def _count(body: Sequence[Instruction]) -> dict[str, float]:
    found = dict.fromkeys(COUNTS, 0.0)
    found["instructions"], found["blocks"] = float(len(body)), 1.0
    for each in body:
        plain = each.kind == "vector" and (each.loads or each.stores)  # a move to or from memory takes no vector unit
        if not plain:
            found[each.kind] += 2 if each.wide else 1
        found["load"] += each.loads
        found["store"] += each.stores
        found["wide"] += each.wide
    return found


def _throughput(found: Mapping[str, float]) -> float:
    """Return cycles of a block by its busiest resource."""
    vector = sum(found[each] for each in ("multiply", "add", "shuffle", "vector"))
    return max(
        found["instructions"] / 6, found["multiply"] / 2, found["add"] / 2, found["shuffle"] / 2, vector / 4,
        found["load"] / 2, found["store"], found["integer"] / 4, 4.0 * found["divide"], 1.0,
    )  # fmt: skip


def _chain(body: Sequence[Instruction]) -> tuple[float, float]:
    """Return cycles per iteration of the values that go from one iteration into the next; and of the first
    iteration.
    """
    ready: dict[str, float] = defaultdict(float)
    written = {each.writes for each in body}
    ends = []
    for _ in range(6):
        end = 0.0
        for each in body:
            begin = max((ready[name] for name in each.reads), default=0.0)
            still = bool(each.memory) and not written.intersection(each.address)  # the same place every time
            if each.loads:
                at = max((ready[name] for name in each.address), default=0.0)
                came = max(at + _LOAD, ready[each.memory] + _FORWARD) if still and each.memory in ready else at + _LOAD
                begin = max(begin, came)
            moved = each.kind == "vector" and not each.reads
            end_of = begin + (0 if (each.loads and moved) else _LATENCY[each.kind])
            if each.writes:
                ready[each.writes] = end_of
            elif each.stores and still:
                ready[each.memory] = begin
            end = max(end, end_of)
        ends.append(end)
    return (ends[5] - ends[2]) / 3, ends[0]
