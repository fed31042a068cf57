"""Two jobs share a link: steps predicted by max-min fair flows, and run in the same network namespaces.

    python benchmarks/shared_link.py [--link LINK ...] [--queue fair first-come]

Each job is data-parallel training on two workers whose layers sleep; gradients, DistributedDataParallel and gloo are
real. A worker of either job is in each of two namespaces, behind one interface, so that all messages of both jobs
cross the same links. With a `fair` queue either job has a class there that may borrow the whole link (hierarchical
token bucket); with `first-come` both are behind one token bucket, and TCP decides who gets how much. The links are
measured by one job alone, a worker of each job is recorded alone, and the steps of both together are predicted by
`foretrace.simulate.flows` before they run. Rows are added to benchmarks/data/shared_link.jsonl; `python
benchmarks/accuracy.py rig` writes the page. It needs root (`foretrace rig check`), takes some three minutes a link, and
nothing else should use the cores meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.network.link_network import LinkNetwork
from foretrace.cost.network.parse import network
from foretrace.experiment.ledger import Row, export_lines, import_lines
from foretrace.experiment.links import netns
from foretrace.experiment.links.arms import make, record, run_steps
from foretrace.experiment.links.calibrate import LinkCalibration, calibrate, title
from foretrace.experiment.links.measure import completed
from foretrace.experiment.messages import Make, Record, RunSteps, Setup
from foretrace.experiment.processes import AskedCall, Workers, alone, join
from foretrace.experiment.trial import figured
from foretrace.files import write_text
from foretrace.graph import store
from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import EDGE_COLUMNS, NO_RELEASE, TASK_COLUMNS, EdgeKind, TaskGraph, TaskKind
from foretrace.hardware.cluster import Link, parse_link
from foretrace.simulate.flows.flows import simulate_flows
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.on_links import Moved, PutIn, as_flows
from tables import ROOT, load, machine

ROWS = ROOT / "benchmarks" / "data" / "shared_link.jsonl"
PAIRS = (("12x1mb/20ms", "24x0.5mb/10ms"), ("8x2mb/15ms/5ms", "12x1mb/20ms/5ms"))
LINKS = ("300mbit", "500mbit")
ARM = "data-parallel bucket_mb=4"
FAIR, FIRST_COME = "fair", "first-come"
PORTS = (0x8000, 0x9000)  # of the two jobs, 4096 each
WORKERS, ROUNDS, BLOCK_S, LONGER, PHASES = 2, 3, 3.0, 1.4, 8


# --- predicted


def side_by_side(graphs: Sequence[TaskGraph], begins_ns: Sequence[int]) -> tuple[TaskGraph, list[Int64]]:
    """Return the tasks of several jobs in one graph, each from its own moment; per job where its tasks are by now.

    Messages of a job wait for the end of the one before, not for a time after its start, which sharing would change.
    """
    first = np.cumsum([0, *map(len, graphs)])
    at = {
        name: np.cumsum([0, *(len(getattr(each, name)) for each in graphs)])
        for name in ("names", "layers", "shapes", "lanes")
    }
    tasks: dict[str, list[Int64]] = {name: [] for name in TASK_COLUMNS}
    edges: dict[str, list[Int64]] = {name: [] for name in (*EDGE_COLUMNS, "dst")}
    for i, (graph, begin) in enumerate(zip(graphs, begins_ns, strict=True)):
        dst = graph.dst
        moved = {
            "lane": graph.lane + at["lanes"][i],
            "name": graph.name + at["names"][i],
            "op": np.where(graph.op >= 0, graph.op + at["names"][i], -1),
            "layer": np.where(graph.layer >= 0, graph.layer + at["layers"][i], -1),
            "shape": np.where(graph.shape >= 0, graph.shape + at["shapes"][i], -1),
            "release": np.where(
                np.bincount(dst, minlength=len(graph)) == 0,
                np.where(graph.release == NO_RELEASE, 0, graph.release) + begin, graph.release,
            ),
            "probes": np.arange(len(graph)) + first[i],  # to find them again
        }  # fmt: skip
        queue = (graph.edge_kind == EdgeKind.STREAM) & graph.from_start
        queue &= (graph.kind[graph.src] == TaskKind.COLLECTIVE) & (graph.kind[dst] == TaskKind.COLLECTIVE)
        queue &= graph.lag > 0
        moved |= {
            "src": graph.src + first[i],
            "dst": dst + first[i],
            "lag": np.where(queue, graph.lag - graph.dur[graph.src], graph.lag),
            "from_start": graph.from_start & ~queue,
        }
        for table in (tasks, edges):
            for name, columns in table.items():
                columns.append(moved[name] if name in moved else getattr(graph, name))
    joined = assemble(
        {name: np.concatenate(each) for name, each in tasks.items()},
        {name: np.concatenate(each) for name, each in edges.items()},
        marks=graphs[0].marks.astype(np.int64),
        names=tuple(name for graph in graphs for name in graph.names),
        layers=tuple(name for graph in graphs for name in graph.layers),
        shapes=tuple(text for graph in graphs for text in graph.shapes),
        lanes=tuple(replace(lane, rank=i) for i, graph in enumerate(graphs) for lane in graph.lanes),
        info=graphs[0].info,
    )
    where = np.argsort(joined.probes)
    return joined, [where[first[i] : first[i + 1]] for i in range(len(graphs))]


def together_s(graphs: Sequence[TaskGraph], link: str, payload: float) -> list[list[float]]:
    """Mean steps of every job beside the other, one for each of some moments at which the second one may begin.

    `payload` is what the link was measured to carry, bytes per second.
    """
    net = network(link, WORKERS)
    assert isinstance(net, LinkNetwork)
    capacity = np.full(len(net.cluster.links), payload)
    period = simulate(graphs[1]).step_time_s
    found: list[list[float]] = [[] for _ in graphs]
    for phase in range(PHASES):
        joined, where = side_by_side(graphs, (0, round(1e9 * period * phase / PHASES)))
        moved: list[Moved] = []
        for graph, rows in zip(graphs, where, strict=True):
            live = (graph.kind == TaskKind.COLLECTIVE) & ~graph.gone & (graph.dur > 0)
            facts = graph.info.recording["distributed"]
            moved += [
                replace(each, rows=tuple(int(rows[row]) for row in each.rows))
                for each in PutIn(facts=facts).found(graph, live, net.cluster).moved
            ]
        flows, links = as_flows(moved, capacity, capacity)
        _, end = simulate_flows(joined, flows, links)
        marks = [end[rows[graph.marks]] for graph, rows in zip(graphs, where, strict=True)]
        until = min(int(each[-1]) for each in marks)
        for own, steps in zip(found, marks, strict=True):
            inside = steps[1:][steps[1:] <= until]  # as they run: the first step of each is not counted
            own.append(float(inside[-1] - inside[0]) / (len(inside) - 1) / 1e9)
    return found


# --- run


def rows_of(link: str, queue: str) -> Iterator[Row]:
    """Measure the link, record both jobs of every pair, predict them together and run them."""
    parsed = parse_link(link)
    with (
        tempfile.TemporaryDirectory(prefix="foretrace-shared-") as name,
        netns.made(WORKERS, parsed) as net,
        netns.inside(net) as first,
        netns.inside(net) as second,
    ):
        for i, workers in enumerate((first, second)):
            for namespace in net.namespaces if queue == FAIR else ():
                ports = f"{PORTS[i]} {PORTS[i] + 0xFFF}"
                _said("ip", "netns", "exec", namespace, "sysctl", "-qw", f"net.ipv4.ip_local_port_range={ports}")
            join(workers, net.addresses[0], netns.PORT + i, 1)
        for namespace in net.namespaces if queue == FAIR else ():
            _classes(namespace, parsed)
        table = Path(name) / "network.json"
        measured = calibrate(first, parsed, table, name=title(WORKERS, link), hosts=False)
        for pair in PAIRS:
            graphs = [_predicted(work, table, Path(name)) for work in pair]
            yield from _run((first, second), pair, graphs, link, queue, measured)


def _classes(namespace: str, link: Link) -> None:
    """Share an interface between the jobs, half for each, and all of it for one alone."""
    device, rate, burst = netns.INTERFACE, round(1e6 * link.gbit_s), netns.burst_bytes(link)
    tokens = ("burst", f"{burst}b", "cburst", f"{burst}b")
    tc = ("tc", "-n", namespace)
    _said(*tc, "qdisc", "replace", "dev", device, "root", "handle", "1:", "htb", "default", "10")
    _said(*tc, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", "htb", "rate", f"{rate}kbit", *tokens)
    for number, ports in zip(("1:10", "1:20"), PORTS, strict=True):
        share = ("rate", f"{rate // 2}kbit", "ceil", f"{rate}kbit", *tokens, "quantum", str(burst // 2))
        _said(*tc, "class", "add", "dev", device, "parent", "1:1", "classid", number, "htb", *share)
        match = ("match", "ip", "dport", f"{ports:#x}", "0xf000", "flowid", number)
        _said(*tc, "filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "prio", "1", "u32", *match)


def _said(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20.0)


def _predicted(work: str, table: Path, folder: Path) -> TaskGraph:
    """One job alone on the link, from a recording of one of its workers."""
    file, (text,) = folder / "alone.graph", completed((ARM,), WORKERS, str(table))
    with alone(1) as workers:
        request = Record(setup=Setup(work=work), arms=((text,),), threads=1, graph=str(file))
        workers.ask(record, request, f"recording {work}", seconds=120.0)
    return parse(text).predict(store.load(file))


def _run(
    jobs: tuple[Workers, Workers], pair: Sequence[str], graphs: Sequence[TaskGraph], link: str, queue: str,
    measured: LinkCalibration,
) -> Iterator[Row]:  # fmt: skip
    alone_s = [simulate(graph).step_time_s for graph in graphs]
    expected = together_s(graphs, link, 1e6 * measured.mbit_s / 8)
    both_s = [float(np.mean(each)) for each in expected]
    used = completed((ARM,), WORKERS, link)
    for workers, work in zip(jobs, pair, strict=True):
        workers.ask(make, Make(name=work, setup=Setup(work=work, techniques=used)), f"making {work}")
    single: list[list[float]] = [[], []]
    shared: list[list[float]] = [[], []]
    phases: list[list[int]] = [[], []]
    for number in range(-1, ROUNDS):
        for i in (0, 1):
            phase = (3 * number + 2 * i) % PHASES
            one = _steps(jobs, pair, [ceil(BLOCK_S / alone_s[0]) * (i == 0), ceil(BLOCK_S / alone_s[1]) * (i == 1)])
            longer = [ceil(BLOCK_S * (1.0 if j == i else LONGER) / both_s[j]) + (j != i) for j in (0, 1)]
            two = _steps(jobs, pair, longer, later_s=alone_s[1] * phase / PHASES)
            if number >= 0:
                single[i].append(one[i])
                shared[i].append(two[i])
                phases[i].append(phase)
    net = network(str(measured.file), WORKERS)
    transfer = one_worker.transfer(net)
    for i, work in enumerate(pair):
        each_s = both_s[i : i + 1] * ROUNDS
        near = [(min(expected[i]), max(expected[i]))]
        if queue == FAIR:  # the moment at which the second job begins is known, about, and stays; else TCP shifts it
            each_s = [expected[i][at] for at in phases[i]]
            beside = [[expected[i][(at + by) % PHASES] for by in (-1, 0, 1)] for at in phases[i]]
            near = [(min(some), max(some)) for some in beside]
        value = float(np.mean(each_s))
        low, high = (
            end * float(np.mean(some))
            for end, some in zip((transfer.low, transfer.high), zip(*near, strict=True), strict=True)
        )
        row = figured((value, low, high), shared[i], each_s=each_s).row(
            "contention jobs=2", model=work, size=f"beside {pair[1 - i]}, {link}, {queue} queue",
            parameters={"link": link, "queue": queue, "beside": pair[1 - i], "alone_predicted_s": alone_s[i],
                        "alone_s": float(np.median(single[i])), "link_mbit_s": measured.mbit_s},
            arms={"blocks_s": shared[i], "alone_s": single[i], "phases_s": expected[i]},
            notes=(machine(), f"load {load()}"),
        )  # fmt: skip
        print(
            f"{work} beside {pair[1 - i]}, {link}, {queue}: alone {1e3 * alone_s[i]:.1f} (measured "
            f"{1e3 * float(np.median(single[i])):.1f}); both predicted {1e3 * value:.1f} ({1e3 * low:.1f} - "
            f"{1e3 * high:.1f}), measured {1e3 * row.after_s:.1f} ms, {100 * row.error:+.2f} %, {row.verdict}",
            flush=True,
        )  # fmt: skip
        yield row


def _steps(
    jobs: tuple[Workers, Workers], pair: Sequence[str], steps: Sequence[int], *, later_s: float = 0.0
) -> list[float]:
    """Run so many steps of both jobs at the same time, the second one begun later; seconds per step of each."""
    running = []
    for i, (workers, work, count) in enumerate(zip(jobs, pair, steps, strict=True)):
        time.sleep(i * later_s)
        calls = [AskedCall(run_steps, RunSteps(name=work, discarded=1, steps=count, together=True))] * WORKERS
        if count:
            workers.submit(calls, f"running {work}")
        running.append(calls if count else [])
    return [
        max((each.wall_s for each in workers.collect(calls, f"running {work}")), default=0.0) if calls else 0.0
        for workers, work, calls in zip(jobs, pair, running, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", nargs="+", default=LINKS, help=", ".join(LINKS))
    parser.add_argument("--queue", nargs="+", default=(FAIR, FIRST_COME), choices=(FAIR, FIRST_COME))
    given = parser.parse_args()
    netns.require()
    rows = list(import_lines(ROWS.read_text(encoding="utf-8"), str(ROWS))) if ROWS.exists() else []
    for link, queue in product(given.link, given.queue):
        for row in rows_of(link, queue):
            rows.append(row)
            write_text(ROWS, export_lines(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
