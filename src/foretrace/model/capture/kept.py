"""Captured operators of named models, kept in the user's cache folder: the second question needs no PyTorch.

The folder is `$FORETRACE_CACHE/operators`, else `~/.cache/foretrace/operators`. A file is named after everything that
decides what is captured: what was asked, the code of this package, the versions of Python and of the packages that
make the model, the instruction sets of this processor, and settings of PyTorch. So nothing that is read is stale;
what is damaged is captured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from foretrace.cost.operators import store
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.hardware.processor import instruction_sets
from foretrace.model.operator_graph import OperatorGraph

PACKAGE = Path(__file__).parents[2]
MOST_BYTES = 200 << 20  # of all files; those used longest ago go first


def kept(
    asked: Mapping[str, str | int | bool | None], packages: Sequence[str], make: Callable[[], OperatorGraph]
) -> OperatorGraph:
    """Return what `make` captures for what was `asked`: read where it was captured before, else captured and kept.

    `packages` are those whose code the model is made of, beside this one. Where no folder can be had, nothing is kept.
    """
    try:
        path = path_for(asked, packages)
    except ForetraceError:  # without a home folder
        return make()
    found = read(path)
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return found
    found = make()
    with contextlib.suppress(ForetraceError, OSError):
        store.make_folder(path.parent)
        _make_room(path.parent)
        write_bytes(path, zlib.compress(msgspec.msgpack.encode(found), 1))
    return found


def path_for(asked: Mapping[str, str | int | bool | None], packages: Sequence[str]) -> Path:
    """Return the file of what was asked, whether it exists or not."""
    torch = sys.modules.get("torch")
    decides = {
        "asked": dict(asked),
        "code": _code(),
        "versions": {name: _version(name) for name in ("torch", "numpy", *packages)},
        "python": platform.python_version(),
        "machine": [platform.machine(), *(instruction_sets() or ())],
        "capability": os.environ.get("ATEN_CPU_CAPABILITY", ""),
        "settings": str(torch.get_default_dtype()) if torch else "torch.float32",
    }
    text = msgspec.json.encode(decides, order="deterministic")
    return store.cache() / "operators" / f"{hashlib.sha256(text).hexdigest()[:32]}.operators"


def read(path: Path) -> OperatorGraph | None:
    """Return the operators in a file; None where it is missing or damaged."""
    try:
        return msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=OperatorGraph)
    except (OSError, zlib.error, msgspec.MsgspecError):
        return None


@cache
def _code() -> str:
    """Return the digest of this package's code and tables; 20 ms."""
    found = hashlib.sha256()
    for path in sorted(each for kind in ("*.py", "*.csv") for each in PACKAGE.rglob(kind)):
        found.update(b"%s\0%s\0" % (bytes(path.relative_to(PACKAGE)), path.read_bytes()))
    return found.hexdigest()


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _make_room(folder: Path) -> None:
    """Remove files until the others fill no more than MOST_BYTES."""
    files = [(each, each.stat()) for each in folder.glob("*.operators")]
    left = sum(stat.st_size for _, stat in files)
    for each, stat in sorted(files, key=lambda pair: pair[1].st_mtime):
        if left <= MOST_BYTES:
            break
        each.unlink(missing_ok=True)
        left -= stat.st_size
