"""A sample of the kept answers beside those of tests/cli/test_deterministic.py; `make golden` holds all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cli import all_answers
from tests.golden import golden

EVERY = 8  # of the questions that need no other's file


def test_sampled_answers_are_the_kept_ones(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where libraries are loaded, with what other tests have captured of models."""
    pytest.importorskip("torch")
    alone = [(name, words) for name, words in golden.questions().items() if " T/" not in words]

    def here(commands: list[list[str]], environment: Mapping[str, str], folder: Path) -> list[tuple[int, str, str]]:
        monkeypatch.chdir(golden.ROOT)
        all_answers.settle(environment, monkeypatch)
        return all_answers.answers(commands)

    assert golden.compare(golden.answers(dict(alone[::EVERY]), shared_data, tmp_path, here)) == {}


def test_every_question_has_an_answer_and_no_answer_lacks_a_question() -> None:
    assert {path.stem for path in golden.ANSWERS.iterdir()} == set(golden.questions())


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        golden.main(["show-missing", "NOSUCH", "show-cnm"])
    assert ended.value.code == 2 and "got NOSUCH, show-cnm" in capsys.readouterr().err


def test_questions_without_their_data_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.main(["show-resnet50", "show-missing", "--data", str(tmp_path / "none")]) == 0
    assert "1 answers, 0 differ; 2 left out, as" in capsys.readouterr().out


@pytest.mark.parametrize("found", [{"s": 1.0 + 1e-11}, {"s": "1"}, {}, {"s": 1.0, "t": 0}, {"s": [1.0]}, {"s": True}])
def test_a_difference_is_found(found: object) -> None:
    assert list(golden.differences({"s": 1.0}, found))
    assert not list(golden.differences({"s": 1.0}, {"s": 1.0 + 1e-13}))


def test_a_question_brings_those_that_make_its_files() -> None:
    known = {"a": "estimate x --out T/g", "b": "show T/g", "c": "show R/h"}
    assert list(golden.with_makers({"b"}, known)) == ["a", "b"] and list(golden.with_makers({"c"}, known)) == ["c"]
