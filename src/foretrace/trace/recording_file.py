"""One recording on disk: the profiler's own JSON with the key "foretrace" added, compressed, written whole.

The file appears under its final name only when it is complete: everything is written to a temporary file
beside it and renamed. The JSON is copied as a stream, never parsed, so memory stays small for any size.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foretrace.errors import TraceError
from foretrace.files import part_of

KEY = "foretrace"
_CHUNK = 1 << 20
_TAIL = 1 << 12  # the closing bracket and `traceName` lie in the last few hundred bytes


def write_recording(export: Callable[[str], Any], path: Path, metadata: dict[str, Any]) -> None:
    """Let `export(file name)` write a Chrome JSON object, add `metadata` under `KEY` and store it as gzip.

    Raises TraceError if the folder cannot be written or the export is not a JSON object.
    """
    text = json.dumps(metadata, allow_nan=False, separators=(",", ":"))
    exported, packed = part_of(path), part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        export(str(exported))
        with packed.open("wb") as raw, gzip.GzipFile("", "wb", 5, raw, mtime=0) as out:
            for chunk in _with_key(exported, path.name, text):
                out.write(chunk)
        packed.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"{path} cannot be written ({reason}); give a folder with room and permission to write"
        raise TraceError(message) from error
    finally:
        for file in (exported, packed):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def _with_key(exported: Path, name: str, text: str) -> Iterator[bytes]:
    """Yield the exported bytes with the host's name blanked, the trace's name mended and the key added."""
    with exported.open("rb") as source:
        head = source.read(_CHUNK)
        held = re.sub(rb'("host_name":\s*)"[^"]*"', rb'\1""', head, count=1)
        while chunk := source.read(_CHUNK):
            held += chunk
            yield held[:-_TAIL]
            held = held[-_TAIL:]
    held = re.sub(rb'("traceName":\s*)"(?:[^"\\]|\\.)*"', rb'\1"' + name.encode() + b'"', held)
    closing = held.rfind(b"}")
    if closing < 0 or held[closing + 1 :].strip():
        raise TraceError(f"the profiler's export for {name} does not end with a JSON object; record again")
    yield held[:closing] + f',\n"{KEY}": '.encode() + text.encode() + b"\n}\n"
