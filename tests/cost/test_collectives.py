"""Costs of collectives: known answers of every model, held-out sizes and numbers of workers, files, bad input."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.network import curves
from foretrace.cost.network.collective_files import read
from foretrace.cost.network.collective_table import CollectiveTable, series_of, table_of
from foretrace.cost.network.link_network import cluster_network, ways
from foretrace.cost.network.nccl import Comm, bandwidths
from foretrace.cost.network.network import CollectiveKind, Network, bus_share
from foretrace.cost.network.parse import network
from foretrace.cost.network.tables import of_table, wiring_of
from foretrace.errors import ForetraceError
from foretrace.hardware.cluster_file import parse
from foretrace.hardware.devices import named
from foretrace.hardware.wiring import HYBRID_CUBE_MESH
from foretrace.model.memory.memory import Sharding
from foretrace.model.messages import TENSOR
from foretrace.model.target import networks_of

AR = CollectiveKind.ALL_REDUCE
CLUSTER = """
nodes: 4
per_node: 4
inside: 800gbit/2us
between: 100gbit/10us
"""


def made(counts: dict[int, float], *, alpha_s: float = 1e-5, per_node: int = 0) -> CollectiveTable:
    """All-reduces of these numbers of workers with a bus bandwidth (bytes/s) each."""
    sizes = np.geomspace(1e4, 1e9, 24)
    return table_of(
        "made",
        [
            series_of(
                "made",
                kind=AR,
                workers=n,
                per_node=per_node or n,
                points=[(s, alpha_s + bus_share(AR, n) * s / rate, 0.0) for s in sizes],
            )
            for n, rate in counts.items()
        ],
    )


# --- links and clusters ---------------------------------------------------------------------------------------------


def test_a_link_is_a_ring() -> None:
    net = network("8gbit/10us", 4)
    assert net.workers == 4
    cost = net.cost(AR, 1e9)
    assert cost.seconds == pytest.approx(6 * 10e-6 + 1.5)
    assert cost.low_s < cost.seconds < cost.high_s
    assert net.cost(CollectiveKind.ALL_GATHER, 1e9).seconds == pytest.approx(3 * 10e-6 + 0.75)
    assert net.cost(CollectiveKind.SEND, 1e9).seconds == pytest.approx(10e-6 + 1.0)
    assert net.cost(AR, 1e9, workers=2).seconds == pytest.approx(2 * 10e-6 + 1.0)


def test_two_levels_save_steps() -> None:
    """BlueConnect: 16 workers in 4 machines need 6 + 6 steps instead of 30 between machines."""
    found = {way.algorithm: way for way in ways(AR, 1e6, parse(CLUSTER), 16)}
    assert found["ring"].latency_s == pytest.approx(30 * 10e-6)
    assert found["hierarchical"].latency_s == pytest.approx(6 * 2e-6 + 6 * 10e-6)
    assert found["hierarchical"].transfer_s == pytest.approx(1.5e6 / 100e9 + 1.5e6 / 12.5e9)
    assert found["tree"].latency_s == pytest.approx(2 * (3 * 2e-6 + 2 * 10e-6))


def test_a_cluster_takes_the_quickest_way(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(CLUSTER)
    net = network(str(file), 16)
    assert "hierarchical" in net.cost(AR, 1e6).why
    assert net.workers == 16 and network(str(file), 6).workers == 6
    inside = net.cost(AR, 1e6, workers=4)
    assert inside.seconds < net.cost(AR, 1e6, workers=5).seconds
    with pytest.raises(ForetraceError, match="16 devices, not 17"):
        network(str(file), 17)


def test_all_to_all_pays_for_what_leaves_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(CLUSTER)
    cost = network(str(file), 16).cost(CollectiveKind.ALL_TO_ALL, 1e9)
    assert cost.seconds == pytest.approx(15 * 10e-6 + 4 * 12 / 16 * 1e9 / 12.5e9, rel=1e-6)


networks = st.sampled_from(
    ["1gbit/50us", "lab.yaml", "nccl:H100-SXM5-80GB,nodes=4,nics=8,nic=400gbit", "nccl:V100-SXM2", "nccl:T4", "made"]
)


def network_of(text: str, workers: int, folder: Path) -> Network:
    if text == "lab.yaml":
        (folder / text).write_text(CLUSTER.replace("nodes: 4", "nodes: 8"))
        text = str(folder / text)
    if text == "made":
        return of_table(made({2: 1e9, 4: 1e9, 8: 1e9}), workers)
    return network(text, workers)


@given(
    text=networks,
    kind=st.sampled_from(list(CollectiveKind)),
    sizes=st.tuples(st.floats(1, 1e11), st.floats(1, 1e11)),
    workers=st.integers(1, 32),
)
def test_costs_are_not_negative_and_grow_with_the_size(
    text: str, kind: CollectiveKind, sizes: tuple[float, float], workers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if text.startswith("nccl:") and "nodes" not in text:
        workers = min(workers, 8)
    if text == "made" and kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.BROADCAST, CollectiveKind.REDUCE):
        kind = AR
    if text == "made" and kind == CollectiveKind.SEND:
        kind = AR
    net = network_of(text, workers, tmp_path_factory.getbasetemp())
    small, large = (net.cost(kind, size) for size in sorted(sizes))
    assert 0 <= small.low_s <= small.seconds <= small.high_s
    if text.startswith("nccl:"):  # its trees lose bandwidth by table where a size doubles: 10 % between two sizes
        assert large.seconds >= 0.6 * small.seconds
    else:
        assert large.seconds >= small.seconds * (1 - 1e-9)
    assert net.cost(kind, sizes[0], workers=1).seconds == 0 == net.cost(kind, 0.0).seconds
    assert small.why


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_sizes_that_cannot_be(size: float) -> None:
    with pytest.raises(ForetraceError, match="cannot be"):
        network("1gbit", 2).cost(AR, size)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no link"),
        ("fast", "FILE.yaml"),
        ("1gbit,per-node=2", "says nothing here"),
        ("none.yaml", "cannot read"),
        ("none.json", "cannot read"),
        ("nccl:", "in no catalog"),
        ("nccl:MI300X", "no constants"),
        ("nccl:h100-sxm5-80gb,nodes=2", "need nic"),
        ("nccl:h100-sxm5-80gb,nodes=x", "no whole number"),
        ("nccl:h100-sxm5-80gb,speed=2", "unknown"),
        ("nccl:h100-sxm5-80gb,nodes=1,per-node=4", "fewer than 8"),
        ("1gbit,", "no option"),
    ],
)
def test_texts_that_are_no_network(text: str, says: str) -> None:
    with pytest.raises(ForetraceError, match=says):
        network(text, 8)
    with pytest.raises(ForetraceError, match="0 workers"):
        network("1gbit", 0)


# --- curves ---------------------------------------------------------------------------------------------------------


def test_a_line_is_not_moved_by_an_outlier() -> None:
    sizes = np.linspace(1e6, 1e8, 50)
    times = 1e-4 + sizes / 1e9
    times[20] *= 5
    found = curves.line(sizes, times)
    assert np.abs(found.at(sizes) / (1e-4 + sizes / 1e9) - 1).max() < 0.02


def test_tables_go_on_beyond_their_ends_as_lines() -> None:
    sizes = np.geomspace(1e4, 1e8, 20)
    fitted = curves.fit_table(sizes, 1e-5 + sizes / 1e9)
    assert fitted.curve.seconds(np.array([1e9]))[0] == pytest.approx(1.0, rel=0.01)
    assert fitted.curve.seconds(np.array([1.0]))[0] == pytest.approx(1e-5, rel=0.5)


@settings(max_examples=60)
@given(
    points=st.dictionaries(st.integers(1, 10**10), st.floats(1e-6, 1e3), min_size=1, max_size=40),
    at=st.floats(1, 1e12),
)
def test_any_points_give_a_positive_finite_curve(points: dict[int, float], at: float) -> None:
    sizes = np.array(sorted(points), dtype=float)
    times = np.array([points[int(size)] for size in sizes])
    fitted = curves.fit_table(sizes, times)
    seconds = float(fitted.curve.seconds(np.array([at]))[0])
    low, high = fitted.factors(at)
    assert np.isfinite(seconds) and seconds >= 0 and 0 < low <= 1 <= high


# --- numbers of workers ---------------------------------------------------------------------------------------------


def test_between_and_beyond_measured_numbers() -> None:
    net = of_table(made({2: 1e9, 4: 1e9, 8: 1e9}, alpha_s=0.0), 16)
    for workers in (3, 6, 16):
        assert net.cost(AR, 1e8, workers=workers).seconds == pytest.approx(bus_share(AR, workers) * 0.1, rel=1e-3)
    inner, outer = net.cost(AR, 1e8, workers=6), net.cost(AR, 1e8, workers=16)
    assert outer.high_s / outer.seconds > inner.high_s / inner.seconds > 1
    exact = net.cost(AR, 1e8, workers=8)
    assert exact.high_s / exact.seconds < inner.high_s / inner.seconds


@settings(max_examples=40)
@given(
    counts=st.sets(st.integers(2, 32), min_size=2, max_size=6), asked=st.integers(2, 64), least=st.floats(0, 0.9),
    nbytes=st.floats(1e3, 1e11),
)  # fmt: skip
def test_a_law_of_two_numbers_is_found_at_any_other(counts: set[int], asked: int, least: float, nbytes: float) -> None:
    """Bandwidth as where a switch joins the devices, no latency: two of the numbers give all the others."""
    rates = {n: 1e9 / (1 + least / (n - 1)) for n in counts}
    net = of_table(made(rates, alpha_s=0.0), 64, wiring="none")
    found = net.cost(AR, nbytes, workers=asked)
    assert found.seconds == pytest.approx(
        bus_share(AR, asked) * nbytes / 1e9 * (1 + least / (asked - 1)), rel=0.02, abs=2e-6
    )
    assert 0 < found.low_s < found.seconds < found.high_s


def test_rows_of_one_size_that_differ_widen_the_range(tmp_path: Path) -> None:
    lines = [f"all-reduce,4,{2**k},{1e-9 * 2**k}" for k in range(10, 24)]
    plain, twice = tmp_path / "once.csv", tmp_path / "twice.csv"
    header = "kind,workers,nbytes,seconds\n"
    plain.write_text(header + "\n".join(lines))
    twice.write_text(header + "\n".join(lines + [f"all-reduce,4,{2**k},{1.4e-9 * 2**k}" for k in range(10, 24)]))
    one, both = (of_table(read(path), 8) for path in (plain, twice))
    for workers, least in ((4, 1 / 1.2), (8, 1 / 1.2)):
        narrow, wide = (net.cost(AR, 1e6, workers=workers) for net in (one, both))
        assert wide.seconds == pytest.approx(1.2 * narrow.seconds, rel=0.01)
        assert wide.low_s <= narrow.seconds <= 1.4 / 1.2 * wide.seconds <= wide.high_s * 1.01
        assert wide.low_s / wide.seconds < narrow.low_s / narrow.seconds
        assert wide.low_s / wide.seconds <= least * 1.01


def test_rings_of_a_wiring_explain_numbers_that_jump() -> None:
    rings = {n: HYBRID_CUBE_MESH.rings(n) * 22e9 for n in (2, 4, 8)}
    net = of_table(made(rings, alpha_s=0.0), 8)
    assert net.wiring is HYBRID_CUBE_MESH
    assert net.cost(AR, 1e9, workers=7).seconds == pytest.approx(bus_share(AR, 7) * 1e9 / (4 * 22e9), rel=0.01)
    assert "hybrid-cube-mesh" in net.cost(AR, 1e9, workers=7).why
    # five have no ring of their own: the range says that it is wider for it, and is
    five, seven = net.cost(AR, 1e9, workers=5), net.cost(AR, 1e9, workers=7)
    assert "lead through a peer" in five.why and "lead through a peer" not in seven.why
    assert five.high_s / five.seconds > seven.high_s / seven.seconds + 0.19
    assert wiring_of(made({2: 1e9, 4: 1.1e9, 8: 1.2e9})) is None
    assert of_table(made(rings), 8, wiring="none").wiring is None


def test_a_collective_that_was_not_measured_is_derived_or_refused() -> None:
    net = of_table(made({4: 1e9}), 4)
    half = net.cost(CollectiveKind.REDUCE_SCATTER, 1e8)
    assert half.seconds == pytest.approx(net.cost(AR, 1e8).seconds / 2)
    assert "was not measured" in half.why and half.high_s / half.seconds > 1.29
    with pytest.raises(ForetraceError, match="says nothing about all-to-all"):
        net.cost(CollectiveKind.ALL_TO_ALL, 1e8)


def test_several_machines_are_told_apart() -> None:
    both = table_of("both", [*made({4: 1e10}).series, *made({4: 1e9}, per_node=2).series])
    assert of_table(both, 4, per_node=4).cost(AR, 1e9).seconds == pytest.approx(0.15, rel=0.01)
    assert of_table(both, 4, per_node=2).cost(AR, 1e9).seconds == pytest.approx(1.5, rel=0.01)


# --- NCCL's model ---------------------------------------------------------------------------------------------------


def test_what_nccl_printed_for_two_machines_of_one_gpu() -> None:
    """Latency/bandwidth of one printed tuning table: ring of 2.4 GB/s, trees twice that, PCI, no LL128."""
    comm = Comm(
        generation="volta",
        ranks=2,
        nodes=2,
        channels=1,
        intra_gb_s=2.4,
        inter_gb_s=2.4,
        tree_intra_gb_s=4.8,
        link="pci",
    )
    printed = {
        (CollectiveKind.BROADCAST, "ring", "LL"): (9.3, 1.2),
        (CollectiveKind.BROADCAST, "ring", "Simple"): (22.4, 2.4),
        (CollectiveKind.ALL_GATHER, "ring", "LL"): (11.6, 2.4),
        (CollectiveKind.ALL_GATHER, "ring", "LL128"): (22.5, 0.0),
        (CollectiveKind.ALL_GATHER, "ring", "Simple"): (22.4, 4.8),
        (AR, "tree", "LL"): (16.8, 0.5),
        (AR, "tree", "LL128"): (31.0, 0.0),
        (AR, "tree", "Simple"): (36.4, 1.9),
        (AR, "ring", "LL"): (16.6, 1.2),
        (AR, "ring", "LL128"): (31.0, 0.0),
        (AR, "ring", "Simple"): (36.4, 2.4),
    }
    for (kind, algorithm, protocol), expected in printed.items():
        found = next(
            each for each in bandwidths(kind, comm) if (each.algorithm, each.protocol) == (algorithm, protocol)
        )
        assert (round(found.latency_us, 1), round(found.gb_s, 1)) == expected


def test_what_nccl_printed_for_h800_and_b200() -> None:
    h800 = Comm(generation="hopper", ranks=32, nodes=4, channels=16, intra_gb_s=11, inter_gb_s=11)
    tree = next(each for each in bandwidths(AR, h800) if (each.algorithm, each.protocol) == ("tree", "Simple"))
    assert tree.gb_s == pytest.approx(68.8, abs=0.05)  # NVIDIA/nccl #1154
    for ranks, printed in ((2, 640), (3, 480)):  # #2343
        b200 = Comm(generation="blackwell", ranks=ranks, channels=16, intra_gb_s=40)
        ring = next(each for each in bandwidths(AR, b200) if (each.algorithm, each.protocol) == ("ring", "Simple"))
        assert ring.gb_s == printed


def test_nvls_starts_where_it_was_seen_to() -> None:
    for device, first in (("H200-SXM-141GB", 5), ("B200-SXM", 6)):
        assert "ring" in network(f"nccl:{device}", first - 1).cost(AR, 1 << 33).why
        assert "NVLS" in network(f"nccl:{device}", first).cost(AR, 1 << 33).why
        assert "ring" in network(f"nccl:{device},nvls=no", first).cost(AR, 1 << 33).why


def test_nccl_predicts_measured_rings(shared_data: Path) -> None:
    """8 A100, 1 GiB: 8.19 ms measured; the model is within its own range."""
    cost = network("nccl:A100-SXM4-80GB", 8).cost(AR, 1 << 30)
    assert cost.low_s <= 8.193e-3 <= cost.high_s


# --- files ----------------------------------------------------------------------------------------------------------

LOG = """\
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
# Using devices
#  Rank  0 Group  0 Pid    100 on      node1 device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid    101 on      node1 device  1 [0x0f] NVIDIA A100-SXM4-80GB
#  Rank  2 Group  0 Pid    102 on      node2 device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  3 Group  0 Pid    103 on      node2 device  1 [0x0f] NVIDIA A100-SXM4-80GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float     {redop}      -1     0.10    0.00    0.00      0     0.10    0.00    0.00      0
     1048576        262144     float     {redop}      -1    104.9   10.00   {bus}      0    103.0   10.18   15.27      0
     2097152        524288     float     {redop}      -1      150   13.98   20.97      0    149.0   14.07   21.11      0
     4194304       1048576     float     {redop}      -1    250.2   16.76   25.15      0    249.0   16.84   25.27      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 20.0
#
"""


def test_output_of_nccl_tests(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    file.write_text(LOG.format(redop="sum", bus="15.00"))
    (series,) = read(file).series
    assert (series.kind, series.workers, series.per_node, series.nodes) == (AR, 4, 2, 2)
    assert series.nbytes == (1048576, 2097152, 4194304)
    assert series.seconds == pytest.approx((104.9e-6, 150e-6, 250.2e-6))


def test_lines_of_a_launcher_do_not_hide_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    stamped = LOG.format(redop="sum", bus="15.00").replace("\n", "\nThu Jul 18 15:41:05 2024<stdout>:")
    command = "mpirun -np 4 -x NCCL_IB_HCA=mlx5_1:1,mlx5_2:1 all_reduce_perf -b 1M -e 4M -f 2 -g 1\n"
    file.write_text(command + stamped + LOG.format(redop="sum", bus="15.00"))  # and once more, plain
    (series,) = read(file).series
    assert (series.kind, series.workers, series.per_node, len(series.nbytes)) == (AR, 4, 2, 3)
    assert series.seconds == pytest.approx((104.9e-6, 150e-6, 250.2e-6))


def test_processes_that_ran_alone_are_told_so(tmp_path: Path) -> None:
    """The usual reason of a bus bandwidth of 0: nccl-tests without MPI, every process rank 0 (nccl-tests #71, #294)."""
    file = tmp_path / "run.log"
    alone = "".join(f"#  Rank  0 Pid   {pid} on host{pid} device  0 [0x00] Tesla V100\n" for pid in (1, 2))
    file.write_text(alone + "     1048576        262144     float     sum      -1    5.0  209.7    0.00      0\n")
    with pytest.raises(ForetraceError, match=r"rank 0 of 1 on every machine.*MPI=1"):
        read(file)


def test_a_log_of_two_workers_may_be_of_two_collectives(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    file.write_text(
        "#  Rank  0 Group  0 Pid 1 on a device  0 [0x31] NVIDIA A40\n"
        "#  Rank  1 Group  0 Pid 2 on b device  0 [0x31] NVIDIA A40\n"
        "     1048576        262144     float     sum      -1    100.0   10.49   10.49      0\n"
    )
    with pytest.raises(ForetraceError, match="all-reduce or send"):
        read(file)
    assert read(file, kind="send").series[0].nodes == 2


def test_the_collective_of_a_log_follows_from_its_bandwidths(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    file.write_text(LOG.format(redop="none", bus=" 7.50").replace("20.97", "10.49").replace("25.15", "12.57"))
    with pytest.raises(ForetraceError, match="`kind=`"):
        read(file)  # all-gather and all-to-all have the same factor
    assert read(file, kind="all_gather").series[0].kind == CollectiveKind.ALL_GATHER
    named = tmp_path / "alltoall_perf.log"
    named.write_bytes(file.read_bytes())
    assert read(named).series[0].kind == CollectiveKind.ALL_TO_ALL


def test_older_output_of_nccl_tests_has_fewer_columns(tmp_path: Path) -> None:
    file = tmp_path / "broadcast_perf.log"
    file.write_text(
        "#       size         count      type    root     time   algbw   busbw  error     time   algbw   busbw  error\n"
        "     1048576        262144     float       0    104.9   10.00   10.00  0e+00    104.9   10.00   10.00  0e+00\n"
    )
    (series,) = read(file, workers=4).series
    assert series.kind == CollectiveKind.BROADCAST and series.seconds == pytest.approx((104.9e-6,))
    with pytest.raises(ForetraceError, match="`workers=N`"):
        read(file)


def test_columns_of_nccl_tests(tmp_path: Path) -> None:
    file = tmp_path / "AR_GPU8_run.csv.gz"
    text = "count,time(us),busbw(GB/s),size(KB),time(us)\n1,100,1,1024,7\n1,50,1,512,7\n"
    file.write_bytes(gzip.compress(text.encode()))
    (series,) = read(file).series
    assert series.workers == 8 and series.nbytes == (512 * 1024, 1024 * 1024)
    assert series.seconds == pytest.approx((50e-6, 100e-6))


def test_plain_columns_and_our_own_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("kind,workers,nbytes,seconds,per_node\nall-reduce,4,1000,0.5,2\nsend,2,1000,0.25,2\n")
    table = read(file)
    assert [(each.kind, each.workers, each.per_node) for each in table.series] == [(AR, 4, 2), ("send", 2, 2)]
    table.save(tmp_path / "mine.json")
    assert read(tmp_path / "mine.json").series == table.series
    assert network(str(tmp_path / "mine.json"), 4).cost(AR, 1000.0).seconds == pytest.approx(0.5)


def test_a_file_of_several_systems_wants_one_named(tmp_path: Path) -> None:
    file = tmp_path / "sweep.csv"
    file.write_text("system,gpus,bytes,busbw_GBps\nA,8,1000,1.75\nB,8,1000,3.5\nC,,1000,2\n")
    assert read(file).systems() == ("A", "B")
    with pytest.raises(ForetraceError, match=r"A \| B"):
        network(str(file), 8)
    assert network(f"{file},system=A", 8).cost(AR, 1000).seconds == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "a,b\n1,2\n", "table of collectives"),
        ("a.csv", "size(B),time(us)\n1,2\n", "`workers=N`"),
        ("AR_GPU2.csv", "size(B),time(us)\n1,x\n", "no number"),
        ("AR_GPU2.csv", "size(B),time(us)\n1,nan\n", "no finite number"),
        ("AR_GPU2.csv", "size(B),time(us)\n1,-2\n", "above 0"),
        ("AR_GPU2.csv", "size(B),time(us)\n", "no sizes"),
        ("AR_GPU2.csv", "size(furlong),time(us)\n1,2\n", "unit"),
        ("AR_GPU2.csv", "size(B),count\n1,2\n", "no column time"),
        ("AR_GPU1.csv", "size(B),time(us)\n1,2\n", "two workers"),
        ("a.csv", "kind,workers,nbytes,seconds\nhug,2,1,1\n", "'hug' is no collective"),
        ("a.csv", "kind,workers,nbytes,seconds\nsend,2.5,1,1\n", "no whole number"),
        ("a.csv", "kind,workers,nbytes,seconds\n", "no measured collective"),
        ("a.csv", "gpus,bytes,busbw_GBps\n8,1000,0\n", "gives no time"),
        ("a.json", "{", "no table of collectives"),
        ("a.json", '{"format": 1, "collectives": []}', "no measured collective"),
        ("a.json", '{"format": 9, "collectives": []}', "format 9"),
        (
            "a.json",
            '{"format": 1, "collectives": [{"kind": "send", "workers": 2, "per_node": 2, "nbytes": [1], '
            '"seconds": []}]}',
            "one time per size",
        ),
        ("a.log", "# nccl-tests\nhello\n", "no line of sizes"),
    ],
)
def test_files_that_are_no_table(tmp_path: Path, name: str, text: str, says: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ForetraceError, match=says):
        read(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match="cannot read"):
        read(tmp_path)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"size(B),time(us)\n" * 100)[:20])
    with pytest.raises(ForetraceError, match="damaged gzip"):
        read(tmp_path / "cut.gz")
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ForetraceError, match="neither text"):
        read(tmp_path / "x.csv")


@given(st.text(alphabet="#,.(){}[]\"' \n\t-0123456789abcdefsizetime", max_size=200))
def test_any_text_is_a_table_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.csv"
    file.write_text(text)
    try:
        read(file)
    except ForetraceError as error:
        assert str(file) in str(error)


# --- measured tables of others, held out ----------------------------------------------------------------------------


def error_of(predicted: list[float], measured: tuple[float, ...]) -> float:
    return float(np.mean(np.abs(np.array(predicted) / np.array(measured) - 1)))


@pytest.mark.parametrize(
    ("file", "most"),
    [("a100_dgx_all_reduce", 0.06), ("a100_dgx_send_recv", 0.02), ("a100_pairwise_nvlink_all_reduce", 0.03)],
)
def test_sizes_held_out(shared_data: Path, file: str, most: float) -> None:
    for series in read(shared_data / "network" / "vidur" / f"{file}.csv.gz").series:
        sizes, times = np.array(series.nbytes), np.array(series.seconds)
        curve = curves.fit_table(sizes[::2], times[::2]).curve
        assert float(np.mean(np.abs(curve.seconds(sizes[1::2]) / times[1::2] - 1))) < 1.1 * most


def together(tables: list[CollectiveTable], name: str) -> CollectiveTable:
    return table_of(name, [each for table in tables for each in table.series])


@pytest.mark.parametrize("device", ["a100", "v100"])
@pytest.mark.parametrize("fitted", [(2, 4, 8), (2, 3, 4, 5, 6)])
def test_numbers_of_workers_held_out(shared_data: Path, device: str, fitted: tuple[int, ...]) -> None:
    folder = shared_data / "network" / f"vtrain_allreduce_{device}"
    tables = {n: read(folder / f"AR_GPU{n}_1M_1024M.csv.gz") for n in range(2, 9)}
    net = of_table(together([tables[n] for n in fitted], device), 8)
    for n, table in tables.items():
        if n not in fitted:
            (series,) = table.series
            found = [net.cost(AR, size, workers=n).seconds for size in series.nbytes[::32]]
            assert error_of(found, series.seconds[::32]) < 0.15, n


@pytest.mark.parametrize(("device", "most"), [("a100", 0.03), ("v100", 0.05)])
@pytest.mark.parametrize("fitted", [(3, 4, 5, 6, 7, 8), (4, 8)])
def test_two_workers_follow_from_more(shared_data: Path, device: str, most: float, fitted: tuple[int, ...]) -> None:
    folder = shared_data / "network" / f"vtrain_allreduce_{device}"
    tables = [read(folder / f"AR_GPU{n}_1M_1024M.csv.gz") for n in fitted]
    (series,) = read(folder / "AR_GPU2_1M_1024M.csv.gz").series
    found = [of_table(together(tables, device), 8).cost(AR, size, workers=2) for size in series.nbytes[::32]]
    assert error_of([each.seconds for each in found], series.seconds[::32]) < most
    inside = [each.low_s <= t <= each.high_s for each, t in zip(found, series.seconds[::32], strict=True)]
    assert np.mean(inside) >= 0.8


def test_a_single_send_has_one_card() -> None:
    """Of the eight cards that a collective is split over; inside a machine with cables, one of those."""
    cards = "nodes: 2\nper_node: 8\ninside: 2400gbit/3us\nbetween: 100gbit/5us\nnics: 8"
    send, reduce = CollectiveKind.SEND, CollectiveKind.ALL_REDUCE
    on = cluster_network(parse(cards), 16)
    assert on.cost(send, 1e9).seconds == pytest.approx(5e-6 + 1e9 / 12.5e9)
    assert on.cost(reduce, 1e9).seconds < 4 * on.cost(send, 1e9).seconds / 8 + 0.02
    assert on.cost(send, 1e9, workers=8).seconds == pytest.approx(3e-6 + 1e9 / 300e9)
    usual = cluster_network(parse("nodes: 2\ndevice: A100-SXM4-80GB\ninside: nvlink\nbetween: usual"), 16)
    assert usual.cost(send, 1e9).seconds == pytest.approx(1e9 / (0.9 * 25e9), rel=0.01)
    wired = "per_node: 8\ndevice: V100-SXM2\ninside: nvlink\nwiring: hybrid-cube-mesh"
    assert cluster_network(parse(wired), 8).cost(send, 1e9).seconds == pytest.approx(1e9 / 22.5e9, rel=0.01)
    assert network("nccl:V100-SXM2", 8).cost(send, 1e9).seconds == pytest.approx(1e9 / 20e9, rel=0.01)
    nccl = network("nccl:H100-SXM5-80GB,nodes=2,nics=8,nic=400gbit", 16)
    assert nccl.cost(send, 1e9).seconds == pytest.approx(1e9 / 50e9, rel=0.01)


def test_nccl_limits_ll_over_three_machines_as_over_many() -> None:
    """`index2 = nNodes <= 2 ? nNodes - 1 : 2` of NCCL's tuning.cc: 39 GB/s over two, 20.4 over more."""
    rates = [
        next(each for each in bandwidths(AR, Comm(generation="hopper", ranks=8 * nodes, nodes=nodes, channels=16,
                                                  intra_gb_s=20.0, inter_gb_s=20.0)) if each.protocol == "LL")
        for nodes in (2, 3, 4)
    ]  # fmt: skip
    bus = [each.gb_s * 2 * (ranks - 1) / ranks for each, ranks in zip(rates, (16, 24, 32), strict=True)]
    assert bus == pytest.approx([39.0, 20.4, 20.4])


def test_bridges_join_two_devices() -> None:
    """NVLink of PCIe boards is a bridge between two; more meet over PCIe. Few of eight MI300X have few links."""
    two, four = (network(f"nccl:A100-PCIe-80GB,per-node={n}", n).cost(AR, 1e9).seconds for n in (2, 4))
    assert four > 3 * two
    assert 1e9 * bus_share(AR, 4) / four < 32e9
    found = {n: networks_of(named("MI300X"), Sharding(workers=1, tensor=n))[TENSOR].cost(AR, 1e9) for n in (2, 8)}
    rates = {n: bus_share(AR, n) * 1e9 / cost.seconds for n, cost in found.items()}
    assert rates[2] == pytest.approx(64e9, rel=0.02) and rates[8] == pytest.approx(7 * 64e9, rel=0.15)
