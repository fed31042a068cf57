"""What a process is in a training over rows: the embedding server, or one of the trainers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from foretrace.arrays import Float32
from foretrace.experiment.messages import (
    ListenRows,
    MeetRows,
    RowTimes,
    TimeRows,
    TrainedRows,
    TrainRows,
    Worker,
)
from foretrace.files import write_bytes
from foretrace.training.rows.kept import BatchLog, file_of, numbers
from foretrace.training.rows.lookups import read
from foretrace.training.rows.optimizers import row_optimizer
from foretrace.training.rows.rows import RowsInMemory
from foretrace.training.rows.server import RemoteRows, RowServer

LINK = "link"  # the server that timing reads from and writes to
TIMED_ROWS = 1 << 14
_URGENT = 0  # kind of a message
_ROLE = "role"  # what a worker keeps it as


def serve(given: ListenRows, worker: Worker) -> dict[str, int]:
    """Become the embedding server; a port for every arm. Raises ForetraceError where what was kept cannot be read."""
    worker.kept[_ROLE] = role = _Server(given)
    return {arm: server.address[1] for arm, server in role.servers.items()}


def listen(given: ListenRows, worker: Worker) -> int:
    """Become a trainer; the port where others can connect."""
    worker.kept[_ROLE] = role = _Trainer(given)
    return role.peers.address[1]


def connect(given: MeetRows, worker: Worker) -> None:
    """Connect with the servers and the other trainers. Raises as `serve`."""
    _trainer(worker).meet(given)


def time_link(given: TimeRows, worker: Worker) -> RowTimes:
    """Time reads, writes and messages."""
    return _trainer(worker).time(given)


def train_batches(given: TrainRows, worker: Worker) -> TrainedRows:
    """Train some batches of an arm."""
    return _trainer(worker).train(given)


def hashes(given: None, worker: Worker) -> dict[str, str]:
    """SHA-256 of tables (a server) or dense weights (a trainer), by arm."""
    arms: dict[str, Float32] = worker.kept[_ROLE].weights()
    return {arm: hashlib.sha256(np.ascontiguousarray(each).tobytes()).hexdigest() for arm, each in arms.items()}


def _trainer(worker: Worker) -> _Trainer:
    role: _Trainer = worker.kept[_ROLE]
    return role


class _Server:
    def __init__(self, request: ListenRows) -> None:
        setup, rule = request.setup, row_optimizer(request.setup.optimizer)
        shape = (sum(setup.rows.values()), setup.width + rule.state)
        folder = Path(setup.folder) if setup.folder else None
        tables = {LINK: np.zeros((TIMED_ROWS, shape[1]), np.float32)}
        for arm in setup.look_ahead:
            if setup.begin and folder is not None:
                tables[arm] = numbers(file_of(folder, "rows", setup.begin), shape)
            else:
                tables[arm] = np.zeros(shape, np.float32)
                drawn = np.random.default_rng(setup.seed).standard_normal((shape[0], setup.width), np.float32)
                tables[arm][:, : setup.width] = 0.1 * drawn
                if folder is not None:
                    write_bytes(file_of(folder, "rows", 0), tables[arm].tobytes())
        self.servers = {
            arm: RowServer(
                RowsInMemory(table), trainers=setup.trainers, optimizer=rule, host=request.host,
                token=bytes.fromhex(setup.token), begin=setup.begin, folder=folder if arm != LINK else None,
                every=setup.every,
            )
            for arm, table in tables.items()
        }  # fmt: skip
        self.tables = tables

    def weights(self) -> dict[str, Float32]:
        return {arm: table for arm, table in self.tables.items() if arm != LINK}


class _Trainer:
    def __init__(self, request: ListenRows) -> None:
        import torch

        from foretrace.training.rows.peers import Peers
        from foretrace.training.rows.trainer import RowTrainer

        torch.set_num_threads(1)
        self.setup, self.rank = request.setup, request.rank
        self.token = bytes.fromhex(self.setup.token)
        self.lookups = read(self.setup.lookups, samples=self.setup.samples, rows=self.setup.rows)
        self.peers = Peers(self.rank, self.setup.trainers, request.host)
        self.trainers: dict[str, RowTrainer] = {}

    def weights(self) -> dict[str, Float32]:
        return {arm: each.dense.numpy() for arm, each in self.trainers.items()}

    def meet(self, request: MeetRows) -> None:
        from foretrace.training.rows.trainer import RowSettings, RowTrainer
        from foretrace.zoo.recommendation import RowClicks

        setup = self.setup
        settings = RowSettings(optimizer=row_optimizer(setup.optimizer), width=setup.width, compute_s=setup.compute_s)
        self.peers.meet(request.trainers, self.token)
        for arm in setup.look_ahead:
            job = RowClicks(
                tables=len(self.lookups.tables), width=setup.width, samples=setup.samples, layers=setup.layers,
                seed=setup.seed,
            )  # fmt: skip
            address = (request.server, request.ports[arm])
            trainer = RowTrainer(job, self.lookups, settings, self.peers, address, self.token)
            if setup.begin:
                kept = numbers(file_of(Path(setup.folder), "dense", setup.begin), (len(trainer.dense),))
                trainer.dense.numpy()[:] = kept
            elif setup.folder:
                self._keep(trainer.dense.numpy(), 0)
            self.trainers[arm] = trainer
        self.link = (request.server, request.ports[LINK])

    def time(self, request: TimeRows) -> RowTimes:
        others = [each for each in range(self.setup.trainers) if each != self.rank]
        number = iter(range(1 << 30))
        with RemoteRows(self.link, token=self.token) as rows:

            def get(count: int) -> None:
                rows.get(np.arange(count) + self.rank)

            def put(count: int) -> None:
                rows.put(np.arange(count), np.zeros((count, rows.width), np.float32))

            def exchange(count: int) -> None:
                batch = next(number)
                for to in others:
                    self.peers.send(to, _URGENT, -1 - batch, np.zeros((count, rows.width), np.float32))
                for of in others:
                    self.peers.receive(of, _URGENT, -1 - batch)

            def timed(what: Callable[[int], None]) -> tuple[tuple[float, ...], ...]:
                exchange(1)  # together
                return tuple(
                    tuple(_seconds(partial(what, count)) for _ in range(request.repetitions)) for count in request.rows
                )

            return RowTimes(get_s=timed(get), put_s=timed(put))

    def train(self, request: TrainRows) -> TrainedRows:
        trainer, look_ahead = self.trainers[request.arm], self.setup.look_ahead[request.arm]
        if self.setup.folder:
            trainer.log = BatchLog(Path(self.setup.folder), self.rank, request.begin)
        if look_ahead:
            ends = trainer.ahead(request.begin, request.end, look_ahead)
        else:
            ends = trainer.uncached(request.begin, request.end)
        counters = trainer.cache.counters if look_ahead else trainer.fetches[0].counters
        if trainer.log is not None:
            trainer.log.close()
            if self.setup.every and not request.end % self.setup.every:
                self._keep(trainer.dense.numpy(), request.end)
        return TrainedRows(
            ends_s=tuple(each - ends[0] for each in ends[1:]),
            hits=counters.hits, misses=counters.misses,
        )  # fmt: skip

    def _keep(self, dense: Float32, batches: int) -> None:
        """Keep the dense weights, which all trainers have alike."""
        if not self.rank:
            write_bytes(file_of(Path(self.setup.folder), "dense", batches), dense.tobytes())


def _seconds(what: Callable[[], object]) -> float:
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun
