"""`foretrace optimise` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from foretrace.cli.app import run
from foretrace.errors import ForetraceError
from foretrace.plan import optimise as module
from foretrace.plan.result import size
from foretrace.report import jsonout
from foretrace.report.optimise import OptimiseView
from foretrace.report.terminal import Terminal, render

DATA = Path(__file__).resolve().parents[1] / "data"
RECORDING = str(DATA / "recommender.json.gz")
GIVEN = ("--workers", "8", "--network", "10gbit/20us")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One technique beside the buckets."""
    monkeypatch.setattr(module, "FASTER", module.FASTER[-1:])
    monkeypatch.delenv("COLUMNS", raising=False)


def test_the_answer_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python, config = tmp_path / "faster.py", tmp_path / "faster.json"
    assert run(["optimise", RECORDING, "--for", "step-time", *GIVEN, "--json", "--write", str(python)]) == 0
    out = capsys.readouterr().out
    view = msgspec.json.decode(out, type=OptimiseView)
    assert set(json.loads(out)) == set(jsonout.schema("optimise")["required"])
    assert view.workers == 8
    low, high = view.interval_s
    assert low <= view.step_s <= high
    assert view.bound_s <= view.step_s * 1.05
    assert sum(each.gradients for each in view.configuration.buckets) == view.search.tensors == 16
    assert python.read_text() == view.snippet
    compile(view.snippet, "faster.py", "exec")
    assert run(["optimise", RECORDING, *GIVEN, "--write", str(config)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == view.headline
    assert json.loads(config.read_text())["fused_optimizer"] is view.configuration.fused_optimizer
    assert "assumed" in out and "next: foretrace whatif" in out


def test_the_next_command_says_the_same_step(capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    assert run(["optimise", RECORDING, *GIVEN, "--json"]) == 0
    view = msgspec.json.decode(capsys.readouterr().out, type=OptimiseView)
    assert run([*shlex.split(view.next)[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["after_s"] == pytest.approx(view.step_s, rel=1e-6)


def test_it_reads_well_without_colour_and_on_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["optimise", RECORDING, "--json"]) == 0
    view = msgspec.json.decode(capsys.readouterr().out, type=OptimiseView)
    assert view.configuration.buckets == () and view.overtaking is None
    for terminal in (Terminal(width=60), Terminal(width=120, bars=True, colour=True)):
        assert view.headline.split()[0] in render(view, terminal)


def test_a_state_is_kept_and_gone_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state.json"
    answers = []
    for _ in range(2):
        assert run(["optimise", RECORDING, *GIVEN, "--resume", str(state), "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    for answer in answers:
        del answer["search"]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--for", "memory"], "choose step-time"),
        (["--seconds", "0"], "no time"),
        (["--seconds", "nan"], "--seconds nan must be finite"),
        (["--seconds", "-1"], "no time"),
        (["--workers", "-2"], "1 or more"),
        (["--workers", "4"], "need a network"),
        (["--workers", "4", "--network", "fast"], "fast"),
        (["--workers", "4", "--network", "-1gbit"], "gbit"),
        (["--network", "1gbit"], "add --workers"),
        (["--backend", "mpi"], "gloo or nccl"),
        (["--gradient-mb", "-1"], "no size"),
        (["--gradient-mb", "nan"], "--gradient-mb nan must be finite"),
        (["--memory-limit", "-1GB"], "no size"),
        (["--memory-limit", "much"], "no size"),
        (["--memory-limit", "0"], "no size"),
        (["--write", "here.txt"], ".py or .json"),
        (["--workers", "2", "--network", "1gbit", "--resume", RECORDING], "no state of a search"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["optimise", RECORDING, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_a_limit_of_memory_that_nothing_meets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["optimise", RECORDING, "--memory-limit", "1kB"]) == 2
    err = capsys.readouterr().err
    assert "the least that was found is" in err or "shows memory" in err


def test_sizes() -> None:
    assert size("") is None
    assert (size("16GB"), size("900MiB"), size("2g"), size("512")) == (16 * 10**9, 900 * 2**20, 2 * 10**9, 512)
    assert size("1e9") == 10**9
    for wrong in ("1e999GB", "16i", "16ib"):
        with pytest.raises(ForetraceError):
            size(wrong)
