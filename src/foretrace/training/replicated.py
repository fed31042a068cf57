"""DistributedDataParallel around models whose loss reads their attributes."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from foretrace.errors import NotApplicableError


class Replicated(DistributedDataParallel):
    """As its base, and plain values of the model can be read from it.

    Calling a part of the model past `forward` would leave gradients unsynchronised, silently; so that is refused.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("module"), name)
        if callable(value):
            raise NotApplicableError(
                f"data-parallel: the loss calls model.{name}, past DistributedDataParallel; call the model itself."
            )
        return value
