"""A range travels with its number: from `estimate --out` through every command that takes a saved graph."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from foretrace.cli.app import application
from foretrace.graph.store import load, save
from tests.cli.conftest import Answer, Cli
from tests.cli.test_real_traces import foretrace

LINK = "10gbit/20us"
# How each command is asked about the saved graph S, and where its answer has the range of a step.
CARRIES: dict[str, tuple[list[str], list[str]]] = {
    "show": ([], ["interval_s"]),
    "simulate": ([], ["interval_s"]),
    "blame": ([], ["interval_s"]),
    "whatif": (["--do", "scale kind=kernel by=0.9"], ["before_interval_s", "interval_s"]),
    "optimise": (["--seconds", "1"], ["interval_s"]),
    "compare": (["S"], ["before_interval_s", "after_interval_s"]),
    "profile": ([], ["interval_s"]),
    "stash": ([], ["interval_s"]),
    "compression advise": (["--network", LINK, "--workers", "2", "--method", "fp16"], ["interval_s"]),
}
# Commands that write a file, looked at by tests of their own below; and those whose answer is no time of a step.
WRITES = {"report", "export", "graph"}
OTHERS = {
    "align": "clocks of recorded ranks",
    "plan second-order": "refuses a device; ranges of every candidate: tests/plan/test_second_order.py",
    "advise": "what techniques save, each with its range: tests/plan/test_advise.py",
    "check": "whether the graph may be changed",
    "calibrate run": "times of operators",
    "cloud advise": "of offers: the test below",
}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All commands of the application by their words."""
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


def takes_a_graph(command: Any) -> bool:
    first = next((each for each in command.params if each.param_type_name == "argument"), None)
    return first is not None and any(word in str(first.metavar) for word in ("TRACE", "BEFORE"))


def test_no_command_is_left_out() -> None:
    found = {name for name, each in commands(typer.main.get_command(application())) if takes_a_graph(each)}
    there = {name for name in found if not name.startswith("fleet ")}  # those take job logs
    assert there == set(CARRIES) | WRITES | set(OTHERS)


@pytest.fixture(scope="module")
def estimated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[float, float]]:
    """A step that nobody recorded, and the range that `estimate` gave it."""
    path = tmp_path_factory.mktemp("estimated") / "step.graph"
    made = foretrace("estimate", "gpt2", "--size", "tiny", "--device", "a100", "--out", path, "--json")
    assert made.code == 0, made.err
    low, high = made.json["interval_s"]
    assert high > 1.3 * low
    return path, (low, high)


def ranges(answer: Answer, fields: list[str]) -> list[tuple[float, float]]:
    assert answer.code == 0, answer.err
    return [tuple(answer.json[field]) for field in fields]


@pytest.mark.parametrize("command", CARRIES)
def test_the_range_of_an_estimate_reaches_the_answer(
    cli: Cli, estimated: tuple[Path, tuple[float, float]], command: str
) -> None:
    path, (low, high) = estimated
    words, fields = CARRIES[command]
    asked = [str(path) if word == "S" else word for word in words]
    for found in ranges(cli(*command.split(), path, *asked, "--json"), fields):
        assert found[1] / found[0] > 1.3, found
    if command in ("show", "simulate", "blame", "profile", "compare"):
        assert found == pytest.approx((low, high), rel=1e-6)


def test_what_is_written_has_the_range(cli: Cli, estimated: tuple[Path, tuple[float, float]], tmp_path: Path) -> None:
    path, (low, high) = estimated
    timeline = tmp_path / "timeline.json.gz"
    assert cli("export", path, "--do", "scale kind=kernel by=0.9", "--out", timeline).code == 0
    runs = json.loads(gzip.decompress(timeline.read_bytes()))["otherData"]["runs"]
    assert runs[0]["interval_s"] == pytest.approx((low, high), rel=1e-6)
    asked = cli("whatif", path, "--do", "scale kind=kernel by=0.9", "--json").json
    assert runs[1]["interval_s"] == asked["interval_s"] and runs[1]["step_s"] == asked["after_s"]
    page = tmp_path / "report.html"
    assert cli("report", path, "--out", page).code == 0
    assert "not recorded: 80 % interval" in page.read_text().replace("\N{NO-BREAK SPACE}", " ")
    again = tmp_path / "again.graph"
    assert cli("graph", path, "--out", again).code == 0
    assert ranges(cli("show", again, "--json"), ["interval_s"])[0] == pytest.approx((low, high), rel=1e-6)


def test_a_change_takes_the_range_of_what_it_removes(cli: Cli, estimated: tuple[Path, tuple[float, float]]) -> None:
    path, _ = estimated
    asked = cli("whatif", path, "--do", "scale kind=host by=0", "--json").json
    names = {each["name"]: each for each in asked["assumptions"]}
    assert names["estimates by host"]["step_at_low_s"] == names["estimates by host"]["step_at_high_s"]
    low, high = asked["interval_s"]
    wide = max(each["step_at_high_s"] for name, each in names.items() if name != "estimates by host")
    assert high == pytest.approx(wide, rel=0.05) and low < asked["after_s"]


def test_what_both_steps_rest_on_is_no_doubt_about_their_ratio(
    cli: Cli, estimated: tuple[Path, tuple[float, float]]
) -> None:
    path, (low, high) = estimated
    asked = cli("whatif", path, "--do", "scale kind=host by=0.5", "--do", "scale kind=kernel by=0.5", "--json").json
    slow, fast = asked["speedup_interval"]
    assert fast / slow < 1 + 0.5 * (high / low - 1) and slow <= asked["speedup"] <= fast
    assert "within the noise" not in asked["headline"]


CHAIN = ["--do", "prefetch-data workers=2"]


def test_a_saved_prediction_keeps_what_it_assumed(cli: Cli, shared_data: Path, tmp_path: Path) -> None:
    run = next((shared_data / "traces" / "kineto").glob("resnet50_num_workers_0*"))
    saved = tmp_path / "predicted.graph"
    asked = cli("whatif", run, *CHAIN, "--save", saved, "--json").json
    for found in ranges(cli("simulate", saved, "--json"), ["interval_s"]) + ranges(
        cli("show", saved, "--json"), ["interval_s"]
    ):
        assert found == pytest.approx(asked["interval_s"], rel=1e-6)
    both = cli("whatif", run, *CHAIN, "--do", "scale kind=kernel by=0.8", "--json").json
    then = cli("whatif", saved, "--do", "scale kind=kernel by=0.8", "--json").json
    assert then["after_s"] == pytest.approx(both["after_s"], rel=1e-6)
    assert then["interval_s"][0] <= both["interval_s"][0] * 1.001
    assert then["interval_s"][1] >= both["interval_s"][1] * 0.999
    compared = cli("compare", run, saved, "--json").json
    assert compared["before_interval_s"] is None
    assert compared["after_interval_s"] == pytest.approx(asked["interval_s"], rel=1e-6)


def test_the_range_of_an_estimate_reaches_every_offer(
    estimated: tuple[Path, tuple[float, float]], tmp_path: Path
) -> None:
    """Steps on other devices are as uncertain as the estimate they start from, at least."""
    path, (low, high) = estimated
    graph = load(path)
    known = save(graph.with_columns(doubt=np.full(len(graph), -1, dtype=np.int32)), tmp_path / "known.graph")
    asked = "--samples", "100000", "--epochs", "2", "--counts", "1", "--json"
    unsure, sure = (foretrace("cloud", "advise", each, *asked).json["offers"] for each in (path, known))
    both = [(a, b) for a in unsure for b in sure if a["name"] == b["name"]]
    assert both
    for a, b in both:
        widths = [each["step_high_s"] / each["step_low_s"] for each in (a, b)]
        assert widths[0] > 1.05 * widths[1]
        assert widths[0] >= min(high / low, 1.3)
