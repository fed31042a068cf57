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
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MARK = "__dynamo_disable"  # where PyTorch keeps the marked function
_APART = f"{_COMPILER}._trace_wrapped_higher_order_op"  # a file that needs nothing of the compiler: transformers' masks
_FINDER = ("find_distributions", "invalidate_caches")  # what importlib asks of everything in `sys.meta_path`


class _StandIn(ModuleType):
    """In the compiler's place: what PyTorch asks of it outside of compiled code. Whatever else is asked loads it.

    That holds for its attributes and for its submodules: as a package without files it leaves `import
    torch._dynamo.config` to `sys.meta_path`, where it stands itself.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__: list[str] = []
        self.unmarked: list[Any] = []
        self.allowed: list[Any] = []

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Return what to load in place of a submodule: the compiler's own, with the compiler itself there again.

        Where that is loaded after the stand-in has left, it is told of what it was to allow.
        """
        if name == _COMPILER:
            sys.meta_path.remove(self)
            compiler = importlib.import_module(_COMPILER)
            for function in self.allowed:
                compiler.allow_in_graph(function)
            return _as_loaded(name)
        if not name.startswith(_COMPILER + "."):
            return None
        if name == _APART:
            import torch

            return spec_from_file_location(name, Path(torch.__path__[0], *name.split(".")[1:]).with_suffix(".py"))
        self.leave()
        importlib.import_module(_COMPILER)
        return _as_loaded(name)

    def disable(self, function: Any = None, recursive: bool = True, *, wrapping: bool = True, **_: Any) -> Any:
        """Return the function as it is, for PyTorch; others are marked when they are called for the first time."""
        if function is None:
            return partial(self.disable, recursive=recursive)
        if wrapping:
            from torch._compile import _disable_dynamo

            return _disable_dynamo(function, recursive)
        self.unmarked.append(function)
        return function

    def allow_in_graph(self, function: Any) -> Any:
        """Return the function as it is."""
        self.allowed.append(function)
        return function

    def assume_constant_result(self, function: Any) -> Any:
        """Return the function with PyTorch's own mark."""
        function._dynamo_marked_constant = True
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no compiled graph to break."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _FINDER:
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_COMPILER), name)

    def leave(self) -> None:
        """Leave no trace; where the compiler is to be told something, wait for it."""
        import torch

        if self in sys.meta_path and not self.allowed:
            sys.meta_path.remove(self)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        if vars(torch).get("_dynamo") is self:
            del torch._dynamo
        for function in self.unmarked:
            if hasattr(function, _MARK):
                delattr(function, _MARK)
        self.unmarked.clear()


def _as_loaded(name: str) -> ModuleSpec:
    """Return a spec of a module that is loaded here. Where importlib finds it in its place, it runs its code again."""
    module = importlib.import_module(name)
    del sys.modules[name]
    return ModuleSpec(name, _Loaded(module))


class _Loaded(Loader):
    """A loader of what is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module as it is."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what importing changed; modules of settings take no such attribute."""
        if module.__spec__ is not self._spec:
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
