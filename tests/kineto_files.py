"""Small recordings written event by event, as Kineto writes them, for tests that need an exact situation."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from foretrace.trace.read import read
from foretrace.trace.trace import Trace

MAIN, AUTOGRAD, DEVICE = 100, 101, 0


class Recording:
    """Collects events (times in us) and reads them back through the reader."""

    def __init__(self, *, device: str = "Test GPU") -> None:
        self.events: list[dict[str, Any]] = []
        self.device = device
        self.extra: dict[str, Any] = {}
        self._next = 1

    def _add(self, cat: str, name: str, ts: float, dur: float, pid: int, tid: int, args: dict[str, Any]) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def op(self, name: str, ts: float, dur: float, *, tid: int = MAIN, **args: Any) -> None:
        self._add("cpu_op", name, ts, dur, 10, tid, args)

    def note(self, name: str, ts: float, dur: float, *, tid: int = MAIN) -> None:
        self._add("user_annotation", name, ts, dur, 10, tid, {})

    def module(self, name: str, ts: float, dur: float, *, tid: int = MAIN) -> None:
        self._add("python_function", f"nn.Module: {name}", ts, dur, 10, tid, {})

    def call(self, name: str, ts: float, dur: float, *, tid: int = MAIN) -> int:
        """A runtime call; returns its correlation id."""
        correlation, self._next = self._next, self._next + 1
        self._add("cuda_runtime", name, ts, dur, 10, tid, {"correlation": correlation})
        return correlation

    def on_device(self, cat: str, name: str, ts: float, dur: float, correlation: int, stream: int, **args: Any) -> None:
        fields = {"device": DEVICE, "stream": stream, "correlation": correlation, **args}
        self._add(cat, name, ts, dur, DEVICE, stream, fields)

    def launch(
        self, name: str, call: float, cost: float, ts: float, dur: float, *, stream: int = 7, tid: int = MAIN
    ) -> None:
        """A kernel and the call that launches it."""
        self.on_device("kernel", name, ts, dur, self.call("cudaLaunchKernel", call, cost, tid=tid), stream)

    def copy(self, name: str, call: float, cost: float, ts: float, dur: float, *, stream: int = 7) -> None:
        """An asynchronous copy and its call."""
        correlation = self.call("cudaMemcpyAsync", call, cost)
        self.on_device("gpu_memcpy", name, ts, dur, correlation, stream, bytes=1 << 20)

    def write(self, path: Path) -> Path:
        body = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": self.device}] if self.device else [],
            **self.extra,
            "traceEvents": self.events,
        }
        path.write_text(json.dumps(body))
        return path

    def trace(self) -> Trace:
        with tempfile.TemporaryDirectory() as folder:
            return read(self.write(Path(folder) / "trace.json"))
