"""Settings of a machine: limits, meters, and that everything is as it was, however a process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError
from foretrace.serving.energy import command, machine
from foretrace.serving.energy.command import environment, setter
from foretrace.serving.energy.machine import held, rapl_meter, recover
from foretrace.serving.energy.tune import tune
from tests.serving.energy import fake_machine

RUN = [sys.executable, "-m", "tests.serving.energy.fake_machine"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fake_machine.make(tmp_path / "sys")


@contextmanager
def holding(root: Path, journal: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has changed settings and waits."""
    with subprocess.Popen([*RUN, str(root), str(journal)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "changed\n"
        try:
            yield process
        finally:
            process.kill()


def test_levels_and_limits_are_the_devices(root: Path) -> None:
    frequency, power = setter("cpu-frequency", root), setter("cpu-power-limit", root)
    assert (frequency.levels, frequency.now()) == ((800, 1200, 1600, 2400), 1600)
    assert power.levels[-1] == power.high == 125 and power.now() == 100
    before = fake_machine.settings(root)
    for each, value in ((frequency, 3000), (power, 126), (power, 1)):
        with pytest.raises(ForetraceError, match="must be"):
            each.set(value)
    assert fake_machine.settings(root) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_restores(root: Path, tmp_path: Path, number: int) -> None:
    before, journal = fake_machine.settings(root), tmp_path / "settings.json"
    with holding(root, journal) as process:
        changed = {file for file, text in fake_machine.settings(root).items() if text != before[file]}
        assert len(changed) == 4 and not any("rapl:2" in file for file in changed) and journal.exists()
        process.send_signal(number)
        assert process.wait(30) != 0
    assert fake_machine.settings(root) == before and not journal.exists()


def test_after_a_kill_the_next_start_restores(root: Path, tmp_path: Path) -> None:
    before, journal = fake_machine.settings(root), tmp_path / "settings.json"
    with holding(root, journal) as process:
        with pytest.raises(ForetraceError, match="another process"):
            recover(journal, lambda name: setter(name, root))
        process.kill()
        process.wait()
    assert fake_machine.settings(root) != before
    assert recover(journal, lambda name: setter(name, root))
    assert fake_machine.settings(root) == before
    assert not journal.exists() and not recover(journal, lambda name: setter(name, root))


def test_every_start_of_a_tune_restores(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path / "cache"))
    before, journal = fake_machine.settings(root), command.journal(root)
    with holding(root, journal) as process:
        process.kill()
        process.wait()
    command.journal(root)
    assert fake_machine.settings(root) == before


def test_an_error_inside_restores(root: Path, tmp_path: Path) -> None:
    before, each = fake_machine.settings(root), setter("cpu-frequency", root)
    with pytest.raises(ZeroDivisionError), held([each], tmp_path / "journal", lambda name: setter(name, root)):
        each.set(1200)
        1 / 0  # noqa: B018
    assert fake_machine.settings(root) == before


def test_journal_of_what_is_no_longer_there_stays(root: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_text('{"cpu-speed": {}}')
    with pytest.raises(ForetraceError, match="no setting"):
        recover(journal, lambda name: setter(name, root))
    journal.write_text("[1]")
    with pytest.raises(ForetraceError, match="no journal"):
        recover(journal, lambda name: setter(name, root))
    assert journal.exists()


def test_packages_are_counted_once_and_over_an_overflow(root: Path) -> None:
    meter = rapl_meter(root)
    assert meter is not None and len(meter.counters) == 2
    before = meter.read()
    for zone, energy_uj in enumerate((7_000_000, 1_000_000)):  # the second one has overflowed
        (root / f"class/powercap/intel-rapl:{zone}/energy_uj").write_text(str(energy_uj))
    assert meter.between(before, meter.read()) == pytest.approx(2 + 262143.32885 - 4)


def test_a_counter_may_overflow_often_while_a_command_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter of 1 J to which 0.4 J are added eight times: 3.2 J, of which its last value shows 0.2."""
    monkeypatch.setattr(command, "_LOOK_S", 0.02)
    zone = root / "class/powercap/intel-rapl:0"
    (zone / "energy_uj").write_text("0")
    (zone / "max_energy_range_uj").write_text("1000000")
    values = " ".join(str(400_000 * i % 1_000_000) for i in range(1, 9))
    work = f"for at in {values}; do sleep 0.1; echo $at > {zone}/now; mv {zone}/now {zone}/energy_uj; done"
    found = environment(["sh", "-c", work, "{n}"], {"n": (1.0,)}, root=root).measure((1.0,))
    assert found.energy_j == pytest.approx(3.2)


def test_a_machine_without_any_says_so(tmp_path: Path) -> None:
    assert machine.cpu_frequency(tmp_path) is None and machine.cpu_power_limit(tmp_path) is None
    assert rapl_meter(tmp_path) is None
    with pytest.raises(ForetraceError, match="offers no cpu-frequency"):
        setter("cpu-frequency", tmp_path)
    with pytest.raises(ForetraceError, match="no energy counter"):
        environment(["true", "{n}"], {"n": (1, 2)}, root=tmp_path).measure((1,))


def test_what_the_system_refuses_is_one_sentence(root: Path) -> None:
    each = setter("cpu-frequency", root)
    for file in root.rglob("scaling_max_freq"):  # root may write files of all modes, but no folder
        file.unlink()
        file.mkdir()
    with pytest.raises(ForetraceError, match="run as root"):
        each.set(1200)


def test_a_command_is_tuned_by_what_the_counters_say(root: Path, tmp_path: Path) -> None:
    """The command is real; as its processor it counts energy by its frequency, and takes longer at a low one."""
    script = tmp_path / "work.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\nroot, batch = Path(sys.argv[1]), int(sys.argv[2])\n"
        "mhz = int((root / 'devices/system/cpu/cpufreq/policy0/scaling_max_freq').read_text()) / 1e3\n"
        "time.sleep(0.05 * 2400 / mhz)\ncounter = root / 'class/powercap/intel-rapl:0/energy_uj'\n"
        "counter.write_text(str(int(counter.read_text()) + int(mhz * 1000 / batch)))\n"
    )
    before = fake_machine.settings(root)
    words = [sys.executable, "-S", "-E", str(script), str(root), "{batch}"]
    found = environment(words, {"cpu-frequency": (), "batch": (1, 2)}, root=root)
    with found.restored(tmp_path / "journal", root):
        tuned = tune(found, "60s", evaluations=8)
    assert tuned.best == (800, 2) and len(tuned.measured) == 8
    assert tuned.default == (1600, 1) and tuned.at_best.energy_j == pytest.approx(0.4)
    assert fake_machine.settings(root) == before


@pytest.mark.parametrize(
    ("command_", "values", "said"),
    [
        (["true"], {}, "`set=` must say"),
        (["true"], {"cpu-speed": ()}, "is no setting"),
        (["true"], {"cpu-frequency": (100.0,)}, "must be 800 to 2400 MHz"),
        (["true", "{batch}"], {"batch": ()}, "needs values"),
    ],
)
def test_what_cannot_be_set(root: Path, command_: list[str], values: dict[str, tuple[float, ...]], said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        environment(command_, values, root=root)


def test_a_command_that_fails_is_told(root: Path) -> None:
    found = environment(["sh", "-c", "echo no such batch >&2; exit {code}"], {"code": (3.0,)}, root=root)
    with pytest.raises(ForetraceError, match="ended with code 3: no such batch"):
        found.measure((3.0,))
    with pytest.raises(ForetraceError, match="cannot run"):
        environment(["/no/such/command", "{n}"], {"n": (1.0,)}, root=root).measure((1.0,))
