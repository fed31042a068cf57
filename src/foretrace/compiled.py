"""`njit`: a loop is compiled when it is first called and kept beside its module or in the user's cache folder."""

from __future__ import annotations

from typing import Any

import numba


def njit(**options: Any) -> Any:
    """`numba.njit`, kept on disk where that can be.

    Where neither the installation nor the user's cache folder may be written (a container without a home), every
    process compiles for itself; NUMBA_CACHE_DIR names a folder.
    """

    def compiled(loop: Any) -> Any:
        try:
            return numba.njit(cache=True, **options)(loop)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return numba.njit(**options)(loop)

    return compiled
