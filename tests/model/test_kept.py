"""Captured operators that are kept: the same as captured anew, by everything that decides them, and never stale."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrace.errors import ForetraceError
from foretrace.model.capture import kept as module
from foretrace.model.capture.kept import kept, path_for, read
from foretrace.model.operator_graph import OperatorGraph
from foretrace.techniques.arguments import parse
from foretrace.techniques.compute.mixed_precision import MixedPrecision

torch = pytest.importorskip("torch")
from foretrace.zoo.operators import operators_of  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to keep in."""
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "operators"


def never() -> OperatorGraph:
    raise AssertionError("captured again")


@pytest.mark.parametrize(
    "ask",
    [
        lambda: operators_of("gnn", size="tiny"),
        lambda: operators_of("gnn", size="tiny", batch=8, training=False, like="cpu"),
        lambda: operators_of("ncf", size="tiny", techniques=[parse("mixed-precision")]),
        lambda: operators_of("mpt-125m", length=64),
    ],
)
def test_what_is_kept_is_what_a_capture_gives(
    ask: Callable[[], OperatorGraph], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask()
    (file,) = own_cache.iterdir()
    assert read(file) == first and read(file) is not first
    with monkeypatch.context() as patch:
        patch.setattr("foretrace.model.capture.capture.capture", never)
        again = ask()
    assert again == first and again.recipe == first.recipe and again.notes == first.notes
    file.unlink()
    assert ask() == first  # captured anew


def test_whatever_decides_it_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str | int | None] = {"model": "gnn", "batch": None}
    found = {path_for(asked, ()), path_for({**asked, "batch": 4}, ()), path_for(asked, ("transformers",))}
    for name, other in (("_code", "edited"), ("_version", "0"), ("instruction_sets", ("avx2",))):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, other=other: other)
            found.add(path_for(asked, ()))
    with monkeypatch.context() as patch:
        patch.setenv("ATEN_CPU_CAPABILITY", "default")
        found.add(path_for(asked, ()))
    torch.set_default_dtype(torch.float64)
    try:
        found.add(path_for(asked, ()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(found) == 8
    assert path_for(asked, ()) in found


def test_the_code_of_the_package_is_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "zoo" / "models.csv").write_text("a")
    monkeypatch.setattr(module, "PACKAGE", tmp_path)

    def code() -> Any:
        return module._code.__wrapped__()

    before = code()
    (tmp_path / "zoo" / "notes.txt").write_text("not read by a capture")
    assert code() == before
    (tmp_path / "zoo" / "models.csv").write_text("b")
    assert code() != before


@pytest.mark.parametrize("damage", [b"", b"no operators", b"x\x9cK\xcb\xcf\x07\x00\x02\x82\x01E"])
def test_a_damaged_file_is_captured_again(damage: bytes) -> None:
    found = operators_of("gnn", size="tiny")
    path = path_for({"model": "gnn"}, ())
    path.write_bytes(damage)
    assert kept({"model": "gnn"}, (), lambda: found) is found
    assert kept({"model": "gnn"}, (), never) == found


def test_where_nothing_can_be_kept_all_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = operators_of("gnn", size="tiny")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path / "file"))
    assert kept({"model": "gnn"}, (), lambda: found) is found

    def homeless() -> Path:
        raise ForetraceError("no home.")

    monkeypatch.setattr("foretrace.cost.operators.store.cache", homeless)
    assert kept({"model": "gnn"}, (), lambda: found) is found


def test_techniques_of_others_are_not_kept(own_cache: Path) -> None:
    class Theirs(MixedPrecision):
        pass

    assert Theirs.__module__ == __name__
    operators_of("ncf", size="tiny", techniques=[Theirs()])
    assert not own_cache.exists()


def test_the_files_used_longest_ago_make_room(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = operators_of("gnn", size="tiny")
    first = next(own_cache.iterdir())
    size = first.stat().st_size
    monkeypatch.setattr(module, "MOST_BYTES", 2 * size)
    for age, name in enumerate(("b", "c"), 1):
        kept({"model": name}, (), lambda: found)
        os.utime(path_for({"model": name}, ()), (age, age))
    os.utime(first, (0, 0))
    operators_of("gnn", size="tiny")  # used now
    kept({"model": "d"}, (), lambda: found)
    assert first in own_cache.iterdir() and not path_for({"model": "b"}, ()).exists()
    assert path_for({"model": "c"}, ()).exists()
