"""What a command prints cannot command a terminal, can be written in any encoding, and fails in a sentence."""

from __future__ import annotations

import io
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretrace.cli.streams import Printed
from foretrace.errors import ForetraceError
from foretrace.plaintext import sentence, visible, whole_number
from tests.cli.conftest import Cli
from tests.fuzz.recording_readers import recordings

EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202egnp.exe\x00"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a shell of its own; `foretrace` stands for this installation."""
    here = f"{sys.executable} -m foretrace"
    return subprocess.run(
        ["/bin/sh", "-c", command.replace("foretrace", here, 1)],
        capture_output=True, text=True, check=False, timeout=200, errors="surrogateescape",
        env={key: value for key, value in {**os.environ, **environment}.items() if value != "unset"},
    )  # fmt: skip


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A recording whose names hold what a terminal obeys."""
    told: dict[str, Any] = json.loads(recordings()["cpu.json"])
    for event in told["traceEvents"]:
        if event["cat"] == "cpu_op":
            event["name"] += EVIL
    path = tmp_path / f"evil{EVIL[:-1]}.json"
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize("arguments", [("show",), ("blame",), ("simulate",), ("whatif", "--do", "scale name=* by=0.5")])
def test_names_do_not_command_the_terminal(cli: Cli, evil: Path, arguments: tuple[str, ...]) -> None:
    answer = cli(arguments[0], evil, *arguments[1:])
    assert answer.code == 0, answer
    assert not set(answer.out + answer.err) & set("\x1b\x07\x9b\u202e\x00")
    assert cli(arguments[0], evil, *arguments[1:], "--json").json["command"] == arguments[0]


def test_names_do_not_command_the_terminal_in_colours(evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretrace import flow
    from foretrace.report.show import show
    from foretrace.report.terminal import Terminal, render

    timeline = flow.read(evil).graph().simulate()
    text = render(show(timeline, path=str(evil)), Terminal(width=100, bars=True, colour=True))
    assert "\x1b[" in text  # colours of ours
    assert "\x1b[31mred" not in text
    assert "\\u001b[31mred" in text
    assert not set(text) & set("\x07\x9b\u202e\x00")


def test_mistakes_do_not_command_the_terminal(cli: Cli, tmp_path: Path) -> None:
    answer = cli("show", tmp_path / EVIL[:-1])
    assert answer.code == 2
    assert "\\u001b[31mred\\u009b2J\\u202e" in answer.err
    assert not set(answer.err) & set("\x1b\x07\x9b\u202e")


def test_pages_and_exports_hold_names_as_data(cli: Cli, evil: Path, tmp_path: Path) -> None:
    page, timeline = tmp_path / "p.html", tmp_path / "t.json"
    answer = cli("whatif", evil, "--do", "scale name=* by=0.5", "--html", page, "--perfetto", timeline)
    assert answer.code == 0, answer
    assert "\x1b" not in page.read_text()
    names = {event.get("name", "") for event in json.loads(timeline.read_text())["traceEvents"]}
    assert any(EVIL in name for name in names)


def test_a_terminal_without_our_characters_gets_others(cnn: Path) -> None:
    answer = shell(f"foretrace show '{cnn}'", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert answer.returncode == 0, answer.stderr
    assert "step" in answer.stdout
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Printed(out).write("µs · 1 – 2 → ×3 日\n")
    out.flush()
    assert out.buffer.getvalue() == b"us - 1 - 2 -> x3 \\u65e5\n"


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/a\xff\xe9.json"
    Path(os.fsdecode(path)).write_bytes(recordings()["cpu.json"])
    asked = (
        "import sys; from foretrace.cli.app import run; sys.exit(run(sys.argv[1:]) or run([*sys.argv[1:], '--json']))"
    )
    answer = subprocess.run([sys.executable, "-c", asked, "show", path], capture_output=True, check=False, timeout=200)
    assert answer.returncode == 0, answer.stderr
    text, brace, found = answer.stdout.partition(b"{")
    assert b"a\\udcff\\udce9.json" in text
    assert json.loads(brace + found)["command"] == "show"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_a_sentence() -> None:
    answer = shell("foretrace devices --json > /dev/full")
    assert answer.returncode == 2
    assert answer.stderr.startswith("foretrace: cannot write to standard output (No space left on device)")
    assert answer.stderr.count("\n") == 1


def test_closed_outputs() -> None:
    answer = shell("foretrace devices >&-")
    assert answer.returncode == 2
    assert answer.stderr.startswith("foretrace: cannot write to standard output (it is closed)")
    assert answer.stderr.count("\n") == 1
    answer = shell("foretrace devices 2>&-")
    assert answer.returncode == 0
    assert "H100" in answer.stdout
    assert shell("foretrace devices | head -1").returncode == 0


def test_a_user_without_a_home(cli: Cli, cnn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is run as a number: HOME is not set and nobody knows the user."""

    def unknown(_: int) -> None:
        raise KeyError

    for name in ("HOME", "FORETRACE_CACHE", "FORETRACE_LEDGER", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cli("show", cnn).code == 0
    assert cli("whatif", cnn, "--do", "fused-optimizer").code == 0
    assert cli("techniques").code == 0
    answer = cli("ledger")
    assert answer.code == 2
    assert "no home folder; set HOME" in answer.err


def test_an_installation_that_may_not_be_written(cnn: Path, tmp_path: Path) -> None:
    """Compiled loops cannot be kept; commands work all the same."""
    import numba

    from foretrace.compiled import njit

    source = tmp_path / "loops.py"
    source.write_text("def twice(n):\n    return 2 * n\n")
    (tmp_path / "__pycache__").write_text("a file where a folder should be")
    space: dict[str, Any] = {"__file__": str(source)}
    exec(compile(source.read_text(), str(source), "exec"), space)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/proc/none")
        patch.setenv("XDG_CACHE_HOME", "/proc/none")
        with pytest.raises(RuntimeError, match="cannot cache"):
            numba.njit(cache=True)(space["twice"])
        assert njit()(space["twice"])(21) == 42


def test_folders_that_may_not_be_written_are_named(cli: Cli, cnn: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    for arguments in (
        ("export", cnn, "--out", nowhere / "t.json"),
        ("graph", cnn, "--out", nowhere / "t.graph"),
        ("report", cnn, "--out", nowhere / "t.html"),
    ):
        answer = cli(*arguments)
        assert answer.code == 2, answer
        assert answer.err.count("\n") == 1


def test_allow_large_is_an_option_of_every_command(cli: Cli, cnn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.reading.FREE", 0)
    monkeypatch.setattr("foretrace.reading.EXPANSION", 1)
    refused = cli("show", cnn)
    assert refused.code == 2
    assert "say --allow-large" in refused.err
    assert cli("show", cnn, "--allow-large").code == 0
    assert "FORETRACE_ALLOW_LARGE" not in os.environ
    for command in ("blame", "fleet run", "network check"):
        assert "--allow-large" in cli(*command.split(), "--help").out


def test_an_error_is_one_readable_line() -> None:
    text = str(ForetraceError(f"a\nb {EVIL} {'x' * 5000} end"))
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 2100
    assert text.startswith("a b")
    assert text.endswith("end")
    assert sentence("plain words stay, µ too.") == "plain words stay, µ too."
    assert visible("a\tb\nc") == "a\tb\nc"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        (" -3 ", -3),
        ("\x1d2", 2),
        ("+1", 1),
        ("²", None),
        ("٣", None),
        ("9" * 5000, None),
        ("", None),
        ("1.0", None),
    ],
)
def test_whole_numbers(text: str, number: int | None) -> None:
    assert whole_number(text) == number
