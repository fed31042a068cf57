"""The JSON contract: an answer as it stands, and its JSON Schema.

The schemas are package data (`report/schemas/<command>.json`), so that a script can validate without
importing us; a test holds the files equal to the structs.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from importlib.resources import files
from inspect import cleandoc
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import msgspec

from foretrace import report
from foretrace.files import write_bytes
from foretrace.plaintext import encoded
from foretrace.report.views import SCHEMA_VERSION, Result

# Fields that hold what a run took on this machine, by command: all others are the same bytes in every run on one input.
MEASURED: dict[str, tuple[str, ...]] = {
    "optimise": ("search.seconds",),
    "rewrite": ("search_s", "check.float32", "check.float32_original"),
    "plan place": ("seconds",),
    "plan rows": ("seconds",),
    "plan soap": ("seconds",),
    "plan transformer": ("seconds",),
    "codesign": ("seconds",),
}


@cache
def answers() -> dict[str, type[Result]]:
    """Return the results of all commands, by command; every module of this room is imported for it."""
    for module in iter_modules(report.__path__, "foretrace.report."):
        import_module(module.name)
    found = {}
    waiting = Result.__subclasses__()
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        found[next(field.default for field in msgspec.structs.fields(each) if field.name == "command")] = each
    found.pop("", None)  # what several of them extend
    return dict(sorted(found.items()))


def dumps(view: Result, *, indent: int = 2) -> str:
    """Return JSON text of an answer, fields in the documented order, no trailing newline."""
    return msgspec.json.format(encoded(view), indent=indent).decode()


def loads(text: str | bytes, command: str) -> Any:
    """Return the view in the JSON of one command; raises msgspec.ValidationError where it breaks the schema."""
    return msgspec.json.decode(text, type=answers()[command])


def schema(command: str) -> dict[str, Any]:
    """Return JSON Schema (draft 2020-12) of one command's answer, as stored in the package."""
    text = files("foretrace.report").joinpath("schemas", _file(command)).read_bytes()
    decoded: dict[str, Any] = msgspec.json.decode(text)
    return decoded


def generate_schema(command: str) -> dict[str, Any]:
    """Return the schema made again from the struct; every answer carries every field, so all are required."""
    (reference,), made = msgspec.json.schema_components([answers()[command]], ref_template="#/$defs/{name}")
    name = reference["$ref"].rsplit("/", 1)[-1]
    components: dict[str, Any] = json.loads(json.dumps(made))
    for part in components.values():
        part["required"] = list(part["properties"])
        if "description" in part:  # from Python 3.13 on, docstrings come without their indentation
            part["description"] = cleandoc(part["description"])
    top = components.pop(name)
    top["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    top["properties"]["command"] = {"const": command}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"foretrace {command} --json",
        **{key: value for key, value in top.items() if key != "title"},
        "$defs": components,
    }


def _file(command: str) -> str:
    """Return the schema's file: "rig-check.json" for `rig check`."""
    return f"{command.replace(' ', '-')}.json"


def main() -> None:
    """Write the schema files of the package again: `python -m foretrace.report.jsonout`."""
    folder = Path(__file__).parent / "schemas"
    for command in answers():
        text = msgspec.json.format(msgspec.json.encode(generate_schema(command)), indent=2)
        write_bytes(folder / _file(command), text + b"\n")


if __name__ == "__main__":
    main()
