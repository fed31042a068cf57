"""`foretrace zoo`: the list, and some steps of one model."""

from __future__ import annotations

import pytest

from foretrace.report.jsonout import schema
from foretrace.zoo import registry
from tests.cli.conftest import Cli, cli
from tests.report.test_jsonout import check

__all__ = ["cli"]


def test_list_names_every_model(cli: Cli) -> None:
    listed = cli("zoo", "--json").json["models"]
    assert [each["name"] for each in listed] == list(registry.entries())
    text = cli("zoo").out
    for each in listed:
        assert each["name"] in text
        assert each["summary"] in text


def test_one_model_is_trained(cli: Cli) -> None:
    pytest.importorskip("torch")
    answer = cli("zoo", "gnn", "--steps", "3", "--json").json
    rules = schema("zoo")
    assert not check(answer, rules, rules["$defs"])
    run = answer["run"]
    assert [each["name"] for each in answer["models"]] == ["gnn"]
    assert run["steps"] == 3
    assert len(run["losses"]) == 5
    assert run["samples_per_s"] == pytest.approx(run["batch_size"] / run["step_time_s"]["median"])
    text = cli("zoo", "gnn", "--steps", "2").out
    assert "A step of 32 samples takes" in text
    assert "2 steps)" in text


def test_mistakes_are_told(cli: Cli) -> None:
    answer = cli("zoo", "resnet-5")
    assert answer.code == 2
    assert "did you mean resnet50" in answer.err
    assert cli("zoo", "gnn", "--size", "huge").code == 2
