"""Named optimisations: each predicts its effect on a `TaskGraph` and says what it assumes.

The techniques are loaded when they are first used: `foretrace.techniques.PrefetchData(workers=4)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.techniques.arguments import parse
    from foretrace.techniques.base import Technique
    from foretrace.techniques.cuda_graphs import CudaGraphs
    from foretrace.techniques.faster_device import FasterDevice
    from foretrace.techniques.fused_optimizer import FusedOptimizer
    from foretrace.techniques.mixed_precision import MixedPrecision
    from foretrace.techniques.prefetch_data import PrefetchData
    from foretrace.techniques.registry import techniques
    from foretrace.techniques.selection import Remove, Scale
    from foretrace.techniques.whatif import WhatIf

__all__ = [
    "CudaGraphs",
    "FasterDevice",
    "FusedOptimizer",
    "MixedPrecision",
    "PrefetchData",
    "Remove",
    "Scale",
    "Technique",
    "WhatIf",
    "parse",
    "techniques",
]

_HOME = {
    "CudaGraphs": "cuda_graphs",
    "FasterDevice": "faster_device",
    "FusedOptimizer": "fused_optimizer",
    "MixedPrecision": "mixed_precision",
    "PrefetchData": "prefetch_data",
    "Remove": "selection",
    "Scale": "selection",
    "Technique": "base",
    "WhatIf": "whatif",
    "parse": "arguments",
    "techniques": "registry",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"foretrace.techniques.{_HOME[name]}"), name)
    raise AttributeError(f"module 'foretrace.techniques' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
