"""The page about techniques names every technique and parameter."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrace.techniques.base import Technique
from foretrace.techniques.registry import techniques

PAGE = (Path(__file__).parents[2] / "docs" / "techniques.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", list(techniques().values()))
def test_every_technique_and_parameter_is_on_the_page(kind: type[Technique]) -> None:
    assert kind.name in PAGE
    for each in kind.parameters():
        assert f"`{each.name}" in PAGE or f"`{each.name}=" in PAGE, f"{kind.name} {each.name}"
