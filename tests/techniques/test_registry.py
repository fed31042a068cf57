"""Built-in techniques and those of other packages."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from foretrace.errors import ForetraceError
from foretrace.graph.edit import scale
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques import registry
from foretrace.techniques.base import Technique, parameter


@dataclass(frozen=True, kw_only=True)
class HalfCopies(Technique):
    """A technique of somebody else."""

    name: ClassVar[str] = "half-copies"
    summary: ClassVar[str] = "copies take half the time"
    source: ClassVar[str] = "a test"

    by: float = parameter(0.5, doc="factor")

    def change(self, graph: TaskGraph) -> TaskGraph:
        return scale(graph, select(graph, kind="copy"), self.by)


def offer(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    entry = EntryPoint(name=name, value=value, group=registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])


def test_an_entry_point_adds_a_technique(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "half-copies", f"{__name__}:HalfCopies")
    assert registry.technique("half-copies") is HalfCopies
    assert next(iter(registry.techniques())) == "prefetch-data"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("broken", "no_such_package:Thing", "cannot be loaded"),
        ("other-name", f"{__name__}:HalfCopies", "no technique of that name"),
        ("thing", "pathlib:Path", "must be a subclass of"),
    ],
)
def test_broken_entry_points_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    offer(monkeypatch, name, value)
    with pytest.raises(ForetraceError, match=f"{name}.*{said}|{said}"):
        registry.techniques()


def test_two_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HalfCopies, "name", "scale")
    offer(monkeypatch, "scale", f"{__name__}:HalfCopies")
    with pytest.raises(ForetraceError, match="two packages offer a technique named scale"):
        registry.techniques()
