"""`foretrace plan MODEL`: the best plan, what lost to it, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretrace.cli.app import run
from foretrace.report import jsonout

SMALL = ["gpt2-xl", "--device", "a100-80gb", "--devices", "20", "--batch", "40"]


def test_a_word_that_is_no_command_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for words in (["plan"], ["plan", "transformer"]):
        assert run([*words, *SMALL, "--json", "--tokens", "1e9"]) == 0
        found = jsonout.loads(capsys.readouterr().out, "plan transformer")
        answers.append((found.best, found.runners_up, found.lost))
        assert found.best.interval_s[0] < found.best.step_s < found.best.interval_s[1]
        assert found.best.peak_bytes <= found.memory_limit_bytes
        assert found.valid - 9 < sum(found.lost.values()) < found.valid  # some are as quick as the best
        assert found.gpu_hours == pytest.approx(1e9 / found.tokens_per_s * 20 / 3600)
    assert answers[0] == answers[1]


def test_text_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *SMALL, "--explain", "--fix", "tensor=5"]) == 0
    out = capsys.readouterr().out
    assert "lost by" in out
    assert "tensor 5" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt2-xl", "--device", "a100-80gb", "--devices", "7", "--fix", "tensor=8"], "devices"),
        (["gpt2-xl", "--device", "a100-80gb", "--fix", "tensor=many"], "write KEY=N"),
        (["gpt2-xl", "--device", "a100-80gb", "--fix", "depth=2"], "no degree 'depth'"),
        (["gpt2-xl", "--device", "a100-80gb", "--fix", "tensor=2", "--fix", "tensor=4"], "has two values, 2 and 4"),
        (["gpt2-xll", "--device", "a100-80gb"], "gpt2-xl"),
        (["gpt2-xl", "--device", "abacus"], "abacus"),
        (["gpt3-175b", "--device", "a100-80gb", "--devices", "1"], "does not fit"),
        (["gpt2-xl", "--device", "a100-80gb", "--tokens", "nan"], "--tokens nan must be finite"),
        (["gpt2-xl", "--device", "a100-80gb", "--grid", "inf"], "--grid inf must be finite"),
        (["palce", "bert"], "No such command 'palce'"),
        (["gpt2-large", "--device", "abacus"], "abacus"),  # a model, however much its name is like a command's
    ],
)
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert run(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_the_best_is_simulated_and_its_timeline_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    assert run(["plan", *SMALL, "--fix", "pipeline=4", "--json", "--perfetto", str(out)]) == 0
    found = jsonout.loads(capsys.readouterr().out, "plan transformer")
    assert found.best.simulated_s >= found.best.step_s * (1 - 1e-6)
    assert all(each.simulated_s >= each.step_s * (1 - 1e-6) for each in found.runners_up)
    (told,) = json.loads(out.read_text())["otherData"]["runs"]
    assert told["step_s"] == pytest.approx(found.best.simulated_s)
    assert run(["plan", *SMALL, "--fix", "pipeline=4"]) == 0
    assert "simulated pass by pass" in capsys.readouterr().out


def test_a_range_holds_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    """On a slow network passes wait for messages that the closed form takes to be hidden: two thirds of a step."""
    words = ["plan", "mpt-3b", "--device", "b200", "--devices", "100", "--batch", "1600", "--link", "1gbit"]
    assert run([*words, "--json"]) == 0
    found = jsonout.loads(capsys.readouterr().out, "plan transformer")
    assert found.best.simulated_s > 1.5 * found.best.step_s
    for each in (found.best, *found.runners_up):
        assert each.interval_s[0] <= each.step_s <= each.interval_s[1]
        assert each.simulated_s < each.interval_s[1]


def test_stages_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-2-7b", "--device", "a100-40gb", "--devices", "24", "--batch", "96", "--link", "10gbit"]
    assert run([*words, "--unequal", "--json"]) == 0
    found = jsonout.loads(capsys.readouterr().out, "plan transformer").unequal
    assert sum(each.layers for each in found.stages) == 32
    assert sum(each.devices for each in found.stages) == 24 and all(
        each.devices == each.tensor * each.context * each.data for each in found.stages
    )
    assert found.interval_s[0] < found.step_s < found.interval_s[1] and found.step_s < found.equal_s
    assert run([*words, "--unequal"]) == 0
    assert "with stages that may differ" in capsys.readouterr().out
    for more, said in (["--fix", "pipeline=4"], "leave it out"), (["--export", "megatron", "--out", "x"], "alike"):
        assert run([*words, "--unequal", *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["hybrid:dqn", "mcmc"])
def test_a_named_strategy_is_held_against_the_best(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    words = ["plan", *SMALL, "--strategy", strategy, "--calls", "60"]
    assert run([*words, "--json"]) == 0
    found = jsonout.loads(capsys.readouterr().out, "plan transformer")
    by = found.searched
    assert by.calls == 60 and 0 < by.found_after <= 60 and by.over_best >= 1 - 1e-9
    assert by.best_s == pytest.approx(by.over_best * found.best.step_s)
    assert by.best["tensor"] * by.best["context"] * by.best["pipeline"] * by.best["data"] == 20
    learns = strategy.startswith("hybrid")
    assert (by.lessons > 0) == learns == (by.nearest_s is not None)
    assert run(words) == 0
    assert ("to learn from" in capsys.readouterr().out) == learns


def test_a_strategy_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *SMALL, "--strategy", "hybrid:cma"]) == 2
    assert "--strategy hybrid:cma must be one that there is; did you mean hybrid:cmaes" in capsys.readouterr().err
