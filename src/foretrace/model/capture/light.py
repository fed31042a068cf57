"""Contexts of a capture; the largest keeps PyTorch's compiler unloaded, which takes longer to load than most captures.

PyTorch marks its reference functions as "not to be compiled", and loads the compiler to say so when one of them is
called. Nothing is compiled here, so the mark is put off: what was called in the meantime is marked by the compiler
itself when it is called again after that was loaded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MARK = "__dynamo_disable"  # where PyTorch keeps the marked function


class _StandIn(ModuleType):
    """In the compiler's place: what PyTorch asks of it outside of compiled code. Whatever else is asked loads it.

    That holds for its attributes and for its submodules: as a package without files it leaves `import
    torch._dynamo.config` to `sys.meta_path`, where it stands itself.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__: list[str] = []
        self.unmarked: list[Any] = []

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Return what to load in place of a submodule: the compiler's own, with the compiler itself there again."""
        if not name.startswith(_COMPILER + "."):
            return None
        self.leave()
        importlib.import_module(_COMPILER)
        return ModuleSpec(name, _Loaded(importlib.import_module(name)))

    def disable(self, function: Any = None, recursive: bool = True, **_: Any) -> Any:
        """Return the function as it is."""
        self.unmarked.append(function)
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no compiled graph to break."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_COMPILER), name)

    def leave(self) -> None:
        """Leave no trace."""
        import torch

        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        if vars(torch).get("_dynamo") is self:
            del torch._dynamo
        for function in self.unmarked:
            if hasattr(function, _MARK):
                delattr(function, _MARK)
        self.unmarked.clear()


class _Loaded(Loader):
    """A loader of what is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module as it is."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what importing changed."""
        module.__spec__ = self._spec


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run without loading `torch._dynamo`; nothing where it is loaded already, or where this is nested."""
    import torch

    if _COMPILER in sys.modules or "_dynamo" in vars(torch):  # `hasattr` would load it
        yield
        return
    stand_in = _StandIn()
    sys.modules[_COMPILER] = torch._dynamo = stand_in
    sys.meta_path.insert(0, stand_in)
    try:
        yield
    finally:
        stand_in.leave()


@contextmanager
def replaced(places: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes (of what, name, value) with other values for a while."""
    before = [(home, name, getattr(home, name)) for home, name, _ in places]
    try:
        for home, name, value in places:
            setattr(home, name, value)
        yield
    finally:
        for home, name, value in before:
            setattr(home, name, value)
