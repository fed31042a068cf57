"""What a process is in a training over rows: the embedding server, or one of the trainers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foretrace.arrays import Float32
from foretrace.experiment.messages import ListenRows, MeetRows, RowTimes, TimeRows, TrainedRows, TrainRows, Worker
from foretrace.files import write_bytes
from foretrace.training.rows.kept import BatchLog, file_of, read_floats
from foretrace.training.rows.lookups import read
from foretrace.training.rows.optimizers import row_optimizer
from foretrace.training.rows.rows import RowsInMemory
from foretrace.training.rows.server import RemoteRows, RowServer

if TYPE_CHECKING:
    from foretrace.training.rows.peers import Peers
    from foretrace.training.rows.trainer import RowTrainer

LINK = "link"  # the server that timing reads from and writes to
TIMED_ROWS = 1 << 14
_URGENT = 0  # kind of a message


class _Trainer:
    """A trainer of every arm: each has a server and dense weights of its own."""

    def __init__(self, given: ListenRows, peers: Peers) -> None:
        self.setup, self.rank, self.peers = given.setup, given.rank, peers
        self.arms: dict[str, RowTrainer] = {}
        self.link = ("", 0)

    def keep(self, dense: Float32, batches: int) -> None:
        """Keep the dense weights, which all trainers have alike."""
        if not self.rank:
            write_bytes(file_of(Path(self.setup.folder), "dense", batches), dense.tobytes())


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
        if folder is not None:
            write_bytes(file_of(folder, "rows", 0), tables[arm].tobytes())
    worker.kept["weights"] = lambda: tables
    start = partial(
        RowServer, trainers=setup.trainers, optimizer=rule, host=given.host, token=bytes.fromhex(setup.token),
        begin=setup.begin,
    )  # fmt: skip
    servers = {arm: start(RowsInMemory(table), folder=folder, every=setup.every) for arm, table in tables.items()}
    servers[LINK] = start(RowsInMemory(np.zeros((TIMED_ROWS, shape[1]), np.float32)))
    return {arm: server.address[1] for arm, server in servers.items()}


def listen(given: ListenRows, worker: Worker) -> int:
    """Become a trainer; the port where others can connect."""
    import torch

    from foretrace.training.rows.peers import Peers

    torch.set_num_threads(1)
    worker.kept["trainer"] = role = _Trainer(given, Peers(given.rank, given.setup.trainers, given.host))
    worker.kept["weights"] = lambda: {arm: each.dense.numpy() for arm, each in role.arms.items()}
    return role.peers.address[1]


def connect(given: MeetRows, worker: Worker) -> None:
    """Connect with the servers and the other trainers. Raises as `serve`."""
    from foretrace.training.rows.trainer import RowSettings, RowTrainer
    from foretrace.zoo.recommendation import RowClicks

    role = _trainer(worker)
    setup, token = role.setup, bytes.fromhex(role.setup.token)
    lookups = read(setup.lookups, samples=setup.samples, rows=setup.rows)
    settings = RowSettings(optimizer=row_optimizer(setup.optimizer), width=setup.width, compute_s=setup.compute_s)
    role.peers.meet(given.trainers, token)
    role.link = (given.server, given.ports[LINK])
    for arm in setup.look_ahead:
        job = RowClicks(
            tables=len(lookups.tables), width=setup.width, samples=setup.samples, layers=setup.layers, seed=setup.seed
        )
        trainer = RowTrainer(job, lookups, settings, role.peers, (given.server, given.ports[arm]), token)
        dense = trainer.dense.numpy()
        if setup.begin:
            dense[:] = read_floats(file_of(Path(setup.folder), "dense", setup.begin), dense.shape)
        elif setup.folder:
            role.keep(dense, 0)
        role.arms[arm] = trainer


def time_link(given: TimeRows, worker: Worker) -> RowTimes:
    """Time reads, writes and messages."""
    role = _trainer(worker)
    others = [each for each in range(role.setup.trainers) if each != role.rank]
    number = iter(range(1 << 30))
    with RemoteRows(role.link, token=bytes.fromhex(role.setup.token)) as rows:

        def get(count: int) -> None:
            rows.get(np.arange(count) + role.rank)

        def put(count: int) -> None:
            rows.put(np.arange(count), np.zeros((count, rows.width), np.float32))

        def together() -> None:
            batch = -1 - next(number)
            for to in others:
                role.peers.send(to, _URGENT, batch, np.zeros(rows.width, np.float32))
            for of in others:
                role.peers.receive(of, _URGENT, batch)

        def timed(what: Callable[[int], None]) -> tuple[tuple[float, ...], ...]:
            together()
            return tuple(tuple(_seconds(what, count) for _ in range(given.repetitions)) for count in given.rows)

        return RowTimes(get_s=timed(get), put_s=timed(put))


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
        if setup.every and not given.end % setup.every:
            role.keep(trainer.dense.numpy(), given.end)
    return TrainedRows(ends_s=tuple(each - ends[0] for each in ends[1:]), hits=counters.hits, misses=counters.misses)


def hashes(given: None, worker: Worker) -> dict[str, str]:
    """Return SHA-256 of tables (a server) or dense weights (a trainer), by arm."""
    arms: dict[str, Float32] = worker.kept["weights"]()
    return {arm: hashlib.sha256(np.ascontiguousarray(each).tobytes()).hexdigest() for arm, each in arms.items()}


def _trainer(worker: Worker) -> _Trainer:
    role: _Trainer = worker.kept["trainer"]
    return role


def _seconds(what: Callable[[int], object], count: int) -> float:
    begun = time.perf_counter()
    what(count)
    return time.perf_counter() - begun
