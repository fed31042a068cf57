"""Workers are forked from a process that has imported PyTorch, and are as if they had been started by themselves."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError
from foretrace.experiment.processes import alone

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

# Lies in the folder of a worker, which is the first place where it looks for modules.
SURROUNDINGS = """
import os, sys

def surroundings(variable: str) -> list[str]:
    return [os.environ.get(variable, ""), os.getcwd(), sys.path[0]]

def family(given: None) -> list[int]:
    parent = os.getppid()
    return [parent, len(os.listdir(f"/proc/{parent}/task")), os.getpgid(0), len(os.listdir("/proc/self/fd"))]
"""


def parent(given: None) -> int:
    return os.getppid()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_forks_are_as_if_started_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families = []
    for value in ("one", "two"):
        folder = tmp_path / value
        folder.mkdir()
        (folder / "beside_us.py").write_text(SURROUNDINGS)
        spec = importlib.util.spec_from_file_location("beside_us", folder / "beside_us.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, "beside_us", module)
        monkeypatch.chdir(folder)
        for variable in ("FORETRACE_OF_THIS_TEST", "TORCHINDUCTOR_CACHE_DIR"):  # PyTorch sets it when it compiles
            monkeypatch.setenv(variable, value)
        with alone(2) as workers:
            for variable in ("FORETRACE_OF_THIS_TEST", "TORCHINDUCTOR_CACHE_DIR"):
                found = workers.ask(module.surroundings, variable, "asking")
                assert found == [[value, str(folder), str(folder)]] * 2
            families += workers.ask(module.family, None, "asking")
            assert [each[2] for each in families[-2:]] == [each.pid for each in workers.processes]  # led by themselves
    assert len({each[0] for each in families}) == 1  # server
    assert {each[1] for each in families} == {1}  # threads of it
    assert len({each[3] for each in families}) == 1  # nothing of one is open in another


def test_forks_end_with_their_server_and_the_next_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_OF_THIS_TEST", "one")  # a server of its own: no other test's workers end with it
    with alone() as workers:
        (server,) = workers.ask(parent, None, "asking")
        os.kill(server, signal.SIGKILL)
        with pytest.raises(ForetraceError, match="worker 0 was ended by SIGKILL while sleeping"):
            workers.ask(sleep, 600.0, "sleeping")
    with alone() as workers:
        (other,) = workers.ask(parent, None, "asking")
        assert other != server
        os.kill(workers.processes[0].pid, signal.SIGTERM)
        assert workers.processes[0].wait(10.0) == -signal.SIGTERM


def test_what_cannot_be_forked_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere/at/all")  # no Python starts there
    said = "that workers are forked from ended with code 1; its last words: .*"
    with pytest.raises(ForetraceError, match=said), alone():
        pass
