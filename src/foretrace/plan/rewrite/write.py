"""A rewritten model as a file: an exported program (.pt2)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes

if TYPE_CHECKING:
    from foretrace.plan.rewrite.emit import Emitted


def checked(path: Path) -> Path:
    """Return itself. Raises ForetraceError for a name that says another format, or a folder that is not there."""
    if path.suffix != ".pt2":
        raise ForetraceError(f"`out={path}`: name a file that ends in .pt2.")
    if not path.parent.is_dir():
        raise ForetraceError(f"`out={path}`: there is no folder {path.parent}; make it, or choose one that exists.")
    return path


def write(emitted: Emitted, path: Path) -> None:
    """Write it to `path` (see `checked`)."""
    import torch

    flat = tuple(emitted.flat(emitted.model.args, emitted.model.kwargs))
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(emitted.module, flat, strict=False), buffer)
    write_bytes(path, buffer.getvalue())
