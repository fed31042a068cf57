"""`njit`: a loop is compiled when it is first called, and kept beside its module and, by content, for this user.

The user's folder is `~/.cache/foretrace/loops`: another environment, a fresh clone, or the next version of the package
does not compile again what did not change.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

from foretrace.errors import MissingExtraError

try:
    import fcntl
except ImportError:  # not on Windows: there each process compiles for itself
    fcntl = None  # type: ignore[assignment]
try:
    import numba
    from numba.core import event
    from numba.core.caching import IndexDataCacheFile
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler
except ImportError as error:
    raise MissingExtraError(f"numba cannot be imported ({error}); reinstall it: pip install numba.") from error


def _linear_algebra_later() -> None:
    """Load numba's functions of arrays without scipy's linear algebra, a sixth of what a short command loads.

    They only ask whether it is there. Loops with `np.dot`, whosever they are, still load it when they are compiled.
    """
    from numba.np import linalg

    if find_spec("scipy") and "numba.np.arraymath" not in sys.modules:
        asked: Any = linalg.ensure_blas
        linalg.ensure_blas = lambda: None
        try:
            loaded: Any = import_module("numba.np.arraymath")
            loaded.ensure_blas = asked
        finally:
            linalg.ensure_blas = asked


_linear_algebra_later()
COMPILING: Any = event.TimingListener()  # type: ignore[no-untyped-call]  # numba has no types
event.register("numba:compile", COMPILING)  # type: ignore[no-untyped-call]


def compiling() -> bool:
    """Return whether a loop is being compiled now."""
    return bool(COMPILING._depth)


def compiled_s() -> float:
    """Return seconds in which loops of this process were compiled so far."""
    return float(COMPILING.duration) if COMPILING.done else 0.0


_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[_Loop], _Loop]:
    """Return `numba.njit`, kept on disk where possible as long as neither the loop nor what it reaches changes.

    Numbers are divided as numpy divides them: no exception has to be compiled in. Nor is a wrapper for C.

    Where neither the installation nor the user's cache folder may be written (a container without a home), every
    process compiles for itself; NUMBA_CACHE_DIR names the only folder to use.
    """
    options = {"error_model": "numpy", "no_cfunc_wrapper": True, **options}

    def compiled(loop: _Loop) -> _Loop:
        made: Any
        try:
            made = numba.njit(cache=True, **options)(loop)
            if hasattr(made, "_cache"):  # numba's own switch may be off
                made._cache._cache_file = _KeptLoop(made._cache)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            made = numba.njit(**options)(loop)
        found: _Loop = made
        return found

    return compiled


class _KeptLoop(IndexDataCacheFile):
    """The files of one loop beside its module, and those under its content in the user's folder.

    By itself numba looks at the file of the loop, not at those of loops and constants that are compiled into it, and
    for no copy of it elsewhere; and processes that begin together all compile it.
    """

    _turn: int | None = None  # a locked file, while this process compiles

    def __init__(self, cache: Any) -> None:
        beside = cache._cache_file
        stamp = (beside._source_stamp, *_compiled_in(cache._py_func))
        name = beside._index_name.removesuffix(".nbi")
        super().__init__(beside._cache_path, name, stamp)  # type: ignore[no-untyped-call]  # numba has no types
        self._by_content = None
        if not numba.config.CACHE_DIR:  # type: ignore[attr-defined]
            content = sha256(repr((stamp, numba.__version__)).encode()).hexdigest()
            with suppress(RuntimeError):  # no home
                folder = Path.home() / ".cache" / "foretrace" / "loops" / f"{cache._py_func.__module__}-{content[:16]}"
                self._by_content = IndexDataCacheFile(str(folder), name, stamp)  # type: ignore[no-untyped-call]

    def load(self, key: Any) -> Any:
        """Return what is kept, None if nothing is: then it is compiled here, and other processes wait for it."""
        found = self._kept(key)
        if found is None and self._turn is None:
            self._take_turn()
            found = self._kept(key)
            if found is not None:
                self._end_turn()
        return found

    def _take_turn(self) -> None:
        """Wait until no other process compiles it, no longer than `_LONGEST_S`; budgets do not pay for that either."""
        if fcntl is None:
            return
        with suppress(OSError):
            self._turn = os.open(f"{self._index_path}.lock", os.O_CREAT | os.O_RDWR, 0o666)
            if not _locked(self._turn):
                end = time.monotonic() + _LONGEST_S
                with event.trigger_event("numba:compile"):
                    while not _locked(self._turn) and time.monotonic() < end:
                        time.sleep(0.02)

    def _end_turn(self) -> None:
        if self._turn is not None:
            os.close(self._turn)
            self._turn = None

    def _kept(self, key: Any) -> Any:
        """Return what is kept, None if nothing is; a copy found by content is put beside the module."""
        found = super().load(key)  # type: ignore[no-untyped-call]
        if found is None and self._by_content is not None:
            with suppress(OSError):
                found = self._by_content.load(key)  # type: ignore[no-untyped-call]
            if found is not None:
                super().save(key, found)  # type: ignore[no-untyped-call]
        return found

    def save(self, key: Any, data: Any) -> None:
        """Keep it in both places; older content of the module leaves the user's folder after `_KEPT_DAYS`."""
        try:
            super().save(key, data)  # type: ignore[no-untyped-call]
        finally:
            self._end_turn()
        if self._by_content is not None:
            folder = Path(self._by_content._cache_path)
            with suppress(OSError):
                if not folder.exists():
                    folder.mkdir(parents=True)
                    for other in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*"):
                        if other.stat().st_mtime < time.time() - _KEPT_DAYS * 86400:
                            shutil.rmtree(other, ignore_errors=True)
                self._by_content.save(key, data)  # type: ignore[no-untyped-call]


_KEPT_DAYS = 30
_LONGEST_S = 120.0  # for a loop that another process began to compile; one that failed has it until it ends


def _locked(file: int) -> bool:
    """Return whether the file is this process's alone now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_KNOWN_BY_VERSION = sys.stdlib_module_names | {"numba", "numpy"}


def _compiled_in(loop: Any) -> list[str]:
    """Return digests of files whose functions a loop reaches, and its constants by value."""
    found, seen, reached = set(), {loop}, [loop]
    while reached:
        function = reached.pop()
        names = _names(function.__code__)
        values = {name: function.__globals__[name] for name in names if name in function.__globals__}
        for module in [value for value in values.values() if isinstance(value, ModuleType)]:
            if module.__name__.partition(".")[0] not in _KNOWN_BY_VERSION:
                values |= {f"{module.__name__}.{each}": vars(module)[each] for each in names & vars(module).keys()}
        for name, value in values.items():
            made: Any = getattr(value, "py_func", getattr(value, "_defn", value))  # of a loop, of an intrinsic
            if isinstance(made, FunctionType | type):
                if made.__module__.partition(".")[0] not in _KNOWN_BY_VERSION:
                    path = Path(inspect.getfile(made))
                    found.add(_digest(path, path.stat().st_mtime_ns))
                    if isinstance(made, FunctionType) and made not in seen:
                        seen.add(made)
                        reached.append(made)
            elif isinstance(value, bool | int | float | str | bytes | tuple | np.generic):
                found.add(f"{name}={value!r}")
            elif isinstance(value, np.ndarray):
                found.add(f"{name}={value.dtype}{value.shape}{sha256(value.tobytes()).hexdigest()}")
    return sorted(found)


def _names(code: CodeType) -> set[str]:
    """Return names that a function and those within it look up."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


@cache
def _digest(path: Path, changed: int) -> str:
    return sha256(path.read_bytes()).hexdigest()


class _Merged(JITCodeLibrary):
    """Code of a loop that is not optimised and made executable by itself, only within the loops that call it."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        return _NoEnvironment


class _NoEnvironment:
    @staticmethod
    def set_env(name: str, env: Any) -> None:
        """Leave it: the environment is that of the loop that is executed."""


class _Inner(Compiler):
    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        library = library or _Merged(target.codegen(), "inner")  # type: ignore[no-untyped-call]
        super().__init__(typing, target, library, *rest)  # type: ignore[no-untyped-call]


def inner(loop: _Loop) -> _Loop:
    """Compile a loop that only other loops call. It allocates nothing, so that nothing has to be counted.

    numba would optimise it once by itself and again in each of its callers, and give it wrappers for Python: twice the
    time to compile.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    made: _Loop = numba.njit(error_model="numpy", pipeline_class=_Inner, **options)(loop)
    return made
