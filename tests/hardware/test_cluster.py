"""Clusters from YAML: both forms, what they work out to, and every mistake as one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.hardware.cables import cycle_in
from foretrace.hardware.cluster import parse_link
from foretrace.hardware.cluster_file import load, parse
from foretrace.hardware.wiring import FULL_MESH, HYBRID_CUBE_MESH, Wiring

SHORT = """
name: two DGX
nodes: 2
per_node: 8
device: A100-SXM4-80GB
inside: nvlink
between: 100gbit/5us
nics: 4
oversubscription: 2
"""
TREE = """
per_node: 4
inside: 100gbit
nodes: [a, b, c, d]
switches: [left, right, top]
links:
  - {from: a, to: left, rate: 40gbit/1us}
  - {from: b, to: left, rate: 40gbit/1us}
  - {from: c, to: right, rate: 40gbit/1us}
  - {from: d, to: right, rate: 40gbit/1us}
  - {from: left, to: top, rate: 10gbit/2us, count: 2}
  - {from: right, to: top, rate: 10gbit/2us, count: 2}
"""


def test_the_examples_of_the_page_are_clusters() -> None:
    page = (Path(__file__).parents[2] / "docs" / "network.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```yaml")[1:]]
    assert [parse(block).workers for block in blocks] == [32, 16, 8]


def test_the_usual_machine_of_a_device() -> None:
    cluster = parse("nodes: 2\ndevice: H100-SXM5-80GB\ninside: nvlink\nbetween: usual")
    assert cluster.per_node == 8 and cluster.between.gbit_s == pytest.approx(8 * 8 * 50)
    with pytest.raises(ForetraceError, match="no network of T4"):
        parse("nodes: 2\ndevice: T4\nbetween: usual")


def test_short_form() -> None:
    cluster = parse(SHORT)
    assert (cluster.name, cluster.nodes, cluster.per_node, cluster.workers) == ("two DGX", 2, 8, 16)
    assert cluster.inside.gbit_s == pytest.approx(300 * 8) and "aiconfigurator" in cluster.inside.source
    assert cluster.between.gbit_s == 400 and cluster.between.latency_us == 5
    assert cluster.between_for(2).gbit_s == 200  # oversubscribed by 2
    assert cluster.spread_over(12) == (2, 8)


def test_machines_below_one_switch_do_not_meet_its_oversubscription() -> None:
    cluster = parse("nodes: 8\nbetween: 100gbit\noversubscription: 4\nper_switch: 2")
    assert cluster.between_for(2).gbit_s == 100
    assert cluster.between_for(4).gbit_s == 50  # one flow of a ring leaves the switch, which has half a link upwards
    assert cluster.between_for(8, everyone=True).gbit_s == pytest.approx(100 * 0.5 / (2 * 6 / 7))


def test_explicit_form_finds_the_bottleneck_of_a_ring() -> None:
    cluster = parse(TREE)
    assert (cluster.nodes, cluster.per_node, cluster.workers) == (4, 4, 16)
    assert cluster.between_for(2).gbit_s == 40  # both below the left switch
    ring = cluster.between_for(4)  # b to c and d to a cross the top, one in each direction
    assert ring.gbit_s == 20 and "top" in ring.name and ring.latency_us == 6
    assert cluster.between_for(4, everyone=True).gbit_s == pytest.approx(3 * 20 / 4)  # 2 x 2 flows share it


def test_machines_may_differ() -> None:
    cluster = parse(
        """
        nodes:
          - {name: big, per_node: 8, inside: 200gbit}
          - {name: small, per_node: 2, inside: 50gbit}
        links: [{from: big, to: small, rate: 10gbit}]
        """
    )
    assert cluster.workers == 10 and cluster.spread_over(9) == (2, 8)
    assert cluster.inside_for(8).gbit_s == 200 and cluster.inside_for(10).gbit_s == 50


def test_a_mesh_of_switches_is_taken_where_it_is_declared() -> None:
    ring = "nodes: [a, b, c]\nlinks: [{from: a, to: b, rate: 1gbit}, {from: b, to: c, rate: 1gbit}, "
    ring += "{from: c, to: a, rate: 1gbit}]\n"
    with pytest.raises(ForetraceError, match="closes a cycle"):
        parse(ring)
    assert parse(ring + "topology: mesh").between_for(3).gbit_s == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "describes no cluster"),
        ("- 1", "describes no cluster"),
        ("[1", "not YAML"),
        ("when: 2001-99-99", "not YAML"),
        ("nodes: 0\nper_node: 1", "nodes is 0"),
        ("nodes: -2", "nodes is -2"),
        ("nodes: 2.5", "nodes is 2.5"),
        ("nodes: true", "nodes is True"),
        ("nodes: 2", "need between"),
        ("per_node: 2", "need inside"),
        ("nodes: 2\nbetwen: 1gbit", "did you mean between"),
        ("nodes: 2\nbetween: -1gbit", "no link"),
        ("nodes: 2\nbetween: 0gbit", "no link"),
        ("nodes: 2\nbetween: .nan", "which is no name"),
        ("nodes: 2\nbetween: 1gbit/-5us", "no latency"),
        ("nodes: 2\nbetween: 1gbit\noversubscription: 0.5", "below 1"),
        ("nodes: 2\nbetween: 1gbit\noversubscription: .nan", "no number"),
        ("nodes: 2\nbetween: 1gbit\noversubscription: .inf", "no number"),
        ("nodes: 2\nnodes: 3\nbetween: 1gbit", "comes twice"),
        ("device: X9\nper_node: 2\ninside: nvlink", "in no catalog"),
        ("device: A100-PCIe\nper_node: 2\ninside: nvlink", "several devices"),
        ("device: T4\nper_node: 2\ninside: nvlink", "has no nvlink rate"),
        ("per_node: 2\ninside: nvlink", "needs device"),
        ("per_node: 9\ninside: 1gbit\nwiring: hybrid-cube-mesh", "joins 8 devices"),
        ("per_node: 2\ninside: 1gbit\nwiring: star", "unknown"),
        ("per_node: 2\ninside: 1gbit\nwiring: [[0, 2]]", "leads beyond"),
        ("per_node: 2\ninside: 1gbit\nwiring: [[0]]", "no cable"),
        ("nodes: []\nlinks: []", "list of one machine"),
        ("nodes: [a, a]\nlinks: [{from: a, to: a, rate: 1gbit}]", "declared twice"),
        ("nodes: [a, b]\nlinks: []", "joined to nothing"),
        ("nodes: [a, b]\nlinks: [{from: a, to: c, rate: 1gbit}]", "no machine and no switch"),
        ("nodes: [a, b]\nlinks: [{from: a, to: a, rate: 1gbit}]", "with itself"),
        ("nodes: [a, b]\nlinks: [{from: a, to: b}]", "lacks rate"),
        ("nodes: [a, b]\nlinks: [{from: a, to: b, rate: 1gbit, count: 0}]", "count is 0"),
        ("nodes: [a, b]\nlinks: [3]", "no link"),
        ("nodes: [a, b]\nswitches: [s]\nlinks: [{from: a, to: b, rate: 1gbit}]", "s is joined to nothing"),
        (
            "nodes: [a, b, c, d]\nlinks: [{from: a, to: b, rate: 1gbit}, {from: c, to: d, rate: 1gbit}]",
            "no link leads from a to c",
        ),
        ("nodes: [a, b]\nlinks: [{from: a, to: b, rate: 1gbit}]\ntopology: star", "tree or mesh"),
    ],
)
def test_mistakes_are_sentences(text: str, says: str) -> None:
    with pytest.raises(ForetraceError, match=says) as raised:
        parse(text, where="lab.yaml")
    assert "lab.yaml" in str(raised.value)


def test_files_are_loaded_and_refused(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(SHORT)
    assert load(file).workers == 16
    with pytest.raises(ForetraceError, match="cannot read"):
        load(tmp_path / "none.yaml")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ForetraceError, match="no text"):
        load(file)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats()
    | st.sampled_from(["a", "s", "1gbit", "nvlink", "2us"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "from", "to", "rate", "per_node", "inside", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
NAMES = "name nodes per_node device inside between nics oversubscription switches links topology wiring per_switch x"
keys = st.sampled_from(NAMES.split(" "))


@given(st.dictionaries(keys, values, max_size=6))
@example({"nodes": ["a"], "links": []})
def test_whatever_a_file_holds_it_is_a_cluster_or_a_sentence(found: dict[str, Any]) -> None:
    try:
        cluster = parse(yaml.safe_dump(found))
    except ForetraceError:
        return
    assert cluster.workers >= 1 and cluster.inside.bytes_per_s > 0 and cluster.between.bytes_per_s > 0


@given(st.text(max_size=60))
def test_whatever_text_is_given(text: str) -> None:
    try:
        parse(text)
    except ForetraceError as error:
        assert str(error)


def test_rings_of_known_wirings() -> None:
    """Those that all-reduce on eight V100 shows: its bus bandwidth is 22.5 GB/s times 1, 2, 4, (2), 2, 4, 6."""
    assert [HYBRID_CUBE_MESH.rings(workers) for workers in range(1, 10)] == [0, 1, 2, 4, 2, 2, 4, 6, 0]
    assert [HYBRID_CUBE_MESH.forwards(workers) for workers in range(2, 9)] == [False, False, False, True] + [False] * 3
    assert [FULL_MESH.rings(workers) for workers in range(2, 9)] == [1, 2, 2, 4, 4, 6, 7]


def test_rings_of_a_ring_and_of_nothing() -> None:
    ring = Wiring(name="ring", devices=4, cables=((0, 1, 1), (1, 2, 1), (2, 3, 1), (0, 3, 1)))
    assert ring.rings(4) == 2 and not ring.forwards(4)  # one in each direction
    apart = Wiring(name="pairs", devices=4, cables=((0, 1, 1), (2, 3, 1)))
    assert apart.rings(2) == 1 and apart.rings(4) == 0


def test_a_wiring_without_a_ring_is_refused() -> None:
    cluster = parse("per_node: 4\ninside: 100gbit\nwiring: [[0, 1], [2, 3]]")
    with pytest.raises(ForetraceError, match="no cable"):
        cluster.inside_for(4)
    assert cluster.inside_for(2).gbit_s == 100


def test_cycles() -> None:
    assert cycle_in([("a", "b"), ("b", "c")]) is None
    assert cycle_in([("a", "b"), ("b", "c"), ("c", "a")]) == ("c", "a")
    assert cycle_in([("a", "b"), ("b", "a")]) == ("b", "a")


@pytest.mark.parametrize("text", ["", "-1gbit", "nan", "infgbit", "1gbit/", "1", "gbit", "1gbit/10", "1e3gbit"])
def test_links_that_are_none(text: str) -> None:
    if text == "1gbit/":
        assert parse_link(text).latency_us == 0
        return
    with pytest.raises(ForetraceError, match="is no link"):
        parse_link(text)


@pytest.mark.parametrize(
    ("text", "gbit_s", "latency_us"),
    [("100gbit", 100, 0), ("100Gb/s", 100, 0), ("100 Gbps", 100, 0), ("100gbps/5us", 100, 5), ("12.5GB/s", 100, 0),
     ("12.5 GBps/50 us", 100, 50), ("100Gb/s/50 us", 100, 50), ("400 Gbit/s, 5us", 400, 5), ("10 Mb/s", 0.01, 0)],
)  # fmt: skip
def test_links_as_people_write_them(text: str, gbit_s: float, latency_us: float) -> None:
    found = parse_link(text)
    assert (found.gbit_s, found.latency_us) == pytest.approx((gbit_s, latency_us))


def test_a_transfer_goes_over_the_cables_of_its_own_machines() -> None:
    tree = parse(TREE)
    assert tree.link_of(0, 4).gbit_s == 40 and tree.link_of(0, 12).gbit_s == 20
    assert tree.link_of(4, 12).latency_us == 1 + 2 + 2 + 1
    two = parse(SHORT)
    assert two.link_of(0, 8).gbit_s == 100 and two.link_of(0, 1).name == two.inside.name
    assert two.between.gbit_s == 400
    over = [two.links[link] for link in two.path(1, 9, alone=True)[0]]
    assert over[-2:] == [("card of worker 1 out", 12.5e9), ("card of worker 9 in", 12.5e9)]
    assert two.path(1, 9)[0] == two.path(1, 9, alone=True)[0][:-2]  # a collective is split over all cards
