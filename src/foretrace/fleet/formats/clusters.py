"""`read_cluster`: descriptions of clusters that other systems write, as a `ClusterTree`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import MOST_PER_NODE, ClusterNode, ClusterTree, load_cluster, tree
from foretrace.fleet.formats import slurm_cluster
from foretrace.fleet.formats.jobs import Bad, cut, every_row, name_of, whole, with_columns
from foretrace.fleet.formats.kubernetes import RESOURCES, TYPE_LABELS, gpus_in, inside, kind_of, objects
from foretrace.fleet.formats.source import Source, load, table

KINDS = (
    "foretrace YAML", "Slurm topology.conf", "Slurm topology.yaml", "scontrol show node", "Alibaba node list (CSV)",
    "Tiresias cluster (CSV)", "Kubernetes nodes (kubectl get nodes -o json)",
)  # fmt: skip
HOST = "kubernetes.io/hostname"


def read_cluster(
    path: str | Path,
    *,
    nodes: str | Path | None = None,
    gpus_per_node: int | None = None,
    gpu_type: str = "",
    topology: str | None = None,
    levels: Sequence[str] = (),
    salvage: bool = False,
) -> ClusterTree:
    """Return a cluster from a file of one of KINDS, decided by content; gzip is unpacked.

    nodes: what `scontrol show node -o` printed, for a Slurm topology, which tells no GPUs; gpus_per_node and gpu_type
    instead where all nodes are alike. topology: the one to take from a topology.yaml. levels: labels of nodes,
    outermost first, where the file has no Topology object of Kueue. salvage: leave out rows that cannot be read.
    Nodes without GPUs are no part of the tree. Raises ForetraceError saying what is missing or cannot be read.
    """
    source = load(path)
    name = Path(path).name.split(".")[0]
    alike = slurm_cluster.alike(gpus_per_node, gpu_type)
    if slurm_cluster.is_topology_conf(source):
        return slurm_cluster.grow(source, slurm_cluster.topology_conf(source), _shown(nodes), alike, name=name)
    if slurm_cluster.is_nodes(source):
        return _flat(source, name)
    if source.has("sn", "gpu", "model"):
        return _alibaba(source, name=name, salvage=salvage)
    if source.has("num_switch", "num_node_p_switch", "num_gpu_p_node"):
        return _tiresias(source, name=name, gpu_type=gpu_type)
    if source.first.lstrip().startswith("{") and any(kind_of(item) == "Node" for item in objects(source)):
        return _kubernetes(source, levels, name=name)
    said = _yaml(source)
    if isinstance(said, dict) and "units" in said:
        return load_cluster(Path(path))
    if isinstance(said, list) and said and isinstance(said[0], dict) and "topology" in said[0]:
        found = slurm_cluster.topology_yaml(source, said, topology)
        if found is None:
            if nodes is None:
                raise source.fail(
                    "the topology is flat and names no nodes; give what scontrol show node -o prints as nodes."
                )
            return _flat(load(nodes), name)
        return slurm_cluster.grow(source, found, _shown(nodes), alike, name=name)
    raise source.fail(f"describes no cluster that can be read; there are {', '.join(KINDS)}.")


def _flat(shown: Source, name: str) -> ClusterTree:
    """Return nodes as scontrol shows them, without switches."""
    return tree(shown.path, list(slurm_cluster.shown_nodes(shown).values()), (), name=name)


def _shown(nodes: str | Path | None) -> dict[str, ClusterNode] | None:
    return None if nodes is None else slurm_cluster.shown_nodes(load(nodes))


def _yaml(source: Source) -> Any:
    try:
        return reading.parse_yaml(source.text, source.path)
    except ForetraceError:
        return None


def _alibaba(source: Source, *, name: str, salvage: bool) -> ClusterTree:
    """Read nodes from columns sn, cpu_milli, memory_mib, gpu, model."""
    taken = table(source)
    at = with_columns(source, taken, ("sn", "gpu", "model"))
    nodes, bad = [], []
    for line, cells in taken.rows:
        try:
            row = cut(cells, len(taken.header))
            count = whole(row[at["gpu"]], "gpu")
            if not 0 <= count <= MOST_PER_NODE:
                raise Bad(f"gpu is {count}, which no node has")
            nodes.append(ClusterNode(name_of(row[at["sn"]], "sn"), count, row[at["model"]].strip()))
        except Bad as why:
            bad.append(f"line {line} ({why})")
    if bad and not salvage:
        raise source.fail(
            f"{len(bad)} of {len(bad) + len(nodes)} nodes cannot be read, the first at {bad[0]}; correct them, or read "
            "with `salvage=` to leave them out."
        )
    return tree(source.path, nodes, (), name=name)


def _tiresias(source: Source, *, name: str, gpu_type: str) -> ClusterTree:
    """Read a cluster from num_switch, num_node_p_switch, num_gpu_p_node in one row."""
    rows = list(every_row(source))
    if len(rows) != 1:
        raise source.fail(f"has {len(rows)} rows where one describes the cluster; leave one.")
    try:
        counts = [whole(rows[0][1][key], key) for key in ("num_switch", "num_node_p_switch", "num_gpu_p_node")]
    except Bad as why:
        raise source.fail(f"line {rows[0][0]} cannot be read ({why}); correct it.") from None
    if min(counts) < 1 or counts[0] * counts[1] > 1_000_000 or counts[2] > MOST_PER_NODE:
        raise source.fail(f"line {rows[0][0]} describes {'x'.join(map(str, counts))}, which is no cluster; correct it.")
    return ClusterTree.of(counts, levels=("switch", "node"), gpu_type=gpu_type, name=name)


def _kubernetes(source: Source, levels: Sequence[str], *, name: str) -> ClusterTree:
    """Read nodes with labels; Kueue's Topology says which labels are levels, outermost first."""
    labels, nodes = list(levels), []
    try:
        for item in objects(source):
            if kind_of(item) == "Topology" and not levels:
                labels = [inside(level, "nodeLabel", of=str) for level in inside(item, "spec", "levels", of=list)]
        labels = [label for label in labels if label != HOST]
        for item in objects(source):
            if kind_of(item) != "Node":
                continue
            host = name_of(inside(item, "metadata", "name", of=str), "metadata.name")
            count = gpus_in(inside(item, "status", "allocatable") or inside(item, "status", "capacity"), RESOURCES)
            marks = inside(item, "metadata", "labels")
            above = tuple(str(marks.get(label, "")) for label in labels)
            if count and not all(above):
                raise Bad(f"node {host!r} lacks the label {labels[above.index('')]!r}")
            kind = next((str(marks[label]) for label in TYPE_LABELS if label in marks), "")
            nodes.append(ClusterNode(host, count, kind, above))
    except Bad as why:
        raise source.fail(f"cannot be read ({why}); correct that object.") from None
    words = [label.rsplit("/", 1)[-1].removeprefix("topology-") for label in labels]
    if len({*words, "node", "cluster"}) < len(words) + 2:
        raise ForetraceError(f"{source.path}: levels {', '.join(labels)} cannot be distinguished; name others.")
    return tree(source.path, nodes, words, name=name)
