"""Bytes of recordings: files, folders, `.gz`, `.zip` and `.tar.gz`, unpacked piece by piece.

Nothing here knows what is inside a recording. Every source is an iterator of unpacked blocks of at most
512 KiB, so a file larger than memory is as good as a small one.
"""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from foretrace.errors import TraceError
from foretrace.names import question
from foretrace.plaintext import visible
from foretrace.reading import STREAMED, Budget, TooLargeError, address, opened, packer
from foretrace.trace import foreign

BLOCK = 1 << 19
SUFFIXES = (".json", ".json.gz")


class CutError(Exception):
    """The bytes of a source end too early; the message says why. What was yielded before is good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSource:
    """One recording: where it comes from and its unpacked bytes; read it before asking for the next one."""

    name: str
    blocks: Iterator[bytes]
    alone: bool  # asked for by name, not found in a folder or an archive


def sources(
    path: str | Path | Sequence[str | Path], progress: Callable[[float], None] | None = None
) -> Iterator[RecordingSource]:
    """Yield all recordings under a file, archive or folder, or in a list of those, in natural order of their names.

    `progress` is called with the share of the stored bytes that were read (0 to 1).

    Raises:
        TraceError: a path does not exist, cannot be read, or holds no file named `*.json` or `*.json.gz`.

    """
    files = stored_files(path)
    total = sum(file.stat().st_size for file, _ in files)
    meter = _Meter(total=total, report=progress)
    for file, alone in files:
        try:
            yield from _open(file, alone, meter)
        except OSError as error:
            raise TraceError(f"{file} cannot be read ({_reason(error)}).") from None


def peek(source: RecordingSource) -> tuple[bytes, RecordingSource]:
    """Return the first bytes of a source, at least 512 where it has so many, and the source as if unread."""
    head, blocks = _begun(source.blocks)
    return head, replace(source, blocks=blocks)


def _begun(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return at least 512 bytes of the beginning, where there are so many, and all blocks as if unread."""
    head = b""
    cut: CutError | None = None
    try:
        while len(head) < 512 and (block := next(blocks, b"")):
            head += block
    except CutError as error:
        cut = error
    return head, _chain(head, blocks, cut)


def stored_files(path: str | Path | Sequence[str | Path]) -> list[tuple[Path, bool]]:
    """Return files and archives under paths, and whether each was asked for by name; see `sources`."""
    given = [Path(path)] if isinstance(path, str | Path) else [Path(p) for p in path]
    if not given:
        raise TraceError("no recording was given: name at least one file or folder.")
    return [(file, file in given) for p in given for file in _files(p)]


class _Meter:
    """Counts stored bytes for the progress report."""

    def __init__(self, *, total: int, report: Callable[[float], None] | None) -> None:
        self._total = max(total, 1)
        self._done = 0
        self._report = report

    def add(self, count: int) -> None:
        self._done += count
        if self._report is not None:
            self._report(min(self._done / self._total, 1.0))


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts rank 2 before rank 10: text and digits in turn, numbers by how many digits, then by those."""
    parts = re.split(r"([0-9]+)", path.name)
    numbers = (digits.lstrip("0") for digits in parts[1::2])
    texts = ((0, text) for text in parts[::2])
    key = [each for pair in zip(texts, ((len(n), n) for n in numbers), strict=False) for each in pair]
    return [*key, (0, parts[-1])]


def _files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            path.stat()
            return [path]
        inside = list(path.iterdir())
        found = [p for p in inside if p.name.lower().endswith(SUFFIXES) and p.is_file()]
    except OSError as error:
        if said := address(path):
            raise TraceError(f"{said}.") from None
        if isinstance(error, FileNotFoundError):
            raise TraceError(f"{path} does not exist; {_beside(path)}") from None
        raise TraceError(f"{path} cannot be read ({_reason(error)}).") from None
    except ValueError:  # a null character in the path
        raise TraceError(f"{str(path)!r} is not a path.") from None
    if not found:
        if said := foreign.folder(path, [p.name for p in inside]):
            raise TraceError(f"{path} {said}.")
        deeper = [p.name for p in inside if p.is_dir() and any(True for end in SUFFIXES for _ in p.glob(f"*{end}"))]
        hint = f" Its folder {min(deeper)} holds some: name that." if deeper else ""
        raise TraceError(f"{path} holds no recording: no file in it is named *.json or *.json.gz.{hint}")
    return sorted(found, key=_natural)


def _beside(path: Path) -> str:
    """Return what is there instead of a file that does not exist, as the end of a sentence."""
    try:
        there = [each.name for each in path.parent.iterdir() if each.is_dir() or each.name.lower().endswith(SUFFIXES)]
    except OSError:
        there = []
    return question(path.name, there, lists="give a recording, or make one: foretrace record -- python train.py")


def _open(path: Path, alone: bool, meter: _Meter) -> Iterator[RecordingSource]:
    with ExitStack() as stack:
        file = stack.enter_context(opened(path))
        budget = Budget(path.stat().st_size, most=STREAMED)
        if file.read(4) in (b"PK\x03\x04", b"PK\x05\x06"):
            yield from _zip(path, meter, budget)
            return
        file.seek(0)
        yield from _peel(visible(str(path)), _raw(file, meter), alone, budget, depth=0)


def _raw(file: io.BufferedReader, meter: _Meter) -> Iterator[bytes]:
    # Small packed blocks: 64 KiB of gzip unpack to 1 or 2 MiB of JSON.
    try:
        while block := file.read(BLOCK >> 4):
            meter.add(len(block))
            yield block
    except OSError as error:
        raise CutError(f"it cannot be read further: {_reason(error)}") from None


def _peel(name: str, blocks: Iterator[bytes], alone: bool, budget: Budget, depth: int) -> Iterator[RecordingSource]:
    """Undo gzip and tar as often as the first bytes ask for it."""
    head, blocks = _begun(blocks)
    if command := packer(head):
        raise TraceError(
            f"{name} is packed in a way that is not read here; unpack it first: {command} {Path(name).name}."
        )
    if head[:2] == b"\x1f\x8b" and depth < 3:
        yield from _peel(name, gunzip(blocks, budget), alone, budget, depth + 1)
    elif head[257:262] == b"ustar" and depth < 3:
        yield from _tar(name, blocks, budget, depth)
    else:
        yield RecordingSource(name=name, blocks=blocks, alone=alone)


def _chain(head: bytes, blocks: Iterator[bytes], cut: CutError | None) -> Iterator[bytes]:
    if head:
        yield head
    if cut is not None:
        raise cut
    yield from blocks


def gunzip(blocks: Iterator[bytes], budget: Budget) -> Iterator[bytes]:
    """Unpack gzip (also of several members) in blocks of at most `BLOCK` bytes.

    Raises:
        CutError: the stream is cut, damaged, or unpacks to more than the budget allows.

    """
    unpack = zlib.decompressobj(wbits=31)
    fresh = True  # nothing of the current member was read yet
    for packed in blocks:
        rest = packed
        while rest:
            if fresh and not rest.strip(b"\0"):
                break  # padding after the last member
            before = unpack.copy()
            try:
                out = unpack.decompress(rest, BLOCK)
            except zlib.error as error:
                yield from _until_fault(before, rest)
                raise CutError(f"gzip stream damaged: {error}") from None
            fresh = False
            _spend(budget, len(out))
            if out:
                yield out
            if unpack.eof:
                rest = unpack.unused_data
                unpack = zlib.decompressobj(wbits=31)
                fresh = True
            else:
                rest = unpack.unconsumed_tail
    if not fresh:
        raise CutError("gzip stream cut")


def _spend(budget: Budget, count: int) -> None:
    try:
        budget.spend(count)
    except TooLargeError as error:
        raise CutError(str(error)) from None


def _until_fault(unpack: zlib._Decompress, packed: bytes) -> Iterator[bytes]:
    """Yield what a damaged piece of a stream unpacks to before its fault."""
    with suppress(zlib.error):
        for at in range(0, len(packed), 16):
            if out := unpack.decompress(packed[at : at + 16]):
                yield out


class _Pipe:
    """The `read` that tarfile wants, over an iterator of blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = b""

    def read(self, size: int) -> bytes:
        parts = [self._rest]
        have = len(self._rest)
        while have < size and (block := next(self._blocks, b"")):
            parts.append(block)
            have += len(block)
        data = b"".join(parts)
        self._rest = data[size:]
        return data[:size]


def _read_member(member: IO[bytes]) -> Iterator[bytes]:
    try:
        while block := member.read(BLOCK >> 3):  # what is before a fault in a piece is lost with it
            yield block
    except (EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError) as error:
        raise CutError(f"archive damaged: {error}") from None


def _tar(name: str, blocks: Iterator[bytes], budget: Budget, depth: int) -> Iterator[RecordingSource]:
    found = False
    damage = ""
    try:
        with tarfile.open(fileobj=_Pipe(blocks), mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                if member.isfile() and member.name.lower().endswith(SUFFIXES):
                    found = True
                    content = archive.extractfile(member)
                    yield from _peel(visible(f"{name}:{member.name}"), _read_member(content), False, budget, depth + 1)
        for _ in blocks:  # to the checksum
            pass
    except (tarfile.TarError, EOFError, CutError) as error:
        damage = f"archive damaged: {error}"
    if damage:
        yield RecordingSource(name=f"{name} (the rest of the archive)", blocks=_cut(damage), alone=True)
    elif not found:
        raise TraceError(f"{name} holds no recording: no file in it is named *.json or *.json.gz.")


def _cut(reason: str) -> Iterator[bytes]:
    yield from ()
    raise CutError(reason)


def _zip(path: Path, meter: _Meter, budget: Budget) -> Iterator[RecordingSource]:
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        raise TraceError(f"{path} is a damaged zip archive ({error}): copy it again.") from None
    with archive:
        members = [m for m in archive.infolist() if m.filename.lower().endswith(SUFFIXES) and not m.is_dir()]
        members = [m for m in members if not m.filename.startswith("__MACOSX/")]
        if not members:
            said = foreign.by_name(path) or "holds no recording: no file in it is named *.json or *.json.gz"
            raise TraceError(f"{path} {said}.")
        for info in sorted(members, key=lambda m: _natural(Path(m.filename))):
            name = visible(f"{path}:{info.filename}")
            try:
                member = archive.open(info)
            except (RuntimeError, NotImplementedError, zipfile.BadZipFile, EOFError) as error:
                raise TraceError(f"{name} cannot be unpacked ({error}): unzip it and name the file.") from None
            with member:
                yield from _peel(name, _bounded(_read_member(member), budget), False, budget, depth=0)
            meter.add(info.compress_size)


def _bounded(blocks: Iterator[bytes], budget: Budget) -> Iterator[bytes]:
    for block in blocks:
        _spend(budget, len(block))
        yield block
