"""GraphSnapShot: what caches of neighbour lists save, in memory, on disk and over a shaped link, and what they cost.

    python -m reproductions graphsnapshot [--quick] [--graphs FOLDER] [--write]

Time: all samplers in turns on one graph, whole periods between two refreshes, predicted before (`plan.data`). Disk:
direct reads past the page cache. Link: lists in a server process behind a shaped link, left out with the reason where
this machine cannot make one. Staleness: distinct neighbours that a hub shows. Accuracy: a graph network, three seeds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev

import msgspec
import numpy as np

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row, export_lines
from foretrace.experiment.links import netns
from foretrace.experiment.trial import figured, in_turns
from foretrace.files import write_text
from foretrace.hardware.cluster import parse_link
from foretrace.plan.data.neighbour_caches import DISK_WIDTH, candidates
from foretrace.training.rows import graphs
from foretrace.training.rows.disk import RowsOnDisk, create
from foretrace.training.rows.neighbours import CachePolicy, NeighbourLists, blocks, distinct, policies
from foretrace.training.rows.rows import RowsInMemory
from foretrace.training.rows.samplers import NeighborLoader
from foretrace.training.rows.server import RemoteRows, RowServer
from reproductions import ROOT, parser_of, shared_data
from reproductions.systems import put
from tables import load, machine, table, today

HERE = Path(__file__).parent
NAMES = ("plain", "plain again", "fcr", "fcr-shared", "otf", "otf-shared", "otf-full-refresh", "otf-partial-fetch")
PORT, TOKEN = 29_600, b"a shaped link of our own"
LINK_WIDTH = 16  # neighbours of a block over a link: 64 bytes
LINKS = {10: ("200mbit", "50mbit"), 60: ("200mbit",)}  # by degree

COLUMNS = ("lists", "sampler", "ms per batch", "against plain", "predicted ms (range)", "error", "memory MB", "hits",
           "read per batch", "filled in s")  # fmt: skip
HEAD = """# GraphSnapShot: caches of neighbour lists

A sampler draws, hop by hop, some neighbours of every node of a batch. Plain sampling (FBL) reads their lists each time.
FCR keeps a random part of every list in memory, twice the fan-out, and draws all anew every 50 batches; OTF keeps 1.2
times the fan-out and every 50 batches replaces 0.4 of it for the nodes that this batch needs. *Shared*: one cache for
both hops; *full refresh*: OTF replaces all that it keeps of a node; *partial fetch*: 0.4 of a fan-out is read from the
lists all the same. Written by `make reproduce NAME=graphsnapshot ARGS=--write`.

**None of it is lossless**: every batch alone is drawn as without a cache, but batches between two refreshes draw from
the same few neighbours (see staleness). With partial fetch a batch may draw a neighbour twice, once from each.
"""
TIMES = """Random graphs of 300,000 nodes, fan-out 10 and 10; 512 nodes per batch in memory, 128 elsewhere; all samplers
in turns, whole periods between two refreshes, median over rounds. Time is CPU time and waiting for reads. Predictions
are made before, from three batches of each sampler with and without a refresh (`plan/data/neighbour_caches.py`). Memory
is that of lists in this process, caches and numbering; *read*: neighbours taken from the lists, refreshes included.
Published: 30 % less time, 73 % less memory.
"""
STALE = """Distinct neighbours that a node shows in 200 batches which all draw 10 of them; in brackets, as expected.
"""
ACCURACY = """Two layers of GraphSAGE (mean), 5 and 5 neighbours, a refresh every 50 batches; test accuracy in % with
all neighbours, at the epoch that was best on validation; mean and standard deviation over seeds.
"""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A graph and how it is sampled."""

    nodes: int
    degree: int
    fan_out: tuple[int, ...] = (10, 10)
    batch: int = 512
    every: int = 50
    rounds: int = 3

    def graph(self) -> graphs.Adjacency:
        """Edges between random nodes."""
        random = np.random.default_rng(0)
        return graphs.Adjacency.of(random.integers(0, self.nodes, (self.nodes * self.degree // 2, 2)), self.nodes)

    def arms(self) -> dict[str, CachePolicy | None]:
        """Samplers by name."""
        return {name: policies(self.every).get(name) for name in NAMES}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One sampler on one store: seconds per batch of every round, and what it was predicted to take."""

    store: str
    degree: int
    name: str
    seconds: tuple[float, ...]
    predicted: tuple[float, float, float]  # and its range
    fill_s: float
    memory_bytes: int  # lists in memory, cache and numbers of nodes
    hits: float  # share of neighbours drawn from the cache
    read: float  # neighbours that a batch read from the lists, with its share of the refreshes


def measure(lists: NeighbourLists, setting: Setting, store: str) -> list[Measured]:
    """Predict all samplers, each from a few batches of its own, and then run them in turns."""
    arms = setting.arms()
    every, fan_out, size = np.arange(setting.nodes), setting.fan_out, setting.batch
    told = list(candidates(lists, num_neighbors=fan_out, input_nodes=every, batch_size=size, among=arms))
    loaders: dict[str, NeighborLoader] = {}
    filled: dict[str, float] = {}
    seeds = [np.random.default_rng(turn).permutation(setting.nodes) for turn in range(setting.rounds)]
    for name, policy in arms.items():
        begin = lists.clock()
        loaders[name] = NeighborLoader(lists, num_neighbors=fan_out, batch_size=size, cache=policy)
        filled[name] = lists.clock() - begin
        loaders[name].counters.rows_read = 0
        loaders[name].sample(every[:size])  # compiles; its refresh comes after `every` more

    def batch_s(name: str, turn: int) -> float:
        count = setting.every if arms[name] else max(setting.every // 10, 2)
        begin = lists.clock()
        for k in range(count):
            loaders[name].sample(seeds[turn][np.arange(k * size, (k + 1) * size) % setting.nodes])
        return (lists.clock() - begin) / count

    taken = in_turns(NAMES, batch_s, setting.rounds)
    found = []
    for expected in told:
        name, batches = expected.loader, expected.batches
        counters = loaders[name].counters
        found.append(Measured(
            store=store, degree=setting.degree, name=name, seconds=tuple(taken[name]), fill_s=filled[name],
            predicted=(expected.epoch_s / batches, expected.low_s / batches, expected.high_s / batches),
            memory_bytes=loaders[name].memory_bytes,
            hits=counters.hits / (counters.hits + counters.misses), read=counters.rows_read / loaders[name].batches,
        ))  # fmt: skip
        print(line(found[-1], found[0]), file=sys.stderr, flush=True)
    return found


def in_memory(setting: Setting) -> list[Measured]:
    """CPU time: nothing is waited for."""
    return measure(NeighbourLists.of(setting.graph()), setting, "memory")


def on_disk(setting: Setting) -> list[Measured]:
    """Lists in a file, every block read past the page cache."""
    adjacency = setting.graph()
    held = blocks(adjacency, DISK_WIDTH)
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        path = Path(folder) / "lists"
        create(path, held.shape[0], held.shape[1], 1, lambda i, j: held[i:j])
        with RowsOnDisk(path, buffer=0, spare=0) as rows:
            store = "disk" if rows.direct else "disk, page cache given back"
            return measure(NeighbourLists(adjacency.starts, rows), setting, store)


def over_link(setting: Setting, rate: str) -> list[Measured]:
    """Lists in a server process behind a shaped link, in namespaces; the loader in another process behind its own."""
    given = msgspec.json.encode(setting).decode()
    with netns.made(2, parse_link(rate)) as net:
        command = [
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-m",
                "reproductions",
                "graphsnapshot",
                "--setting",
                given,
                "--host",
                host,
            ]
            for name, host in zip(net.namespaces, ("", net.addresses[0]), strict=True)
        ]
        with subprocess.Popen(command[0], stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT) as server:
            try:
                if server.stdout is None or server.stdout.readline() != b"ready\n":
                    raise ForetraceError("the server of neighbour lists did not start.")
                done = subprocess.run(command[1], stdout=subprocess.PIPE, cwd=ROOT, check=True)
            finally:
                server.kill()
    return [msgspec.structs.replace(each, store=f"link {rate}")
            for each in msgspec.json.decode(done.stdout, type=list[Measured])]  # fmt: skip


def serve(setting: Setting) -> None:
    """Be the server until standard input ends."""
    held = RowsInMemory(blocks(setting.graph(), LINK_WIDTH))
    with RowServer(held, host="0.0.0.0", port=PORT, token=TOKEN):
        print("ready", flush=True)
        sys.stdin.read()


def connect(setting: Setting, host: str) -> None:
    """Be the loader, and print what was measured."""
    with RemoteRows((host, PORT), token=TOKEN) as rows:
        found = measure(NeighbourLists(setting.graph().starts, rows), setting, "link")
    print(msgspec.json.encode(found).decode())


def line(row: Measured, plain: Measured) -> str:
    """One line of the table of times."""
    time_s, (predicted, low, high) = median(row.seconds), row.predicted
    cells = (
        f"{row.store}, degree {row.degree}", row.name, f"{1e3 * time_s:.3g}",
        f"{100 * (time_s / median(plain.seconds) - 1):+.0f} %",
        f"{1e3 * predicted:.3g} ({1e3 * low:.3g} – {1e3 * high:.3g})", f"{100 * (predicted / time_s - 1):+.0f} %",
        f"{row.memory_bytes / 1e6:.1f}", f"{100 * row.hits:.0f} %", f"{row.read:,.0f}", f"{row.fill_s:.2g}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def ledger_rows(found: Sequence[Measured], setting: Setting) -> Iterator[Row]:
    """A row of the ledger for every sampler of one store."""
    for each in found:
        yield figured(each.predicted, each.seconds, clock="cpu" if each.store == "memory" else "wall").row(
            f"sample-neighbours {each.name}.{each.store}", parameters={"degree": each.degree, "batch": setting.batch,
            "fan_out": list(setting.fan_out), "every": setting.every}, model=f"{setting.nodes} random nodes",
            size=f"degree {each.degree}",
        )  # fmt: skip


def staleness(degrees: Sequence[int], batches: int, every: int) -> str:
    """Distinct neighbours that hubs show, drawn and as expected."""
    arms: dict[str, CachePolicy | None] = {"plain": None, **policies(every)}
    rows = []
    for name, policy in arms.items():
        cells = []
        for degree in degrees:
            star = graphs.Adjacency.of(np.stack([np.zeros(degree, np.int64), np.arange(1, degree + 1)], axis=1),
                                       degree + 1, directed=True)  # fmt: skip
            loader = NeighborLoader(NeighbourLists.of(star), num_neighbors=[10], cache=policy)
            seen = {int(node) for _ in range(batches) for node in loader.sample(np.zeros(1, np.int64)).n_id[1:]}
            expected = policy.distinct(degree, 10, batches) if policy else distinct(degree, 10, batches)
            cells.append(f"{len(seen):,} ({expected:,.0f})")
        rows.append((name, *cells))
    return table(("sampler", *(f"of {each:,}" for each in degrees)), rows)


def accuracies(folder: Path, *, seeds: int, quick: bool) -> str:
    """Test accuracy by sampler and graph."""
    from reproductions.graphsnapshot.training import accuracy

    planted = graphs.planted(nodes=1000 if quick else 6000, edges=15_000 if quick else 180_000, communities=10,
                             mixing=0.6, features=16)  # fmt: skip
    held = {f"planted ({planted.adjacency.nodes:,} nodes)": (planted, 2 if quick else 15, 64)}
    for name in ("cora", "citeseer"):
        if (folder / f"{name}.npz").is_file():
            held[name] = (graphs.read(folder / f"{name}.npz"), 2 if quick else 30, 32)
        else:
            print(f"{name} is left out: there is no {folder / name}.npz.", file=sys.stderr)
    rows = []
    for arm in ("plain", "fcr", "otf", "otf-partial-fetch"):
        cells = []
        for data, epochs, batch in held.values():
            policy = policies(50).get(arm)
            found = [100 * accuracy(data, policy, seed=seed, epochs=epochs, num_neighbors=(5, 5), batch_size=batch)
                     for seed in range(seeds)]  # fmt: skip
            cells.append(f"{mean(found):.1f} ± {stdev(found) if seeds > 1 else 0:.1f}")
        rows.append((arm, *cells))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return table(("sampler", *held), rows)


@contextmanager
def skipping(name: str, why: list[str]) -> Iterator[None]:
    """Go on where a machine cannot do something, and say it on the page."""
    try:
        yield
    except (ForetraceError, subprocess.CalledProcessError) as error:
        why.append(f"{name} is left out: {error}")
        print(why[-1], file=sys.stderr)


def _held(row: Row) -> bool:
    return row.predicted_low <= row.measured <= row.predicted_high


def measured(folder: Path, *, quick: bool, keep: bool) -> str:
    """Measure everything; the page. `keep` writes the rows of the ledger beside it."""
    nodes = 3_000 if quick else 300_000
    every, rounds = (4, 2) if quick else (50, 3)
    runs: list[tuple[str, Setting, Callable[[Setting], list[Measured]]]] = []
    for degree in (10, 60):
        small = Setting(nodes=nodes, degree=degree, batch=128, every=every, rounds=rounds)
        large = msgspec.structs.replace(small, batch=512, rounds=2 * rounds + 1)
        runs += [("memory", large, in_memory), ("disk", small, on_disk)]
        runs += [
            (f"a link of {rate}", small, partial(over_link, rate=rate)) for rate in (() if quick else LINKS[degree])
        ]
    lines: list[str] = []
    rows: list[Row] = []
    out: list[str] = []
    for name, setting, run in runs:
        with skipping(name, out):
            found = run(setting)
            lines += [line(each, found[0]) for each in found]
            rows += list(ledger_rows(found, setting))
    if keep:
        write_text(HERE / "rows.jsonl", export_lines(rows))
    errors = sorted(abs(row.error) for row in rows)
    said = (f"{len(rows)} predictions: median error {100 * median(errors):.0f} %, worst {100 * errors[-1]:.0f} %; the "
            f"range, wide as they are, holds {sum(map(_held, rows))} of them ([rows.jsonl](rows.jsonl)).")  # fmt: skip
    return "\n".join([
        HEAD, f"*{today()}, {machine()}; load averages {load()}.*", *out, "",
        "## Time and memory\n", TIMES, table(COLUMNS, ()), *lines, "", said, "",
        "## Staleness\n", STALE, staleness((30, 200, 2000), 200, 50), "",
        "## Accuracy\n", ACCURACY, accuracies(folder, seeds=1 if quick else 3, quick=quick), "",
    ])  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("graphsnapshot", __doc__)
    default = shared_data() / "graphs"
    parser.add_argument("--quick", action="store_true", help="small graphs, one seed, no link")
    parser.add_argument("--graphs", type=Path, default=default, help="folder of cora.npz and citeseer.npz")
    parser.add_argument("--write", action="store_true", help="write README.md and rows.jsonl beside this file")
    parser.add_argument("--setting", help="be one end of a link: the server of this setting's lists ...")
    parser.add_argument("--host", help="... or the loader that reads them from a server here")
    given = parser.parse_args(arguments)
    if given.setting:
        setting = msgspec.json.decode(given.setting, type=Setting)
        connect(setting, given.host) if given.host else serve(setting)
        return 0
    print(page := measured(given.graphs, quick=given.quick, keep=given.write))
    if given.write:
        put(HERE / "README.md", page)
    return 0
