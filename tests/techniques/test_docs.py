"""The page about techniques: its example works, and it names every technique and parameter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foretrace.graph.select import select
from foretrace.techniques.base import Technique
from foretrace.techniques.registry import techniques
from tests.techniques.workloads import Gpu

PAGE = (Path(__file__).parents[2] / "docs" / "techniques.md").read_text(encoding="utf-8")


def test_the_example_of_an_own_technique_works() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]
    made: dict[str, type[Technique]] = {}
    exec(code, made)
    graph = Gpu().graph()
    predicted = made["HalfCopies"]().predict(graph)
    copies = select(graph, kind="copy")
    assert predicted.dur[copies].sum() * 2 == graph.dur[copies].sum()
    assert [each.flag for each in predicted.assumptions] == ["by"]


@pytest.mark.parametrize("kind", list(techniques().values()))
def test_every_technique_and_parameter_is_on_the_page(kind: type[Technique]) -> None:
    assert kind.name in PAGE
    for each in kind.parameters():
        assert f"`{each.name}" in PAGE or f"`{each.name}=" in PAGE, f"{kind.name} {each.name}"
