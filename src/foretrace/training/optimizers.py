"""Optimizers made anew with other settings, on the same parameters."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from foretrace.errors import NotApplicableError

if TYPE_CHECKING:
    from torch.optim import Optimizer


def remade(optimizer: Optimizer, **settings: Any) -> Optimizer:
    """An optimizer of the same class on the same parameter groups with other settings; its state begins anew.

    Raises NotApplicableError where its class does not know a setting, or refuses these.
    """
    kind = type(optimizer)
    takes = inspect.signature(kind).parameters
    if unknown := [name for name in settings if name not in takes]:
        raise NotApplicableError(f"{kind.__name__} takes no {' and no '.join(unknown)}.")
    defaults = {key: value for key, value in optimizer.defaults.items() if key in takes} | settings
    groups = [
        {key: value for key, value in group.items() if key == "params" or (key in defaults and key not in settings)}
        for group in optimizer.param_groups
    ]
    try:
        return kind(groups, **defaults)
    except (RuntimeError, ValueError) as error:
        raise NotApplicableError(f"{kind.__name__} refuses {settings}: {error}.") from error
