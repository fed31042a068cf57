"""A rewritten model as files: an exported program (.pt2), or a folder with readable code and its weights."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes, write_text

if TYPE_CHECKING:
    from foretrace.plan.rewrite.emit import Emitted

_HEAD = '''"""{name}, rewritten by foretrace: forward() takes the original's tensors and returns a tuple of tensors.

    from model import Rewritten
    outputs = Rewritten()({inputs})
"""

from math import inf, nan
from pathlib import Path

import torch
from torch import device


class Rewritten(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in torch.load(Path(__file__).with_name("weights.pt"), weights_only=True).items():
            self.register_buffer(name, value)

'''


def checked(path: Path) -> Path:
    """Return itself. Raises ForetraceError for a name that says no format, or a folder that holds other things."""
    if path.suffix not in (".pt2", ""):
        raise ForetraceError(f"`out={path}`: name a file that ends in .pt2, or a folder.")
    if path.suffix == "" and path.exists() and (not path.is_dir() or _strange(path)):
        raise ForetraceError(f"`out={path}` exists and is no folder of a rewritten model; name another one.")
    if not path.parent.is_dir():
        raise ForetraceError(f"`out={path}`: there is no folder {path.parent}; make it, or choose one that exists.")
    return path


def _strange(path: Path) -> bool:
    return any(each.name not in ("model.py", "weights.pt", "__pycache__") for each in path.iterdir())


def write(emitted: Emitted, path: Path) -> None:
    """Write it to `path` (see `checked`)."""
    import torch

    module, model = emitted.module, emitted.model
    if path.suffix == ".pt2":
        flat = tuple(emitted.flat(model.args, model.kwargs))
        buffer = io.BytesIO()
        with torch.no_grad():
            torch.export.save(torch.export.export(module, flat, strict=False), buffer)
        write_bytes(path, buffer.getvalue())
        return
    path.mkdir(parents=True, exist_ok=True)
    inputs = ", ".join(node.name for node in module.graph.nodes if node.op == "placeholder")
    code = "\n".join(f"    {line}".rstrip() for line in module.code.strip().splitlines())
    buffer = io.BytesIO()
    torch.save(dict(module.state_dict()), buffer)
    write_bytes(path / "weights.pt", buffer.getvalue())
    write_text(path / "model.py", _HEAD.format(name=model.name, inputs=inputs) + code + "\n")
