"""`foretrace calibrate device --operators`: what it prints, stores and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretrace.cli.app import run
from foretrace.cost.operators import store
from foretrace.model.on_processor import Processor
from foretrace.report.jsonout import schema
from tests.report.test_jsonout import check


def test_few_operators_are_timed_stored_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "device", "--operators", "8", "--threads", "1", "--seconds", "20"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Products run at ")
    assert "8 operators timed on" in out
    assert "with 1 thread" in out
    stored = json.loads(Path(out.split("stored in ")[1].splitlines()[0]).read_text())
    known = store.load(stored["machine"])
    assert Processor.of(known).host.networks >= 1


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "device", "--operators", "6", "--threads", "1", "--seconds", "20", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rules = schema("calibrate")
    assert not check(answer, rules, rules["$defs"])
    assert answer["of"] == "device"
    assert sum(not key.startswith("near ") for key in answer["seconds"]) == 6


def test_too_few_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "device", "--operators", "2"]) == 2
    assert "2 operators say too little of a machine" in capsys.readouterr().err
