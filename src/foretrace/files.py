"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import os
from pathlib import Path

from foretrace.errors import ForetraceError


def write_bytes(path: Path, data: bytes, *, compress: bool = False) -> None:
    """Write `data`, as gzip if asked, to a temporary file beside `path` and rename it.

    Raises ForetraceError where the folder is missing or may not be written, and where `path` is a device or a folder,
    which a rename would replace.
    """
    if compress:
        data = gzip.compress(data, compresslevel=6, mtime=0)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            raise ForetraceError(f"cannot write {path}, which is no file; name a file that may be written anew.")
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise ForetraceError(
            f"cannot write {path} ({error.strerror or error}); choose a folder that exists and is yours."
        ) from None
    finally:
        with contextlib.suppress(OSError):  # it could not be made, and that has been said
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode("utf-8", errors="replace"))
