"""`njit`: a loop is compiled when it is first called and kept beside its module or in the user's cache folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from foretrace.errors import MissingExtraError

try:
    import numba
    from numba.core import event
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler
except ImportError as error:
    raise MissingExtraError(f"numba cannot be imported ({error}); reinstall it: pip install numba.") from error

COMPILING: Any = event.TimingListener()  # type: ignore[no-untyped-call]  # numba has no types
event.register("numba:compile", COMPILING)  # type: ignore[no-untyped-call]


def compiling() -> bool:
    """Whether a loop is being compiled now."""
    return bool(COMPILING._depth)


def compiled_s() -> float:
    """Seconds in which loops of this process were compiled so far."""
    return float(COMPILING.duration) if COMPILING.done else 0.0


_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def njit(*, files: Sequence[str] = (), **options: Any) -> Callable[[_Loop], _Loop]:
    """`numba.njit`, kept on disk where that can be; `files` hold loops that it calls beside those of its own file.

    Numbers are divided as numpy divides them: no exception has to be compiled in. Nor is a wrapper for C.

    Where neither the installation nor the user's cache folder may be written (a container without a home), every
    process compiles for itself; NUMBA_CACHE_DIR names a folder.
    """
    options = {"error_model": "numpy", "no_cfunc_wrapper": True, **options}

    def compiled(loop: _Loop) -> _Loop:
        made: Any
        try:
            made = numba.njit(cache=True, **options)(loop)
            if files and hasattr(made, "_cache"):  # numba's own switch may be off; by itself it looks at one file
                kept = made._cache._cache_file
                kept._source_stamp = (kept._source_stamp, *(sha256(Path(each).read_bytes()).digest() for each in files))
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            made = numba.njit(**options)(loop)
        found: _Loop = made
        return found

    return compiled


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
