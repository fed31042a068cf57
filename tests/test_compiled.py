"""Loops that are kept on disk are compiled again when a file that they name has changed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest

INNER = "from foretrace.compiled import inner\n\n\n@inner\ndef more(x):\n    return x + {}\n"
OUTER = """from foretrace.compiled import njit
import inner_loop


@njit(_nrt=False)
def twice(x):
    return 2 * inner_loop.more(x)
"""


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")  # type: ignore[attr-defined]
def test_an_edit_in_a_file_that_a_loop_names_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"), raising=False)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    inner, outer = tmp_path / "inner_loop.py", tmp_path / "outer_loop.py"
    outer.write_text(OUTER)
    seen = []
    for added in (1, 1, 5):
        inner.write_text(INNER.format(added))
        load(inner, monkeypatch)
        twice = load(outer, monkeypatch).twice
        seen.append((twice(10), sum(twice.stats.cache_hits.values())))
    assert seen == [(22, 0), (22, 1), (30, 0)]


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")  # type: ignore[attr-defined]
def test_a_copy_elsewhere_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    seen = []
    for place, added in (("one", 1), ("two", 1), ("three", 2)):
        (tmp_path / place).mkdir()
        inner, outer = tmp_path / place / "inner_loop.py", tmp_path / place / "outer_loop.py"
        inner.write_text(INNER.format("LIMIT").replace("\n\n\n@", f"\nLIMIT = {added}\n\n@"))
        outer.write_text(OUTER)
        load(inner, monkeypatch)
        twice = load(outer, monkeypatch).twice
        seen.append((twice(10), sum(twice.stats.cache_hits.values())))
    assert seen == [(22, 0), (22, 1), (24, 0)]
    assert len(list((tmp_path / "home/.cache/foretrace/loops").iterdir())) == 2
