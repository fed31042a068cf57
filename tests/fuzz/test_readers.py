"""Every module that reads files is in the fuzzer's list; whole samples are read, damaged ones read or refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from tests.fuzz.mutations import FORMS, mutated
from tests.fuzz.reader import WAYS, Reader, check
from tests.fuzz.readers import readers

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "foretrace"
NAMES = sorted(readers())

# The doors through which files of others come in, and what may open files beside them.
DOORS = {"read_bytes", "read_struct", "read_text", "sources", "parse_json", "parse_yaml"}
# Models that a server loads are programs: they are loaded in a process of their own, whose end is an answer.
OWN_FILES = re.compile(
    r"^(reading|files|shipped|executor|compiled|flow|lazy)\.py$|^(experiment/(links/(?!calibrate)|rows/|worker|forks|cores|runner|stalls|differential)|trace/(observe|autorecord|recorder|"
    r"recording_file)|cost/(network/collective_bench|operators/(grid|local|machine)|devices/(learned|roofline))|report/|"
    r"plan/|serving/server/models|fleet/(sweep|rig/)|hardware/(devices|processor)|training/|testing/|cli/)"
)


def _reads_files(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(node.func, "value", None)
        of = owner.id if isinstance(owner, ast.Name) else ""
        raw = called in ("open", "decompress", "safe_load") or (of, called) == ("json", "loads")
        if called in DOORS or raw:
            return True
    return False


def test_every_module_that_reads_files_has_a_reader() -> None:
    covered = {module for reader in readers().values() for module in reader.covers}
    found = {
        str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".")
        for path in SOURCE.rglob("*.py")
        if not OWN_FILES.match(str(path.relative_to(SOURCE))) and _reads_files(path)
    }
    assert sorted(found - covered) == [], "these modules read files; give each a reader in tests/fuzz"


def test_every_reader_covers_modules_that_are_there() -> None:
    for reader in readers().values():
        for module in reader.covers:
            file = module.replace(".", "/") + ".py"
            base = ROOT if module.startswith("reproductions.") else SOURCE
            assert (base / file).is_file(), f"{reader.name} covers {module}"


def test_files_come_in_through_one_door() -> None:
    """What unpacks, and what parses YAML or JSON of others, stands in `foretrace.reading` alone."""
    raw = re.compile(r"\bgzip\.(decompress|open)\(|\byaml\.(safe_)?load\(|\blzma\.|\bbz2\.")
    for path in SOURCE.rglob("*.py"):
        if not OWN_FILES.match(str(path.relative_to(SOURCE))):
            found = raw.search(path.read_text())
            assert found is None, f"{path.relative_to(SOURCE)}: {found[0]} has no limits" if found else ""


def outcome(reader: Reader, path: Path, way: int) -> str:
    """How an input ended: "read", or the sentence; asserts that figures can be."""
    try:
        for name, value in reader.play(path, way):
            bad = check(name, value)
            assert not bad, bad
    except ForetraceError as error:
        assert str(error).strip()
        assert "\n" not in str(error)
        return str(error)
    return "read"


@pytest.mark.parametrize("name", NAMES)
def test_whole_samples_are_read(name: str, tmp_path: Path) -> None:
    for sample, data in readers()[name].samples().items():
        path = tmp_path / sample
        path.write_bytes(data)
        assert outcome(readers()[name], path, 1) == "read", sample


@pytest.mark.parametrize("name", NAMES)
def test_damaged_samples_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """A taste of benchmarks/fuzz.py: other damage for every reader than its default."""
    reader = readers()[name]
    for sample, data in reader.samples().items():
        form = next((each for each in sorted(FORMS, key=len, reverse=True) if sample.endswith("." + each)), "")
        for number in range(6):
            path = tmp_path / sample
            path.write_bytes(mutated(data, form, Random(f"taste {name} {sample} {number}")))
            outcome(reader, path, 2 + number % (WAYS - 2))


def test_the_same_dice_give_the_same_damage() -> None:
    data = next(iter(readers()["recording"].samples().values()))
    assert mutated(data, "json", Random("a")) == mutated(data, "json", Random("a")) != data


def test_figures_that_cannot_be_are_told() -> None:
    assert "not finite" in check("step", [1.0, float("nan")])
    assert "is -1" in check("step", -1)
    assert check("step", np.zeros(0)) == ""
