"""`njit`: a loop is compiled when it is first called and kept beside its module or in the user's cache folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from foretrace.errors import MissingExtraError

try:
    import numba
    from numba.core import event
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


def njit(**options: Any) -> Callable[[_Loop], _Loop]:
    """`numba.njit`, kept on disk where that can be.

    Where neither the installation nor the user's cache folder may be written (a container without a home), every
    process compiles for itself; NUMBA_CACHE_DIR names a folder.
    """

    def compiled(loop: _Loop) -> _Loop:
        made: _Loop
        try:
            made = numba.njit(cache=True, **options)(loop)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            made = numba.njit(**options)(loop)
        return made

    return compiled
