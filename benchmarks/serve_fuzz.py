"""Send a server requests that nobody should send, and find any that it does not answer as its OpenAPI document says.

    python benchmarks/serve_fuzz.py [--requests 10000] [--seed 0] [--json]

schemathesis draws requests for every operation of the document, half of them as it allows and half not; the others
are valid requests whose bytes were changed. An answer must have a documented status (500 is none) and the body that
goes with it; the server must live and be right in the end. Exit code 1 where it is not so. Requests go to this machine.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2)
    def forward(self, x, word):
        return {"y": self.last(x + self.table(word)), "root": x.sqrt()}
def net():
    return Net(), {"x": torch.ones(2, 3), "word": torch.zeros(2, dtype=torch.int64)}
"""
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
VALID = {
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]},
        {"name": "word", "datatype": "INT64", "shape": [2], "data": [0, 4]},
    ],
    "id": "7", "parameters": {"binary_data_output": False}, "outputs": [{"name": "y"}],
}  # fmt: skip
PLAIN = {"x": [[1, 2, 3]], "word": [1]}


@dataclass
class Fuzzed:
    """Requests by kind, answers by status, and what must not be."""

    drawn: int = 0
    changed: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)


def drawn(url: str, requests: int, number: int, found: Fuzzed, statuses: Counter[str]) -> None:
    """Requests that schemathesis draws."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations: list[Any] = [each.ok() for each in schema.get_all_operations()]  # type: ignore[union-attr]
    writing = [each for each in operations if each.body]
    reading = [each for each in operations if not each.body]
    for operation in operations:
        share = 0.1 * requests / len(reading) if operation in reading else 0.9 * requests / len(writing)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            def one(case: Any) -> None:
                try:
                    response = case.call(base_url=url, timeout=60)
                except OSError as error:
                    found.trouble.append(f"{case.method} {case.path}: no answer, {error}")
                    return
                found.drawn += 1
                statuses[str(response.status_code)] += 1
                try:
                    case.validate_response(response, checks=CHECKS)
                    if response.status_code not in (503, 504):
                        case.validate_response(response, checks=[not_a_server_error])
                except Exception as error:  # whatever kind of failure it is
                    found.trouble.append(f"{case.method} {case.path}: {str(error)[:400]}")

            with suppress(Exception):  # there are no wrong requests where nothing can be said
                seed(number)(
                    settings(
                        max_examples=max(round(share / 2), 1), deadline=None, database=None, phases=[Phase.generate],
                        suppress_health_check=list(HealthCheck),
                    )(given(case=operation.as_strategy(mode))(one))
                )()  # fmt: skip


def changed(url: str, requests: int, number: int, found: Fuzzed, statuses: Counter[str]) -> None:
    """Valid requests with bytes, numbers or headers changed."""
    draws, (host, _, port) = random.Random(number), url.removeprefix("http://").partition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    documented = {"200", "400", "401", "403", "404", "405", "408", "409", "413", "415", "422", "429", "503", "504"}
    words = [
        b"NaN", b"1e999", b"-1", b"[" * 2000, b"{}", b"null", b"\xff\xfe", b"99999999999999999999", b'"', b"true", b"",
    ]  # fmt: skip
    for _ in range(requests):
        path, body = draws.choice([("/v2/models/fuzzed/infer", VALID), ("/predict", PLAIN)])
        data = bytearray(json.dumps(body).encode())
        for _ in range(draws.randint(1, 3)):
            at = draws.randrange(len(data) + 1)
            data[at : at + draws.randint(0, 6)] = draws.choice([*words, bytes([draws.randrange(256)])])
        headers = {}
        if draws.random() < 0.3:
            headers["Inference-Header-Content-Length"] = draws.choice(
                ["-1", "x", "0", "9" * 30, str(draws.randrange(len(data) + 9)), str(len(data))]
            )
        if draws.random() < 0.05:
            headers |= draws.choice([{"Content-Encoding": "gzip"}, {"Host": "example.com"}, {"Host": ""}])
        try:
            connection.request(draws.choice(["POST"] * 20 + ["GET", "PUT", "DELETE"]), path, bytes(data), headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, HTTPException) as error:
            found.trouble.append(f"no answer: {type(error).__name__} {error} to {bytes(data)[:200]!r} {headers}")
            connection.close()
            continue
        found.changed += 1
        status = str(response.status)
        statuses[status] += 1
        if status not in documented or (status != "200" and "error" not in json.loads(text)):
            found.trouble.append(f"{status} {text[:200]!r} to {bytes(data)[:200]!r} {headers}")
    connection.request("POST", "/predict", json.dumps(PLAIN).encode())
    last = connection.getresponse()
    if last.status != 200 or len(json.loads(last.read())["y"][0]) != 2:
        found.trouble.append(f"after all that the server answers {last.status} to a valid request")
    connection.close()


def run(requests: int, number: int = 0) -> Fuzzed:
    """Start a server, send that, stop it."""
    found, statuses = Fuzzed(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "fuzzed.py").write_text(MODEL, encoding="utf-8")
        words = ["serve", f"{folder}/fuzzed.py:net", "--split", "1x1:4", "--port", "0"]
        command = [sys.executable, "-m", "foretrace", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = re.search(r"http://\S+?(?=,)", server.stdout.readline())
            assert address is not None, "the server did not start"
            try:
                drawn(address[0], requests // 2, number, found, statuses)
                changed(address[0], requests - found.drawn, number, found, statuses)
            finally:
                server.terminate()
            if server.wait(timeout=60):
                found.trouble.append(f"the server ended with code {server.returncode}")
    found.statuses = dict(sorted(statuses.items()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = run(args.requests, args.seed)
    print(
        json.dumps(asdict(found), indent=2)
        if args.json
        else f"{found.drawn} drawn, {found.changed} changed: {found.statuses}"
    )
    for each in [] if args.json else found.trouble[:20]:
        print(f"  {each}")
    return 1 if found.trouble else 0


if __name__ == "__main__":
    sys.exit(main())
