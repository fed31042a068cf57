"""JSON Schemas of answers, made from their structs: `python -m tests.report.schemas` writes those of the package."""

from __future__ import annotations

import json
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec

from foretrace import report
from foretrace.files import write_bytes
from foretrace.report.jsonout import answers, file_of
from foretrace.report.views import SCHEMA_VERSION


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


def main() -> None:
    """Write the schema files of the package again: `python -m tests.report.schemas`."""
    folder = Path(report.__file__).parent / "schemas"
    for command in answers():
        text = msgspec.json.format(msgspec.json.encode(generate_schema(command)), indent=2)
        write_bytes(folder / file_of(command), text + b"\n")


if __name__ == "__main__":
    main()
