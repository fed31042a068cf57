"""What Slurm tells of a cluster: topology.conf, topology.yaml, and `scontrol show node` (with or without -o).

Topologies name nodes and switches but no GPUs; these come from `scontrol show node`, or are said by the user to be
alike everywhere. See topology.conf(5), topology.yaml(5) and scontrol(1).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterNode, ClusterTree, tree
from foretrace.fleet.formats.slurm import gpus_by_kind
from foretrace.fleet.formats.source import Source

_PAIR = re.compile(r"([A-Za-z_]+)=(\S*)")
_KEY = re.compile(r"(?:(?<=\s)|^)([A-Za-z][A-Za-z0-9_/:.]*)=")
_FREE = re.compile(r"\b(JobName|Command|WorkDir|Comment|AdminComment|OS)=")  # their values may hold blanks
_NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
DEEPEST = 32
MOST = 1_000_000  # hosts of one expression; more is a slip of the pen


@dataclass
class Switches:
    """A topology before its nodes have GPUs: per switch its children and nodes, in the order of the file."""

    children: dict[str, list[str]]
    nodes: dict[str, list[str]]
    word: str = "switch"

    @property
    def leaves(self) -> list[tuple[str, tuple[str, ...]]]:
        """Those with nodes and no switches below, and their nodes."""
        return [(each, tuple(nodes)) for each, nodes in self.nodes.items() if nodes and not self.children[each]]


def is_topology_conf(source: Source) -> bool:
    """Return whether its first line that says something names a switch or a block."""
    return bool(re.match(r"(SwitchName|BlockName|BlockSizes)\s*=", _first(source), re.IGNORECASE))


def is_nodes(source: Source) -> bool:
    """Return whether it begins with a node as scontrol shows it."""
    return bool(re.match(r"NodeName=", _first(source)))


def _first(source: Source) -> str:
    lines = (line.split("#", 1)[0].strip() for line in source.lines)
    return next((line for line in lines if line), "")


def topology_conf(source: Source) -> Switches:
    """Return switches (or blocks) of a topology.conf; raises ForetraceError with the line that cannot be read."""
    found = Switches({}, {})
    for at, line in enumerate(source.lines, 1):
        said = {key.lower(): value for key, value in _PAIR.findall(line.split("#", 1)[0]) if value != "(null)"}
        if not said:
            if line.split("#", 1)[0].strip():
                raise source.fail(f"line {at} says nothing of the form Key=Value; correct it.")
            continue
        if "blocksizes" in said and len(said) == 1:
            continue  # how many nodes a block plans with; the blocks themselves are what matters here
        name = said.get("switchname") or said.get("blockname")
        if not name:
            raise source.fail(f"line {at} names no switch and no block; write SwitchName= or BlockName=.")
        if "blockname" in said:
            found.word = "block"
        _add(source, found, name, said.get("switches", ""), said.get("nodes", ""), f"line {at}")
    return found


def _add(source: Source, found: Switches, name: str, children: str, nodes: str, where: str) -> None:
    for each in expand(name):
        if each in found.children:
            raise source.fail(f"{where} names the switch {each!r} once more; name every switch once.")
        found.children[each], found.nodes[each] = expand(children), expand(nodes)


def topology_yaml(source: Source, said: list[Any], wanted: str | None) -> Switches | None:
    """Return the topology of that name, else the default one, else the first; None where it is flat. Raises
    ForetraceError.
    """
    if not all(isinstance(each, dict) and "topology" in each for each in said):
        raise source.fail("is no list of topologies; write - topology: NAME with tree, block or flat.")
    by_name = {str(each["topology"]): each for each in said}
    if wanted is not None and wanted not in by_name:
        raise source.fail(f"has no topology {wanted!r}; it has {', '.join(by_name)[:200]}.")
    default = next((each for each in said if each.get("cluster_default") is True), said[0])
    chosen = default if wanted is None else by_name[wanted]
    if "tree" in chosen:
        kind, key, word = "tree", "switches", "switch"
    elif "block" in chosen:
        kind, key, word = "block", "blocks", "block"
    elif chosen.get("flat") is True:
        return None
    else:
        raise source.fail(f"topology {str(chosen['topology'])!r} is neither tree, block nor flat; name one that is.")
    entries = chosen[kind].get(key) if isinstance(chosen[kind], dict) else None
    if not isinstance(entries, list) or not entries:
        raise source.fail(f"topology {str(chosen['topology'])!r} has no {key}; write them below {kind}.")
    found = Switches({}, {}, word)
    for at, entry in enumerate(entries):
        where = f"{kind}.{key}[{at}]"
        if not isinstance(entry, dict) or not isinstance(entry.get(word), str):
            raise source.fail(f"{where} has no {word}; give it a name.")
        texts = [entry.get(name, "") or "" for name in ("children", "nodes")]
        if not all(isinstance(text, str) for text in texts):
            raise source.fail(f"{where}: children and nodes are written as tux[0-3,7]; correct them.")
        _add(source, found, entry[word], texts[0], texts[1], where)
    return found


def shown_nodes(source: Source) -> dict[str, ClusterNode]:
    """Return nodes by name as scontrol shows them; raises ForetraceError where a node has two kinds, or none stands
    there.
    """
    devices: dict[str, ClusterNode] = {}
    for said in pairs(source.text, "NodeName"):
        name = said["NodeName"]
        # sites that hide Gres still configure it as a trackable resource
        found = gpus_by_kind(said.get("Gres", "")) or gpus_by_kind(said.get("CfgTRES", ""))
        kinds = sorted(kind for kind in found if kind)
        if len(kinds) > 1:
            raise source.fail(f"node {name!r} has GPUs of {' and '.join(kinds)}; describe it as a node for each kind.")
        if name in devices:
            raise source.fail(f"node {name!r} stands twice; print every node once.")
        devices[name] = ClusterNode(name, max(found.values(), default=0), "".join(kinds))
    if not devices:
        raise source.fail("shows no node; print it with scontrol show node -o.")
    return devices


def pairs(text: str, first: str) -> Iterator[dict[str, str]]:
    """Yield records of Key=Value that each begin with the key `first`, with or without -o."""
    begins = [found.start() for found in re.finditer(rf"^\s*{first}=", text, re.MULTILINE)]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=False):
        said: dict[str, str] = {}
        lines = text[begin:end].strip().splitlines()
        for line in lines:
            marks = list(_KEY.finditer(line))
            free = _FREE.search(line)
            if free and len(lines) > 1:  # not -o, and not jobcomp: its value is the rest of the line
                marks = [each for each in marks if each.start() <= free.start()]
            for i, mark in enumerate(marks):
                stop = marks[i + 1].start() if i + 1 < len(marks) else len(line)
                said.setdefault(mark[1], line[mark.end() : stop].strip())
                if mark[1] == "Nodes" and first == "JobId":  # one line for each group of nodes alike
                    said["held"] = said.get("held", "") + "\n" + line.strip()
        yield said


def grow(
    source: Source,
    found: Switches,
    devices: Mapping[str, ClusterNode] | None,
    alike: ClusterNode | None,
    *,
    name: str,
) -> ClusterTree:
    """Return switches with GPUs as a tree. A single switch above all is the cluster and no level of its own.

    Raises ForetraceError where switches form no tree, a node lies below two leaf switches, or GPUs are not known.
    """
    parent: dict[str, str] = {}
    for switch, children in found.children.items():
        for child in children:
            if child not in found.children:
                raise source.fail(f"{found.word} {switch!r} leads to {child!r}, which is not described; add its line.")
            if child in parent or child == switch:
                raise source.fail(f"{found.word} {child!r} lies below two others, which is no tree; leave one out.")
            parent[child] = switch
    chains: dict[str, tuple[str, ...]] = {}
    for switch, hosts in found.nodes.items():
        if not hosts:
            continue
        chain = [switch]
        while chain[-1] in parent:
            chain.append(parent[chain[-1]])
            if len(chain) > DEEPEST:
                raise source.fail(f"{found.word} {switch!r} is in a ring or deeper than {DEEPEST} levels; correct it.")
        chains[switch] = tuple(reversed(chain))
    if not chains:
        raise source.fail("names no nodes; add Nodes= to its leaf switches.")
    if len({chain[0] for chain in chains.values()}) == 1 and all(len(chain) > 1 for chain in chains.values()):
        chains = {switch: chain[1:] for switch, chain in chains.items()}
    elif len(chains) == 1:
        chains = dict.fromkeys(chains, ())
    depth = max(map(len, chains.values()))
    # a leaf that hangs higher than others is a unit of its own on the levels that it lacks
    chains = {
        switch: (*chain[:-1], *[chain[-1]] * (depth - len(chain) + 1)) if chain else ()
        for switch, chain in chains.items()
    }
    nodes = []
    for switch, above in chains.items():
        for host in found.nodes[switch]:
            device = alike if devices is None else devices.get(host)
            if device is None:
                raise source.fail(f"how many GPUs {host!r} has is not known; add it to the nodes or say gpus_per_node.")
            nodes.append(replace(device, name=host, above=above))
    words = [found.word if level == 1 else f"{found.word}{level}" for level in range(depth, 0, -1)]
    return tree(source.path, nodes, words, name=name)


def alike(count: int | None, kind: str) -> ClusterNode | None:
    """Return what every node is like, None where the user does not say."""
    if count is None:
        return None
    if count < 1:
        raise ForetraceError(f"a node has one GPU or more, not {count}; say another gpus_per_node.")
    return ClusterNode("", count, kind)


def expand(text: str) -> list[str]:
    """Return names of a hostlist such as `tux[0-3,7],login1`, as they are written, with leading zeros.

    Several brackets in one name count like a clock, the last one fastest. Raises ForetraceError where brackets do not
    match, a range runs backwards or there are more than a million names.
    """
    names: list[str] = []
    for part in _apart(text):
        pieces: list[list[str]] = []
        total = 1
        rest = part
        while rest:
            plain, opened, rest = rest.partition("[")
            pieces.append([plain])
            if opened:
                inner, closed, rest = rest.partition("]")
                if not closed or "[" in inner:
                    raise _broken(text, "its brackets do not match")
                values = _values(inner, text)
                total *= len(values)
                if total > MOST:
                    raise _broken(text, f"it names more than {MOST:,} hosts")
                pieces.append(values)
            elif "]" in plain:
                raise _broken(text, "its brackets do not match")
        if len(names) + total > MOST:
            raise _broken(text, f"it names more than {MOST:,} hosts")
        names.extend("".join(choice) for choice in itertools.product(*pieces))
    return names


def _apart(text: str) -> list[str]:
    """Return parts between commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _values(inner: str, text: str) -> list[str]:
    values: list[str] = []
    for part in inner.split(","):
        found = _NUMBERS.fullmatch(part.strip())
        if not found:
            raise _broken(text, f"{part[:20]!r} is no number or range")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise _broken(text, f"the range {part[:40]} runs backwards")
        if int(last) - int(first) >= MOST:
            raise _broken(text, f"it names more than {MOST:,} hosts")
        width = len(first) if first.startswith("0") else 0
        values.extend(str(number).zfill(width) for number in range(int(first), int(last) + 1))
    return values


def _broken(text: str, why: str) -> ForetraceError:
    return ForetraceError(f"cannot read the hosts {text[:60]!r}: {why}; write them as in tux[0-3,7].")
