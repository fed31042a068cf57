"""What every kind of rows must do."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from foretrace.arrays import Float32
from foretrace.testing import RowsConformance
from foretrace.training.rows.rows import Rows, RowsInMemory
from foretrace.training.rows.server import RemoteRows, RowServer


class TestInMemory(RowsConformance):
    def rows(self, values: Float32) -> Rows:
        return RowsInMemory(values)


def _serve(values: Float32, pipe: Any) -> None:
    server = RowServer(RowsInMemory(values))
    pipe.send((server.address, server.token))
    threading.Event().wait()


class TestRemote(RowsConformance):
    """The server is a process of its own, which can be killed."""

    @pytest.fixture(autouse=True)
    def _processes(self) -> Iterator[None]:
        self.processes: dict[Any, Any] = {}
        yield
        for each in self.processes.values():
            each.kill()
            each.join()

    def rows(self, values: Float32) -> Rows:
        context = multiprocessing.get_context("fork")
        mine, its = context.Pipe()
        process = context.Process(target=_serve, args=(values, its))
        process.start()
        address, token = mine.recv()
        rows = RemoteRows(address, token=token)
        self.processes[address] = process
        return rows

    def kill(self, rows: Rows) -> bool:
        assert isinstance(rows, RemoteRows)
        self.processes[rows.address].kill()
        return True
