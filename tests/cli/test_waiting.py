"""A command that works in silence shows that it lives, and leaves no trace of it."""

from __future__ import annotations

import io
import sys
import time

import pytest

from foretrace.cli.waiting import sign_of_life


class Screen(io.StringIO):
    """A terminal that keeps what it is sent."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setenv("TERM", "xterm")
    return made


def until(screen: Screen, text: str) -> None:
    while text not in screen.getvalue():
        time.sleep(0.005)


def seen(screen: Screen) -> str:
    """What remains on the screen, line by line."""
    return "\n".join(line.rpartition("\r\x1b[2K")[2] for line in screen.getvalue().split("\n"))


def test_a_silent_command_shows_a_line_that_goes_with_the_answer(screen: Screen) -> None:
    with sign_of_life("whatif", silence_s=0.02):
        until(screen, "foretrace whatif: at work for 0 s")
        print("the answer")
        until(screen, "the answer")
    assert seen(screen) == "the answer\n"


def test_a_command_that_speaks_is_left_alone(screen: Screen) -> None:
    with sign_of_life("show", silence_s=60):
        print("the answer")
        print("beside it", file=sys.stderr)
    assert screen.getvalue() == "the answer\nbeside it\n"


def test_a_pipe_gets_nothing_but_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with sign_of_life("show", silence_s=0.0):
        time.sleep(0.02)
        print("the answer")
    assert capsys.readouterr() == ("the answer\n", "")
