"""`foretrace techniques`: the what-ifs there are, with their parameters and where they were verified."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import options

if TYPE_CHECKING:
    from foretrace.report.listings import ParameterView, TechniqueView
    from foretrace.techniques.base import Parameter, Technique


def techniques(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One technique, with all it takes.")] = "",
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", metavar="FILE", help="Where verified rows are; by default the user's own."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the techniques that there are, or explain one of them.

    Example: foretrace techniques prefetch-data
    """
    from foretrace.techniques import registry

    known = {name: registry.technique(name)} if name else registry.techniques()
    verified = _verified(ledger)
    if as_json:
        from foretrace.report.jsonout import dumps
        from foretrace.report.listings import TechniquesView

        print(dumps(TechniquesView(techniques=tuple(_facts(each, verified) for each in known.values()))))
        return
    if name:
        _explain(known[name], verified)
        return
    width = max(map(len, known))
    shipped = _shipped()
    print(f"{'':<{width}}  predict  apply  verified on")
    for key, technique in known.items():
        models, ours = verified.get(key, ()), shipped.get(key, ())
        where = _listed(models) if models else f"{_listed(ours)} (docs/accuracy.md, not here yet)" if ours else "–"
        print(f"{key:<{width}}  yes      {'yes' if technique.can_apply() else 'no':<5}  {where}")
        print(f"{'':<{width}}  {technique.summary}")
    print("\nnext: foretrace techniques prefetch-data")


def _listed(models: tuple[str, ...]) -> str:
    return ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")


def _explain(technique: type[Technique], verified: Mapping[str, tuple[str, ...]]) -> None:
    print(f"{technique.name}  {technique.summary}")
    print(f"  rule: {technique.source}")
    if technique.can_apply():
        print(f"  apply: yes{f', needs {technique.needs}' if technique.needs else ''}")
        print(f"  costs: {technique.effort or 'not said'}")
        print(f"  verified here on: {', '.join(verified.get(technique.name, ())) or 'no model yet'}")
        print(f"  verified in docs/accuracy.md on: {', '.join(_shipped().get(technique.name, ())) or 'no model yet'}")
    else:
        print(f"  apply: no, {technique.not_applied}")
    print()
    for parameter in technique.parameters():
        print(f"  {parameter.name}=  {parameter.doc}{_value(parameter)}")


def _verified(ledger: Path | None) -> Mapping[str, tuple[str, ...]]:
    """Models of conclusive rows, by technique; empty where there is no ledger yet."""
    from foretrace.experiment.ledger import verified_on

    return verified_on(ledger)


def _shipped() -> Mapping[str, tuple[str, ...]]:
    """The same of the developers' ledger."""
    from foretrace.experiment.ledger import shipped_on

    return shipped_on()


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


def _facts(technique: type[Technique], verified: Mapping[str, tuple[str, ...]]) -> TechniqueView:
    from foretrace.report.listings import TechniqueView

    return TechniqueView(
        name=technique.name,
        summary=technique.summary,
        source=technique.source,
        apply=technique.can_apply(),
        not_applied=technique.not_applied,
        effort=technique.effort,
        needs=technique.needs,
        verified_on=verified.get(technique.name, ()),
        shipped_on=_shipped().get(technique.name, ()),
        parameters=tuple(map(_taken, technique.parameters())),
    )


def _taken(parameter: Parameter) -> ParameterView:
    from foretrace.report.listings import ParameterView, PriorView

    prior = parameter.prior
    return ParameterView(
        name=parameter.name,
        type=parameter.type,
        doc=parameter.doc,
        unit=parameter.unit,
        default=parameter.default,
        required=parameter.required,
        choices=parameter.choices,
        prior=PriorView(value=prior.value, low=prior.low, high=prior.high, unit=prior.unit, why=prior.why)
        if prior is not None
        else None,
    )
