"""All techniques by name: ours, and those of other packages.

A package adds one by the entry point group `foretrace.techniques`, whose values are subclasses of `Technique`::

    [project.entry-points."foretrace.techniques"]
    my-technique = "my_package:MyTechnique"
"""

from __future__ import annotations

from foretrace.errors import ForetraceError
from foretrace.lazy import homes, load
from foretrace.names import chosen
from foretrace.shipped import entry_points
from foretrace.techniques.base import Technique

# What people call them elsewhere.
ALIASES = {
    "amp": "mixed-precision", "autocast": "mixed-precision", "automatic-mixed-precision": "mixed-precision",
    "ddp": "data-parallel", "distributed-data-parallel": "data-parallel", "fsdp": "fully-sharded",
    "zero-3": "fully-sharded", "gradient-checkpointing": "activation-recomputation",
    "activation-checkpointing": "activation-recomputation", "checkpointing": "activation-recomputation",
    "recompute": "activation-recomputation", "torch.compile": "compiled", "compile": "compiled",
    "nhwc": "channels-last",
    "grad-accumulation": "gradient-accumulation", "cudagraph": "cuda-graphs", "cuda-graph": "cuda-graphs",
    "prefetch": "prefetch-data", "fused-adam": "fused-optimizer", "local-sgd": "local-steps",
    "cpu-offload": "activation-offload",
}  # fmt: skip
GROUP = "foretrace.techniques"
_OTHERS = ("Technique", "WhatIf", "parse", "techniques")  # that the package offers
BUILT_IN: tuple[type[Technique], ...] = tuple(
    load(*home) for name, home in homes(__file__).items() if name not in _OTHERS
)


def techniques() -> dict[str, type[Technique]]:
    """Return every technique by name, ours first. Raises ForetraceError for a broken or clashing entry point."""
    found = {each.name: each for each in BUILT_IN}
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
        except Exception as error:
            raise ForetraceError(f"the technique {entry.name} ({entry.value}) cannot be loaded: {error}.") from error
        if not (isinstance(loaded, type) and issubclass(loaded, Technique)) or loaded.name != entry.name:
            raise ForetraceError(
                f"the entry point {entry.name} ({entry.value}) is no technique of that name; "
                "it must be a subclass of foretrace.techniques.base.Technique."
            )
        if found.setdefault(entry.name, loaded) is not loaded:
            raise ForetraceError(f"two packages offer a technique named {entry.name}; uninstall {entry.value}.")
    return found


def technique(name: str) -> type[Technique]:
    """Return the technique of this name. Raises ForetraceError naming the nearest ones."""
    known = techniques()
    return known[chosen(name, known, f"there is no technique {name!r}", ALIASES)]
