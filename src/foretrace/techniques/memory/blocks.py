"""Which modules of a model are its blocks, chosen alike from a recording and from the model itself."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretrace.graph.select import glob

if TYPE_CHECKING:
    from torch import nn

# They hold modules for others to call, or are the same class whatever they hold.
_CONTAINERS = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
_NO_CLASS = (*_CONTAINERS, "Sequential")
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One module of a model."""

    path: str  # "layers.3.attention"; "" is the model itself
    kind: str  # class name
    parameters: int  # elements that it holds itself, without those of modules inside
    root: int = 0  # which model, where a run trains several


def modules_of(model: nn.Module) -> list[Module]:
    """Return the modules of a model, in the order of `named_modules`."""
    return [
        Module(path=path, kind=type(each).__name__, parameters=sum(p.numel() for p in each.parameters(recurse=False)))
        for path, each in model.named_modules()
    ]


def recorded_modules(facts: Iterable[dict[str, Any]]) -> list[Module]:
    """Return the modules that a recorder stored, helpers without parameters left out."""
    return [
        Module(path=each["name"], kind=each["class"], parameters=int(each["parameters"]), root=int(each["root"]))
        for each in facts
        if int(each["root"]) >= 0
    ]


def choose(modules: list[Module], pattern: str) -> list[Module]:
    """Return the blocks: modules whose path or class fits a glob, or for "auto" the repeated class that holds most
    parameters.

    Only modules with modules inside can be blocks by "auto". Of chosen modules inside each other the outer one stays.
    Empty where none fits.
    """
    inside = _inside(modules)
    if pattern == AUTO:
        wanted = _repeated(modules, inside)
        fits = [each.kind == wanted and inside[each.root, each.path][0] > 0 for each in modules]
    else:
        expression = glob(pattern, ignore_case=False)
        fits = [
            bool(each.path and (expression.fullmatch(each.path) or expression.fullmatch(each.kind)))
            and each.kind not in _CONTAINERS
            for each in modules
        ]
    return _outermost([each for each, fit in zip(modules, fits, strict=True) if fit])


def _repeated(modules: list[Module], inside: dict[tuple[int, str], tuple[int, int]]) -> str:
    """Return the class with several instances that hold most parameters together; "" if there is none."""
    grouped: dict[str, list[Module]] = defaultdict(list)
    for each in modules:
        if each.path and each.kind not in _NO_CLASS and inside[each.root, each.path][0]:
            grouped[each.kind].append(each)
    outer = {kind: _outermost(found) for kind, found in grouped.items()}
    weight = {
        kind: sum(inside[each.root, each.path][1] for each in found) for kind, found in outer.items() if len(found) > 1
    }
    return max(weight, key=lambda kind: weight[kind]) if weight else ""


def _inside(modules: list[Module]) -> dict[tuple[int, str], tuple[int, int]]:
    """Return per module the number of modules inside it, and all parameters of both."""
    count: Counter[tuple[int, str]] = Counter()
    size: Counter[tuple[int, str]] = Counter()
    for each in modules:
        size[each.root, each.path] += each.parameters
        parts = each.path.split(".") if each.path else []
        for i in range(len(parts)):
            above = each.root, ".".join(parts[:i])
            count[above] += 1
            size[above] += each.parameters
    return {(each.root, each.path): (count[each.root, each.path], size[each.root, each.path]) for each in modules}


def _outermost(chosen: list[Module]) -> list[Module]:
    return [
        each
        for each in chosen
        if not any(each.root == other.root and each.path.startswith(f"{other.path}.") for other in chosen)
    ]


def layer_prefixes(chosen: list[Module], facts: dict[str, Any], layers: tuple[str, ...]) -> list[list[int]]:
    """Return per chosen module the indices of the layers of a graph that lie in it.

    A recording calls modules `Class_number`, numbered within a class in the order in which they are first called.
    """
    modules, calls = facts.get("modules", []), facts.get("module_calls", [])
    order = list(dict.fromkeys(calls)) or list(range(len(modules)))
    number: dict[tuple[int, str], str] = {}
    counted: Counter[str] = Counter()
    for index in order:
        kind = modules[index]["class"]
        number.setdefault((int(modules[index]["root"]), modules[index]["name"]), f"{kind}_{counted[kind]}")
        counted[kind] += 1
    found = []
    for each in chosen:
        label = number.get((each.root, each.path))
        inside = re.compile(rf"(?:.*\.)?{re.escape(label)}(?:\..*)?") if label else None
        found.append([i for i, text in enumerate(layers) if inside is not None and inside.fullmatch(text)])
    return found
