"""Write a file whole or not at all; know what a file holds, wherever it lies."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from foretrace.errors import ForetraceError, refused

PART = ".part"  # ends the name of a file that is being written


def write_bytes(path: Path, data: bytes, *, compress: bool = False) -> None:
    """Write `data`, as gzip if asked, to a temporary file beside `path` and rename it.

    A process that is killed meanwhile leaves `path` as it was and, where the file system knows files without a name
    (Linux), nothing beside it. Raises ForetraceError where the folder is missing or may not be written, and where
    `path` is a device or a folder, which a rename would replace.
    """
    if compress:
        data = gzip.compress(data, compresslevel=6, mtime=0)
    temporary = part_of(path)
    try:
        with refused(f"cannot write {path}", "choose a folder that exists, is yours and has room"):
            if path.exists() and not path.is_file():
                raise ForetraceError(f"cannot write {path}, which is no file; name a file that may be overwritten.")
            _write_whole(temporary, data)
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it could not be made, and that has been said
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8", errors="replace"))


def part_of(path: Path) -> Path:
    """Return a hidden name beside `path` that no other process, thread or machine uses: process numbers repeat."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{PART}")


def _write_whole(path: Path, data: bytes) -> None:
    """Write a new file; it has its name only once it is whole, where the system can do that."""
    try:
        # O_TMPFILE: Linux, on most file systems. The (unused) directory makes Python follow the link in /proc.
        with os.fdopen(os.open(path.parent, os.O_WRONLY | os.O_TMPFILE, 0o666), "wb") as unnamed:
            unnamed.write(data)
            unnamed.flush()
            os.link(f"/proc/self/fd/{unnamed.fileno()}", path, src_dir_fd=unnamed.fileno())
    except (AttributeError, OSError):
        with path.open("xb") as named:
            named.write(data)


def digest(path: Path) -> str:
    """Return SHA-256 of a file's content, or of names and contents in a folder: the same after a copy or move.

    Raises ForetraceError where it cannot be read.
    """
    with refused(f"cannot read {path}", "name one that exists"):
        if not path.is_dir():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        inside = sorted(each for each in path.rglob("*") if each.is_file())
    lines = (f"{each.relative_to(path)}\0{digest(each)}\n" for each in inside)
    return hashlib.sha256("".join(lines).encode("utf-8", errors="surrogateescape")).hexdigest()


def evict(paths: Iterable[Path]) -> None:
    """Take files out of the page cache, so that the next one who reads them waits for storage."""
    os.sync()  # only clean pages can be given up
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
