"""Training over an embedding server, uncached and with look-ahead: the same weights to the bit."""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from foretrace.arrays import Float32, Int64
from foretrace.training.rows.kept import BatchLog, file_of, logged, recover, whole_batches
from foretrace.training.rows.lookups import Lookups, zipf
from foretrace.training.rows.optimizers import row_optimizer
from foretrace.training.rows.rows import RowsInMemory
from foretrace.training.rows.server import Peers, RowServer

torch = pytest.importorskip("torch")

from foretrace.training.rows.trainer import RowTrainer  # noqa: E402
from foretrace.zoo.recommendation import RowClicks  # noqa: E402

WIDTH = 8


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def lookups_of(batches: int) -> Lookups:
    return zipf(exponent=1.05, tables=4, rows=300, pooling=2, samples=32, batches=batches)


def train(
    trainers: int, optimizer: str, look_aheads: tuple[int, ...], batches: int = 20, folder: Path | None = None,
    trace: int = 20,
) -> tuple[str, str, Float32]:  # fmt: skip
    """Hashes of table and dense weights after segments of batches, each with its look-ahead (0: uncached).

    With a folder, first weights and all batches are kept there.
    """
    lookups, rule = lookups_of(trace), row_optimizer(optimizer)
    table = np.random.default_rng(1).normal(0, 0.1, (1200, WIDTH + rule.state)).astype(np.float32)
    table[:, WIDTH:] = 0
    if folder is not None:
        file_of(folder, "rows", 0).write_bytes(table.tobytes())
    jobs = [RowClicks(tables=4, width=WIDTH, samples=32) for _ in range(trainers)]
    peers = [Peers(rank, trainers) for rank in range(trainers)]
    edges = np.linspace(0, batches, len(look_aheads) + 1).astype(int).tolist()

    def one(rank: int) -> str:
        peers[rank].meet([each.address for each in peers], server.token)
        trainer = RowTrainer(
            jobs[rank].module, jobs[rank].loss, lookups, rule, peers[rank], server.address, server.token
        )
        if folder is not None:
            trainer.log = BatchLog(folder, rank, 0)
            file_of(folder, "dense", 0).write_bytes(trainer.dense.numpy().tobytes())
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
    ("trainers", "optimizer", "batches"),
    [(1, "sgd", 20), (2, "sgd", 72), (2, "adagrad rate=0.1", 20), (3, "sgd", 20), (4, "sgd", 20), (4, "adagrad", 20)],
)
def test_look_ahead_gives_the_same_bits(trainers: int, optimizer: str, batches: int) -> None:
    truth = train(trainers, optimizer, (0,), batches, trace=batches)
    assert not np.isnan(truth[2]).any()
    for look_ahead in (64,) if batches > 64 else (1, 4, 16, 64):  # of fewer batches than 64, all
        found = train(trainers, optimizer, (look_ahead,), batches, trace=batches)
        assert found[:2] == truth[:2], look_ahead
    assert train(trainers, optimizer, (0, 4, 16), batches, trace=batches)[:2] == truth[:2]  # one after the other, too


@pytest.mark.parametrize(("trainers", "look_ahead", "optimizer"), [(3, 4, "adagrad"), (2, 0, "sgd")])
def test_logs_of_batches_give_the_weights_after_each_to_the_bit(
    tmp_path: Path, trainers: int, look_ahead: int, optimizer: str
) -> None:
    rule = row_optimizer(optimizer)
    shape = (1200, WIDTH + rule.state)
    train(trainers, optimizer, (look_ahead,), folder=tmp_path)
    ends = np.cumsum([20 + len(ids) * (8 + 4 * WIDTH) + 4 * len(dense) for ids, _, dense in of(tmp_path, 1)])
    last = file_of(tmp_path, "log1", 0)
    for batches, beyond in ((20, 0), (7, 30), (1, 5)):  # of one trainer, and so many bytes of the next batch
        again = tmp_path / str(batches)
        shutil.copytree(tmp_path, again, ignore=lambda folder, names: [each for each in names if each.isdigit()])
        (again / last.name).write_bytes(last.read_bytes()[: ends[batches - 1] + beyond])
        assert whole_batches(again, trainers=trainers, width=WIDTH) == batches
        assert recover(again, trainers=trainers, shape=shape, optimizer=rule) == batches
        assert {each.name for each in again.iterdir()} == {f"rows-{batches}.f32", f"dense-{batches}.f32"}
        found = [hashlib.sha256(file_of(again, what, batches).read_bytes()).hexdigest() for what in ("rows", "dense")]
        assert tuple(found) == train(trainers, optimizer, (0,), batches)[:2]


def of(folder: Path, rank: int) -> list[tuple[Int64, Float32, Float32]]:
    return list(logged(file_of(folder, f"log{rank}", 0), WIDTH))
