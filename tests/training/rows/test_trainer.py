"""Training over an embedding server, uncached and with look-ahead: the same weights to the bit."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from foretrace.arrays import Float32
from foretrace.training.rows.lookups import Lookups, zipf
from foretrace.training.rows.optimizers import row_optimizer
from foretrace.training.rows.peers import Peers
from foretrace.training.rows.rows import RowsInMemory
from foretrace.training.rows.server import RowServer

torch = pytest.importorskip("torch")

from foretrace.training.rows.trainer import RowSettings, RowTrainer  # noqa: E402
from foretrace.zoo.recommendation import RowClicks  # noqa: E402

WIDTH = 8


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def lookups_of(batches: int, seed: int = 0) -> Lookups:
    return zipf(exponent=1.05, tables=4, rows=300, pooling=2, samples=32, batches=batches, seed=seed)


def train(trainers: int, optimizer: str, look_aheads: tuple[int, ...], batches: int = 20) -> tuple[str, str, Float32]:
    """Hashes of table and dense weights after segments of batches, each with its look-ahead (0: uncached)."""
    lookups, rule = lookups_of(batches), row_optimizer(optimizer)
    table = np.random.default_rng(1).normal(0, 0.1, (1200, WIDTH + rule.state)).astype(np.float32)
    table[:, WIDTH:] = 0
    jobs = [RowClicks(tables=4, width=WIDTH, samples=32) for _ in range(trainers)]
    peers = [Peers(rank, trainers) for rank in range(trainers)]
    edges = np.linspace(0, batches, len(look_aheads) + 1).astype(int).tolist()

    def one(rank: int) -> str:
        peers[rank].meet([each.address for each in peers], server.token)
        trainer = RowTrainer(
            jobs[rank], lookups, RowSettings(optimizer=rule, width=WIDTH), peers[rank], server.address, server.token
        )
        for begin, end, look_ahead in zip(edges[:-1], edges[1:], look_aheads, strict=True):
            if look_ahead:
                trainer.ahead(begin, end, look_ahead)
                assert trainer.cache.held == 0
            else:
                trainer.uncached(begin, end)
        trainer.close()
        return hashlib.sha256(trainer.dense.numpy().tobytes()).hexdigest()

    rows = RowsInMemory(table)
    with RowServer(rows, trainers=trainers, optimizer=rule) as server, ThreadPoolExecutor(trainers) as pool:
        dense = set(pool.map(one, range(trainers)))
        assert server.complete == batches
    for each in peers:
        each.close()
    (only,) = dense  # all trainers have the same dense weights
    return hashlib.sha256(rows.values.tobytes()).hexdigest(), only, rows.values


@pytest.mark.parametrize(
    ("trainers", "optimizer"), [(1, "sgd"), (2, "adagrad rate=0.1"), (3, "sgd"), (4, "adagrad rate=0.1")]
)
def test_look_ahead_gives_the_same_bits(trainers: int, optimizer: str) -> None:
    truth = train(trainers, optimizer, (0,))
    assert not np.isnan(truth[2]).any()
    for look_ahead in (1, 4, 16, 64):
        found = train(trainers, optimizer, (look_ahead,))
        assert found[:2] == truth[:2], look_ahead
    assert train(trainers, optimizer, (0, 4, 16))[:2] == truth[:2]  # one after the other, too
