"""`RowRun`: the processes of a training over rows, on this machine's own network or on shaped links."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from foretrace.arrays import Float32
from foretrace.errors import ForetraceError, refused
from foretrace.experiment.links import netns
from foretrace.experiment.messages import (
    ListenRows,
    MeetRows,
    RowSetup,
    TrainedRows,
    TrainRows,
    Worker,
)
from foretrace.experiment.processes import START_S, AskedCall, DeadError, Workers, alone
from foretrace.files import write_bytes, write_text
from foretrace.hardware.cluster import parse_link
from foretrace.reading import read_text
from foretrace.training.rows.kept import BatchLog, file_of, forget, read_floats, recover, whole_batches
from foretrace.training.rows.lookups import Lookups, read
from foretrace.training.rows.optimizers import row_optimizer
from foretrace.training.rows.rows import RowsInMemory
from foretrace.training.rows.server import Peers, RowServer

if TYPE_CHECKING:
    from foretrace.training.rows.trainer import RowTrainer

_LOOKUPS, _SETUP = "lookups.npz", "setup.json"
TIMED, _REPEATS = (256, 8192), 7  # rows of a read, and how often each is timed


@dataclass(frozen=True, kw_only=True)
class RowWeights:
    """SHA-256 of the tables and of the dense weights, which all trainers have alike."""

    table: str
    dense: str


class RowRun:
    """Trainers and their server, ready. Made by `running`."""

    def __init__(self, workers: Workers, setup: RowSetup, net: netns.Net | None) -> None:
        self._workers, self.setup, self.net, self.done = workers, setup, net, setup.begin
        self.hit_rate = 0.0  # of the last batches that looked ahead

    def train(self, arm: str, begin: int, end: int, *, seconds: float = 0.0) -> list[TrainedRows]:
        """Train batches of an arm; by trainer. Raises ForetraceError where a process ends."""
        calls = [AskedCall(train_batches, TrainRows(arm=arm, begin=begin, end=end))] * self.setup.trainers
        try:
            found = self._workers.ask_each(calls, f"training {arm}", patience_s=seconds + START_S)
            if self.setup.every and end % self.setup.every == 0:
                self.keep(end)
        except DeadError as error:
            raise ForetraceError(self._ended(error, begin)) from None
        self.done = end
        if self.setup.look_ahead[arm]:
            hits = sum(each.hits for each in found)
            self.hit_rate = hits / max(hits + sum(each.misses for each in found), 1)
        return found

    def keep(self, batches: int) -> None:
        """Keep the table and the dense weights after so many batches, if there is a folder, and forget older ones."""
        if self.setup.folder:
            self._workers.ask(keep, batches, "keeping weights")
            forget(Path(self.setup.folder), batches)

    def time(self) -> list[tuple[tuple[float, ...], ...]]:
        """Return seconds of reads of TIMED rows over the links, all at once: by trainer, size and repetition."""
        calls = [AskedCall(time_link, None)] * self.setup.trainers
        return self._workers.ask_each(calls, "timing the link", patience_s=3 * START_S)

    def weights(self) -> dict[str, RowWeights]:
        """Return what was trained, by arm."""
        *trainers, server = self._workers.ask(hashes, None, "comparing weights")
        found = {}
        for arm in self.setup.look_ahead:
            dense = {each[arm] for each in trainers}
            if len(dense) > 1:
                raise RuntimeError(f"trainers of {arm} have different dense weights")
            found[arm] = RowWeights(table=server[arm], dense=dense.pop())
        return found

    def _ended(self, error: DeadError, begin: int) -> str:
        """Return one sentence on a process that ended."""
        who = "the row server" if error.rank == self.setup.trainers else f"trainer {error.rank}"
        how = f"was ended by {error.signal}" if error.signal else "ended by itself"
        if not self.setup.folder:
            return f"{who} {how} after batch {begin}; keep weights in `folder=` to continue after such an end."
        kept = whole_batches(Path(self.setup.folder), trainers=self.setup.trainers, width=self.setup.width)
        return f"{who} {how}; {kept} whole batches or more are kept in {self.setup.folder}: continue there."


@contextmanager
def running(lookups: Lookups, setup: RowSetup, *, link: str = "") -> Iterator[RowRun]:
    """Start the processes of a training; ended with the block. `setup.lookups`, `.rows` and `.token` are filled in.

    With a `link` every trainer has a network of its own, whose two directions are shaped to it. With `setup.folder`
    the training continues from what is kept there. Raises ForetraceError where a network or a process cannot be had.
    """
    parsed = parse_link(link) if link else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foretrace-rows-")))
        arrays = {f"{t.name}.{what}": getattr(t, what) for t in lookups.tables for what in ("ids", "offsets")}
        np.savez(folder / _LOOKUPS, **arrays)
        setup = msgspec.structs.replace(
            setup, lookups=str(folder / _LOOKUPS), samples=lookups.samples, token=secrets.token_hex(16),
            rows={table.name: table.rows for table in lookups.tables}, begin=_begin(setup, lookups),
        )  # fmt: skip
        net = None
        if parsed is None:
            workers = stack.enter_context(alone(setup.trainers + 1))
            hosts = ["127.0.0.1"] * (setup.trainers + 1)
        else:
            net = stack.enter_context(netns.made(setup.trainers, parsed, servers=1))
            workers, hosts = stack.enter_context(netns.inside(net)), list(net.addresses)
        begins: list[AskedCall[Any]] = [
            AskedCall(listen, ListenRows(setup=setup, rank=rank, host=hosts[rank])) for rank in range(setup.trainers)
        ]
        serving = AskedCall(serve, ListenRows(setup=setup, rank=setup.trainers, host=hosts[-1]))
        *ports, arms = workers.ask_each([*begins, serving], "starting", patience_s=START_S)
        meet = MeetRows(server=hosts[-1], ports=arms, trainers=tuple(zip(hosts, ports, strict=False)))
        workers.ask_each([AskedCall(connect, meet)] * setup.trainers, "meeting", patience_s=START_S)
        run = RowRun(workers, setup, net)
        if not setup.begin:
            run.keep(0)
        yield run


def train(lookups: Lookups, setup: RowSetup, *, batches: int = 0, link: str = "") -> RowWeights:
    """Train the one arm of a setup for so many batches, by default all; what it came to.

    With a folder every batch is logged there, and all weights are written every so many. A training that was ended, at
    any point and however, continues after the last whole batch, to the bits of one that was not. Raises ForetraceError
    in one sentence where a process ends.
    """
    (arm,) = setup.look_ahead
    end = batches or lookups.batches
    with running(lookups, setup, link=link) as run:
        every = setup.every or end
        while run.done < end:
            run.train(arm, run.done, min((run.done // every + 1) * every, end))
        return run.weights()[arm]


def _begin(setup: RowSetup, lookups: Lookups) -> int:
    """Return from which batch on to train. Raises ForetraceError where the folder is another training's."""
    if not setup.folder:
        return 0
    folder = Path(setup.folder)
    same = msgspec.structs.replace(setup, begin=0, compute_s=0.0, look_ahead=dict.fromkeys(setup.look_ahead, 0))
    like = msgspec.json.encode(same).decode()
    with refused(f"{folder} cannot be used", "choose a folder of yours"):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder / _SETUP).exists():
        write_text(folder / _SETUP, like)
    elif read_text(folder / _SETUP, mend="choose another folder") != like:
        raise ForetraceError(f"{folder} holds weights of another training; choose another `folder=`.")
    rule = row_optimizer(setup.optimizer)
    shape = (sum(table.rows for table in lookups.tables), setup.width + rule.state)
    return recover(folder, trainers=setup.trainers, shape=shape, optimizer=rule)


@dataclass(frozen=True, kw_only=True)
class _Trainer:
    """A trainer of every arm: each has a server and dense weights of its own."""

    setup: RowSetup
    rank: int
    peers: Peers
    arms: dict[str, RowTrainer]


def serve(given: ListenRows, worker: Worker) -> dict[str, int]:
    """Become the embedding server; a port for every arm. Raises ForetraceError where what was kept cannot be read."""
    setup, rule = given.setup, row_optimizer(given.setup.optimizer)
    shape = (sum(setup.rows.values()), setup.width + rule.state)
    folder = Path(setup.folder) if setup.folder else None
    tables = {}
    for arm in setup.look_ahead:
        if setup.begin and folder is not None:
            tables[arm] = read_floats(file_of(folder, "rows", setup.begin), shape)
            continue
        tables[arm] = np.zeros(shape, np.float32)
        drawn = np.random.default_rng(setup.seed).standard_normal((shape[0], setup.width), np.float32)
        tables[arm][:, : setup.width] = 0.1 * drawn
    worker.kept["weights"] = lambda: tables
    worker.kept["keep"] = folder, "rows"
    servers = {
        arm: RowServer(
            RowsInMemory(table), trainers=setup.trainers, optimizer=rule, host=given.host,
            token=bytes.fromhex(setup.token), begin=setup.begin,
        )
        for arm, table in tables.items()
    }  # fmt: skip
    return {arm: server.address[1] for arm, server in servers.items()}


def listen(given: ListenRows, worker: Worker) -> int:
    """Become a trainer; the port where others can connect."""
    import torch

    torch.set_num_threads(1)
    peers = Peers(given.rank, given.setup.trainers, given.host)
    arms: dict[str, RowTrainer] = {}
    worker.kept["trainer"] = _Trainer(setup=given.setup, rank=given.rank, peers=peers, arms=arms)
    worker.kept["weights"] = lambda: {arm: each.dense.numpy() for arm, each in arms.items()}
    if not given.rank:  # all trainers have the same dense weights
        worker.kept["keep"] = Path(given.setup.folder), "dense"
    return peers.address[1]


def connect(given: MeetRows, worker: Worker) -> None:
    """Connect with the servers and the other trainers. Raises as `serve`."""
    from foretrace.training.rows.trainer import RowTrainer
    from foretrace.zoo.recommendation import RowClicks

    role = _trainer(worker)
    setup, token = role.setup, bytes.fromhex(role.setup.token)
    lookups = read(setup.lookups, samples=setup.samples, rows=setup.rows)
    rule = row_optimizer(setup.optimizer)
    role.peers.meet(given.trainers, token)
    for arm in setup.look_ahead:
        job = RowClicks(
            tables=len(lookups.tables), width=setup.width, samples=setup.samples, layers=setup.layers, seed=setup.seed
        )
        at = given.server, given.ports[arm]
        trainer = RowTrainer(job.module, job.loss, lookups, rule, role.peers, at, token, compute_s=setup.compute_s)
        if setup.begin:
            dense = trainer.dense.numpy()
            dense[:] = read_floats(file_of(Path(setup.folder), "dense", setup.begin), dense.shape)
        role.arms[arm] = trainer


def time_link(given: None, worker: Worker) -> tuple[tuple[float, ...], ...]:
    """Return seconds of reads, by size and repetition."""
    rows = next(iter(_trainer(worker).arms.values())).fetches[0]

    def seconds(count: int) -> float:
        begun = time.perf_counter()
        rows.get(np.arange(count) % rows.count)
        return time.perf_counter() - begun

    return tuple(tuple(seconds(count) for _ in range(_REPEATS)) for count in TIMED)


def train_batches(given: TrainRows, worker: Worker) -> TrainedRows:
    """Train some batches of an arm."""
    role = _trainer(worker)
    setup, trainer, look_ahead = role.setup, role.arms[given.arm], role.setup.look_ahead[given.arm]
    if setup.folder:
        trainer.log = BatchLog(Path(setup.folder), role.rank, given.begin)
    begin, end = given.begin, given.end
    ends = trainer.ahead(begin, end, look_ahead) if look_ahead else trainer.uncached(begin, end)
    counters = trainer.cache.counters if look_ahead else trainer.fetches[0].counters
    if trainer.log is not None:
        trainer.log.close()
    return TrainedRows(ends_s=tuple(each - ends[0] for each in ends[1:]), hits=counters.hits, misses=counters.misses)


def keep(batches: int, worker: Worker) -> None:
    """Write the table (the server) or the dense weights (the first trainer) after so many batches."""
    if "keep" in worker.kept:
        folder, what = worker.kept["keep"]
        for each in worker.kept["weights"]().values():
            write_bytes(file_of(folder, what, batches), each.tobytes())


def hashes(given: None, worker: Worker) -> dict[str, str]:
    """Return SHA-256 of tables (a server) or dense weights (a trainer), by arm."""
    arms: dict[str, Float32] = worker.kept["weights"]()
    return {arm: hashlib.sha256(np.ascontiguousarray(each).tobytes()).hexdigest() for arm, each in arms.items()}


def _trainer(worker: Worker) -> _Trainer:
    role: _Trainer = worker.kept["trainer"]
    return role
