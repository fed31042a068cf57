"""Where calibrations are kept: one file per machine, threads, PyTorch and allocator settings, in a cache folder.

The folder is `$FORETRACE_CACHE/calibration`, else `~/.cache/foretrace/calibration`. A file is written whole; saving
merges with what is there, under a lock, so that two processes which save at once lose nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from foretrace.cost.operators.machine import differences
from foretrace.errors import ForetraceError, refused
from foretrace.files import write_bytes
from foretrace.reading import home

FORMAT = 1


class _File(msgspec.Struct, kw_only=True):
    format: int
    machine: dict[str, Any]
    seconds: dict[str, float]


def cache() -> Path:
    """Return the folder of all that was measured here."""
    given = os.environ.get("FORETRACE_CACHE")
    return Path(given) if given else home() / ".cache" / "foretrace"


def folder() -> Path:
    """Return the folder of the calibrations."""
    return cache() / "calibration"


def make_folder(path: Path | None = None) -> None:
    """Make a folder, by default that of the calibrations, where it is not there yet. Raises ForetraceError."""
    path = path or folder()
    with refused(f"cannot make the folder {path}", "set FORETRACE_CACHE to a folder of yours"):
        path.mkdir(parents=True, exist_ok=True)


def path_for(machine: Mapping[str, Any]) -> Path:
    """Return the file of this fingerprint, whether it exists or not."""
    text = msgspec.json.encode(dict(machine), order="deterministic")
    return folder() / f"{hashlib.sha256(text).hexdigest()[:16]}.json"


def load(machine: Mapping[str, Any]) -> dict[str, float]:
    """Return the times stored for this fingerprint, empty where there are none.

    Raises ForetraceError on a damaged file, and on one that was measured elsewhere and copied under this name.
    """
    try:
        path = path_for(machine)
    except ForetraceError:  # without a home folder nothing can have been stored
        return {}
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ForetraceError(f"cannot read the calibration {path} ({error.strerror or error}).") from None
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForetraceError(
            f"{path} is no calibration ({error}); delete it and run foretrace calibrate device again."
        ) from None
    if found.format != FORMAT:
        raise ForetraceError(
            f"{path} is a calibration of format {found.format}, this foretrace reads format {FORMAT}; delete it and "
            "run foretrace calibrate device again."
        )
    if other := differences(found.machine, machine):
        raise ForetraceError(
            f"{path} holds times of another machine than its name says: {', '.join(other)}; delete it and run "
            "foretrace calibrate device again."
        )
    return {key: value for key, value in found.seconds.items() if value > 0.0}


def save(machine: Mapping[str, Any], seconds: Mapping[str, float]) -> Path:
    """Add these times to those stored for this fingerprint; newer ones replace older ones."""
    path = path_for(machine)
    make_folder()
    with _locked(path.with_suffix(".lock")):
        merged = {**load(machine), **seconds}
        file = _File(format=FORMAT, machine=dict(machine), seconds=merged)
        write_bytes(path, msgspec.json.format(msgspec.json.encode(file), indent=1))
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; the system releases it when the process ends, however it ends."""
    with refused(f"cannot write {path}", "set FORETRACE_CACHE to a folder of yours"):
        held = path.open("a+b")
    with held as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except ImportError:  # Windows
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined,unused-ignore]
        yield
