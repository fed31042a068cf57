"""`held`: settings of the machine may be changed inside, and are as they were after it, however it ends.

What was set before is written to a journal before anything is changed. An exception, Ctrl-C, SIGTERM and SIGHUP restore
it at once; after SIGKILL, whoever comes next does, by the journal. One process at a time has the journal's lock.
"""

from __future__ import annotations

import fcntl
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from foretrace.errors import ForetraceError
from foretrace.files import write_text
from foretrace.reading import parse_json, read_text
from foretrace.serving.energy.machine import Setter

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
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
