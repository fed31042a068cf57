"""Serve a model for minutes while everything goes wrong, and compare every answer with the model's own.

    python benchmarks/serve_soak.py [--seconds 600] [--rate 60] [--kill-every 30] [--model MODEL] [--json]

One server on two cores. Requests of 1 to 5 samples come at random times in three forms (binary tensors, JSON of the
protocol, plain JSON). Meanwhile the split changes every few seconds, a worker is killed every `--kill-every`, some
clients send their request over seconds, others leave before the answer. In the first and the last tenth none of that
happens. A request that is refused (429, 503) is sent again as Retry-After says. Exit code 1 where an answer was lost,
wrong or not its request's own, where memory or open files of the server grew, or where it left a process behind. Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from foretrace.serving.server.models import Array, ModelSource
from foretrace.serving.server.protocol import DATATYPES, HEADER_LENGTH

SPLITS = ("2x1:4", "1x2:8", "1x1:16", "1x1:2+1x1:6")
POOL = 64  # different samples
PATIENCE_S = 60.0  # for an answer, refusals included
GROWTH_MB = 24.0  # of the server's memory from the first fifth to the end: what the allocator of C keeps
MLP = """
import torch
def mlp():
    layers = [torch.nn.Linear(64, 512), torch.nn.Tanh(), *(torch.nn.Linear(512, 512), torch.nn.Tanh()) * 4]
    return torch.nn.Sequential(*layers, torch.nn.Linear(512, 10)), torch.zeros(2, 64)
"""


@dataclass
class Soak:
    """What was seen. `trouble` is each thing that must not be."""

    seconds: float = 0.0
    asked: int = 0
    answered: int = 0
    samples: int = 0
    left: int = 0  # clients that went away
    slow: int = 0  # answered clients that sent over seconds
    refused: dict[str, int] = field(default_factory=dict)  # by status; each was sent again
    reconfigurations: int = 0
    kills: int = 0
    retries: int = 0  # parts of requests that the server ran again
    p50_ms: dict[str, float] = field(default_factory=dict)  # before, during, after
    p99_ms: dict[str, float] = field(default_factory=dict)
    memory_mb: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of the server: after a fifth of the time, largest, last
    open_files: tuple[int, int] = (0, 0)  # after a fifth of the time, last
    exit_code: int | None = None
    trouble: list[str] = field(default_factory=list)


class Asker:
    """Sends requests and checks answers."""

    def __init__(self, session: aiohttp.ClientSession, source: ModelSource, seen: Soak, seed: int) -> None:
        model = source.load()
        self.facts, self.seen, self.draws = model.facts, seen, random.Random(seed)
        numbers = np.random.default_rng(seed)
        self.pool: dict[str, Array] = {}
        for each in self.facts.inputs:
            shape = (POOL, *each.sizes)
            drawn = numbers.standard_normal(shape) if "float" in each.dtype else numbers.integers(0, 9, shape)
            self.pool[each.name] = drawn.astype(each.dtype)
        self.expected = model(self.pool)
        for name, array in self.expected.items():
            flat = array.reshape(POOL, -1).astype(np.float64)
            apart = np.abs(flat[:, None] - flat[None]).max(axis=2) + 1e9 * np.eye(POOL)
            self.tolerance = 1e-3 * max(1.0, float(np.abs(flat).max()))
            assert apart.min() > 4 * self.tolerance, f"answers of {name} must differ to be told apart"
        self.session = session
        self.times = dict[str, list[float]](before=[], during=[], after=[])
        self.phase = "before"

    async def ask(self) -> None:
        """One request, sent again where it is refused; its answer must be right."""
        rows = [self.draws.randrange(POOL) for _ in range(self.draws.randint(1, 5))]
        phase, began, number = self.phase, time.monotonic(), f"{self.seen.asked}"
        self.seen.asked += 1
        path, body, headers = self._request(rows, number)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with self.session.post(path, data=body, headers=headers) as answered:
                        text = await answered.read()
                    if answered.status not in (429, 503):
                        break
                    key = str(answered.status)
                    self.seen.refused[key] = self.seen.refused.get(key, 0) + 1
                    await asyncio.sleep(float(answered.headers["retry-after"]))
        except (TimeoutError, aiohttp.ClientError) as error:
            self.seen.trouble.append(f"request {number} lost: {type(error).__name__} {error}")
            return
        self.times[phase].append(time.monotonic() - began)
        self.check(answered, text, rows, number)

    def check(self, answered: aiohttp.ClientResponse, text: bytes, rows: Sequence[int], number: str) -> None:
        """Compare an answer with the model's own."""
        if answered.status != 200:
            self.seen.trouble.append(f"request {number} lost: {answered.status} {text[:200]!r}")
            return
        found, ident = self._outputs(answered.headers, text)
        if ident not in (number, None):
            self.seen.trouble.append(f"request {number} has the answer of {ident}")
        for name, array in self.expected.items():
            if array[rows].shape != found[name].shape or not np.abs(array[rows] - found[name]).max() < self.tolerance:
                self.seen.trouble.append(f"request {number} has wrong numbers in {name}")
                return
        self.seen.answered += 1
        self.seen.samples += len(rows)

    async def ask_slowly(self, over_s: float, leave: bool) -> None:
        """Send a request in pieces; `leave` instead of waiting for the answer."""
        rows = [self.draws.randrange(POOL)]
        self.seen.asked += 1
        number = f"slow {self.seen.asked}"
        path, body, headers = self._request(rows, number)
        step = -(-len(body) // 10)

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), step):
                yield body[start : start + step]
                await asyncio.sleep(over_s / 10)

        headers = headers | {"Content-Length": str(len(body)), "Connection": "close"}
        try:
            async with asyncio.timeout(self.draws.uniform(0, over_s) if leave else PATIENCE_S):
                async with self.session.post(path, data=pieces(), headers=headers) as answered:
                    text = await answered.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            if leave and isinstance(error, TimeoutError):
                self.seen.left += 1
            else:
                self.seen.trouble.append(f"request {number} lost: {type(error).__name__} {error}")
            return
        if answered.status in (429, 503):
            self.seen.left += 1
            return
        self.seen.slow += 1
        self.check(answered, text, rows, number)

    def _request(self, rows: Sequence[int], number: str) -> tuple[str, bytes, dict[str, str]]:
        form = self.draws.choice(("binary", "json", "plain"))
        arrays = {name: array[rows] for name, array in self.pool.items()}
        if form == "plain":
            return "/predict", msgspec.json.encode({key: each.tolist() for key, each in arrays.items()}), {}
        tensors, behind = list[dict[str, Any]](), b""
        for spec in self.facts.inputs:
            array = arrays[spec.name]
            tensor: dict[str, Any] = {"name": spec.name, "shape": array.shape, "datatype": DATATYPES[spec.dtype]}
            if form == "binary":
                tensor["parameters"] = {"binary_data_size": array.nbytes}
                behind += array.tobytes()
            else:
                tensor["data"] = array.reshape(-1).tolist()
            tensors.append(tensor)
        asked = {"id": number, "inputs": tensors, "parameters": {"binary_data_output": form == "binary"}}
        head = msgspec.json.encode(asked)
        headers = {HEADER_LENGTH: str(len(head))} if behind else {}
        return f"/v2/models/{self.facts.name}/infer", head + behind, headers

    def _outputs(self, headers: Mapping[str, str], text: bytes) -> tuple[dict[str, Array], str | None]:
        length = int(headers.get(HEADER_LENGTH, len(text)))
        told = json.loads(text[:length])
        if "outputs" not in told:
            return {name: np.array(each) for name, each in told.items()}, None
        rest, found = text[length:], {}
        kinds = {word: name for name, word in DATATYPES.items()}
        for each in told["outputs"]:
            if "data" in each:
                array = np.array(each["data"])
            else:
                size = each["parameters"]["binary_data_size"]
                array, rest = np.frombuffer(rest[:size], kinds[each["datatype"]]), rest[size:]
            found[each["name"]] = array.reshape(each["shape"])
        return found, told["id"]


async def soak(url: str, pid: int, source: ModelSource, args: argparse.Namespace) -> Soak:
    """Run the load and the trouble; what was seen."""
    # The server closes connections that are idle for five seconds: the client does so sooner.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        return await _soaked(session, pid, source, args)


async def _soaked(session: aiohttp.ClientSession, pid: int, source: ModelSource, args: argparse.Namespace) -> Soak:
    seen = Soak(seconds=args.seconds)
    asker, draws = Asker(session, source, seen, args.seed), random.Random(args.seed + 1)
    began = time.monotonic()
    quiet_until, quiet_from = began + args.seconds / 10, began + 0.9 * args.seconds
    tasks = set[asyncio.Task[None]]()

    def spawn(work: Any) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def send() -> None:
        due = began
        while (due := due + draws.expovariate(args.rate)) < began + args.seconds or asker.phase == "during":
            await asyncio.sleep(max(due - time.monotonic(), 0))
            spawn(asker.ask())

    async def state() -> dict[str, Any]:
        async with session.get("/split") as answered:
            found: dict[str, Any] = await answered.json()
        return found

    def lacking() -> bool:
        return bool(seen.reconfigurations < args.changes or seen.kills < args.kills)

    async def trouble() -> None:
        next_kill = quiet_until + args.kill_every / 2
        while time.monotonic() < quiet_from or (not seen.trouble and lacking()):
            wanted = draws.choice([each for each in SPLITS if each != (await state())["split"]])
            async with session.put("/split", json={"split": wanted}) as answered:
                text = await answered.text()
            if answered.status != 200:
                seen.trouble.append(f"split {wanted}: {answered.status} {text[:200]}")
            else:
                seen.reconfigurations += 1
            spawn(asker.ask_slowly(draws.uniform(1, 4), leave=False))
            spawn(asker.ask_slowly(draws.uniform(0, 1), leave=True))
            await asyncio.sleep(draws.uniform(0, args.change_every))
            if time.monotonic() > next_kill and (alive := (await state())["processes"]):
                next_kill += args.kill_every
                seen.kills += 1
                with suppress(ProcessLookupError):
                    os.kill(draws.choice(alive), signal.SIGKILL)

    memory, files = list[float](), list[int]()

    async def watch() -> None:
        while True:
            memory.append(resident_mb(pid))
            files.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
            await asyncio.sleep(args.seconds / 200)

    watching, sending = asyncio.create_task(watch()), asyncio.create_task(send())
    await asyncio.sleep(quiet_until - time.monotonic())
    asker.phase = "during"
    await trouble()
    asker.phase = "after"
    await sending
    await asyncio.gather(*tasks)
    watching.cancel()
    fifth = len(memory) // 5
    seen.memory_mb = (max(memory[: fifth + 1]), max(memory), memory[-1])
    seen.open_files = (max(files[: fifth + 1]), files[-1])
    if seen.memory_mb[2] > seen.memory_mb[0] + GROWTH_MB:
        seen.trouble.append(f"memory of the server grew from {seen.memory_mb[0]:.0f} to {seen.memory_mb[2]:.0f} MB")
    if seen.open_files[1] > seen.open_files[0] + 20:
        seen.trouble.append(f"open files of the server grew from {seen.open_files[0]} to {seen.open_files[1]}")
    async with session.get("/metrics") as answered:
        counted = re.findall(r"^foretrace_retries_total (\S+)$", await answered.text(), re.M)
    seen.retries = int(float(counted[0]))
    for phase, times in asker.times.items():
        if times:
            seen.p50_ms[phase], seen.p99_ms[phase] = (1e3 * float(np.quantile(times, q)) for q in (0.5, 0.99))
    return seen


def resident_mb(pid: int) -> float:
    """Memory of a process that no other one has (private pages), in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return sum(int(each) for each in re.findall(r"^Private_\w+: +(\d+) kB$", text, re.M)) / 1024


def started(pid: int) -> str:
    """When a living process was started, since numbers are used again; "" where there is none."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if words[0] == "Z" else words[19]
    return ""


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    found, parents = [pid], dict[int, int]()
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(each.parent.name)] = int(each.read_text().rpartition(")")[2].split()[1])
    for above in found:
        found += [each for each, parent in parents.items() if parent == above]
    return found[1:]


def run(args: argparse.Namespace) -> Soak:
    """Start a server, soak it, stop it."""
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or f"{folder}/soaked.py:mlp"
        Path(folder, "soaked.py").write_text(MLP, encoding="utf-8")
        words = ["serve", model, "--size", "tiny", "--split", SPLITS[0], "--port", "0"]
        command = [sys.executable, "-m", "foretrace", *words]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+?(?=,)", server.stdout.readline())
            assert address is not None, "the server did not start"
            seen = asyncio.run(soak(address[0], server.pid, ModelSource(name=model, size="tiny"), args))
            below = [(each, started(each)) for each in descendants(server.pid)]
            server.send_signal(signal.SIGTERM)
            seen.exit_code = server.wait(timeout=60)
            if seen.exit_code:
                seen.trouble.append(f"the server ended with code {seen.exit_code}")
            end = time.monotonic() + 30
            while (left := [each for each in below if started(each[0]) == each[1]]) and time.monotonic() < end:
                time.sleep(0.1)
            for number, _ in left:
                what = Path(f"/proc/{number}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
                seen.trouble.append(f"a process was left behind: {what[-200:]}")
        finally:
            server.kill()
            server.communicate()
    if seen.asked != seen.answered + seen.left + sum("lost" in each or "wrong" in each for each in seen.trouble):
        seen.trouble.append(f"{seen.asked} requests, but {seen.answered} answers and {seen.left} clients that left")
    return seen


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--seconds", type=float, default=600.0)
    found.add_argument("--rate", type=float, default=60.0, help="requests per second")
    found.add_argument("--change-every", type=float, default=4.0, help="most seconds between two changes of the split")
    found.add_argument("--kill-every", type=float, default=30.0)
    found.add_argument("--changes", type=int, default=0, help="of the split at least, however long they take")
    found.add_argument("--kills", type=int, default=0, help="of workers at least")
    found.add_argument("--model", default="", help="a zoo model (tiny), or another; by default a small network")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--json", action="store_true")
    return found


def main() -> int:
    args = parser().parse_args()
    seen = run(args)
    if args.json:
        print(json.dumps(asdict(seen), indent=2))
    else:
        kinds = Counter(re.sub(r"\d+", "N", each) for each in seen.trouble)
        for name, value in asdict(seen).items():
            print(f"{name:>18}  {dict(kinds) if name == 'trouble' else value}")
    return 1 if seen.trouble else 0


if __name__ == "__main__":
    sys.exit(main())
