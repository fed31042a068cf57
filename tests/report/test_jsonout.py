"""The JSON contract: documented names, sums that hold, schemas that match, files that a script can rely on."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from foretrace.report import jsonout
from foretrace.report.jsonout import dumps, loads, schema
from foretrace.report.views import SCHEMA_VERSION, Result
from tests.report.report_views import make_blame, make_compare, make_show, make_simulate, make_whatif
from tests.report.schemas import generate_schema

ANSWERS = [make_show(), make_simulate(), make_blame(), make_whatif(), make_compare()]
BY_COMMAND = pytest.mark.parametrize("view", ANSWERS, ids=lambda view: view.command)

CONTRACT = {
    "show": {
        "schema_version", "device", "ranks", "steps", "step_time_s", "breakdown_s", "attributed_gpu_share", "headline",
    },
    "simulate": {"schema_version", "step_time_s", "measured_s", "error"},
    "whatif": {"schema_version", "before_s", "after_s", "interval_s", "changes", "assumptions"},
    "blame": {"schema_version", "rows"},
    "compare": {"schema_version", "before_s", "after_s", "rows"},
}  # fmt: skip


def check(value: Any, rule: dict[str, Any], defs: dict[str, Any], at: str = "$") -> list[str]:
    """The parts of JSON Schema that our schemas use, so that the test needs no package."""
    if "$ref" in rule:
        return check(value, defs[rule["$ref"].rsplit("/", 1)[-1]], defs, at)
    if "anyOf" in rule:
        found = [check(value, each, defs, at) for each in rule["anyOf"]]
        return [] if any(not each for each in found) else found[0]
    if "const" in rule:
        return [] if value == rule["const"] else [f"{at}: {value!r} is not {rule['const']!r}"]
    if not rule:
        return []
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
        "boolean": bool, "null": type(None),
    }  # fmt: skip
    if not isinstance(value, kinds[rule["type"]]) or isinstance(value, bool) != (rule["type"] == "boolean"):
        return [f"{at}: {value!r} is no {rule['type']}"]
    problems = []
    if rule["type"] == "object":
        problems += [f"{at}.{key} is missing" for key in rule.get("required", ()) if key not in value]
        known = rule.get("properties", {})
        if more := rule.get("additionalProperties"):  # an object whose keys are data
            known = known | {key: more for key in value if key not in known}
        problems += [f"{at}.{key} is not documented" for key in value if key not in known]
        for key in value.keys() & known.keys():
            problems += check(value[key], known[key], defs, f"{at}.{key}")
    if rule["type"] == "array":
        for i, each in enumerate(value):
            problems += check(each, rule.get("items") or rule["prefixItems"][i], defs, f"{at}[{i}]")
    return problems


@BY_COMMAND
def test_answers_keep_the_contract(view: Result) -> None:
    answer = json.loads(dumps(view))
    assert CONTRACT[view.command] <= answer.keys()
    assert answer["schema_version"] == SCHEMA_VERSION
    assert answer["command"] == view.command


@BY_COMMAND
def test_answers_validate(view: Result) -> None:
    rules = schema(view.command)
    answer = json.loads(dumps(view))
    assert not check(answer, rules, rules["$defs"])
    if importlib.util.find_spec("jsonschema"):
        jsonschema = importlib.import_module("jsonschema")
        jsonschema.Draft202012Validator(rules).validate(answer)


@BY_COMMAND
def test_a_broken_answer_does_not_validate(view: Result) -> None:
    rules = schema(view.command)
    answer = json.loads(dumps(view))
    for key in answer:
        without = {k: v for k, v in answer.items() if k != key}
        assert check(without, rules, rules["$defs"]) == [f"$.{key} is missing"]
    assert check(answer | {"extra": 1}, rules, rules["$defs"])
    assert check(answer | {"schema_version": 99}, rules, rules["$defs"])
    assert check(answer | {"headline": 3}, rules, rules["$defs"])


def unordered(part: Any) -> Any:
    """A schema whose alternatives are in one order: older releases of msgspec list null first."""
    if isinstance(part, dict):
        return {
            key: sorted(map(unordered, value), key=repr) if key == "anyOf" else unordered(value)
            for key, value in part.items()
        }
    return [unordered(each) for each in part] if isinstance(part, list) else part


@pytest.mark.parametrize("command", jsonout.answers())
def test_schema_files_match_the_structs(command: str) -> None:
    assert unordered(schema(command)) == unordered(generate_schema(command)), (
        "run: python -m tests.report.schemas, if the change was wanted; raise SCHEMA_VERSION if it breaks readers"
    )


@BY_COMMAND
def test_answers_survive_the_round_trip(view: Result) -> None:
    assert loads(dumps(view), view.command) == view


def test_the_documented_sums_hold() -> None:
    answer = json.loads(dumps(make_show()))
    assert math.fsum(answer["breakdown_s"].values()) == pytest.approx(answer["step_time_s"]["median"], abs=1e-12)


@pytest.mark.parametrize("command", jsonout.answers())
def test_every_field_is_documented(command: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    general, *sections = text.split("\n## ")
    mine = next(section for section in sections if section.startswith(f"`foretrace {command} "))
    rules = schema(command)
    assert [key for key in rules["properties"] if f"`{key}`" not in mine and f"`{key}`" not in general] == []
    nested = {key for part in rules["$defs"].values() for key in part["properties"]}
    assert [key for key in sorted(nested) if f"`{key}`" not in text] == []
