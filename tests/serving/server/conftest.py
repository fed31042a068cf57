"""Model files, and a real server on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = """
import os, time
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2)

    def forward(self, x, word):
        if (x == 666).any():
            os._exit(7)
        if (x == 777).any():
            time.sleep(1000)
        return {"y": self.last(x + self.table(word)), "root": x.sqrt()}

def net():
    return Net(), {"x": torch.ones(2, 3), "word": torch.zeros(2, dtype=torch.int64)}

def unseeded():
    torch.seed()
    return net()

def bare():
    return torch.nn.Linear(3, 2)

def three():
    return 3

def total():
    class Total(torch.nn.Module):
        def forward(self, x):
            return x.sum()
    return Total(), torch.ones(2, 3)

def broken():
    raise ValueError("no weights here")
"""
Serve = Callable[..., tuple[str, "subprocess.Popen[str]"]]


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with functions that make models."""
    path = tmp_path_factory.mktemp("models") / "nets.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Start `foretrace serve` with these words; its address and process. All are ended, and must end well."""
    servers: list[subprocess.Popen[str]] = []

    def start(*words: str) -> tuple[str, subprocess.Popen[str]]:
        command = [sys.executable, "-m", "foretrace", "serve", *words, "--port", "0"]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        out, err = servers[-1].stdout, servers[-1].stderr
        assert out is not None and err is not None
        found = re.search(r"https?://\S+?(?=,)", out.readline())
        assert found is not None, err.read()
        return found[0], servers[-1]

    yield start
    for server in servers:
        server.send_signal(signal.SIGTERM)
    for server in servers:
        assert server.wait(timeout=200) == 0
        for stream in (server.stdout, server.stderr):
            assert stream is not None
            stream.close()
