"""Loops that are kept on disk are compiled again when a file that they name has changed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
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


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")  # type: ignore[attr-defined]
def test_processes_that_begin_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fcntl", reason="where files cannot be locked, each compiles")
    (tmp_path / "inner_loop.py").write_text(INNER.format(1))
    long = "".join(f"    if x > {n}:\n        x *= {n}\n" for n in range(100, 200))  # to compile: seconds
    (tmp_path / "outer_loop.py").write_text(OUTER.replace("    return", f"{long}    return"))
    script = (
        "import outer_loop, sys\n"
        "from foretrace import compiled\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(outer_loop.twice(10), sum(outer_loop.twice.stats.cache_hits.values()), compiled.compiled_s() > 0)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path / "home"), "NUMBA_CACHE_DIR": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for each in processes:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in processes:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    said = sorted(each.communicate()[0].split() for each in processes)
    assert [each[:2] for each in said] == [["22", "0"], ["22", "1"], ["22", "1"]]
    assert said[0][2] == "True"


def test_linear_algebra_is_loaded_where_a_loop_uses_it() -> None:
    code = """
import sys
import numba
import numpy as np
import foretrace.compiled
assert "scipy.linalg" not in sys.modules
a = np.arange(9.0).reshape(3, 3) + np.eye(3)
found = numba.njit(lambda a: (a @ a, np.convolve(a[0], a[1]), a @ np.linalg.inv(a)))(a)
assert all(map(np.allclose, found, (a.dot(a), np.convolve(a[0], a[1]), np.eye(3))))
assert "scipy.linalg" in sys.modules
"""
    # What is loaded does not hang on how well it is optimised, which is half of the time to compile it.
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"NUMBA_OPT": "0"})
