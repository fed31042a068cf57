"""A command that works in silence shows that it lives, and leaves no trace of it."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest

from foretrace.cli.waiting import sign_of_life


class Screen(io.StringIO):
    """A terminal that keeps what it is sent."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Screen]:
    """Makes both outputs of the running test go to a terminal (what a fixture sets, the capture of pytest unsets)."""

    def shown() -> Screen:
        made = Screen()
        monkeypatch.setattr(sys, "stderr", made)
        monkeypatch.setattr(sys, "stdout", made)
        monkeypatch.setenv("TERM", "xterm")
        return made

    return shown


def until(screen: Screen, text: str) -> None:
    end = time.monotonic() + 200
    while text not in screen.getvalue():
        assert time.monotonic() < end
        time.sleep(0.005)


def seen(screen: Screen) -> str:
    """What remains on the screen, line by line."""
    return "\n".join(line.rpartition("\r\x1b[2K")[2] for line in screen.getvalue().split("\n"))


def test_a_silent_command_shows_a_line_that_goes_with_the_answer(screen: Callable[[], Screen]) -> None:
    terminal = screen()
    with sign_of_life("whatif", silence_s=0.02):
        until(terminal, "foretrace whatif: at work for ")
        print("the answer")
        until(terminal, "the answer")
    assert seen(terminal) == "the answer\n"


def test_compiling_is_said(screen: Callable[[], Screen]) -> None:
    from numba.core.event import trigger_event

    import foretrace.compiled
    from foretrace.deadline import uncompiled

    terminal, began, real = screen(), uncompiled(), time.monotonic()
    with sign_of_life("optimise", silence_s=0.02), trigger_event("numba:compile"):
        until(terminal, "compiling loops, once after an installation")
    spent = time.monotonic() - real
    assert foretrace.compiled.compiled_s() > 0
    assert uncompiled() - began < spent  # no budget pays for it


def test_a_command_that_speaks_is_left_alone(screen: Callable[[], Screen]) -> None:
    terminal = screen()
    with sign_of_life("show", silence_s=60):
        print("the answer")
        print("beside it", file=sys.stderr)
    assert terminal.getvalue() == "the answer\nbeside it\n"


def test_a_pipe_gets_nothing_but_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with sign_of_life("show", silence_s=0.0):
        time.sleep(0.02)
        print("the answer")
    assert capsys.readouterr() == ("the answer\n", "")
