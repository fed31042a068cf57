"""The floors of the house: imports only go down, and every room is on the plan."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lines of a room, tests aside: about a thousand for a system.
LIMITS = {
    "plan": 16_600, "fleet": 16_450, "techniques": 12_600, "training": 10_800, "cost": 10_700, "report": 9_150,
    "model": 9_000, "serving": 7_600, "graph": 6_800, "simulate": 6_200, "experiment": 6_000, "trace": 4_400,
    "cli": 3_700, "zoo": 2_450, "hardware": 1_600, "search": 1_550, "testing": 1_200,
}  # fmt: skip


def test_imports_only_go_down(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from importlinter.cli import lint_imports

    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0, capsys.readouterr().out


def test_no_package_is_in_a_circle_with_its_own_modules() -> None:
    """As between siblings, which import-linter looks at: TYPE_CHECKING and lazy imports count."""
    import grimp

    graph = grimp.build_graph("foretrace", cache_dir=None)
    for package in graph.modules:
        if graph.find_children(package):
            for module in graph.find_modules_that_directly_import(package):
                if module.startswith(f"{package}."):
                    chain = graph.find_shortest_chain(package, module)
                    assert chain is None, " -> ".join((*chain, package))


def test_no_public_class_name_has_two_meanings() -> None:
    """Names with an underscore count for their file alone, and classes within functions for their function."""
    homes: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src" / "foretrace").rglob("*.py")):
        for name in re.findall(r"^class ([^\W_]\w*)", path.read_text(), re.MULTILINE):
            homes.setdefault(name, set()).add(path.relative_to(ROOT / "src" / "foretrace").as_posix())
    doubled = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert not doubled


def test_the_glossary_names_classes_where_they_are() -> None:
    import foretrace

    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| `([\w/]+\.py)` \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    nouns = [noun for noun, _, _ in rows]
    assert len(nouns) == len(set(nouns)) <= 60
    for noun, _, file in rows:
        tree = ast.parse((ROOT / "src" / "foretrace" / file).read_text())
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        assert noun in classes, f"{file} has no class {noun}"
    public = {name for name in dir(foretrace) if isinstance(getattr(foretrace, name), type)}
    assert public <= set(nouns)


def test_options_are_spelled_in_cli_alone() -> None:
    """Below, texts name parameters (`foretrace.errors.spelled`). Whole commands may be shown; reports end with them."""
    known = {"cli", "report"}
    slurm = {  # they write and name options of Slurm
        f"fleet/{each}.py"
        for each in (
            "export/slurm", "formats/slurm", "live/questions", "live/records", "live/sources", "policies/slurm_nodes",
            "rig/cluster", "rig/on_ray", "rig/play",
        )
    }  # fmt: skip
    command = re.compile(r"foretrace [a-z]+[^.;]*")
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "foretrace").rglob("*.py")):
        if "--" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        told = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        texts = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
        ]
        place = path.relative_to(ROOT / "src" / "foretrace")
        wrong = [text for text in texts if re.search(r"--[a-z]", command.sub("", text))]
        if wrong and place.as_posix() not in slurm:
            found.setdefault(place.parts[0], []).extend(wrong)
    assert not {room: texts for room, texts in found.items() if room not in known}
    assert known <= found.keys()


def test_parameters_are_options_while_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretrace.errors import OPTIONS, ForetraceError

    error = ForetraceError("`workers=2` needs `memory_limit=`; see `foretrace show`")
    assert str(error) == "`workers=2` needs `memory_limit=`; see `foretrace show`"
    monkeypatch.setenv(OPTIONS, "1")
    assert str(error) == "--workers 2 needs --memory-limit; see `foretrace show`"


def test_every_room_is_a_floor_and_on_the_plan() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = config["tool"]["importlinter"]["contracts"][0]["layers"]
    floors = {room.strip() for layer in layers for room in layer.split("|")}
    plan = (ROOT / "docs" / "architecture.md").read_text()
    for room in (ROOT / "src" / "foretrace").iterdir():
        if room.stem.startswith("_") or (room.is_file() and room.suffix != ".py"):
            continue
        assert f"foretrace.{room.stem}" in floors, f"{room.name} is on no floor of pyproject.toml"
        assert f"{room.stem}/" in plan or f"{room.stem}.py" in plan, f"{room.name} is not in docs/architecture.md"


def test_the_wheel_holds_the_package_alone() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/foretrace"]}


def test_no_room_outgrows_its_limit() -> None:
    """Who raises a number says in the commit which mechanism was looked for first."""
    for room, most in LIMITS.items():
        files = [*(ROOT / "src" / "foretrace" / room).rglob("*.py")]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        assert files and lines <= most, f"{room}/ has {lines} lines, its limit is {most}"
    rooms = {each.name for each in (ROOT / "src" / "foretrace").iterdir() if each.is_dir()} - {"__pycache__"}
    assert rooms == LIMITS.keys()


def test_no_file_holds_two_ideas() -> None:
    long = {
        path.relative_to(ROOT): lines
        for path in (ROOT / "src").rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 550
    }
    assert not long, f"split these files: {long}"
