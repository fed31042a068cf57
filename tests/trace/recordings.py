"""Small recordings in the words of Kineto, for the reader's tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

THREAD = 100
DEVICE = 0
STREAM = 7


def op(name: str, ts: float, dur: float, *, cat: str = "cpu_op", tid: Any = THREAD, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 99, "tid": tid, "ts": ts, "dur": dur, "args": args}


def call(name: str, ts: float, dur: float, correlation: int, *, cat: str = "cuda_runtime") -> Event:
    return op(name, ts, dur, cat=cat, cbid=211, correlation=correlation)


def kernel(
    name: str, ts: float, dur: float, correlation: int, *, stream: int = STREAM, cat: str = "kernel", **args: Any
) -> Event:
    work = {"device": DEVICE, "context": 1, "stream": stream, "correlation": correlation}
    return {
        "ph": "X", "cat": cat, "name": name, "pid": DEVICE, "tid": stream, "ts": ts, "dur": dur, "args": work | args,
    }  # fmt: skip


def thread_name(tid: Any, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": 99, "tid": tid, "ts": 0, "args": {"name": name}}


def step(number: int, ts: float, dur: float) -> Event:
    return op(f"ProfilerStep#{number}", ts, dur, cat="user_annotation")


def training(steps: int = 2, at: int = 1_700_000_000_000_000) -> list[Event]:
    """Steps of 1 ms: an operator launches a kernel, which ends in the same step."""
    events: list[Event] = [thread_name(THREAD, "thread 100 (python)")]
    for i in range(steps):
        t = at + 1000 * i
        events += [
            step(i, t, 1000),
            op("aten::mm", t + 100, 200) | {"args": {"Sequence number": i, "Input Dims": [[2, 3], [3, 4]]}},
            call("cudaLaunchKernel", t + 150, 10, 1 + i),
            kernel("gemm", t + 200, 500, 1 + i),
            {"ph": "s", "id": 1 + i, "pid": 99, "tid": THREAD, "ts": t + 150, "cat": "ac2g", "name": "ac2g"},
            {"ph": "f", "id": 1 + i, "pid": 0, "tid": 7, "ts": t + 200, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        ]
    return events


def document(events: list[Event], **metadata: Any) -> bytes:
    """The recording as Kineto writes it: metadata on both sides of the events."""
    tail = {key: metadata.pop(key) for key in ("traceName", "baseTimeNanoseconds") if key in metadata}
    head = {"schemaVersion": 1, **metadata}
    text = json.dumps(head)[:-1] + ',\n  "traceEvents": [\n  '
    text += ",\n  ".join(json.dumps(e) for e in events) + "\n  ]"
    text += "".join(f',\n  "{key}": {json.dumps(value)}' for key, value in tail.items())
    return (text + "\n}\n").encode()


def write(path: Path, content: bytes | list[Event], **metadata: Any) -> Path:
    """Write a recording, packed if its name ends with `.gz`."""
    data = content if isinstance(content, bytes) else document(content, **metadata)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path
