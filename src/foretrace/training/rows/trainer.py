"""`RowTrainer`: synchronous training of a dense network over rows of a server, uncached or with look-ahead.

Both ways give the same weights, to the bit: a row's gradients are added up in the order of the ranks and applied once,
whoever does it; dense gradients likewise, a share of them by every trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.arrays import Float32, Int64
from foretrace.training.rows.kept import BatchLog
from foretrace.training.rows.lookahead import LAG, LookAheadRows, TrainerTurn, numbered, plan_ahead
from foretrace.training.rows.lookups import Lookups
from foretrace.training.rows.optimizers import DENSE_RATE, RowOptimizer, add_up
from foretrace.training.rows.server import CHUNK, Address, Peers, RemoteRows

FETCHERS = 2  # requests for rows of later batches that are under way: one travels while another is answered
FETCHED_AHEAD = 8  # batches whose rows may lie ready, at most


class _Kind(IntEnum):
    """Of messages between trainers; those needed at once are even."""

    GRADIENTS = 0
    LATER_GRADIENTS = 1
    VALUES = 2
    LATER_VALUES = 3
    DENSE_GRADIENTS = 4
    DENSE_SUMS = 6


# Of a batch, a trainer, how many there are, and what this one looked up (samples, tables, width): the loss of its
# samples, divided by those of *all* trainers.
RowLoss = Callable[[int, int, int, Tensor], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Reads:
    """What one trainer reads in a batch."""

    ids: Int64  # each once
    places: Tensor  # of every read among `ids`
    offsets: Tensor


class RowTrainer:
    """One of `peers.trainers` trainers of a dense `module` over the table at `server`.

    `compute_s` is the least that the passes of a batch take: what is missing is slept.

    `uncached` and `ahead` train some batches and return when each had ended (seconds of `perf_counter`). Raises
    ForetraceError where the server or another trainer is gone.
    """

    def __init__(
        self, module: nn.Module, loss: RowLoss, lookups: Lookups, optimizer: RowOptimizer, peers: Peers,
        server: Address, token: bytes, *, compute_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.loss, self.lookups, self.optimizer, self.peers, self.compute_s = loss, lookups, optimizer, peers, compute_s
        self.rank, self.trainers = peers.rank, peers.trainers
        self._others = [each for each in range(self.trainers) if each != self.rank]
        self.log: BatchLog | None = None  # of what this trainer finds
        self.cache: LookAheadRows  # of the last batches that looked ahead
        self._lock = threading.Lock()  # of the cache
        self._pace = _Pace()
        self._keeping = 0  # batch whose later rows are being exchanged
        self.fetches = tuple(RemoteRows(server, token=token, rank=self.rank) for _ in range(FETCHERS))
        self.pushes = RemoteRows(
            server, token=token, rank=self.rank, pace=lambda: self._pace.wait(self._keeping + LAG), urgent=False
        )
        self.width = self.pushes.width - optimizer.state  # weights of a row
        self._parameters = tuple(module.parameters())
        self.dense = torch.nn.utils.parameters_to_vector(self._parameters).detach().clone()
        torch.nn.utils.vector_to_parameters(self.dense, self._parameters)  # they are views of it from now on
        edges = np.linspace(0, len(self.dense), self.trainers + 1).astype(int).tolist()
        self._shares = [slice(begin, end) for begin, end in pairwise(edges)]

    def close(self) -> None:
        """Close the log and the connections with the server; those with peers stay."""
        if self.log is not None:
            self.log.close()
        for each in (*self.fetches, self.pushes):
            each.close()

    def uncached(self, begin: int, end: int) -> list[float]:
        """Train batches that each fetch their rows, and whose gradients the server applies."""
        reads, ends = [self._reads(batch) for batch in range(begin, end)], [time.perf_counter()]
        for batch, read in enumerate(reads, begin):
            values = self.fetches[0].get_after(batch, read.ids)
            gradients, dense = self._passes(batch, read, values)
            self._keeping = -LAG  # nothing is more urgent
            self.pushes.push(batch, read.ids, gradients, gradients=True, width=self.width)
            self._exchange_dense(batch, dense)
            ends.append(time.perf_counter())
        self.fetches[0].get_after(end, np.empty(0, np.int64))
        return ends

    def ahead(self, begin: int, end: int, look_ahead: int) -> list[float]:
        """Train batches whose rows stay with trainers as long as a plan says."""
        plan = plan_ahead(self.lookups, trainers=self.trainers, look_ahead=look_ahead, begin=begin, end=end)
        self.cache = cache = LookAheadRows(self.pushes, plan, self.rank)
        reads = [self._reads(batch) for batch in range(begin, end)]
        turns = [
            [plan.turn(batch, self.rank, soon=which) for which in (None, True, False)] for batch in range(begin, end)
        ]
        ends, depth = [time.perf_counter()], min(look_ahead, FETCHED_AHEAD)
        with ThreadPoolExecutor(FETCHERS) as fetcher, ThreadPoolExecutor(1) as keeper, ThreadPoolExecutor(1) as pusher:
            fetched: dict[int, Future[Float32]] = {}
            kept: dict[int, Future[Future[None]]] = {}
            pushed: dict[int, Future[None]] = {}
            try:
                for batch, read, (turn, soon, later) in zip(range(begin, end), reads, turns, strict=True):
                    self._pace.now(batch, urgent=False)
                    for coming in range(max([batch, *(each + 1 for each in fetched)]), min(batch + depth + 1, end)):
                        after = max(coming - look_ahead, begin)
                        fetched[coming] = fetcher.submit(self._fetch, coming, after, turns[coming - begin][0].fetch)
                    if batch - LAG >= begin:
                        pushed[batch - LAG] = kept.pop(batch - LAG).result()
                    if batch - depth - LAG >= begin:
                        pushed.pop(batch - depth - LAG).result()
                    rows = fetched.pop(batch).result()
                    with self._lock:
                        cache.begin(turn, rows)
                        values = cache.get(read.ids)
                    gradients, dense = self._passes(batch, read, values)
                    with self._lock:
                        cache.poison(read.ids)  # until they are updated, here or by their owner
                    self._pace.now(batch, urgent=True)
                    self._exchange_dense(batch, dense)
                    new = self._update(_Kind.GRADIENTS, batch, soon, read.ids, values, gradients)
                    self._pass_on(_Kind.VALUES, batch, soon, new)
                    self._pace.now(batch, urgent=False)
                    kept[batch] = keeper.submit(self._keep, batch, later, read.ids, values, gradients, pusher)
                    ends.append(time.perf_counter())
                for each in (*pushed.values(), *(each.result() for each in kept.values())):
                    each.result()
            except BaseException:
                self.peers.close()  # nobody waits for this trainer, nor does it for others
                self._pace.now(end, urgent=False)
                fetcher.shutdown(wait=False, cancel_futures=True)
                raise
        self.fetches[0].get_after(end, np.empty(0, np.int64))
        return ends

    def _reads(self, batch: int) -> _Reads:
        read, offsets = numbered(self.lookups, batch, self.rank, self.trainers)
        ids, places = np.unique(read, return_inverse=True)
        return _Reads(ids=ids, places=torch.from_numpy(places.reshape(-1)), offsets=torch.from_numpy(offsets))

    def _passes(self, batch: int, read: _Reads, values: Float32) -> tuple[Float32, Float32]:
        """Return gradients of rows (n, width) and of the dense network, flat; at least `compute_s` have passed."""
        until = time.perf_counter() + self.compute_s
        weights = torch.from_numpy(np.ascontiguousarray(values[:, : self.width])).requires_grad_()
        looked = functional.embedding_bag(read.places, weights, read.offsets, mode="sum")
        looked = looked.view(len(self.lookups.tables), -1, self.width).transpose(0, 1)
        loss = self.loss(batch, self.rank, self.trainers, looked)
        found = torch.autograd.grad(loss, [weights, *self._parameters])
        dense: Float32 = torch.cat([each.reshape(-1) for each in found[1:]]).numpy()
        gradients: Float32 = found[0].numpy()
        if self.log is not None:
            self.log.append(read.ids, gradients, dense)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return gradients, dense

    def _fetch(self, batch: int, after: int, ids: Int64) -> Float32:
        """Return rows of a later batch, piece by piece while nothing urgent is under way."""
        table = self.fetches[batch % FETCHERS]
        found, rows = np.empty((len(ids), table.width), np.float32), max(CHUNK // (4 * table.width), 1)
        for at in range(0, len(ids), rows):
            self._pace.wait(batch)
            found[at : at + rows] = table.get_after(after, ids[at : at + rows])
        return found

    def _exchange_dense(self, batch: int, dense: Float32) -> None:
        """Add up dense gradients in the order of the ranks, each trainer a share of them; then update the network."""

        def from_all(kind: _Kind, mine: Float32) -> list[Float32]:
            return [mine if of == self.rank else self.peers.receive(of, kind, batch) for of in range(self.trainers)]

        for to in self._others:
            self.peers.send(to, _Kind.DENSE_GRADIENTS, batch, dense[self._shares[to]])
        parts = from_all(_Kind.DENSE_GRADIENTS, dense[self._shares[self.rank]])
        mine = sum(parts[1:], parts[0])
        for to in self._others:
            self.peers.send(to, _Kind.DENSE_SUMS, batch, mine)
        self.dense -= DENSE_RATE * torch.from_numpy(np.concatenate(from_all(_Kind.DENSE_SUMS, mine)))

    def _update(
        self, kind: _Kind, batch: int, turn: TrainerTurn, ids: Int64, values: Float32, gradients: Float32
    ) -> Float32:
        """Update the rows that this trainer owns by the gradients of all, in its cache, too: (owned, width + state)."""
        for to in self._others:
            self.peers.send(
                to, kind, batch, gradients[np.searchsorted(ids, turn.gradients_to[to])], pace=self._paced(kind, batch)
            )
        at = np.searchsorted(ids, turn.owned)
        parts = {self.rank: (turn.owned, gradients[at])}
        for of in self._others:
            given = self.peers.receive(of, kind, batch).reshape(-1, self.width)
            parts[of] = turn.gradients_from[of], given
        _, sums = add_up([parts[of] for of in range(self.trainers)])
        new = self.optimizer.apply(values[at], sums)
        with self._lock:
            self.cache.put(turn.owned, new)
        return new

    def _pass_on(self, kind: _Kind, batch: int, turn: TrainerTurn, new: Float32) -> None:
        """Send updated rows to those that read them next, hold what others send, and release what is not read again."""
        for to in self._others:
            rows = new[np.searchsorted(turn.owned, turn.values_to[to])]
            self.peers.send(to, kind, batch, rows, pace=self._paced(kind, batch))
        for of in self._others:
            found = self.peers.receive(of, kind, batch).reshape(-1, self.cache.width)
            with self._lock:
                self.cache.admit(turn.values_from[of], found)
        with self._lock:
            self.cache.evict(turn.evict)

    def _keep(
        self, batch: int, turn: TrainerTurn, ids: Int64, values: Float32, gradients: Float32, pusher: ThreadPoolExecutor
    ) -> Future[None]:
        """Update all rows of a batch that the next one does not need; the writing back of some."""
        new = self._update(_Kind.LATER_GRADIENTS, batch, turn, ids, values, gradients)
        back = new[np.searchsorted(turn.owned, turn.write_back)]
        pushed = pusher.submit(self._push, batch, turn.write_back, back)
        self._pass_on(_Kind.LATER_VALUES, batch, turn, new)
        return pushed

    def _push(self, batch: int, ids: Int64, values: Float32) -> None:
        """Write back what nobody reads within the window."""
        self._keeping = batch
        self.pushes.push(batch, ids, values, gradients=False)

    def _paced(self, kind: _Kind, batch: int) -> Callable[[], None]:
        """Return what waits before every piece of a message: nothing does for one that is needed at once."""
        return (lambda: self._pace.wait(batch + LAG)) if kind % 2 else (lambda: None)


class _Pace:
    """Lets what is not urgent wait while a trainer exchanges what it needs at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent, self._batch = False, 0

    def now(self, batch: int, *, urgent: bool) -> None:
        """Note which batch it is, and whether something is urgent."""
        with self._changed:
            self._urgent, self._batch = urgent, batch
            self._changed.notify_all()

    def wait(self, needed: int) -> None:
        """Wait while something is urgent, unless this is for a batch that has begun: others may wait for it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._urgent or needed <= self._batch)
