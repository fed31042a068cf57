"""`Peers`: messages between trainers, over two connections per pair, so that what is urgent waits behind nothing."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from foretrace.arrays import Float32
from foretrace.errors import ForetraceError
from foretrace.training.rows.server import PATIENCE_S, SMALL_BUFFER, Address, receive, send

_NOTHING = np.empty(0, np.uint32)


class Peers:
    """One trainer's connections to the others. Make it, tell the others `address`, then `meet` them all.

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
                    send(to, (0, self.rank, lane), _NOTHING, token, lambda: None)
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

    def send(self, to: int, kind: int, batch: int, numbers: Float32, pace: Callable[[], object] = lambda: None) -> None:
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
        for each in (*self._sockets.values(), self._listening):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

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
