"""Files that others made: read whole, unpacked within limits, as bytes, text, JSON or YAML.

Every reader that wants a whole file comes through here (recordings are streamed, see `foretrace.trace.stream`), so that
no reader has to think of bombs, encodings, lone surrogates, or of what a parser raises beside its own error.

A packed file may unpack to `EXPANSION` times its size, the first `FREE` bytes aside, and to `WHOLE` bytes at most;
FORETRACE_ALLOW_LARGE=1 (--allow-large) lifts both limits.
"""

from __future__ import annotations

import json
import os
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from errno import ESPIPE
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.arrays import Array

Struct = TypeVar("Struct")

ALLOW_LARGE = "FORETRACE_ALLOW_LARGE"
# Deflate cannot pack more than 1,030 : 1. Recordings reach 30 : 1, and since hardly two of their time stamps are
# equal they cannot come near 400 : 1; what does, is a bomb.
EXPANSION = 400
FREE = 256 << 20
WHOLE = 4 << 30  # bytes of a file that is held in memory whole
STREAMED = 64 << 30  # bytes of a file that is read piece by piece
_BLOCK = 1 << 20
_MOST_NODES = 100_000  # of YAML with its aliases written out, beyond ten times what stands in the file
_MOST_DEPTH = 100
_MOST_DIGITS = 30  # of a whole number; a float holds every such number, if not exactly

_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\\\|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_URL = re.compile(r"^([a-z][a-z0-9+.-]+):/+(?=[^/])", re.IGNORECASE)
_FETCH = {"s3": "aws s3 cp", "gs": "gcloud storage cp", "hf": "hf download", "az": "az storage blob download"}
_PACKERS = {
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"\xfd7zXZ\x00": "xz -d",
    b"BZh": "bunzip2",
    b"7z\xbc\xaf\x27\x1c": "7z x",
    b"Rar!": "unrar x",
    b"\x04\x22\x4d\x18": "lz4 -d",
}


def address(path: str | Path) -> str:
    """Return what to do with an address in place of a file; "" for a path."""
    match = _URL.match(str(path))
    if match is None:
        return ""
    kind = match[1].lower()
    whole = f"{kind}://{str(path)[match.end() :]}"
    return f"{whole} is an address, and nothing is fetched here; fetch it first: {_FETCH.get(kind, 'curl -LO')} {whole}"


class TooLargeError(ForetraceError):
    """A file unpacks to more than it may."""


class Budget:
    """How many bytes one stored file may unpack to, on all levels of packing together."""

    def __init__(self, stored: int, most: int = WHOLE) -> None:
        self.stored, self._most = stored, most
        self._unpacked = 0
        self._free = bool(os.environ.get(ALLOW_LARGE))

    def spend(self, count: int) -> None:
        """Count unpacked bytes. Raises TooLargeError."""
        self._unpacked += count
        if self._free:
            return
        if self._unpacked > self._most:
            raise TooLargeError(f"it unpacks to more than {self._most >> 30} GiB; say `allow_large=` if that is meant")
        if self._unpacked > FREE and self._unpacked > EXPANSION * self.stored:
            raise TooLargeError(
                f"it unpacks to more than {EXPANSION} times its size, as no recording and no log does; say "
                "`allow_large=` if that is meant"
            )


def home() -> Path:
    """Return the user's home folder. Raises ForetraceError where there is none (a container run as an unknown user)."""
    try:
        return Path.home()
    except RuntimeError:
        raise ForetraceError(
            "this user has no home folder; set HOME, or FORETRACE_CACHE and FORETRACE_LEDGER to places of yours."
        ) from None


def packer(head: bytes) -> str:
    """Return the command that unpacks a file that begins so, "" where it is not packed, or packed as we read it."""
    return next((command for magic, command in _PACKERS.items() if head.startswith(magic)), "")


# What NumPy, pyarrow and zipfile raise for damaged files.
DAMAGED = (
    ValueError, OSError, EOFError, LookupError, TypeError, SyntaxError, tokenize.TokenError, RuntimeError,
    ArithmeticError, AttributeError, MemoryError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def parse_npz(data: bytes) -> dict[str, Array]:
    """Return all arrays of an NPZ file, within a budget. Raises one of DAMAGED, or TooLargeError."""
    import numpy as np

    with zipfile.ZipFile(BytesIO(data)) as archive:
        Budget(len(data)).spend(sum(each.file_size for each in archive.infolist()))
    with np.load(BytesIO(data), allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}


def opened(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, also for a pipe: it gives its bytes once, if anybody writes to it."""
    if not path.is_dir() and not path.is_file() and (path.is_fifo() or path.is_socket()):
        raise OSError(ESPIPE, "it is a pipe, whose bytes can be read once; write them to a file first")
    return path.open("rb")


def read_bytes(path: Path, *, mend: str = "give a file that exists") -> bytes:
    """Return all bytes of a file, unpacked if it is gzip. Raises ForetraceError that ends with `mend`."""
    try:
        if not path.is_file() and path.exists():
            raise ForetraceError(f"cannot read {path}, which is no file; {mend}.")
        size = path.stat().st_size
        if size > WHOLE and not os.environ.get(ALLOW_LARGE):
            raise TooLargeError(f"{path} has more than {WHOLE >> 30} GiB; say `allow_large=` if that is meant.")
        data = path.read_bytes()
    except FileNotFoundError:
        if said := address(path):
            raise ForetraceError(f"{said}.") from None
        raise ForetraceError(f"cannot read {path}, which does not exist; {mend}.") from None
    except OSError as error:
        raise ForetraceError(f"cannot read {path} ({error.strerror or error}); {mend}.") from None
    except ValueError as error:  # a null character in the name
        raise ForetraceError(f"cannot read {str(path)!r} ({error}); {mend}.") from None
    except MemoryError:
        raise ForetraceError(f"{path} does not fit into memory; give a smaller file.") from None
    if command := packer(data[:8]):
        raise ForetraceError(
            f"{path} is packed in a way that is not read here; unpack it first: {command} {path.name}."
        )
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return b"".join(gunzip(data))
    except TooLargeError as error:
        raise TooLargeError(f"{path}: {error}.") from None
    except (zlib.error, EOFError) as error:
        raise ForetraceError(f"{path} is a damaged gzip file ({error}); copy it again.") from None
    except MemoryError:
        raise ForetraceError(f"{path} does not fit into memory when unpacked; give a smaller file.") from None


def gunzip(data: bytes) -> Iterator[bytes]:
    """Unpack gzip of one or several members. Raises zlib.error, EOFError where it is cut, TooLargeError."""
    budget = Budget(len(data))
    rest = data
    while rest.strip(b"\0"):  # padding may follow the last member
        unpack = zlib.decompressobj(wbits=31)
        while not unpack.eof:
            block = unpack.decompress(rest, _BLOCK)
            rest = unpack.unconsumed_tail
            if not block and not rest and not unpack.eof:
                raise EOFError("it is cut")
            budget.spend(len(block))
            yield block
        rest = unpack.unused_data


def read_text(path: Path, *, mend: str = "give a file that exists", lenient: bool = False) -> str:
    """Return the text of a file (UTF-8, its mark left out), unpacked if it is gzip.

    `lenient` reads what is no UTF-8 as the replacement character; else that is an error. Raises ForetraceError.
    """
    data = read_bytes(path, mend=mend)
    try:
        return data.decode("utf-8-sig", errors="replace" if lenient else "strict")
    except UnicodeDecodeError as error:
        raise ForetraceError(f"{path} is no text (byte {error.start:,} is not UTF-8); {mend}.") from None


def read_struct(path: Path, kind: type[Struct], what: str, mend: str) -> Struct:
    """Return the struct that a file holds as JSON. Raises ForetraceError: it is no `what`, and how to `mend` that."""
    import msgspec  # here: --help needs none

    try:
        return msgspec.json.decode(read_bytes(path, mend=mend), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForetraceError(f"{path} is no {what} ({error}); {mend}.") from None


def parse_json(text: str | bytes, where: str, *, mend: str = "mend it") -> Any:
    """Return a JSON text as Python values.

    Halves of surrogate pairs, which no text may hold, become the replacement character. Numbers that JSON does not know
    (NaN, Infinity) are refused. Raises ForetraceError.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        return json.loads(_SURROGATE.sub(_whole, text), parse_constant=_no_constant, parse_int=_int)
    except RecursionError:
        raise ForetraceError(f"{where} is JSON that is nested too deeply; {mend}.") from None
    except ValueError as error:
        raise ForetraceError(f"{where} is not JSON ({' '.join(str(error).split())[:200]}); {mend}.") from None


def _whole(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) != 6 else "\\ufffd"


def _int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def parse_yaml(text: str, where: str, *, mend: str = "mend it") -> Any:
    """Return a YAML text as Python values: words, numbers, lists and mappings with texts as unique keys.

    Aliases may not blow it up beyond ten times what stands in the file. Raises ForetraceError.
    """
    import yaml

    try:
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _weigh(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ForetraceError(f"{where} is YAML that is nested too deeply; {mend}.") from None
    except (yaml.YAMLError, ValueError, OverflowError, AttributeError, TypeError, LookupError) as error:
        # beside its own error the parser raises others for dates that do not exist and for keys that cannot be
        raise ForetraceError(f"{where} is not YAML ({' '.join(str(error).split())[:200]}); {mend}.") from None


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """As the safe loader, but a key is text, and one that comes twice is a mistake."""

    def mapping(loader: Any, node: Any) -> dict[str, Any]:
        seen: set[str] = set()
        for each, _ in node.value:
            if not isinstance(each, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is no word", each.start_mark)
            if each.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {each.value} comes twice", each.start_mark
                )
            seen.add(each.value)
        loader.flatten_mapping(node)  # << takes in other mappings
        return {key.value: loader.construct_object(value, deep=True) for key, value in node.value}

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader


def _weigh(root: Any) -> None:
    """Refuse a document that holds itself, or that aliases make much larger than what stands in the file."""
    weights: dict[int, int] = {}

    def weigh(node: Any, above: tuple[int, ...]) -> int:
        key = id(node)
        if key in above:
            raise ValueError("an alias stands inside what it names")
        if key not in weights:
            if len(above) > _MOST_DEPTH:
                raise RecursionError
            inner = node.value if isinstance(node.value, list) else []
            parts = [part for each in inner for part in (each if isinstance(each, tuple) else (each,))]
            weights[key] = 1 + sum(weigh(part, (*above, key)) for part in parts)
        return weights[key]

    whole = weigh(root, ())
    if whole > _MOST_NODES + 10 * len(weights):
        raise ValueError(f"its aliases, written out, make {whole:,} values of {len(weights):,}")
