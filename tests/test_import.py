"""`import foretrace` is quick because it loads nothing; every public name still resolves."""

from __future__ import annotations

import subprocess
import sys

import pytest

import foretrace

HEAVY = ("numpy", "numba", "torch", "rich", "jinja2", "msgspec", "typer")


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules], sep=',')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split(",")) - {""}


def test_importing_loads_no_library() -> None:
    assert loaded_by("import foretrace") == set()


def test_help_loads_no_numbers_and_no_torch() -> None:
    code = "from foretrace.cli.app import run\nrun(['--help'])\nrun(['whatif', '--help'])"
    assert loaded_by(code) <= {"typer", "rich"}


@pytest.mark.parametrize("name", dir(foretrace))
def test_public_names_resolve(name: str) -> None:
    assert getattr(foretrace, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = foretrace.nonsense  # type: ignore[attr-defined]
