"""Descriptions of clusters become trees."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.formats import read_cluster
from foretrace.fleet.formats.slurm_cluster import expand

CONF = """# leaf switches first
SwitchName=s0 Nodes=tux[0-3,7] LinkSpeed=900
SwitchName=s1 Nodes=tux[04-06]
SwitchName=s2 Switches=s[0-1]  # two of them
SwitchName=s3 Nodes=big[1-2]
SwitchName=s4 Switches=s3,s2
"""
YAML = """
- topology: tree1
  cluster_default: true
  tree:
    switches:
    - {switch: root, children: "s[1-2]"}
    - {switch: s1, nodes: "node[01-02]"}
    - {switch: s2, nodes: "node[03-04]"}
- topology: blocks
  block:
    block_sizes: [2, 4]
    blocks:
    - {block: b1, nodes: "node[01-02]"}
    - {block: b2, nodes: "node[03-04]"}
- topology: plain
  flat: true
"""
NODES = """NodeName=node01 Arch=x86_64 CPUTot=64 Gres=gpu:a100:8(S:0-1) State=IDLE CfgTRES=cpu=64,gres/gpu=8
NodeName=node02 Gres=gpu:a100:4(S:0),gpu:a100:4(S:1),nic:2 State=MIXED+DRAIN
NodeName=node03 Gres=(null) CfgTRES=cpu=2,gres/gpu=2,gres/gpu:v100=2
NodeName=node04 Gres=(null) CfgTRES=cpu=2,mem=5G
"""


def counts(tree: ClusterTree) -> list[int]:
    return [tree.units(level) for level in range(len(tree.levels))]


def sound(tree: ClusterTree) -> None:
    """Every unit lies wholly inside one of the next level, and none is empty."""
    for inner, outer in zip(tree.starts, tree.starts[1:], strict=False):
        assert set(outer.tolist()) <= set(inner.tolist())
    for starts in tree.starts:
        assert (np.diff(starts) > 0).all()
        assert (starts[0], starts[-1]) == (0, tree.gpus)
    assert counts(tree)[-1] == 1
    for level, names in enumerate(tree.names):
        assert len(names) in (0, tree.units(level))


def test_units_are_numbered_counted_and_found() -> None:
    tree = parse_cluster("2x2x4@a+1x3x2@b")  # racks of 8, 8 and 6 GPUs
    at, lo, hi, parent = (each.tolist() for each in tree.numbered())
    assert at == [0, 7, 10, 11]
    assert lo == [0, 4, 8, 12, 16, 18, 20, 0, 8, 16, 0] and hi == [4, 8, 12, 16, 18, 20, 22, 8, 16, 22, 22]
    assert parent == [7, 7, 8, 8, 9, 9, 9, 10, 10, 10, -1]
    assert tree.counts(1, tree.gpu_type == 1).tolist() == [0, 0, 6]
    assert tree.largest().tolist() == [[4, 8, 16], [2, 6, 6]]
    assert [tree.around(gpus) for gpus in ([3, 0], [4, 3], np.array([16, 21]), [7, 8], [5])] == [0, 1, 1, 2, 0]
    assert parse_cluster("64").numbered()[3].tolist() == [-1] and parse_cluster("64").around([0, 63]) == 0


def test_a_bigger_cluster_has_more_units_like_its_last() -> None:
    tree = replace(parse_cluster("1x2x4@a+1x3x2@b"), quotas={"lab": 3})
    more = tree.bigger(2)
    sound(more)
    assert counts(more) == [2 + 3 * 3, 1 + 3, 1] and more.gpus == 8 + 3 * 6 and more.quotas == {"lab": 3}
    assert np.diff(more.starts[1]).tolist() == [8, 6, 6, 6] and more.counts(1, more.gpu_type == 1).tolist() == [
        0,
        6,
        6,
        6,
    ]
    assert more.name == "1x2x4@a+1x3x2@b + 2 rack"
    for units, said in ((0, "by 0"), (2**24, "too large")):
        with pytest.raises(ForetraceError, match=said):
            tree.bigger(units)
    with pytest.raises(ForetraceError, match="describe it as 1x64"):
        parse_cluster("64").bigger(1)


def put(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tux", "a-b", "r1n"]),
            st.lists(st.tuples(st.integers(0, 120), st.integers(0, 12)), max_size=3),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=4,
    )
)  # fmt: skip
def test_hostlists_name_what_they_say(parts: list[tuple[str, list[tuple[int, int]], int]]) -> None:
    written, meant = [], []
    for prefix, ranges, width in parts:
        if not ranges:
            written.append(prefix)
            meant.append(prefix)
            continue
        inside = []
        for first, more in ranges:
            low, high = f"{first:0{width}d}", f"{first + more:0{width}d}"
            inside.append(low if more == 0 else f"{low}-{high}")
            padded = width if low.startswith("0") else 0
            meant += [f"{prefix}{number:0{padded}d}" for number in range(first, first + more + 1)]
        written.append(f"{prefix}[{','.join(inside)}]")
    assert expand(",".join(written)) == meant


def test_hostlists_with_several_brackets_and_broken_ones() -> None:
    assert expand("r[0-1]n[08-10]x") == [f"r{r}n{n}x" for r in (0, 1) for n in ("08", "09", "10")]
    assert expand("") == []
    for text in ("a[0-", "a]0", "a[[0]]", "a[3-1]", "a[x]", "a[0-9999999]", "a[0-999]b[0-999]c[0-9]", "a[]"):
        with pytest.raises(ForetraceError, match="cannot read the hosts"):
            expand(text)


def test_topology_conf(tmp_path: Path) -> None:
    path = put(tmp_path, "topology.conf", CONF)
    tree = read_cluster(path, gpus_per_node=8, gpu_type="h100")
    sound(tree)
    assert tree.levels == ("node", "switch", "switch2", "cluster")
    assert (counts(tree), tree.gpus, tree.types) == ([10, 3, 2, 1], 80, ("h100",))
    assert tree.names[0] == ("tux0", "tux1", "tux2", "tux3", "tux7", "tux04", "tux05", "tux06", "big1", "big2")
    assert tree.names[1] == ("s0", "s1", "s3")
    with pytest.raises(ForetraceError, match="how many GPUs 'tux0' has is not known"):
        read_cluster(path)
    blocks = put(tmp_path, "b.conf", "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2\n")
    assert read_cluster(blocks, gpus_per_node=4).levels == ("node", "block", "cluster")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "names no nodes"),
        ("SwitchName=a Switches=b Nodes=n1\nSwitchName=b Switches=a\n", "ring"),
        ("SwitchName=a Switches=b\n", "leads to 'b', which is not described"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", "once more"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", "stands twice"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a\nSwitchName=c Switches=a\n", "no tree"),
        ("SwitchName=a Nodes=n[1-\n", "brackets do not match"),
        ("SwitchName=a Nodes=n1\nhello\n", "line 2 says nothing"),
    ],
)
def test_topologies_that_are_no_trees(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match=said):
        read_cluster(put(tmp_path, "topology.conf", text), gpus_per_node=8)


def test_scontrol_and_topology_yaml(tmp_path: Path) -> None:
    nodes, topology = put(tmp_path, "nodes", NODES), put(tmp_path, "topology.yaml", YAML)
    tree = read_cluster(nodes)
    sound(tree)
    assert (tree.levels, tree.gpus, tree.types) == (("node", "cluster"), 18, ("a100", "v100"))
    assert tree.names[0] == ("node01", "node02", "node03")
    lines = put(tmp_path, "lines", NODES.replace(" ", "\n   "))  # scontrol without -o
    assert (read_cluster(lines).starts[0] == tree.starts[0]).all()
    tree = read_cluster(topology, nodes=nodes)
    assert (tree.levels, counts(tree)) == (("node", "switch", "cluster"), [3, 2, 1])
    tree = read_cluster(topology, nodes=nodes, topology="blocks")
    assert (tree.levels, tree.names[1]) == (("node", "block", "cluster"), ("b1", "b2"))
    assert read_cluster(topology, nodes=nodes, topology="plain").levels == ("node", "cluster")
    for name, said in (("none", "has no topology 'none'"), ("plain", "flat")):
        with pytest.raises(ForetraceError, match=said):
            read_cluster(topology, gpus_per_node=1, topology=name)
    mixed = put(tmp_path, "mixed", "NodeName=n Gres=gpu:a100:4,gpu:v100:2\n")
    with pytest.raises(ForetraceError, match="GPUs of a100 and v100"):
        read_cluster(mixed)


def test_kubernetes_nodes_below_a_topology(tmp_path: Path) -> None:
    def node(name: str, block: str, rack: str, gpus: int | None) -> dict[str, Any]:
        labels = {"x/topology-block": block, "x/topology-rack": rack, "nvidia.com/gpu.product": "H100"}
        return {
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "status": {"allocatable": {"cpu": "64"} | ({} if gpus is None else {"nvidia.com/gpu": str(gpus)})},
        }

    levels = [
        {"nodeLabel": "x/topology-block"},
        {"nodeLabel": "x/topology-rack"},
        {"nodeLabel": "kubernetes.io/hostname"},
    ]
    items = [
        {"kind": "Topology", "spec": {"levels": levels}},
        # racks of the same name in different blocks are different racks
        node("n1", "b1", "r1", 8), node("n2", "b2", "r1", 8), node("n3", "b1", "r2", 4), node("cpu", "b1", "r2", None),
    ]  # fmt: skip
    path = put(tmp_path, "nodes.json", json.dumps({"kind": "List", "items": items}))
    tree = read_cluster(path)
    sound(tree)
    assert (tree.levels, counts(tree)) == (("node", "rack", "block", "cluster"), [3, 3, 2, 1])
    assert (tree.names[0], tree.types) == (("n1", "n3", "n2"), ("H100",))
    path.write_text(json.dumps({"kind": "List", "items": items[1:]}))
    assert read_cluster(path).levels == ("node", "cluster")
    assert read_cluster(path, levels=["x/topology-block"]).levels == ("node", "block", "cluster")
    with pytest.raises(ForetraceError, match="lacks the label 'zone'"):
        read_cluster(path, levels=["zone"])


def test_csv_and_own_descriptions(tmp_path: Path) -> None:
    path = put(
        tmp_path, "nodes.csv", "sn,cpu_milli,memory_mib,gpu,model\na,1,1,2,P100\nb,1,1,0,\nc,1,1,4,T4\nd,1,1,x,T4\n"
    )
    with pytest.raises(ForetraceError, match=r"1 of 4 nodes cannot be read, the first at line 5"):
        read_cluster(path)
    assert read_cluster(path, salvage=True).gpus == 6
    path = put(
        tmp_path, "t.csv", "num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n5,32,8,128,256\n"
    )
    tree = read_cluster(path)
    assert (tree.levels, counts(tree), tree.gpus) == (("node", "switch", "cluster"), [160, 5, 1], 1280)
    path = put(tmp_path, "own.yaml", "levels: [rack, node]\nunits: [{count: [2, 4], gpus: 8, type: v100}]\n")
    assert read_cluster(path).gpus == 64
    with pytest.raises(ForetraceError, match="describes no cluster"):
        read_cluster(put(tmp_path, "x", "hello\n"))


def test_real_files(shared_data: Path) -> None:
    fleet = shared_data / "fleet"
    tree = read_cluster(fleet / "alibaba2023" / "openb_node_list_gpu_node.csv")
    sound(tree)
    assert (tree.gpus, counts(tree), len(tree.types)) == (6_212, [1_213, 1], 7)
    assert read_cluster(fleet / "alibaba2023" / "openb_node_list_all_node.csv.gz").gpus == 6_212
    assert read_cluster(fleet / "tiresias" / "n32g4.csv").gpus == 128


@pytest.mark.parametrize("text", [CONF, YAML, NODES], ids=["conf", "yaml", "scontrol"])
def test_damage_ends_in_a_tree_or_an_error(text: str) -> None:
    trees = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster"

        @settings(max_examples=40)
        @given(
            st.integers(0, len(text) - 1),
            st.integers(0, 6),
            st.sampled_from(["", "[", "]", "-", "=", "9", "s1", ": ", "\n", "é"]),
        )
        def damaged(at: int, cut: int, stray: str) -> None:
            nonlocal trees
            path.write_text(text[:at] + stray + text[at + cut :])
            try:
                tree = read_cluster(path, gpus_per_node=2)
            except ForetraceError as error:
                assert "\n" not in str(error)
                return
            sound(tree)
            trees += 1

        damaged()
    assert trees
