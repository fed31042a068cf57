"""Ray: a placement group as JSON and as the Python that reserves it, timer included.

Strategies are those of `ray.util.placement_group`: STRICT_PACK (one node), PACK (as few as it can), and, for a level
above nodes, `topology_strategy={label: "STRICT_PACK"}` of newer versions (Ray 2.60 has it).
"""

from __future__ import annotations

import json
import math
from typing import Any

from foretrace.fleet.export.ask import Ask
from foretrace.shipped import filled


def group(ask: Ask) -> dict[str, str]:
    """Return NAME.json and NAME.py."""
    if ask.level == 0:
        bundles = [{"GPU": ask.share if ask.gpus == 1 else 1}] * ask.gpus
        strict: dict[str, Any] = {"strategy": "STRICT_PACK"}
    else:
        pods, each = ask.pods
        bundles = [{"GPU": each}] * pods
        label = ask.labels.get(ask.level_name, "")
        strict = {"strategy": "PACK"} if ask.anywhere else {"topology_strategy": {label: "STRICT_PACK"}}
    loose = {"strategy": "PACK"}
    first = loose if ask.wait_s == 0 or ask.anywhere else strict
    timed = first is strict and not math.isinf(ask.wait_s)
    said = {
        "name": ask.name,
        "bundles": bundles,
        **first,
        "wait_s": ask.wait_s if timed else None,
        "then": loose if timed else None,
        "gpu_type": ask.gpu_type or None,
    }
    code = filled(
        "foretrace.fleet.export", "reserve.py.j2", job=_plain(ask.job), within=_plain(ask.within), bundles=bundles,
        first=_arguments(first), name=repr(ask.name), seconds=said["wait_s"], then=_arguments(loose),
    )  # fmt: skip
    return {f"{ask.name}.json": json.dumps(said, indent=2) + "\n", f"{ask.name}.py": code}


def _arguments(strategy: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in strategy.items())


def _plain(text: str) -> str:
    """Fit for a docstring: no quotes, backslashes or control characters."""
    return "".join(sign if sign.isprintable() and sign not in '"\\' else "_" for sign in text)
