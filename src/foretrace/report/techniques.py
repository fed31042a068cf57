"""`foretrace techniques` as an answer: the what-ifs there are, or one of them with all it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from foretrace.report.blocks import Block, Headline, Line, Next
from foretrace.report.views import Result, taken
from foretrace.techniques.base import Prior

if TYPE_CHECKING:
    from foretrace.techniques.base import Technique

Models = Mapping[str, tuple[str, ...]]  # by technique


class ParameterView(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a technique."""

    name: str
    type: str
    doc: str
    unit: str
    default: str | float | bool | None
    required: bool
    choices: tuple[str, ...]
    prior: Prior | None


class TechniqueView(msgspec.Struct, frozen=True, kw_only=True):
    """One technique."""

    name: str
    summary: str
    source: str
    apply: bool
    not_applied: str  # why it cannot be, "" where it can
    effort: str  # what it costs to do
    needs: str
    verified_on: tuple[str, ...]  # models with a conclusive row in the ledger
    shipped_on: tuple[str, ...]  # the same in the ledger that docs/accuracy/techniques.md is made of
    parameters: tuple[ParameterView, ...]


class TechniquesView(Result, frozen=True, kw_only=True):
    """`foretrace techniques`: all of them, or the one that was named."""

    command: str = "techniques"
    techniques: tuple[TechniqueView, ...]

    def shown(self, top: int) -> Iterator[Block]:
        if len(self.techniques) == 1:
            yield from _one(self.techniques[0])
            return
        applied = sum(each.apply for each in self.techniques)
        yield Headline(f"{len(self.techniques)} techniques can be predicted, {applied} of them applied and measured.")
        for each in self.techniques:
            where = _listed(each.verified_on) or (
                f"{_listed(each.shipped_on)} (docs/accuracy.md, not here yet)" if each.shipped_on else "no model yet"
            )
            yield Line(f"verified on {where}" if each.apply else "only predicted", label=each.name)
            yield Line(each.summary, soft=True)
        yield Next("foretrace techniques prefetch-data")


def techniques(known: Iterable[type[Technique]], *, verified: Models, shipped: Models) -> TechniquesView:
    """Return techniques, and the models on which they were verified here and in docs/accuracy.md."""
    return TechniquesView(
        techniques=tuple(
            taken(
                TechniqueView,
                each,
                apply=each.can_apply(),
                verified_on=verified.get(each.name, ()),
                shipped_on=shipped.get(each.name, ()),
                parameters=tuple(taken(ParameterView, parameter) for parameter in each.parameters()),
            )
            for each in known
        )
    )


def _one(technique: TechniqueView) -> Iterator[Block]:
    yield Headline(f"{technique.name}  {technique.summary}")
    yield Line(technique.source, label="rule")
    if technique.apply:
        yield Line(f"yes{f', needs {technique.needs}' if technique.needs else ''}", label="apply")
        yield Line(technique.effort or "not said", label="costs")
        yield Line(", ".join(technique.verified_on) or "no model yet", label="verified here on")
        yield Line(", ".join(technique.shipped_on) or "no model yet", label="verified in docs/accuracy.md on")
    else:
        yield Line(f"no, {technique.not_applied}", label="apply")
    yield ""
    for parameter in technique.parameters:
        yield f"{parameter.name}=  {parameter.doc}{_value(parameter)}"


def _listed(models: tuple[str, ...]) -> str:
    return ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")


def _value(parameter: ParameterView) -> str:
    if parameter.required:
        return " (required)"
    if parameter.prior is not None:
        prior = parameter.prior
        return f" (assumed {prior.value:g}, {prior.low:g} – {prior.high:g} {prior.unit}: {prior.why})"
    choices = f", one of {', '.join(parameter.choices)}" if parameter.choices else ""
    default = "" if parameter.default is None else f"default {parameter.default}"
    text = (default + choices).removeprefix(", ")
    return f" ({text})" if text else ""
