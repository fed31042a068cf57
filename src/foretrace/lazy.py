"""Packages whose names are loaded when they are first used. The stub beside a package says its names, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any


def homes(file: str) -> dict[str, tuple[str, str]]:
    """Return module and name there of all that the stub of a package imports, in its order; `file`: one beside it."""
    with open(f"{os.path.dirname(file)}/__init__.pyi", encoding="utf-8") as stub:  # noqa: PTH120, PTH123  (quick)
        imports = [each.partition(" import ") for each in stub.read().split("\nfrom ")[1:]]
    words = ((home, names.lstrip("(\n ").replace(",", "").split()[:3]) for home, _, names in imports)
    return {name: (home, there) for home, (there, _, name) in words}


def load(home: str, name: str) -> Any:
    """Return what a module has under a name: an attribute, or a module below it."""
    module = import_module(home)
    return getattr(module, name) if name in vars(module) else import_module(f"{home}.{name}")


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package."""
    known = homes(file)

    def loaded(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return load(*known[name])

    return loaded, lambda: sorted(known), list(known)
