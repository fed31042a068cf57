"""An embedding server: a table that several trainers read and write over sockets, and `RemoteRows`, one's end of it.

    with RowServer(RowsInMemory(values)) as server, RemoteRows(server.address, token=server.token) as rows:
        rows.get(ids)

A request is one message: a fixed header, row numbers, values; nothing in it is ever unpickled or executed, and who does
not know the token gets no answer. Writes are applied once a message is here whole, under a lock: no reader sees a part
of a row.

Trainers that work in step number their batches. `push` gives the server one trainer's part of a batch; once those of
all trainers are here they are applied at once (gradients added up in the order of the ranks), and a read can wait for
as many batches as it must see. So the table is always that of a whole number of batches.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from enum import IntEnum

import numpy as np

from foretrace.arrays import Array, Float32, Int64
from foretrace.errors import ForetraceError, refused
from foretrace.training.rows.optimizers import RowOptimizer, add_up
from foretrace.training.rows.rows import Rows

Address = tuple[str, int]
Pace = Callable[[], object]

CHUNK = 16 << 10  # bytes between two looks at whether something more urgent is to be sent
SMALL_BUFFER = 16 << 10  # of what is not urgent, bytes that may wait in the kernel ahead of what is
PATIENCE_S = 120.0  # for the other trainers
_TOKEN = 16
_HEADER = struct.Struct("<BiqQQ")  # what, rank, batch, rows, bytes of values
_MOST_BYTES = 1 << 34
_NOTHING = np.empty(0, np.uint32)


class RowRequest(IntEnum):
    """What a message requests, or answers."""

    HELLO = 1  # the token; answered with the table's sizes
    GET = 2  # rows as they are once `batch` batches are whole
    PUT = 3
    ADD = 4
    PUSH_GRADIENTS = 5  # one rank's part of a batch
    PUSH_VALUES = 6
    DONE = 7  # an answer: values, or none
    REFUSED = 8  # an answer: a sentence
    LEAVE = 9  # this trainer has ended as it should


def send(
    to: socket.socket, header: tuple[int, int, int], ids: Array, values: Array | bytes, pace: Pace = lambda: None
) -> None:
    """Write one message; `pace` is called before every CHUNK and may wait."""
    sent = memoryview(values if isinstance(values, bytes) else values.tobytes())
    to.sendall(_HEADER.pack(*header, len(ids), len(sent)) + ids.tobytes())
    for at in range(0, len(sent), CHUNK):
        pace()
        to.sendall(sent[at : at + CHUNK])


def receive(
    of: socket.socket, dtype: type[np.generic], most: int = _MOST_BYTES
) -> tuple[int, int, int, Int64, memoryview]:
    """Read one message: what, rank, batch, row numbers and the bytes of values.

    Raises EOFError where the other end is gone, ValueError for what is no message.
    """
    what, rank, batch, count, size = _HEADER.unpack(take(of, _HEADER.size))
    if max(size, count) > most:
        raise ValueError(f"a message of {size} bytes")
    ids = np.frombuffer(take(of, count * np.dtype(dtype).itemsize), dtype).astype(np.int64)
    return what, rank, batch, ids, take(of, size)


def take(of: socket.socket, size: int) -> memoryview:
    """Return exactly so many bytes. Raises EOFError."""
    found = memoryview(bytearray(size))
    got = 0
    while got < size:
        more = of.recv_into(found[got:])
        if not more:
            raise EOFError
        got += more
    return found


def number_type(count: int) -> type[np.generic]:
    """Return how row numbers of a table of so many rows are sent."""
    return np.uint32 if count <= 1 << 32 else np.int64


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


class RowServer(AbstractContextManager["RowServer"]):
    """Serves `rows` to `trainers` trainers that push every batch from `begin` on; threads of this process."""

    def __init__(
        self, rows: Rows, *, trainers: int = 1, optimizer: RowOptimizer | None = None, host: str = "127.0.0.1",
        port: int = 0, token: bytes = b"", begin: int = 0,
    ) -> None:  # fmt: skip
        self.rows, self.optimizer, self.trainers = rows, optimizer, trainers
        self.token = token or secrets.token_bytes(_TOKEN)
        self.complete = begin  # batches that are in the table
        self._changed = threading.Condition()
        self._staged: dict[int, dict[int, tuple[int, Int64, Float32]]] = {}
        self._lost = ""
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server((host, port))
        self.address: Address = self._listening.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        _end(self._listening, *self._open)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one connection until it ends."""
        rank, left = -1, False
        self._open.add(connection)
        with connection, suppress(EOFError, OSError, ValueError, struct.error):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            what, rank, _, _, said = receive(connection, np.uint32, len(self.token))
            if what != RowRequest.HELLO or not secrets.compare_digest(said, self.token):
                rank = -1
                return
            self._reply(connection, struct.pack("<QQ", self.rows.count, self.rows.width))
            kind = number_type(self.rows.count)
            while not left:
                request = receive(connection, kind)
                left = request[0] == RowRequest.LEAVE
                try:
                    self._reply(connection, self._answer(*request))
                except ForetraceError as error:
                    self._reply(connection, str(error).encode(), RowRequest.REFUSED)
        self._open.discard(connection)
        if rank >= 0 and not left:
            with self._changed:
                self._lost = self._lost or f"trainer {rank}"
                self._changed.notify_all()

    def _reply(self, connection: socket.socket, values: Array | bytes, what: RowRequest = RowRequest.DONE) -> None:
        send(connection, (what, 0, 0), _NOTHING, values)

    def _answer(self, what: int, rank: int, batch: int, ids: Int64, sent: memoryview) -> Array | bytes:
        width = self.rows.width
        if what == RowRequest.PUSH_GRADIENTS and self.optimizer is not None:
            width -= self.optimizer.state
        with self._changed:
            if what == RowRequest.GET:
                self._wait(lambda: self.complete >= batch, batch)
                return self.rows.get(ids)
            if what in (RowRequest.LEAVE, RowRequest.HELLO):
                return b""
            if len(sent) != 4 * width * len(ids):
                raise ForetraceError(
                    f"Values of {len(ids)} rows must be {4 * width * len(ids)} bytes, got {len(sent)}."
                )
            values = np.frombuffer(sent, np.float32).reshape(len(ids), width)
            if what == RowRequest.PUT:
                self.rows.put(ids, values)
            elif what == RowRequest.ADD:
                self.rows.add(ids, values)
            else:
                self._stage(what, rank, batch, ids, values)
            return b""

    def _wait(self, until: Callable[[], bool], batch: int) -> None:
        if not self._changed.wait_for(lambda: until() or bool(self._lost), PATIENCE_S) or (self._lost and not until()):
            who = f"{self._lost} left" if self._lost else f"no part of it came for {PATIENCE_S:g} s"
            raise ForetraceError(
                f"batch {batch} cannot be read: {who} in the middle of batch {self.complete}; the table is that after "
                f"{self.complete} batches."
            )

    def _stage(self, what: int, rank: int, batch: int, ids: Int64, values: Float32) -> None:
        """Keep one rank's part of a batch, and apply the batch once it is whole."""
        parts = self._staged.setdefault(batch, {})
        if not 0 <= rank < self.trainers or batch < self.complete or rank in parts:
            raise ForetraceError(f"trainer {rank} must push each batch from {self.complete} on once, got {batch}.")
        parts[rank] = (what, self.rows.checked(ids), values)
        while len(self._staged.get(self.complete, ())) == self.trainers:
            self._apply(self._staged.pop(self.complete))
            self.complete += 1
            self._changed.notify_all()

    def _apply(self, parts: dict[int, tuple[int, Int64, Float32]]) -> None:
        gradients = [parts[rank][1:] for rank in sorted(parts) if parts[rank][0] == RowRequest.PUSH_GRADIENTS]
        if gradients:
            if self.optimizer is None:
                raise ForetraceError("a server without an optimizer takes rows, not gradients; give it one.")
            ids, sums = add_up(gradients)
            self.rows.put(ids, self.optimizer.apply(self.rows.get(ids), sums))
        for what, ids, values in parts.values():
            if what == RowRequest.PUSH_VALUES:
                self.rows.put(ids, values)


class RemoteRows(Rows):
    """The table of a `RowServer`. Threads may share it; each request waits for its answer.

    `pace` is called between pieces of what is sent, and may wait while something more urgent is; what is not `urgent`
    waits here and not in the kernel. Raises ForetraceError where there is no server, it does not know the token, or it
    has ended.
    """

    def __init__(
        self, address: Address, *, token: bytes, rank: int = -1, pace: Pace = lambda: None,
        urgent: bool = True,
    ) -> None:  # fmt: skip
        self.address, self.rank, self._pace = address, rank, pace
        self._lock = threading.Lock()
        self._numbers: type[np.generic] = np.uint32
        with refused(f"no row server answers at {address[0]}:{address[1]}", "start it first"):
            self._socket = socket.create_connection(address, timeout=PATIENCE_S + 10)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not urgent:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        try:
            count, width = struct.unpack("<QQ", self._ask(RowRequest.HELLO, 0, np.empty(0, np.int64), token))
        except ForetraceError:
            self._socket.close()
            raise
        super().__init__(count, width)
        self._numbers = number_type(count)

    def get_after(self, batches: int, ids: Int64) -> Float32:
        """Return the rows of `ids` (n,) once so many batches are whole, and no earlier: (n, width)."""
        return self._read(lambda ids: self._get(ids, batches), ids)

    def push(self, batch: int, ids: Int64, values: Float32, *, gradients: bool, width: int = 0) -> None:
        """Send this rank's part of a batch: rows (n, width), or gradients (n, `width`) for the server's optimizer.

        Every rank pushes every batch once, an empty part included.
        """
        what = RowRequest.PUSH_GRADIENTS if gradients else RowRequest.PUSH_VALUES
        self._write(lambda ids, values: self._ask(what, batch, ids, values), ids, values, width)

    def close(self) -> None:
        with self._lock, self._socket, suppress(OSError, EOFError, ValueError):
            send(self._socket, (RowRequest.LEAVE, self.rank, 0), _NOTHING, b"")
            receive(self._socket, self._numbers)

    def _get(self, ids: Int64, batches: int = 0) -> Float32:
        found = self._ask(RowRequest.GET, batches, ids, b"")
        return np.frombuffer(found, np.float32).reshape(len(ids), self.width)

    def _put(self, ids: Int64, values: Float32) -> None:
        self._ask(RowRequest.PUT, 0, ids, values)

    def _add(self, ids: Int64, values: Float32) -> None:
        self._ask(RowRequest.ADD, 0, ids, values)

    def _ask(self, what: RowRequest, batch: int, ids: Int64, values: Array | bytes) -> memoryview:
        try:
            with self._lock:
                send(self._socket, (what, self.rank, batch), ids.astype(self._numbers), values, self._pace)
                answer, *_, found = receive(self._socket, self._numbers)
        except (OSError, EOFError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it closed the connection"
            raise ForetraceError(
                f"the row server at {self.address[0]}:{self.address[1]} is gone ({why}); start it again and continue "
                "from the last checkpoint."
            ) from None
        if answer != RowRequest.DONE:
            raise ForetraceError(bytes(found).decode(errors="replace"))
        return found


class Peers:
    """One trainer's connections to the others: two per pair, so that what is urgent waits behind nothing.

    Make it, tell the others `address`, then `meet` them all.
    A message has a kind (a number that its two ends agree on) and a batch; urgent kinds are even. Raises ForetraceError
    where another trainer is gone or silent.
    """

    def __init__(self, rank: int, trainers: int, host: str = "127.0.0.1") -> None:
        self.rank, self.trainers = rank, trainers
        self.bytes_sent = 0
        self._listening = socket.create_server((host, 0))
        self.address: Address = self._listening.getsockname()[:2]
        self._sockets: dict[tuple[int, int], socket.socket] = {}
        self._arrived = threading.Condition()
        self._messages: dict[tuple[int, int, int], memoryview] = {}
        self._gone: set[int] = set()

    def meet(self, addresses: Sequence[Address], token: bytes) -> None:
        """Connect with all others: to those before this one, and from those behind it."""
        self._listening.settimeout(PATIENCE_S)
        try:
            for other in range(self.rank):
                for lane in (0, 1):
                    to = socket.create_connection(addresses[other], PATIENCE_S)
                    self._sockets[other, lane] = to
                    send(to, (0, self.rank, lane), _NOTHING, token)
            while len(self._sockets) < 2 * (self.trainers - 1):
                of, _ = self._listening.accept()
                of.settimeout(PATIENCE_S)
                _, other, lane, _, said = receive(of, np.uint32, len(token))
                if secrets.compare_digest(said, token) and self.rank < other < self.trainers and lane in (0, 1):
                    self._sockets[other, lane] = of
                else:
                    of.close()
        except (OSError, EOFError, ValueError, struct.error) as error:
            self.close()
            raise ForetraceError(f"trainer {self.rank} did not meet all {self.trainers} trainers ({error}).") from None
        for (other, lane), each in self._sockets.items():
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if lane:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
            threading.Thread(target=self._listen, args=(other, each), daemon=True).start()

    def send(self, to: int, kind: int, batch: int, numbers: Float32, pace: Pace = lambda: None) -> None:
        """Send float32 numbers to another trainer; `pace` may wait before every piece."""
        self.bytes_sent += numbers.nbytes
        try:
            send(self._sockets[to, kind % 2], (kind, self.rank, batch), _NOTHING, numbers, pace)
        except OSError:
            raise self._left(to, batch) from None

    def receive(self, of: int, kind: int, batch: int) -> Float32:
        """Wait for a message of another trainer: its numbers, flat."""
        key = (of, kind, batch)
        with self._arrived:
            self._arrived.wait_for(lambda: key in self._messages or of in self._gone, PATIENCE_S)
            if key not in self._messages:
                raise self._left(of, batch)
            return np.frombuffer(self._messages.pop(key), np.float32)

    def close(self) -> None:
        """Close all connections."""
        _end(*self._sockets.values(), self._listening)

    def _listen(self, other: int, of: socket.socket) -> None:
        with suppress(OSError, EOFError, ValueError, struct.error):
            while True:
                kind, _, batch, _, said = receive(of, np.uint32)
                with self._arrived:
                    self._messages[other, kind, batch] = said
                    self._arrived.notify_all()
        with self._arrived:
            self._gone.add(other)
            self._arrived.notify_all()

    def _left(self, other: int, batch: int) -> ForetraceError:
        how = "is gone" if other in self._gone else f"said nothing for {PATIENCE_S:g} s"
        return ForetraceError(f"trainer {other} {how} in batch {batch}; continue from the last checkpoint.")
