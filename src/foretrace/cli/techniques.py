"""`foretrace techniques`: the what-ifs there are, with their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli import options

if TYPE_CHECKING:
    from foretrace.techniques.base import Parameter, Technique


def techniques(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One technique, with all it takes.")] = "",
    as_json: options.AsJson = False,
) -> None:
    """List the what-ifs that --do takes, or explain one of them.

    Example: foretrace techniques prefetch-data
    """
    from foretrace.techniques import registry

    known = {name: registry.technique(name)} if name else registry.techniques()
    if as_json:
        import msgspec

        found = {"schema_version": 1, "command": "techniques", "techniques": [_facts(each) for each in known.values()]}
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    width = max(map(len, known))
    for key, technique in known.items():
        print(f"{key:<{width}}  {technique.summary}")
        if not name:
            continue
        print(f"{'':<{width}}  rule: {technique.source}\n")
        for parameter in technique.parameters():
            print(f"  {parameter.name}=  {parameter.doc}{_value(parameter)}")
    if not name:
        print("\nnext: foretrace techniques NAME, or foretrace whatif TRACE --do NAME")


def _value(parameter: Parameter) -> str:
    if parameter.required:
        return " (required)"
    if parameter.prior is not None:
        prior = parameter.prior
        return f" (assumed {prior.value:g}, {prior.low:g} – {prior.high:g} {prior.unit}: {prior.why})"
    choices = f", one of {', '.join(parameter.choices)}" if parameter.choices else ""
    default = "" if parameter.default is None else f"default {parameter.default}"
    text = (default + choices).removeprefix(", ")
    return f" ({text})" if text else ""


def _facts(technique: type[Technique]) -> dict[str, Any]:
    return {
        "name": technique.name,
        "summary": technique.summary,
        "source": technique.source,
        "parameters": [
            {
                "name": each.name,
                "type": each.type,
                "doc": each.doc,
                "unit": each.unit,
                "default": each.default,
                "required": each.required,
                "choices": each.choices,
            }
            for each in technique.parameters()
        ],
    }
