"""Packages whose names are loaded when they are first used. The stub beside a package says its names, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any


def homes(file: str) -> dict[str, str]:
    """Return the module of every name that the stub of a package imports, in its order; `file` is one of its files."""
    with open(f"{os.path.dirname(file)}/__init__.pyi", encoding="utf-8") as stub:  # noqa: PTH120, PTH123  (quick)
        imports = [each.partition(" import ") for each in stub.read().split("\nfrom ")[1:]]
    return {names.lstrip("(\n ").split()[0]: home for home, _, names in imports}


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package."""
    known = homes(file)

    def load(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = known[name]
        return import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)

    return load, lambda: sorted(known), list(known)
