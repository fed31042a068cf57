"""When requests are due, and what a latency counts from."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import msgspec
import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")

from foretrace.errors import ForetraceError
from foretrace.report import serve
from foretrace.serving.server.dispatcher import BatchEstimator
from foretrace.serving.server.load import LoadResult, arrivals, load
from foretrace.serving.server.protocol import InferTensor, ModelMetadata

ABOUT = ModelMetadata(
    name="slow", versions=["1"], platform="none", outputs=[],
    inputs=[InferTensor(name="x", datatype="FP32", shape=[-1, 2])],
)  # fmt: skip


@pytest.mark.parametrize("pattern", ["constant", "poisson", "diurnal"])
def test_arrivals_have_the_rate_and_the_order(pattern: str) -> None:
    found = arrivals(pattern, rate=200, seconds=50, seed=1)
    expected = 200 * 50 * (0.5 if pattern == "diurnal" else 1)
    assert abs(len(found) - expected) < 5 * expected**0.5
    assert (np.diff(found) >= 0).all() and found[0] >= 0 and found[-1] < 50
    if pattern == "poisson":  # gaps of an exponential distribution: mean and deviation are equal
        gaps = np.diff(found)
        assert abs(gaps.std() / gaps.mean() - 1) < 0.1
        np.testing.assert_array_equal(found, arrivals(pattern, rate=200, seconds=50, seed=1))
    else:
        np.testing.assert_allclose(np.diff(found)[:100], 0.005 if pattern == "constant" else 0.02)


def test_recorded_arrivals(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("TIMESTAMP,tokens\n2023-11-16 18:15:46.68,3\n2023-11-16 18:15:47.18,4\n2023-11-16 18:15:50.68,5\n")
    np.testing.assert_allclose(arrivals(str(file), rate=1, seconds=2), [0, 0.5], atol=1e-6)
    file.write_text("arrival_s\n5\n7.5\n1e2\n")
    np.testing.assert_allclose(arrivals(str(file), rate=1, seconds=99), [0, 2.5, 95])
    file.write_text('{"timestamp": 500, "input_length": 7, "output_length": 5}\n' * 2)  # Mooncake's, in milliseconds
    file.write_text(file.read_text() + '{"timestamp": 2000, "input_length": 7, "output_length": 5}\n')
    np.testing.assert_allclose(arrivals(str(file), rate=1, seconds=9), [0, 0, 1.5])
    for text, words in [
        ("a,b\n1,2\n", "must have a column of arrivals"),
        ("arrival_s\n1\nx\n", "request 2: arrival_s is 'x', no number"),
        ("arrival_s\n2\n1\n", "in order"), ("arrival_s\nnan\n", "none NaN"), ("arrival_s\n", "holds no requests"),
        ("", "holds no requests"),
    ]:  # fmt: skip
        file.write_text(text)
        with pytest.raises(ForetraceError, match=words):
            arrivals(str(file), rate=1, seconds=9)
    with pytest.raises(ForetraceError, match="must be at most"):
        arrivals("constant", rate=1e9, seconds=9)


class SlowServer:
    """Answers one request after the other; the `stalled` one takes a while."""

    def __init__(self, stalled: int, stall_s: float) -> None:
        self.stalled, self.stall_s, self.asked, self.port = stalled, stall_s, 0, 0
        self.stop = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self.thread = Thread(target=self.loop.run_until_complete, args=(self._serve(),))
        self.thread.start()
        while not self.port:
            time.sleep(0.01)

    async def _serve(self) -> None:
        one, served = asyncio.Lock(), set[asyncio.Task[None] | None]()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.add(asyncio.current_task())
            while head := await reader.readline():
                size = 0
                while line := (await reader.readline()).strip():
                    size = int(line.split()[1]) if line.startswith(b"Content-Length") else size
                await reader.readexactly(size)
                body = msgspec.json.encode({"models": ["slow"]} if head.startswith(b"GET /v2 ") else ABOUT)
                if head.startswith(b"POST"):
                    async with one:
                        self.asked += 1
                        await asyncio.sleep(self.stall_s if self.asked == self.stalled else 0)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        await self.stop.wait()
        server.close()
        await asyncio.gather(*(each for each in served if each))  # a loop that ends leaves open sockets behind

    def __enter__(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join()
        self.loop.close()


def test_a_stall_shows_in_every_request_that_it_held_up() -> None:
    with SlowServer(stalled=10, stall_s=1.0) as url:
        found = load(url, due=arrivals("constant", rate=50, seconds=2))
    assert found.sent == len(found.latency_s) == 100 and found.statuses == {"200": 100}
    # Due in the second of the stall: 50 requests, which wait 1.0, 0.98, ... seconds. A client that waits saw one.
    assert (found.latency_s > 0.05).sum() >= 45 and found.latency_s[-1] > 0.9
    assert found.latency_s.mean() > 0.2


def test_a_closed_loop_keeps_to_its_time() -> None:
    with SlowServer(stalled=0, stall_s=0) as url:
        found = load(url, clients=3, seconds=0.5)
    assert 0.5 <= found.seconds < 30 and found.sent == len(found.latency_s) > 3


def test_what_cannot_be_loaded() -> None:
    with pytest.raises(ForetraceError, match=r"Cannot connect to host 127.0.0.1:9 .* is one running there"):
        load("http://127.0.0.1:9", clients=1)
    for url in ("ftp://127.0.0.1", "http://127.0.0.1:port"):
        with pytest.raises(ForetraceError, match=f"{url} must be the address of a server"):
            load(url, clients=1)


def test_nothing_answered_is_an_answer() -> None:
    found = LoadResult(model="m", seconds=1.0, sent=3, statuses={"429": 3}, latency_s=np.array([]), late_s=0.0)
    view = serve.loaded(found, url="u", arrivals="constant", clients=0, samples=1)
    assert not view.ok and view.latency_s["p99"] is None and "0 of 3 requests" in view.headline


def test_the_estimate_follows_the_queue_as_published() -> None:
    estimator = BatchEstimator()
    assert estimator.batch == 1
    for _ in range(60):
        estimator.sample(16)
    assert estimator.average == pytest.approx(16 * (1 - 0.9**60)) and estimator.batch == 16
    estimator.sample(0)  # one reading does not change the mode of ten
    assert estimator.batch == 16
    for _ in range(60):
        estimator.sample(3)
    assert estimator.batch == 2  # the largest power of two up to 3
