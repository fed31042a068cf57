"""docs/write-a-policy.md: its policy passes its tests, is found by its entry point, and keeps its promise."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.fleet import policies
from foretrace.fleet.cluster import parse_cluster
from foretrace.fleet.simulate import simulate
from foretrace.fleet.stepping import View
from foretrace.fleet.workload import Workload

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-policy.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's blocks as an installed package would lay them out."""
    _, policy, tests = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    entry = re.search(r"```toml\n\[project\.entry-points\.(\"[^\n]+\")\]\n(.*?)```", PAGE, re.DOTALL)
    assert entry is not None
    (tmp_path / "patient.py").write_text(policy)
    (tmp_path / "test_patient.py").write_text(tests)
    facts = tmp_path / "patient-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: patient\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{entry[1].strip(chr(34))}]\n{entry[2].replace(chr(34), '')}")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("patient", "test_patient"):
        sys.modules.pop(name, None)


def test_the_first_block_is_a_policy() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], names)
    names["turns"].validate()
    assert names["turns"].compiled


def test_the_page_passes_its_own_conformance_tests() -> None:
    tests = import_module("test_patient").TestPatient()
    names = [name for name in dir(tests) if name.startswith("test_")]
    assert len(names) == 7
    for name in names:
        getattr(tests, name)()


def test_the_policy_is_found_by_its_entry_point_and_keeps_its_promise() -> None:
    """A job of four GPUs among a stream of short small ones: it starves by stated time, not with patience."""
    assert "patient" in policies.names()
    n = 200
    work = Workload.of(
        submit_s=[*np.arange(n) * 50.0, 10.0],
        gpus=[1] * n + [4],
        work_s=[150.0] * n + [500.0],
        job=[*(f"short{at}" for at in range(n)), "long"],
    )
    cluster, long = parse_cluster("1x4"), work.position("long")
    soon = simulate(work, cluster, policies.parse("patient longest-s=1000"))
    never = simulate(work, cluster, policies.parse("patient longest-s=1000000"))
    assert never.start_ns[long] > 9000 * 10**9
    assert 1010 * 10**9 <= soon.start_ns[long] <= 1200 * 10**9, "at most one short job's length after its turn came"


def test_the_page_names_what_the_view_has() -> None:
    table = PAGE[PAGE.index("| the moment") : PAGE.index("`remaining_s`, and jobs")]
    said = {re.split(r"\W", each)[0] for each in re.findall(r"`([^`]+)`", table)}
    has = {name for name in vars(View) if not name.startswith("_")}
    rest = {"workload", "cluster", "ordered", "admitted", "placed", "outranked"}
    assert said | rest == has
