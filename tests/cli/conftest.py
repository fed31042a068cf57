"""Run commands in this process, as a user would run them in a shell."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foretrace.cli.app import run

DATA = Path(__file__).resolve().parents[1] / "data"


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Answer]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("show", path)`; the terminal is a pipe, 120 wide."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: str | Path) -> Answer:
        capsys.readouterr()
        code = run([str(each) for each in arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def cnn() -> Path:
    return DATA / "cnn.json.gz"


@pytest.fixture(scope="session")
def recommender() -> Path:
    return DATA / "recommender.json.gz"


@pytest.fixture(scope="session")
def fused() -> Path:
    return DATA / "recommender-fused.json.gz"
