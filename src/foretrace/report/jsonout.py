"""The JSON contract: an answer as it stands, and its JSON Schema.

The schemas are package data (`report/schemas/<command>.json`), so that a script can validate without
importing us; a test holds the files equal to the structs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.resources import files
from pkgutil import iter_modules
from typing import Any

import msgspec

from foretrace import report
from foretrace.plaintext import encoded
from foretrace.report.views import Result

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
    text = files("foretrace.report").joinpath("schemas", file_of(command)).read_bytes()
    decoded: dict[str, Any] = msgspec.json.decode(text)
    return decoded


def file_of(command: str) -> str:
    """Return the name of the schema of a command: "rig-check.json" for `rig check`."""
    return f"{command.replace(' ', '-')}.json"
