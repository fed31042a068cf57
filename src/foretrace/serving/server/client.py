"""A small asynchronous HTTP/1.1 client: what a load generator needs, and nothing that would slow it down."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from foretrace.errors import ForetraceError

_MOST_HEADERS, _MOST_BODY = 100, 1 << 30


@dataclass(frozen=True, slots=True)
class Answered:
    """Status, headers (names in lower case) and body of a response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """Requests to one server, on connections that are kept and used again; the last one used first."""

    def __init__(self, url: str, *, token: str = "") -> None:
        """Raises ForetraceError for what is no http:// or https:// URL."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self.host, port = parts.hostname or "", parts.port
        except ValueError:
            raise ForetraceError(f"{url[:80]} must be a URL; write http://127.0.0.1:8000.") from None
        if parts.scheme not in ("http", "https") or not self.host:
            raise ForetraceError(f"{url[:80]} must be a URL; write http://127.0.0.1:8000.")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port, self.path = port or (443 if self.tls else 80), parts.path.rstrip("/")
        authority = f"[{self.host}]" if ":" in self.host else self.host
        self.head = f"Host: {authority}:{self.port}\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        self.repeated = 0  # requests written to a connection that the server was closing
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answered:
        """One request. Raises OSError or EOFError where the connection fails, ValueError for what is no HTTP."""
        more = "".join(f"{key}: {value}\r\n" for key, value in (headers or {}).items())
        head = f"{method} {path} HTTP/1.1\r\n{self.head}{more}Content-Length: {len(body)}\r\n\r\n"
        while True:
            kept = self._usable()
            reader, writer = self._free.pop() if kept else await self._connected()
            try:
                writer.write(head.encode("latin-1") + body)
                await writer.drain()
                first = await reader.readline()
            except (OSError, EOFError):
                first = b""
            except BaseException:
                writer.close()
                raise
            if first:
                break
            writer.close()  # the server closed a connection that was idle while we wrote
            if not kept:
                raise EOFError("the server closed the connection")
            self.repeated += 1
        try:
            answered = await self._answer(reader, int(first.split()[1]))
        except BaseException:
            writer.close()
            raise
        if answered.headers.get("connection", "").lower() == "close":
            writer.close()
        else:
            self._free.append((reader, writer))
        return answered

    def close(self) -> None:
        """Close connections that are free."""
        while self._free:
            self._free.pop()[1].close()

    def _usable(self) -> bool:
        """Whether a free connection is left, once those that the server has closed are gone."""
        while self._free and self._free[-1][0].at_eof():
            self._free.pop()[1].close()
        return bool(self._free)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=1 << 20)

    async def _answer(self, reader: asyncio.StreamReader, status: int) -> Answered:
        headers = dict[str, str]()
        for _ in range(_MOST_HEADERS):
            line = (await reader.readline()).decode("latin-1").strip()
            if not line:
                break
            key, _, value = line.partition(":")
            headers[key.lower()] = value.strip()
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b""
            while size := int((await reader.readline()).strip() or b"0", 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
            return Answered(status, headers, body)
        size = int(headers.get("content-length", "0"))
        if not 0 <= size <= _MOST_BODY:
            raise ValueError(f"a body of {size} bytes")
        return Answered(status, headers, await reader.readexactly(size))
