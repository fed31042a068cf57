"""The embedding server: whole batches, who may ask, and what it refuses."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.training.rows.optimizers import add_up, row_optimizer
from foretrace.training.rows.rows import RowsInMemory
from foretrace.training.rows.server import RemoteRows, RowServer

IDS, ONES = np.array([0, 2]), np.ones((2, 2), np.float32)


def server(**given: object) -> RowServer:
    return RowServer(RowsInMemory(np.zeros((4, 2), np.float32)), **given)  # type: ignore[arg-type]


def test_gradients_are_added_up_in_the_order_of_the_ranks_and_zeros_keep_their_sign() -> None:
    one, other, third = (np.array([[each]], np.float32) for each in (1e8, -1e8, 1.0))
    ids, sums = add_up([(np.array([1]), one), (np.array([1]), other), (np.array([1]), third)])
    assert (ids.tolist(), sums.tolist()) == ([1], [[1.0]])
    assert add_up([(np.array([1]), one), (np.array([1]), third), (np.array([1]), other)])[1].tolist() == [[0.0]]
    _, sums = add_up([(np.array([0]), np.array([[-0.0]], np.float32)), (np.array([1]), one)])
    assert np.signbit(sums[0, 0])


def test_a_batch_is_applied_once_it_is_whole() -> None:
    with (
        server(trainers=2, optimizer=row_optimizer("sgd rate=1")) as found,
        RemoteRows(found.address, token=found.token, rank=0) as first,
        RemoteRows(found.address, token=found.token, rank=1) as second,
    ):
        first.push(0, IDS, ONES, gradients=True)
        assert not second.get(IDS).any() and found.complete == 0
        late: list[float] = []
        waiting = threading.Thread(target=lambda: late.extend(first.get_after(1, IDS)[:, 0].tolist()))
        waiting.start()
        second.push(0, IDS[:1], ONES[:1], gradients=True)
        waiting.join(10)
        assert late == [-2.0, -1.0] and found.complete == 1
        with pytest.raises(ForetraceError, match="once"):
            first.push(0, IDS, ONES, gradients=True)


def test_who_waits_for_a_trainer_that_left_is_told_so() -> None:
    with server(trainers=2) as found:
        first = RemoteRows(found.address, token=found.token, rank=0)
        second = RemoteRows(found.address, token=found.token, rank=1)
        second._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ForetraceError, match="trainer 1 left in the middle of batch 0") as said:
            first.get_after(1, IDS)
        assert "that after 0 batches" in str(said.value)
        first.close()
        second.close()


def test_strangers_and_nonsense_get_no_answer() -> None:
    with server() as found:
        with pytest.raises(ForetraceError, match="gone"):
            RemoteRows(found.address, token=b"wrong")
        with socket.create_connection(found.address, timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            with suppress(ConnectionResetError):  # what it sent was not read to its end
                assert stranger.recv(100) == b""
        with RemoteRows(found.address, token=found.token) as rows:
            assert rows.count == 4
            with pytest.raises(ForetraceError, match="optimizer"):
                rows.rank = 0
                rows.push(0, IDS, ONES, gradients=True)
    with pytest.raises(ForetraceError, match="start it first"):
        RemoteRows(found.address, token=found.token)


@pytest.mark.parametrize("text", ["", "adam", "sgd rate=x", "sgd rate=0", "adagrad width=3"])
def test_what_is_no_optimizer_is_refused(text: str) -> None:
    with pytest.raises(ForetraceError):
        row_optimizer(text)
