"""What can be set and metered on this machine: frequencies and power limits of processors, by sysfs; and restoring it.

Every setting is a `Setter`; those of GPUs are in `nvml.py`. Limits are checked before anything is written.

Settings that are `held` are as they were at the end, however that comes. What was set before is written to a journal
before anything is changed. An exception, Ctrl-C, SIGTERM and SIGHUP restore it at once; after SIGKILL, whoever comes
next does, by the journal. One process at a time has the journal's lock.
"""

from __future__ import annotations

import fcntl
import json
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType

from foretrace.errors import ForetraceError, refused
from foretrace.files import write_text
from foretrace.reading import parse_json, read_text

SYSFS = Path("/sys")
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the highest, where the driver lists no levels
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
State = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Setter(ABC):
    """One setting of the machine: its limits and levels; kinds of hardware override the methods."""

    name: str
    unit: str
    low: float
    high: float
    levels: tuple[float, ...]

    @abstractmethod
    def now(self) -> float:
        """Return what it is set to."""

    @abstractmethod
    def state(self) -> State:
        """Return all that `restore` needs."""

    def set(self, value: float) -> None:
        """Set it. Raises ForetraceError for a value beyond its limits, before anything is written."""
        if not self.low <= value <= self.high:
            raise beyond(self, value)
        self._write(value)

    @abstractmethod
    def restore(self, state: State) -> None:
        """Restore it as it was. Raises ForetraceError."""

    @abstractmethod
    def _write(self, value: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SysfsSetter(Setter):
    """A setting that lies in one file per core or package."""

    scale: float  # of the files, over `unit`
    files: tuple[Path, ...]

    def now(self) -> float:
        """Return what the first file says."""
        return _number(self.files[0]) / self.scale

    def state(self) -> State:
        """Return the text of every file."""
        return {str(file): file.read_text().strip() for file in self.files}

    def _write(self, value: float) -> None:
        for file in self.files:
            _write(file, str(round(value * self.scale)))

    def restore(self, state: State) -> None:
        """Restore every file that is ours; all are tried."""
        errors = []
        for file in self.files:
            if (text := state.get(str(file))) is not None:
                try:
                    _write(file, text)
                except ForetraceError as error:
                    errors.append(error)
        if errors:
            raise errors[0]


def beyond(setter: Setter, value: float) -> ForetraceError:
    """Return what is said of a value that the device does not take."""
    return ForetraceError(
        f"{setter.name} must be {setter.low:g} to {setter.high:g} {setter.unit}, got {value:g}; choose another one."
    )


def cpu_frequency(root: Path = SYSFS) -> SysfsSetter | None:
    """Return the highest frequency that cores may take (cpufreq); None where it cannot be set."""
    policies = sorted((root / "devices/system/cpu/cpufreq").glob("policy*"))
    policies = [each for each in policies if (each / "scaling_max_freq").exists()]
    if not policies:
        return None
    low = max(_number(each / "cpuinfo_min_freq") for each in policies) / 1e3
    high = min(_number(each / "cpuinfo_max_freq") for each in policies) / 1e3
    listed = policies[0] / "scaling_available_frequencies"
    steps = sorted(float(each) / 1e3 for each in listed.read_text().split()) if listed.exists() else ()
    levels = [each for each in steps or [round(high * share) for share in _SHARES] if low <= each <= high]
    files = tuple(each / "scaling_max_freq" for each in policies)
    return SysfsSetter(
        name="cpu-frequency", unit="MHz", scale=1e3, files=files, low=low, high=high, levels=tuple(levels)
    )


def cpu_power_limit(root: Path = SYSFS) -> SysfsSetter | None:
    """Return the long-term power limit of every package (RAPL); None where it cannot be set."""
    zones = [each for each in _packages(root) if (each / "constraint_0_power_limit_uw").exists()]
    most = [_number(path) / 1e6 for each in zones if (path := each / "constraint_0_max_power_uw").exists()]
    if not zones or len(most) < len(zones) or not min(most):
        return None
    high = min(most)
    levels = tuple(round(high * share, 3) for share in _SHARES)
    files = tuple(each / "constraint_0_power_limit_uw" for each in zones)
    return SysfsSetter(
        name="cpu-power-limit", unit="W", scale=1e6, files=files, low=0.1 * high, high=high, levels=levels
    )


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Counters of energy, J; one may overflow once between two readings."""

    name: str
    counters: tuple[Callable[[], float], ...]
    overflow: tuple[float, ...] = (inf,)  # where each begins at 0 again

    def read(self) -> list[float]:
        """Read every counter. Raises ForetraceError without permission."""
        return [each() for each in self.counters]

    def between(self, before: Sequence[float], after: Sequence[float]) -> float:
        """Return the joules of all counters."""
        return sum((b - a) % most for a, b, most in zip(before, after, self.overflow, strict=True))


def rapl_meter(root: Path = SYSFS) -> Meter | None:
    """Return the meter of this machine's processor packages; None where there is none."""
    zones = [each for each in _packages(root) if (each / "energy_uj").exists()]
    if not zones:
        return None
    return Meter(
        name="processor packages (RAPL)", counters=tuple(partial(_joules, each / "energy_uj") for each in zones),
        overflow=tuple(_joules(each / "max_energy_range_uj") for each in zones),
    )  # fmt: skip


def _joules(file: Path) -> float:
    return _number(file) / 1e6


def _packages(root: Path) -> list[Path]:
    # Zones inside of packages (intel-rapl:0:1) and the whole board (psys) would count twice.
    zones = (each for each in sorted((root / "class/powercap").glob("intel-rapl:*")) if each.name.count(":") == 1)
    return [each for each in zones if (each / "name").read_text().startswith("package")]


def _number(file: Path) -> float:
    with refused(f"cannot read {file}", "run as root, or have it made readable"), suppress(ValueError):
        if 0 <= (found := float(file.read_text())) < inf:
            return found
    raise ForetraceError(f"{file} holds no number; is its driver loaded?")


def _write(file: Path, text: str) -> None:
    with refused(f"cannot write {file}", "run as root, or tune what needs no permission"):
        file.write_text(text)


# --- restoring -------------------------------------------------------------------------------------------------------


Find = Callable[[str], Setter]


@contextmanager
def held(setters: Sequence[Setter], journal: Path, find: Find) -> Iterator[None]:
    """Restore `setters` at the end. Raises ForetraceError where another process holds them, or one cannot be restored.

    A journal that another process left is restored first; `find` gives the setters that it names.
    """
    with _locked(journal):
        _recover(find, journal)
        write_text(journal, json.dumps({each.name: dict(each.state()) for each in setters}))
        with _ending_by_signals():
            try:
                yield
            finally:
                with _deaf():
                    _recover({each.name: each for each in setters}.__getitem__, journal)


def recover(journal: Path, find: Find) -> bool:
    """Restore what a process that was killed left changed; whether there was any. Raises ForetraceError."""
    if not journal.exists():
        return False
    with _locked(journal):
        return _recover(find, journal)


def _recover(find: Find, journal: Path) -> bool:
    """Restore what a journal says, and remove it. It stays where something is not restored."""
    if not journal.exists():
        return False
    kept = parse_json(read_text(journal), str(journal), mend="restore the settings by hand and remove it")
    if not isinstance(kept, dict) or not all(isinstance(each, dict) for each in kept.values()):
        raise ForetraceError(f"{journal} is no journal of settings; restore them by hand and remove it.")
    errors = []
    for name, state in reversed(kept.items()):
        try:
            find(name).restore(state)
        except (ForetraceError, ValueError) as error:
            errors.append(error)
    if errors:
        raise ForetraceError(f"settings are not restored: {errors[0]} {journal} says what they were.")
    journal.unlink()
    return True


@contextmanager
def _locked(journal: Path) -> Iterator[None]:
    lock = journal.with_name(f".{journal.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ForetraceError(f"another process changes settings now (it holds {lock}); wait for it.") from None
        yield


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this thread by an exception; only the main thread hears of signals."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heard = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {each: signal.signal(each, end) for each in heard}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore, inside, all signals but SIGKILL."""
    blocked = {*_SIGNALS, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
