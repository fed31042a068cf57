"""What a training process can tell about itself beside its events.

Everything here runs inside somebody else's training process: standard library and PyTorch only, no numpy, and
a fact that cannot be found is named in `missing` instead of stopping the run.
"""

from __future__ import annotations

from typing import Any


def pytorch() -> Any:
    """Return the `torch` package; untyped, because its annotations differ from version to version."""
    import torch

    return torch
